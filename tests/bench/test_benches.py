"""Every bench runs with --quick and prints the document that bench/report/report.py specifies as its last line.

Most runs need `--all`. .ci/pythons runs `smoke`, and tests/ui tests `record`.
"""

import contextlib
import importlib
import io
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image, ImageSequence

from bass_core.model.runner import ModelRunner
from bass_core.verify.judge import Judge
from bench.__main__ import MODULES
from bench.cpu import floor, larger, rounds
from bench.cpu.batch import BASS, speedup
from bench.cpu.default import ARMS, speed_claims
from bench.cpu.default import main as default
from bench.cpu.spec import mean_ratio
from bench.gpu import host
from bench.peers.llama_cpp import INSTALL
from bench.report import film
from bench.report.report import command
from bench.robustness import mutants
from bench.robustness.mutants import KNOWN
from tests.support import ROOT
from tests.support.page import hosted, save_tiny_pair
from ui.recordings.shelf import SHIPPED, requested_recordings

KEYS = {"bench", "device", "versions", "revision", "seed", "weights_sha256", "results", "claims"}


def run(name, *arguments):
    """Run a bench in this process and return its document."""
    threads, output = torch.get_num_threads(), io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            importlib.import_module(f"bench.{MODULES[name]}").main([*map(str, arguments)])
    finally:
        torch.set_num_threads(threads)
    return check_document(output.getvalue(), name)


def run_in_subprocess(name, *arguments):
    """Run a bench that changes its process in a subprocess, and return its document."""
    command = [sys.executable, "-m", "bench", name, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return check_document(done.stdout, name)


def check_document(output, name):
    """Return the document, after checking its form and that no decided claim fails."""
    document = json.loads(output.splitlines()[-1])
    assert document.keys() >= KEYS and document["bench"] == name and document["results"]
    assert all(claim.keys() == {"name", "value", "bar", "holds"} for claim in document["claims"])
    decided = [claim for claim in document["claims"] if claim["holds"] is not None]
    assert [claim["name"] for claim in decided if not claim["holds"]] == []
    return document


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return the options for a tiny pair in float32."""
    target, draft = save_tiny_pair(tmp_path_factory.mktemp("pair"))
    return ("--pair", target, "--draft", draft)


@pytest.fixture(scope="module")
def target(tiny):
    """Return the options for the tiny target without a draft."""
    return tiny[:2]


@pytest.mark.slow
def test_default_runs(tiny):
    """In float32 every arm writes the same greedy text. Claims about speed are decided only by a full run."""
    document = run("default", "--quick", *tiny, "--dtype", "float32", "--texts", "repeat")
    cases = {(row["text"], row["temperature"], row["threads"], row["batch"]) for row in document["results"]}
    assert cases == set(itertools.product(("repeat",), (0.0, 0.7), (1,), (1, 2)))
    assert all(row[arm] > 0 for row in document["results"] for arm in ARMS if arm != "regular")


def test_claims_of_default_are_decided_by_the_worst_case_and_name_it():
    """A case is compared with its best fixed length only if that length beats regular decoding."""
    cases = [(1, 1.3, 1.25, 1.4, 1.1), (4, 0.98, 1.0, 0.9, 0.8), (8, 0.99, 0.6, 0.7, 1.01)]
    heads = ("batch", "auto", "fixed 1", "fixed 2", "fixed 4")
    rows = [
        {"text": "chat", "temperature": 0.0, "threads": 2, **dict(zip(heads, case, strict=True))} for case in cases
    ]
    regular, fixed = speed_claims(rows, quick=False)
    assert (regular["value"], regular["holds"]) == (0.98, True)
    assert regular["name"] == "auto / regular, least: chat, temperature 0, 2 threads, batch 4"
    assert (fixed["value"], fixed["holds"]) == (pytest.approx(1.3 / 1.4, abs=1e-4), False)
    assert fixed["name"].endswith("batch 1")
    assert [claim["holds"] for claim in speed_claims(rows, quick=True)] == [None, None]
    assert len(speed_claims([rows[1]], quick=False)) == 1


def test_a_questions_file_without_the_text_s_categories_is_refused(tmp_path, capsys):
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"category": "coding", "turns": ["Sort a list.", "Faster."]}) + "\n")
    with pytest.raises(SystemExit):
        default(["--questions", str(file)])
    assert "no prompts for chat" in capsys.readouterr().err


@pytest.mark.slow
def test_spec_runs(tiny, tmp_path):
    """The calls of all turns are counted for each category of questions. Turns need a chat template."""
    target, file = shutil.copytree(tiny[1], tmp_path / "target"), tmp_path / "questions.jsonl"
    template = "{% for one in messages %}{{ one['role'] }}: {{ one['content'] }}\n{% endfor %}"
    (target / "chat_template.jinja").write_text(template)
    questions = [("talk", ["Hello.", "And more."])] * 2 + [("sums", ["1 + 1?"])] * 3
    file.write_text("\n".join(json.dumps({"category": kind, "turns": turns}) for kind, turns in questions))
    options = ("--quick", "--pair", target, "--draft", tiny[3], "--dtype", "float32", "--questions", file)
    options += ("--draft-length", 3, "--drafter", "model")
    rows = run("spec", *options)["results"]
    calls = {(row["category"], row["batch"]): row["calls"] for row in rows if row["temperature"] == 0.7}
    assert calls == {
        ("talk", 1): 4, ("sums", 1): 2, ("all", 1): 6, ("talk", 2): 2, ("sums", 2): 1, ("all", 2): 3
    }  # fmt: skip
    for row in rows:
        assert 0 < row["at 1"] <= 1 < row["tokens a round"] and row["bass"] > 0 < row["bass ms/token"]
    with pytest.raises(SystemExit):
        run("spec", *options, "--categories", "riddles")


def test_a_mean_of_ratios_has_a_margin_of_error():
    assert mean_ratio([2.0, 0.5]) == pytest.approx((1.0, 196 * math.log(2)))
    assert mean_ratio([1.5]) == (pytest.approx(1.5), None)
    assert mean_ratio([]) == (None, None)


def test_a_stored_command_has_file_names_without_folders(monkeypatch, tmp_path):
    (read := tmp_path / "questions.jsonl").touch()
    monkeypatch.setattr(sys, "argv", ["bench", "spec", "--questions", str(read), "--json", str(tmp_path / "made")])
    assert command() == "python -m bench spec --questions questions.jsonl"


def test_unknown_names_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "nothing"])
    assert importlib.import_module("bench.__main__").main() == 2
    error = capsys.readouterr().err
    assert all(name in error for name in MODULES)
    with pytest.raises(SystemExit):
        run("mutants", "no such mutant")


@pytest.mark.parametrize("name", MODULES)
def test_every_bench_has_help(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        run(name, "--help")


def test_the_crossover_s_label_is_at_its_line():
    """On a log axis Plotly expects log10 of an annotation's position."""
    stored = json.loads((ROOT / "bench" / "results" / "batch-cpu.json").read_text(encoding="utf-8"))
    figure = speedup({**stored, "crossover": {BASS: 4.0}})
    (line,), (label,) = figure.layout.shapes, figure.layout.annotations
    assert line.x0 == line.x1 == 4.0 and label.x == pytest.approx(math.log10(4.0))


def test_floor_alternates_steps_with_a_pass_before_each():
    order = []
    arms = {(name, 1, 1): lambda name=name: order.append(name) for name in ("a", "b", floor.AGAIN)}
    passes, times = floor.by_turns(arms, lambda: order.append("pass"), repeats=2)
    assert order == ["pass", "a", "pass", "b", floor.AGAIN] * 3
    assert len(passes) == 6 and {len(samples) for samples in times.values()} == {2}


def test_every_mutant_applies_to_the_sources(tmp_path):
    assert len({mutant.name for mutant in KNOWN}) == len({(m.file, m.old, m.new) for m in KNOWN}) == len(KNOWN)
    for i, mutant in enumerate(KNOWN):
        copy = tmp_path / str(i) / mutant.file
        copy.parent.mkdir(parents=True)
        copy.write_text((ROOT / mutant.file).read_text())
        mutant.apply(tmp_path / str(i))


@pytest.mark.slow
@pytest.mark.demand
def test_batch_runs(tiny, browser_executable, tmp_path):
    """In float32 all decoders write the same text. Each figure is saved as a PNG."""
    document = run("batch", "--quick", *tiny, "--dtype", "float32", "--report", tmp_path)
    arms = {row["arm"] for row in document["results"]}
    assert arms >= {"regular", "speculative", "bass", "generate", "amusd", "assisted"}
    names = {"batch-speedup.png", "batch-roofline.png"}
    assert {path.name for path in tmp_path.iterdir()} == names == set(document["files"])


@pytest.mark.slow
@pytest.mark.demand
def test_floor_runs(tiny):
    document = run("floor", "--quick", *tiny)
    assert {row["what"] for row in document["results"]} == {floor.STEP, floor.DRAFT, floor.AGAIN, floor.PROMPT}
    assert all(row["lowest / floor"] > 0 for row in document["results"])


@pytest.mark.slow
def test_host_replays_every_round(monkeypatch):
    forward = ModelRunner.forward

    def only_prompts(runner, batch):
        assert batch.eager, "a round that is not replayed"
        return forward(runner, batch)

    def eager(*_):
        raise AssertionError("a round that is judged without a graph")

    monkeypatch.setattr(ModelRunner, "forward", only_prompts)
    monkeypatch.setattr(Judge, "verify", eager)
    assert [row["arm"] for row in run("host", "--quick")["results"]] == list(host.ARMS)


@pytest.mark.slow
@pytest.mark.demand
def test_both_ways_to_take_back_states_write_the_same_rounds():
    rows = run("states", "--quick", "--dtype", "float32")["results"]
    assert [row["rounds alike"] for row in rows] == ["3 of 3"] * 4 and all(row["ms a round"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.demand
def test_the_parts_of_a_round_add_up(tiny):
    for row in run("rounds", "--quick", *tiny)["results"]:
        assert row["ms"] > row["with chain"] >= row["outside"] > 0 and row["judge"] > 0 < row["target"]
        assert row["ms"] == pytest.approx(sum(row[part] for part in rounds.PARTS)) and row["rounds"] > 0


@pytest.mark.slow
@pytest.mark.demand
def test_precision_runs(target):
    dtypes = ["bfloat16", "int8", "int8-per-token"]
    exact, *others = run("precision", "--quick", *target, "--dtypes", *dtypes)["results"]
    assert (exact["same choice"], exact["KL, mnat"]) == (1, 0)
    assert all(0 <= row["same choice"] <= 1 and 0 < row["KL, mnat"] < 100 for row in others)
    *timed, per_token = others
    assert per_token["KL, mnat"] > timed[-1]["KL, mnat"]
    assert all(row["batch 1, ms"] > 0 for row in timed) and per_token["batch 1, ms"] is None


@pytest.mark.slow
@pytest.mark.demand
def test_larger_runs():
    rows = run("larger", "--quick")["results"]
    assert [row["batch"] for row in rows] == [1, 2]
    assert all(row[f"fixed {length}"] > 0 for row in rows for length in (1, 2, 3, 4))


@pytest.mark.slow
@pytest.mark.demand
def test_larger_compares_the_families_that_our_kernels_know():
    rows = run("larger", "--families", "--quick")["results"]
    assert {row["family"] for row in rows} == set(larger.FAMILIES) and all(row["own kernels"] for row in rows)


@pytest.mark.slow
@pytest.mark.demand
def test_peers_runs(smollm2_folder):
    """In float32 all our arms write the same text.

    If llama.cpp is not installed, the document has a note in place of its rows.
    """
    document = run_in_subprocess(
        "peers", "--quick", "--pair", smollm2_folder, "--dtype", "float32", "--quantised", "int4"
    )
    arms = {(row["who"], row["method"], row["batch"]) for row in document["results"]}
    ours = {("ours", method, 1) for method in ("regular", "speculative", "bass")} | {("ours", "bass", 2)}
    theirs = {("generate", 2), ("generate_batch", 2), ("as our lane", 2), ("prompt lookup", 1)}
    assert arms >= ours | {("transformers", *arm) for arm in theirs}
    assert ("llama.cpp", "plain", 2) in arms or INSTALL in document["notes"]
    bits = {"float32": 32, "Q4_1": 4, "int4": 4}
    assert all(row["bits"] == bits[row["weights"]] for row in document["results"])


@pytest.mark.slow
@pytest.mark.demand
def test_start_runs(target):
    run("start", "--quick", *target)


@pytest.mark.slow
@pytest.mark.demand
def test_load_runs():
    """With --quick, it has 20 clients for 6 s."""
    run("load", "--quick")


@pytest.mark.slow
@pytest.mark.demand
def test_page_runs(tiny, browser_executable):
    document = run_in_subprocess("page", "--quick", *tiny, "--batch", 2)
    networks = {row["network"]: row for row in document["results"] if "network" in row}
    assert networks.keys() == {"here", "fast 3G"}
    assert 0 < networks["here"]["first token ms"] < networks["fast 3G"]["first token ms"]
    assert all(row["requests"] > 10 and row["KB"] > 100 for row in networks.values())


@pytest.mark.slow
@pytest.mark.demand
def test_a_film_has_a_picture_per_snapshot(browser_executable, monkeypatch, tmp_path, capsys):
    """Film a recording of three snapshots, on a page of this process."""
    whole = SHIPPED[film.RECORDING].recording
    snapshots = whole["snapshots"][:3]
    short = tmp_path / "short.json"
    short.write_text(json.dumps(whole | {"snapshots": snapshots}))

    @contextlib.contextmanager
    def served(*options):
        assert options == ("--replay", film.RECORDING)
        with hosted(None, offers=requested_recordings(str(short))) as address:
            yield None, address

    monkeypatch.setattr(film, "serve", served)
    # In a separate thread, since another test of this process may be using Playwright.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(film.main, ["--out", str(tmp_path)]).result()
    with Image.open(tmp_path / "race.gif") as film_file:
        pictures = [(frame.info["duration"], frame.convert("RGB")) for frame in ImageSequence.Iterator(film_file)]
    at = [snapshot["view"]["elapsed_ms"] for snapshot in snapshots]
    # A GIF stores durations in hundredths of a second.
    durations = [at[1] - at[0], at[2] - at[1], film.HOLD_MS]
    assert [duration for duration, _ in pictures] == pytest.approx(durations, abs=11)
    assert len({picture.tobytes() for _, picture in pictures}) == 3 and pictures[0][1].width > 900
    assert "race.gif: 3 pictures" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.demand
def test_pictures_runs(tiny, browser_executable, tmp_path):
    document = run_in_subprocess("pictures", "--quick", *tiny, "--out", tmp_path)
    assert [row["lane"] for row in document["results"]] == ["regular", "speculative", "bass"]
    assert (tmp_path / "lecture-wins.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.demand
def test_gpu_runs(tmp_path):
    """Makes a dry run of one section. tests/devices runs the other sections."""
    document = run_in_subprocess("gpu", "--quick", "--sections", "kernels", "--json", tmp_path / "gpu.json")
    assert json.loads((tmp_path / "gpu.json").read_text()) == document
    decided = {claim["name"] for claim in document["claims"] if claim["holds"] is not None}
    assert decided == {"sections that ran to their end", "kernels: cases that passed"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="mutants are tested in forks")
def test_a_mutant_whose_tests_hang_is_ended(monkeypatch):
    monkeypatch.setattr(mutants, "_run_tests", lambda *arguments: time.sleep(600))
    assert mutants._failure(mutants._tests_on(None, [], 0.1), 0.1) == "over 0.1 s"


@pytest.mark.slow
def test_mutants_runs():
    """Runs only four mutants, among them one of heads and one of trees, since all of them take too long."""
    chosen = [mutant.name for mutant in KNOWN[18::31]]
    document = run_in_subprocess("mutants", "--quick", *chosen)
    assert len(document["claims"]) == 1 + len(chosen)

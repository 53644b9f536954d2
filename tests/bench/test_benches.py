"""Every bench runs in its quick form, and its last line is the document that bench/report/report.py specifies."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import MODULES
from bench.cpu.batch import BASS, _speedup
from bench.drafting.default import ARMS
from bench.peers.llama_cpp import INSTALL
from bench.robustness.mutants import KNOWN
from tests.ui.conftest import save_tiny_pair
from ui.recordings.recording import load

ROOT = Path(__file__).parents[2]
DRAFT = ROOT / "drafts" / "smollm2"
KEYS = {"bench", "device", "versions", "revision", "seed", "weights_sha256", "results", "claims"}


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "bench", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(document, name):
    assert document.keys() >= KEYS
    assert document["bench"] == name
    assert document["results"]
    assert all(claim.keys() == {"name", "value", "bar", "holds"} for claim in document["claims"])
    counted = [claim for claim in document["claims"] if claim["holds"] is not None]
    assert counted and [claim["name"] for claim in counted if not claim["holds"]] == []


def test_overhead(tmp_path):
    document = run("overhead", "--quick", "--json", tmp_path / "out.json")
    check(document, "overhead")
    assert json.loads((tmp_path / "out.json").read_text()) == document


def test_outside(tmp_path):
    save_tiny_pair(tmp_path)
    check(run("outside", "--quick", "--pair", tmp_path / "target", "--batch", 2), "outside")


def test_turns(tmp_path):
    """The same revision on both sides: each figure is there once for each turn, and no checkout is left behind."""
    document = run("turns", "HEAD", "overhead", "--quick", "--turns", 1)
    assert {row["figure"] for row in document["results"]} == {"round ms", "its forwards ms", "ratio", "acceptance"}
    assert all(row["before, turns"] and row["after, turns"] for row in document["results"])
    left = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True).stdout
    assert "turns-" not in left


@pytest.mark.slow
def test_start(tmp_path):
    save_tiny_pair(tmp_path)
    check(run("start", "--quick", "--pair", tmp_path / "target"), "start")


@pytest.mark.slow
def test_latency(smollm2_folder):
    """With the real model: a tiny random one writes no text that repeats."""
    document = run("latency", "--quick", "--pair", smollm2_folder, "--dtype", "float32", "--batch", 1, 2)
    check(document, "latency")
    assert len(document["weights_sha256"]) == 64


@pytest.mark.slow
def test_floor(smollm2_folder):
    """With the real model: a tiny one fits a cache, and has more than a hundredth of its bytes in norms."""
    document = run("floor", "--quick", "--pair", smollm2_folder, "--draft", DRAFT)
    check(document, "floor")
    assert {row["what"] for row in document["results"]} >= {"products, ours", "step", "draft step"}


@pytest.mark.slow
def test_window(smollm2_folder):
    """With the real model: the bench builds its prompts from files by a tokenizer."""
    document = run("window", "--quick", "--pair", smollm2_folder, "--dtype", "float32")
    check(document, "window")
    assert {row["part"] for row in document["results"]} == {"acceptance", "steps", "turn", "whole"}


def test_unknown_bench_is_refused():
    done = subprocess.run([sys.executable, "-m", "bench", "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert all(name in done.stderr for name in MODULES)


@pytest.mark.slow
def test_exactness(smollm2_folder):
    """In float32 no row may differ, so that every claim holds."""
    document = run("exactness", "--quick", "--pair", smollm2_folder, "--dtype", "float32")
    check(document, "exactness")
    assert {row["arm"] for row in document["results"]} >= {"regular", "speculative", "bass"}


@pytest.mark.slow
def test_gpu(tmp_path):
    """The dry run: every section completes on a CPU, kernels and texts are equal, no claim on time is made."""
    document = run("gpu", "--quick", "--results", tmp_path, "--recordings", tmp_path)
    check(document, "gpu")
    assert not [row for row in document["results"] if row["case"] == "FAILED" or "failed" in row["what"]]
    passed = {(row["section"], row["case"]): row for row in document["results"] if row["what"] == "cases passed"}
    assert (passed["smoke", "smoke"]["value"], passed["faults", "faults"]["value"]) == (5, 11)
    assert all(row["unit"] == f"of {row['value']}" for row in passed.values())
    measured = {(row["section"], row["case"]) for row in document["results"]}
    assert {("roofline", "target, ours, best tiles"), ("profile", "round b2 l=5 temperature 0.8")} <= measured
    decided = {claim["name"] for claim in document["claims"] if claim["holds"] is not None}
    assert decided == {"kernels-equal", "texts-equal-float32", "sections-that-ran"}
    assert not list(tmp_path.glob("*.json*l")) and not list(tmp_path.glob("*.json"))
    recording = load(tmp_path / "cpu-dry-run-fair.json.xz")
    assert recording["snapshots"][-1]["view"]["done"] and "tiny models" in recording["about"]


def test_default(tmp_path):
    """In float32 every arm writes the same greedy text. Only the full run says which is fastest."""
    target, draft = save_tiny_pair(tmp_path)
    pair = ("--pair", target, "--draft", draft, "--dtype", "float32")
    document = run("default", "--quick", *pair, "--texts", "repeat")
    check(document, "default")
    cases = {(row["text"], row["temperature"], row["threads"], row["batch"]) for row in document["results"]}
    assert cases == set(itertools.product(("repeat",), (0.0, 0.7), (1,), (1, 2)))
    assert all(row[arm] > 0 for row in document["results"] for arm in ARMS if arm != "regular")


@pytest.mark.slow
def test_mutants():
    """Every third known mutation of the decoder is caught: all of them take a quarter of an hour."""
    chosen = [mutant.name for mutant in KNOWN[::3]]
    document = run("mutants", "--quick", "--only", *chosen)
    check(document, "mutants")
    assert len(document["claims"]) == 1 + len(chosen)


def test_every_mutant_fits_the_sources(tmp_path):
    """Each is applied to a copy of the file that it breaks."""
    for i, mutant in enumerate(KNOWN):
        copy = tmp_path / str(i) / mutant.file
        copy.parent.mkdir(parents=True)
        copy.write_text((ROOT / mutant.file).read_text())
        mutant.apply(tmp_path / str(i))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["load", "fuzz"])
def test_the_real_server_under(name):
    """The quick forms: load with 20 clients for 6 s, fuzz with 120 cases."""
    check(run(name, "--quick"), name)


@pytest.mark.slow
def test_amusd(smollm2_folder):
    """In float32 all arms write the same text. Only the full run measures their cost."""
    document = run("amusd", "--quick", "--pair", smollm2_folder, "--draft", DRAFT, "--dtype", "float32")
    check(document, "amusd")


@pytest.mark.slow
def test_amusd_under_faults():
    """Forty of the thousand short runs, one with a killed draft process and one with a stopped one."""
    check(run("amusd", "--stress", "--quick"), "amusd")


@pytest.mark.slow
def test_page(tmp_path, browser_executable):
    """With a tiny pair, since three processes and a browser are slow enough."""
    target, draft = save_tiny_pair(tmp_path)
    check(run("page", "--quick", "--pair", target, "--draft", draft, "--batch", 2), "page")


@pytest.mark.slow
def test_pictures(tmp_path, browser_executable):
    target, draft = save_tiny_pair(tmp_path)
    document = run("pictures", "--quick", "--pair", target, "--draft", draft, "--out", tmp_path)
    check(document, "pictures")
    assert [row["lane"] for row in document["results"]] == ["regular", "speculative", "bass"]
    assert (tmp_path / "lecture-wins.png").read_bytes().startswith(b"\x89PNG")


def test_the_crossover_is_named_where_its_line_stands():
    """On a log axis Plotly expects the log10 of an annotation's position; the plain number is far out of view."""
    stored = json.loads((ROOT / "bench" / "results" / "batch-cpu.json").read_text(encoding="utf-8"))
    drawn = _speedup({**stored, "crossover": {BASS: 4.0}})
    (line,), (words,) = drawn.layout.shapes, drawn.layout.annotations
    assert line.x0 == line.x1 == 4.0 and words.x == pytest.approx(math.log10(4.0))


@pytest.mark.slow
def test_batch(smollm2_folder, browser_executable, tmp_path):
    """In float32 all decoders write the same text. The report needs no other file; each figure has a PNG."""
    document = run(
        "batch", "--quick", "--pair", smollm2_folder, "--draft", DRAFT, "--dtype", "float32", "--report", tmp_path
    )
    check(document, "batch")
    assert {row["arm"] for row in document["results"]} >= {"regular", "speculative", "bass", "generate"}
    names = {"batch.html", "batch-latency.png", "batch-speedup.png", "batch-roofline.png"}
    assert {path.name for path in tmp_path.iterdir()} == names == set(document["files"])
    assert "<script src" not in (tmp_path / "batch.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_ragged(smollm2_folder):
    """Tokens per round agree with their formulas within the sampling error."""
    document = run("ragged", "--quick", "--pair", smollm2_folder, "--draft", DRAFT, "--dtype", "float32")
    check(document, "ragged")
    assert {row.get("policy") for row in document["results"]} >= {"each row its own", "common stop"}


@pytest.mark.slow
def test_peers(smollm2_folder):
    """In float32 all our arms write one text. Without llama.cpp its rows are left out, and the bench says so."""
    document = run("peers", "--quick", "--pair", smollm2_folder, "--dtype", "float32")
    check(document, "peers")
    arms = {(row["who"], row["method"], row["batch"]) for row in document["results"]}
    ours = {("ours", method, 1) for method in ("regular", "speculative", "bass")} | {("ours", "bass", 2)}
    assert arms >= ours | {("transformers", "generate", 2), ("transformers", "prompt lookup", 1)}
    assert ("llama.cpp", "plain", 2) in arms or INSTALL in document["notes"]
    assert all(
        row["bits"] == {"float32": 32, "Q4_1": 4, "int8": 8, "int4": 4}[row["weights"]]
        for row in document["results"]
    )

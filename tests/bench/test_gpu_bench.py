"""The GPU bench without a GPU: a section that dies loses no other figures, and claims are ratios of figures.

The processes are real. tests/devices/test_gpu_bench.py runs the sections on an emulated device.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu
from bench.gpu import context
from bench.gpu.checks import require
from bench.gpu.context import Context, Row
from bench.gpu.kernels import compare
from bench.gpu.speed import known_card
from tests.support import ROOT

CPU = torch.device("cpu")
BASE = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("", None),
        ("os.kill(os.getpid(), 9)", r"^signal 9 ended it, whose limit is 60 s, after: case two$"),
        ("sys.stdout.write('figure: {\"wh'); sys.exit(3)", "^case two$"),
        ("raise SystemExit(1)", "^case two$"),
    ],
    ids=["runs", "dies", "mid-line", "fails"],
)
def test_a_process_that_dies_keeps_its_figures_and_a_reason(end: str, why: str | None) -> None:
    rows: list[Row] = []
    program = "import os, sys; print('case one'); print('figure: {\"what\": 1}'); print('case two', flush=True); "
    reason = gpu.run_process([sys.executable, "-c", program + end], BASE, 60, rows.append)
    assert rows == [{"what": 1}]
    assert reason == why or (why and reason and re.search(why, reason))


@pytest.mark.slow
def test_a_process_that_hangs_is_killed() -> None:
    rows: list[Row] = []
    program = "import time; print('figure: {}', flush=True); time.sleep(600)"
    reason = gpu.run_process([sys.executable, "-c", program], BASE, 5, rows.append)
    assert rows == [{}] and reason == "signal 9 ended it, whose limit is 5 s, after: nothing"


@pytest.mark.slow
def test_the_last_line_of_a_section_that_cannot_run_is_the_reason() -> None:
    """Kernels can't run on a CPU without Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "bench", "gpu", "--here", "kernels", "--quick"],
        cwd=ROOT, env=BASE, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("RuntimeError: Triton ")


@pytest.mark.slow
def test_a_terminated_run_leaves_its_document(tmp_path: Path) -> None:
    """SIGTERM, as sent by `timeout`, arrives after the first figure. The document is still saved and printed."""
    path = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "bench", "gpu", "--sections", "steps", "lanes", "--json", str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        while not path.exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate()
    document = json.loads(path.read_text())
    assert json.loads(printed.splitlines()[-1]) == document and document["results"][0]["section"] == "steps"
    assert {"device", "versions", "revision", "date", "seed"} <= document.keys()
    claims = {claim["name"]: claim for claim in document["claims"]}
    assert claims["sections that ran to their end"]["holds"] is False


def test_a_second_run_resumes_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run repeats only sections that did not finish, or all of them if the seed has changed."""
    path, ran = tmp_path / "gpu.json", list[str]()

    def process(command: list[str], environment: Any, limit: float, take: Any) -> str | None:
        name = command[command.index("--here") + 1]
        ran.append(name)
        take(figure(name, "case", "what", len(ran)))
        return "it died" if name == "steps" and len(ran) < 3 else None

    monkeypatch.setattr(gpu, "run_process", process)
    for seed, sections in (("0", ["texts", "steps"]), ("0", ["steps"]), ("1", ["texts", "steps"])):
        ran_before = len(ran)
        gpu.main(["--sections", "texts", "steps", "--json", str(path), "--seed", seed])
        assert ran[ran_before:] == sections
    document = json.loads(path.read_text())
    assert [row["value"] for row in document["results"] if row["what"] == "what"] == [4, 5]


def test_a_run_on_the_cpu_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(gpu, "run_process", lambda *_: None)
    gpu.main(["--sections", "texts", "--json", str(tmp_path / "gpu.json")])
    assert "The sections run on the CPU: the NVIDIA driver is too old" in capsys.readouterr().out


def test_cases_continue_after_a_failure_and_stop_if_the_device_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise AssertionError("rows differ")

    cases = [("one", lambda: None), ("two", fail), ("three", lambda: None)]
    rows: list[Row] = []
    Context("texts", CPU, rows.append).cases(cases)
    assert [(row["case"], row["what"], row["value"], row["unit"]) for row in rows] == [
        ("two", "AssertionError: rows differ", None, ""),
        ("cases", "passed", 2, "of 3"),
    ]

    class Broken:
        def synchronize(self, device: torch.device) -> None:
            raise RuntimeError("illegal memory access")

    monkeypatch.setattr(context, "runtime", lambda device: Broken())
    with pytest.raises(RuntimeError, match="illegal"):
        Context("texts", torch.device("cuda"), rows.append).cases(cases)
    assert rows[-1]["unit"] == "of 2"


def figure(section: str, case: str, what: str, value: Any, unit: str = "") -> Row:
    return {"section": section, "case": case, "what": what, "value": value, "unit": unit}


FIGURES = [
    figure("kernels", "cases", "passed", 9, "of 10"),
    figure("texts", "cases", "passed", 5, "of 5"),
    figure("steps", "target b1 x 1 kv512", "step / floor", 1.2),
    figure("steps", "target b8 x 1 kv512", "step", 4.0),
    figure("steps", "target b8 x 5 kv512", "step", 4.8),
    figure("lanes", "b8 a0.8 regular", "ms/token", 4.5),
    figure("lanes", "b8 a0.8 bass", "ms/token", 1.5),
]


@pytest.mark.parametrize("timed", [True, False])
def test_claims_are_checks_and_plain_ratios(timed: bool) -> None:
    """A claim without figures is open, and so is a claim about the times of a dry or quick run.

    A missing check fails.
    """
    ended = ["texts", "kernels", "steps", "lanes"]
    claims = gpu.claims(FIGURES, [*ended, "faults"], ended, timed)
    assert {claim["name"]: (claim["value"], claim["holds"]) for claim in claims} == {
        "sections that ran to their end": (0.8, False),
        "texts: cases that passed": (1.0, True),
        "kernels: cases that passed": (0.9, False),
        "faults: cases that passed": (0.0, False),
        "a step of batch 1 / its floor": (1.2, False if timed else None),
        "a step of batch 8 / its floor": (0.0, None),
        "verifying 5 tokens / a step": (1.2, True if timed else None),
        "regular / BASS": (3.0, True if timed else None),
        "generate / BASS": (0.0, None),
        "BASS's share of the peak FLOP/s": (0.0, None),
    }


def test_an_error_may_not_exceed_that_of_torch_by_much() -> None:
    exact = torch.ones(4, dtype=torch.float64)
    compare((exact + 0.02).bfloat16(), (exact + 0.01).bfloat16(), exact)
    with pytest.raises(AssertionError, match="error"):
        compare((exact + 0.1).bfloat16(), (exact + 0.01).bfloat16(), exact)
    with pytest.raises(AssertionError, match="not every output"):
        compare(torch.tensor([1.0, 1, 1, float("nan")]), exact.float(), exact)
    require([[1], [2]], [[1], [3]], but=1)
    with pytest.raises(AssertionError, match=r"rows \[1\] of 2 differ"):
        require([[1], [2]], [[1], [3]])


def test_a_card_is_recognised_by_its_name() -> None:
    names = (
        "NVIDIA H100 80GB HBM3",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA GeForce RTX 5090",
        "NVIDIA H200",
    )
    assert [card and card.name for card in map(known_card, names)] == ["H100", "RTX 5090 Laptop", None, "H200"]

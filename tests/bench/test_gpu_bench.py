"""The GPU bench's bookkeeping: a process that dies loses only its section, and a killed run keeps its results.

Contract: no model runs here; test_benches.py has the dry run of the whole bench.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu
from bench.gpu import plan, processes, results
from bench.gpu.claims import claims

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
FAKE = Path(__file__).parent / "fake_gpu_process.py"
HEAD: dict[str, Any] = {
    "device": "A GPU/80GB", "dry": False, "command": "python -m bench gpu", "versions": {"torch": "2.99"},
    "revision": "abc", "seed": 0, "quick": False, "date": "2026-01-02", "time": "030405",
}  # fmt: skip


def begin(folder: Path, sections: tuple[str, ...] = plan.DEFAULT) -> Path:
    """The results file of a run that has just begun."""
    lines = folder / "run.lines.jsonl"
    results.append(lines, kind="run", sections=list(sections), **HEAD)
    return lines


def options(sections: tuple[str, ...], minutes: float = 5.0, **more: Any) -> Namespace:
    return Namespace(minutes=minutes, sections=list(sections), seed=0, quick=False, recordings=Path("."), **more)


def run_fake(folder: Path, monkeypatch: pytest.MonkeyPatch, what: dict[str, Any], *sections: str) -> results.Lines:
    """Run the sections in one process, with fake_gpu_process.py in place of the real one."""
    monkeypatch.setattr(processes, "PROCESS", [sys.executable, str(FAKE), json.dumps(what)])
    lines = begin(folder, sections)
    processes.run(options(sections), CPU, lines)
    return results.read(lines)


def starts(lines: results.Lines) -> list[str]:
    return [line["section"] for line in lines if line["kind"] == "start"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["dies", "sticky"])
def test_a_section_whose_process_ends_loses_itself_alone(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is kept, no other section is blamed, none runs twice, and a new process runs the next section."""
    lines = run_fake(tmp_path, monkeypatch, {"roofline": what}, "roofline", "lanes", "races")
    assert starts(lines) == ["roofline", "lanes", "races"]
    assert list(results.failures(lines)) == ["roofline"]
    assert [line["section"] for line in lines if line["kind"] == "end"] == ["lanes", "races"]
    rows = results.document(lines)["results"]
    assert [row["section"] for row in rows if row["what"] == "written before"] == ["roofline", "lanes", "races"]
    assert ("CUDA error: sticky" in results.failures(lines)["roofline"]) == (what == "sticky")


@pytest.mark.slow
def test_an_error_that_passes_leaves_the_process_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[list[str]] = []
    real = processes.start
    monkeypatch.setattr(processes, "start", lambda *given: (begun.append(list(given[3])), real(*given)))
    lines = run_fake(tmp_path, monkeypatch, {"lanes": "raises"}, "roofline", "lanes", "races")
    assert begun == [["roofline", "lanes", "races"]]
    assert results.failures(lines) == {"lanes": "RuntimeError: CUDA error: raises"}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["sticky", "dies"])
def test_checks_go_on_behind_the_case_that_broke_them(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = {"checks": {"cases": ["passes", what, "raises", "passes"]}}
    lines = run_fake(tmp_path, monkeypatch, cases, "checks")
    assert results.failures(lines) == {} and starts(lines) == ["checks", "checks"]
    assert [line["label"] for line in lines if line["kind"] == "begun"] == [f"case {index}" for index in range(4)]
    rows = {(row["case"], row["what"]): row for row in results.document(lines)["results"]}
    assert (rows["group", "cases passed"]["value"], rows["group", "cases passed"]["unit"]) == (2, "of 4")
    assert {case for case, what in rows if what == "failed"} == {"group: case 1", "group: case 2"}
    assert ("process died" in rows["group: case 1", "failed"]["value"]) == (what == "dies")


def test_cases_are_dealt_out_by_the_kernel_that_they_compile(tmp_path: Path) -> None:
    from bench.gpu.context import Context

    ran: list[tuple[int, str]] = []
    for part in range(2):
        ctx = Context(CPU, tmp_path / "lines", float("inf"), 0, False, tmp_path, "checks", (part, 2))
        variants = ("a", "b", "a", "c", "b", "a")
        ctx.cases(("group", one, one, lambda one=one, part=part: ran.append((part, one))) for one in variants)
    assert sorted(ran) == [(0, "a"), (0, "a"), (0, "a"), (0, "c"), (1, "b"), (1, "b")]


def test_a_process_that_dies_before_it_begins_is_not_started_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PROCESS", [sys.executable, "-c", "raise SystemExit(1)"])
    lines = begin(tmp_path, ("lanes", "races"))
    processes.run(options(("lanes", "races")), CPU, lines)
    assert set(results.failures(results.read(lines))) == {"lanes", "races"}


def test_a_killed_run_keeps_its_results_and_finish_makes_the_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed in "lanes" while writing a line: its complete rows count, and unfinished sections are named."""
    lines = begin(tmp_path, ("roofline", "lanes", "races"))
    for section, figure in (("roofline", 1.2), ("lanes", 4.0)):
        results.append(lines, kind="start", section=section, part=0)
        results.append(lines, kind="row", **row(section, "decode-b1-kv512", "step / floor", figure))
        if section == "roofline":
            results.append(lines, kind="end", section=section, part=0, seconds=1.0)
    with lines.open("a") as file:
        file.write('{"kind": "row", "section": "la')
    gpu.main(["--finish", str(lines), "--json", str(tmp_path / "asked.json")])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "a-gpu-80gb-2026-01-02-030405.json").read_text()) == document
    assert json.loads((tmp_path / "asked.json").read_text()) == document
    assert (document["device"], document["versions"], document["revision"]) == (
        "A GPU/80GB",
        {"torch": "2.99"},
        "abc",
    )
    assert [one["value"] for one in document["results"] if one["what"] == "step / floor"] == [1.2, 4.0]
    said = {one["name"]: (one["value"], one["holds"]) for one in document["claims"]}
    assert said["decode-b1"] == (1.2, False) and said["sections-that-ran"] == (0.3333, False)
    failed = {one["section"]: one["what"] for one in document["results"] if one["case"] == "FAILED"}
    assert failed == {"lanes": "the run ended while it ran", "races": "it was not begun"}
    assert lines.exists()


@pytest.mark.parametrize("text", [None, "", '{"kind": "ru', "[]"])
def test_a_file_that_holds_no_run_is_refused_in_a_sentence(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "some.lines.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match="holds no run of this bench"):
        gpu.main(["--finish", str(path)])


def test_a_terminated_run_ends_with_its_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Terminated as by `timeout`. The run prints its versions first, and its lines are kept."""

    def run(_arguments: Any, _device: Any, lines: Path) -> None:
        results.append(lines, kind="start", section="lanes", part=0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(gpu, "run", run)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            gpu.main(["--sections", "lanes", "races", "--results", str(tmp_path)])
    finally:
        signal.signal(signal.SIGTERM, before)
    said = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1 and f"torch {torch.__version__.split('+')[0]}" in said[0]
    failed = {one["section"]: one["what"] for one in json.loads(said[-1])["results"] if one["case"] == "FAILED"}
    assert failed == {"lanes": "the run ended while it ran", "races": "it was not begun"}
    (lines,) = tmp_path.iterdir()
    assert results.head(results.read(lines))["sections"] == ["lanes", "races"]


@pytest.mark.slow
def test_the_document_is_there_after_every_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the second section's process starts, the document already holds the first one's row."""
    seen: list[Any] = []
    real = results.write

    def write(lines: results.Lines, folder: Path) -> Path | None:
        path = real(lines, folder)
        seen.append(json.loads(path.read_text())["results"] if path else None)
        return path

    monkeypatch.setattr(results, "write", write)
    run_fake(tmp_path, monkeypatch, {"roofline": "sticky"}, "roofline", "lanes")
    assert [one["case"] for one in seen[0] if one["section"] == "roofline"] == ["a row", "Triton", "FAILED"]
    assert seen[0] != seen[-1]


def test_a_dry_run_leaves_nothing_behind(tmp_path: Path) -> None:
    lines = tmp_path / "run.lines.jsonl"
    results.append(lines, kind="run", sections=["lanes"], **HEAD | {"dry": True})
    assert results.write(results.read(lines), tmp_path) is None
    assert list(tmp_path.iterdir()) == [lines]


def test_no_time_is_a_failure_that_is_named(tmp_path: Path) -> None:
    lines = begin(tmp_path, ("attention", "races"))
    processes.run(options(("attention", "races"), minutes=0.0), CUDA, lines)
    failed = [line for line in results.read(lines) if line["kind"] == "failed"]
    assert [(line["section"], line["error"]) for line in failed] == [
        ("races", "no time was left for it"),
        ("attention", "no time was left for it"),
    ]


def test_every_section_keeps_time_for_those_behind_it() -> None:
    """Even if each process uses all its time, later groups get what they need. Some sections have a cap."""
    left, asked = 60 * plan.MINUTES, list(plan.DEFAULT)
    for group in plan.ORDER[:-1]:
        taken = plan.seconds(list(group), asked, left, plan.MINUTES)
        assert taken >= sum(plan.NEEDS[name] for name in group)
        left -= taken
    assert left >= 0
    assert plan.seconds(["smoke"], asked, 3600.0, 60.0) == 20.0
    assert plan.seconds(["checks"], asked, 3600.0, 60.0) == 90.0
    assert plan.seconds(["lanes"], ["lanes"], 300.0, 5.0) == 300.0
    assert "compiled" not in plan.DEFAULT and plan.SECTIONS.index("products") < plan.SECTIONS.index("lanes")


def row(section: str, case: str, what: str, value: Any, unit: str = "") -> dict[str, Any]:
    return {"section": section, "case": case, "what": what, "value": value, "unit": unit, "note": ""}


ROWS = [
    row("checks", "attention", "cases passed", 9, "of 10"),
    row("roofline", "decode-b1-kv512", "step / floor", 1.2),
    row("roofline", "decode-b8-kv512", "step", 4.0),
    row("roofline", "verify5-b8-kv512", "step", 4.8),
    row("lanes", "b8 regular", "ms_per_token", 4.5),
    row("lanes", "b8 regular", "flops_utilization", 0.03),
    row("lanes", "b8", "generate, eager", 30.0),
    row("lanes", "b8 a0.8 bass l=bass", "ms_per_token", 2.0),
    row("lanes", "b8 a0.8 bass l=6", "ms_per_token", 1.5),
    row("lanes", "b8 a0.9 bass l=8", "flops_utilization", 0.17),
    row("lanes", "b8 a0.9 speculative l=5", "flops_utilization", 0.9),
    row("attention", "b1 kv512 x 1", "fused / best other", 1.01),
    row("attention", "b8 kv4096 x 1", "fused / best other", 0.5),
    row("attention", "b8 kv4096 x 1", "fused share of copy", 0.85),
]


def test_claims_are_plain_ratios_of_what_was_measured() -> None:
    made = {one["name"]: (one["value"], one["holds"]) for one in claims(ROWS, open_=False)}
    assert made == {
        "kernels-equal": (0.9, False),
        "texts-equal-float32": (0.0, None),
        "decode-b1": (1.2, False),
        "decode-b8": (0.0, None),
        "verify-b8": (1.2, True),
        "bass-over-regular": (3.0, True),
        "bass-over-generate": (20.0, True),
        "attention-bandwidth": (0.85, True),
        "attention-never-slower": (1.01, True),
        "flops": (0.17, True),
        "flops-over-regular": (5.6667, True),
    }


def test_a_dry_run_decides_nothing_that_is_a_matter_of_time() -> None:
    assert {one["name"] for one in claims(ROWS, open_=True) if one["holds"] is not None} == {"kernels-equal"}

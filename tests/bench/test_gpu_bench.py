"""The GPU bench's bookkeeping: a process that dies costs its section alone, and claims come from rows.

Contract: no model runs here; the dry run of everything is in test_benches.py.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu
from bench.gpu.claims import claims

CUDA = torch.device("cuda")


def test_a_process_that_dies_loses_one_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies in "lanes", after a row; "races" runs in a new process, which knows the plan that was found."""
    out = tmp_path / "lines"
    out.touch()
    started: list[list[str]] = []

    def start(_arguments: Any, _device: Any, to: Path, names: list[str], *_: float) -> bool:
        started.append(list(names))
        with to.open("a") as file:
            for name in names:
                if name == "lanes":
                    file.write(json.dumps({"kind": "row", "section": name, "case": "b8", "value": 1}) + "\n")
                    return True
                file.write(json.dumps({"kind": "end", "section": name}) + "\n")
        return False

    monkeypatch.setattr(gpu, "_start", start)
    arguments = Namespace(minutes=5.0, sections=list(gpu.SECTIONS))
    gpu._run(arguments, CUDA, out)
    assert started[2:4] == [["roofline", "lanes", "races"], ["races"]]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["section"] for line in lines if line["kind"] == "failed"] == ["lanes"]
    assert {line["section"] for line in lines if line["kind"] == "end"} == {*gpu.SECTIONS} - {"lanes"}
    assert [line["section"] for line in lines if line["kind"] == "row"] == ["lanes"]


def test_one_of_several_processes_of_a_section_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "lines"
    out.touch()

    def start(_arguments: Any, _device: Any, to: Path, names: list[str], *_: float) -> bool:
        with to.open("a") as file:
            file.write(json.dumps({"kind": "end", "section": names[0]}) + "\n")
        return names == ["checks"]

    monkeypatch.setattr(gpu, "_start", start)
    gpu._run(Namespace(minutes=5.0, sections=["checks", "attention"]), CUDA, out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["section"] for line in lines if line["kind"] == "failed"] == ["checks"]


def test_no_time_is_a_failure_that_is_named(tmp_path: Path) -> None:
    out = tmp_path / "lines"
    out.touch()
    gpu._run(Namespace(minutes=0.0, sections=["attention", "races"]), CUDA, out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["section"], line["error"]) for line in lines] == [
        ("races", "no time was left for it"),
        ("attention", "no time was left for it"),
    ]


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

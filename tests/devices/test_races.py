"""Races, clocks and costs on an accelerator: parallel streams, two devices, and measured times."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from bass_core import generate, race
from bass_core.decode import calibrate
from bass_core.decode.cost_store import DOUBTS
from bass_core.lanes.clock import LaneClock
from kernels.support import new_stream, on, runtime
from tests.support.models import slow_but, texts_of, tiny_pair

from ..conformance import table
from .emulation import emulated, ledger
from .emulation.models import TOKENS, pair

EMUL, OTHER = torch.device(emulated.TYPE, 0), torch.device(emulated.TYPE, 1)
METHODS = ("regular", "speculative", "bass", "amusd", "transformers")


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASS_GRAPHS", "0")


@pytest.mark.parametrize(
    ("scheduling", "architecture"),
    slow_but([("fair", "llama")], [("fair", "llama"), ("overlap", "llama"), ("in_turn", "opt")]),
)
def test_every_lane_of_a_race_writes_the_same_text(scheduling: str, architecture: str) -> None:
    models = pair(architecture, "perturbed")
    rows = table.PROMPTS["different"][:2]
    *_, last = race(models, rows, lanes=METHODS, scheduling=scheduling, max_new_tokens=TOKENS, draft_length=3)
    expected = [text[:TOKENS] for text in table.expected(architecture, "greedy")[:2]]
    for method in METHODS:
        lane = last["lanes"][method]
        assert lane["error"] is None
        assert [sequence["token_ids"] for sequence in lane["sequences"]] == expected
        assert lane["clock_ms"] > 0
    assert not ledger.races


@pytest.mark.slow
def test_a_fair_race_never_waits_for_a_whole_device() -> None:
    *_, last = race(
        pair("llama", "none"), table.PROMPTS["different"][0], lanes=("regular",), max_new_tokens=TOKENS
    )
    assert last["done"] and not ledger.waits["device"]


@pytest.mark.slow
def test_a_lanes_stream_waits_for_earlier_work() -> None:
    """A pair's weights and a lane's caches are made on the default stream, often by another thread."""
    tensor = torch.zeros(4, device=EMUL)

    def work() -> None:
        with new_stream(EMUL):
            tensor.add_(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not ledger.races


@pytest.mark.slow
def test_a_lane_is_timed_on_its_own_device() -> None:
    """The lane's clock measures its device, although another device is the current one."""
    clock = LaneClock(OTHER)
    x = torch.zeros(4, device=OTHER)
    with clock.running():
        for _ in range(10):
            x.add_(1)
    assert clock.ms == pytest.approx(0.1)


@pytest.mark.slow
def test_a_pair_on_the_second_device_writes_the_same_text() -> None:
    second = tiny_pair(to=OTHER)
    with on(OTHER):
        out = generate(second, table.PROMPTS["different"][:2], draft_length=2, max_new_tokens=TOKENS)
    assert texts_of(out) == [text[:TOKENS] for text in table.expected("llama", "greedy")[:2]]
    assert out.metrics.ms_per_token and not ledger.races
    assert runtime(OTHER).current_device() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "drafter", "graphs"),
    [
        ("perturbed", "model", "0"),
        ("head", "adaptive", "0"),
        ("none", "prompt_lookup", "0"),
        ("head", "model", "1"),
    ],
)
def test_costs_are_measured_on_the_device_and_saved(
    kind: str, drafter: str, graphs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BASS_GRAPHS", graphs)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "REPEATS", 1)
    monkeypatch.setattr(calibrate, "WIDTHS", (1, 2, 4))
    monkeypatch.setattr(DOUBTS, "add", lambda figure: None)  # one repeat is slow, so a round may well be faster
    options: dict[str, Any] = {"drafter": drafter, "draft_length": "cost-aware", "max_new_tokens": TOKENS}
    lengths, step = list[tuple[int, int]](), calibrate._RoundTimer._step

    def noted(timer: Any, decoder: Any) -> Any:
        round_, ms = step(timer, decoder)
        if round_.kind != "prefill":
            lengths.append((decoder.policy.length, round_.lengths[0]))
        return round_, ms

    monkeypatch.setattr(calibrate._RoundTimer, "_step", noted)
    out = generate(pair("llama", kind), table.PROMPTS["different"][:2], **options)
    assert texts_of(out) == [text[:TOKENS] for text in table.expected("llama", "greedy")[:2]]
    files = list(tmp_path.rglob("*.json"))
    assert len(files) == 1 and ledger.waits["device"] > 0
    assert len(lengths) >= 6 and all(drafted == asked for asked, drafted in lengths), lengths
    ledger.clear()
    generate(pair("llama", kind), table.PROMPTS["different"][:2], **options)
    assert list(tmp_path.rglob("*.json")) == files and not ledger.waits["device"]

"""Where a round's time goes: the parts of every round, on the CPU and on the emulated accelerator."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bass_core import ModelPair, SamplingParams, race, stream
from bass_core.machine import stopwatch
from bass_core.machine.stopwatch import Stopwatch
from bass_core.sequence import Round
from tests.bass_core.accelerated import (  # noqa: F401
    ROWS,
    TEXT,
    accelerator,
    on_device,
    small,
)
from tests.devices.emulation import ledger
from tests.models import NEAR, perturbed, tiny

PAIR = ModelPair(tiny("llama"), perturbed(tiny("llama"), NEAR["llama"]))


def check(rounds: list[Round], drafts: bool) -> None:
    """The parts fit into each round, and a round that drafted nothing has no time for drafts."""
    before, seen = 0.0, set()
    for round_ in rounds:
        took, before = round_.time_ms - before, round_.time_ms
        if round_.kind == "prefill":
            assert round_.draft_ms is round_.verify_ms is None
            continue
        assert round_.draft_ms is not None and round_.verify_ms is not None
        draft, verify = round_.draft_ms, round_.verify_ms
        assert verify > 0 and draft + verify <= took + 1e-6
        assert (draft > 0) == (round_.kind == "verify")
        seen.add(round_.kind)
    assert ("verify" in seen) == drafts


@pytest.mark.parametrize("method", ["regular", "speculative", "bass"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_parts_fit_into_their_round(method: str, temperature: float) -> None:
    for ways in ({"draft_length": 3}, {"draft_length": "auto", "tree": (2, 1)}):
        asked: dict[str, Any] = {**TEXT, **ways, "sampling": SamplingParams(temperature)}
        check(list(stream(PAIR, ROWS, method=method, **asked)), drafts=method != "regular")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("graphs", ["0", "1"])
def test_an_accelerator_s_events_give_the_parts_and_no_more_waits(
    graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BASS_GRAPHS", graphs)
    pair = on_device()
    list(stream(pair, ROWS, **TEXT))
    ledger.clear()
    rounds = list(stream(pair, ROWS, **TEXT))
    check(rounds, drafts=True)
    assert not ledger.races and not ledger.waits["device"]


def test_laps_leave_set_up_time_out_and_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, clock = Stopwatch(torch.device("cpu")), SimpleNamespace(now=0.0, setup=0.0)
    monkeypatch.setattr(stopwatch, "setup_ms", lambda: clock.setup)
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: clock.now / 1000))
    for ms, setup in ((0, 0), (10, 4), (5, 9), (7, 0)):
        clock.now, clock.setup = clock.now + ms, clock.setup + setup
        watch.mark()
    assert watch.laps() == pytest.approx([6, 0, 7])
    watch.mark()
    watch.mark()
    assert watch.laps() == [0]


def test_records_tell_the_parts_and_none_where_they_are_unknown() -> None:
    *_, last = race(PAIR, ROWS, lanes=["bass"], **TEXT)
    records = last["lanes"]["bass"]["rounds"]
    assert records[0]["kind"] == "prefill" and records[0]["draft_ms"] is records[0]["verify_ms"] is None
    for before, record in pairwise(records):
        draft, verify = record["draft_ms"], record["verify_ms"]
        assert draft is not None and verify is not None
        assert draft + verify <= record["time_ms"] - before["time_ms"] + 1e-3

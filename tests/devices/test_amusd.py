"""AMUSD with target and draft on one device, each on a stream of its own: no text is lost, and nothing leaves it.

Contract: what the two share is ordered by events and by what the host waits for; the emulation notes whatever is
not. Large numbers stay: a read is of a token, of two numbers beside it, or of a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from bass_core import ModelPair, SamplingParams, generate
from bass_core.amusd import decoder as amusd
from bass_core.amusd import link as amusd_link
from bass_core.amusd import process as amusd_process
from bass_core.amusd.draft import DraftSession

from ..conformance import table
from .emulation import capture, ledger
from .emulation.models import TOKENS, pair, texts

WARM = SamplingParams(0.9, top_k=30, top_p=0.95)
ROWS = table.PROMPTS[:3]


@pytest.fixture(autouse=True)
def a_patient_target(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The draft is a thread beside it; an emulated operator takes its time, and the draft gets ahead."""
    monkeypatch.setattr(ModelPair, "amusd_draft", "stream", raising=False)
    monkeypatch.setattr(amusd, "DELAYS", (0.1, 0.0))
    monkeypatch.setattr(amusd_process, "PATIENCE_S", 60.0)
    monkeypatch.setattr(amusd_link, "SEND_PATIENCE_S", 60.0)
    yield
    for one in list(amusd_process._idle):
        amusd_process.close(one)


def run(name: str, **arguments: Any) -> Any:
    draft = table.DRAFTS[name]
    asked = {"drafter": draft.drafter, "draft_length": 3, "max_new_tokens": TOKENS, "attention": "pad"}
    out = generate(pair("llama", draft.kind), ROWS, method="amusd", **{**asked, **arguments})
    assert out.timeline is not None and out.timeline["note"] is None
    assert out.metrics.drafted, "nothing was drafted in time"
    return out


DRAFTS = [name for name, draft in table.DRAFTS.items() if draft.drafter in ("model", "cascade", "adaptive")]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("sampling", [SamplingParams(), WARM], ids=["greedy", "sampled"])
def test_nothing_is_out_of_order(
    name: str, sampling: SamplingParams, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not captured:
        monkeypatch.setenv("BASS_GRAPHS", "0")
    reads: list[int] = []
    draw = DraftSession._draw

    def drawn(self: DraftSession, logits: Tensor) -> Any:
        columns, q = draw(self, logits)
        reads.append(1 if q is None else 2)
        return columns, q

    monkeypatch.setattr(DraftSession, "_draw", drawn)
    out = run(name, sampling=sampling)
    assert bool(capture.captured) is captured
    # A verdict a round; of a drafted token the token, and with a q its largest value and the token's.
    assert ledger.reads.total() == out.metrics.target_forwards + sum(reads)
    if sampling.greedy:
        assert texts(out) == [text[:TOKENS] for text in table.expected("llama", "greedy")[:3]]
    assert not ledger.races, ledger.races[:3]

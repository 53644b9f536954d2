"""AMUSD with target and draft on one device, each on its own stream: texts are right, and no bulk data leaves it.

Contract: events or waits of the host order what the two share; the emulation records everything unordered. Large
tensors stay on the device: a read is a token, two numbers beside it, or a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bass_core import ModelPair, SamplingParams, generate
from bass_core.amusd import decoder as amusd
from bass_core.amusd import host as amusd_host
from bass_core.amusd import messages as amusd_messages
from bass_core.amusd.session import DraftSession
from bass_core.drafting.base import Proposal

from ..conformance import table
from .emulation import capture, ledger
from .emulation.models import TOKENS, pair, texts

WARM = SamplingParams(0.9, top_k=30, top_p=0.95)
ROWS = table.PROMPTS["different"][:3]


@pytest.fixture(autouse=True)
def a_patient_target(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The draft is a thread; emulated operators are slow, so the target waits longer and the draft gets ahead."""
    monkeypatch.setattr(ModelPair, "amusd_draft", "stream", raising=False)
    monkeypatch.setattr(amusd, "DELAYS", (0.1, 0.0))
    monkeypatch.setattr(amusd_host, "PATIENCE_S", 60.0)
    monkeypatch.setattr(amusd_messages, "SEND_PATIENCE_S", 60.0)
    yield
    for one in list(amusd_host._idle):
        amusd_host.close(one)


def run(name: str, **arguments: Any) -> Any:
    draft = table.DRAFTS[name]
    asked = {"drafter": draft.drafter, "draft_length": 3, "max_new_tokens": TOKENS, "attention": "pad"}
    out = generate(pair("llama", draft.kind), ROWS, method="amusd", **{**asked, **arguments})
    assert out.timeline is not None and out.timeline["note"] is None
    assert out.metrics.drafted, "nothing was drafted in time"
    return out


DRAFTS = [name for name, draft in table.DRAFTS.items() if draft.drafter in ("model", "adaptive")]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("sampling", [SamplingParams(), WARM], ids=["greedy", "sampled"])
def test_nothing_is_out_of_order(
    name: str, sampling: SamplingParams, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not captured:
        monkeypatch.setenv("BASS_GRAPHS", "0")
    reads: list[int] = []
    take = DraftSession._take

    def taken(self: DraftSession, proposal: Proposal) -> Any:
        drawn = not all(proposal.copied)
        reads.append(drawn + (drawn and proposal.max_probs is not None))
        return take(self, proposal)

    monkeypatch.setattr(DraftSession, "_take", taken)
    out = run(name, sampling=sampling)
    assert bool(capture.captured) is captured
    # Reads: a verdict per round; per drafted token the token and, if the drafter may be unsure, two numbers of q.
    assert ledger.reads.total() == out.metrics.target_forwards + sum(reads)
    if sampling.greedy:
        assert texts(out) == [text[:TOKENS] for text in table.expected("llama", "greedy")[:3]]
    assert not ledger.races, ledger.races[:3]

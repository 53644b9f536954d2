"""AMUSD with target and draft on separate streams or devices: texts are right, and only small values are read.

The host reads a token, two numbers about it, or the result of a verification. The emulation records work on shared
data that no wait of the host orders.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

from bass_core import SamplingParams, generate
from bass_core.decode.amusd.session import DraftSession, draft_source, second_device
from bass_core.draft.base import Proposal
from tests.support.models import texts_of
from tests.support.schedule import draft_in_step

from ..conformance import table
from .emulation import capture, ledger
from .emulation.models import TOKENS, pair

pytestmark = pytest.mark.slow

WARM = SamplingParams(0.9, top_k=30, top_p=0.95)
ROWS = table.PROMPTS["different"][:3]


@pytest.fixture(autouse=True)
def in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_in_step(monkeypatch)


def run(name: str, **arguments: Any) -> Any:
    draft = table.DRAFTS[name]
    options = {"drafter": draft.drafter, "draft_length": 3, "max_new_tokens": TOKENS, "attention": "pad"}
    out = generate(pair("llama", draft.kind), ROWS, method="amusd", **{**options, **arguments})
    assert out.timeline is not None and out.timeline["note"] is None
    assert out.metrics.drafted
    return out


DRAFTS = [name for name, draft in table.DRAFTS.items() if draft.drafter in ("model", "adaptive")]


@pytest.mark.parametrize("sampling", [SamplingParams(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("name", "way"),
    [*zip(DRAFTS, cycle(["eager", "captured", "two devices"]), strict=False), ("adaptive_head", "captured")],
)
def test_all_work_is_ordered_and_only_small_values_are_read(
    name: str, way: str, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "two devices":
        monkeypatch.setattr("bass_core.decode.amusd.session.second_device", second_device)
        # Copying the model runs it once: forget the reads of that run.
        draft_source(pair("llama", table.DRAFTS[name].kind))
        ledger.clear()
    if way != "captured":
        monkeypatch.setenv("BASS_GRAPHS", "0")
    reads: list[int] = []
    read = DraftSession._read

    def counted(self: DraftSession, proposal: Proposal) -> Any:
        drawn = any(proposal.num_drafted) and not all(proposal.copied or [False])
        reads.append(drawn + (drawn and proposal.max_probs is not None))
        return read(self, proposal)

    monkeypatch.setattr(DraftSession, "_read", counted)
    out = run(name, sampling=sampling)
    assert bool(capture.captured) is (way == "captured")
    # One read per verification and one per drafted token. If the drafter can be unsure, a
    # second read for each drafted token fetches two numbers.
    assert ledger.reads.total() == out.metrics.target_forwards + sum(reads)
    if sampling.greedy:
        assert texts_of(out) == [text[:TOKENS] for text in table.expected("llama", "greedy")[:3]]
    assert not ledger.races, ledger.races[:3]

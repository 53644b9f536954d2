"""Every method on a device that is not the host: the CPU's texts, no mixed devices, and one wait per round.

Contract: the cases are the conformance suite's in which each choice occurs, and sampled ones under the rejection
rule. A round reads one value on the host, and two more with a head that checks its confidence
("adaptive"); no round waits for a copy to the device.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

from bass_core import METHODS, SamplingParams, generate, stream

from ..conformance import table
from .emulation import ledger
from .emulation.models import TOKENS, pair, run, texts

pytestmark = pytest.mark.slow

WARM = SamplingParams(0.9, top_k=30, top_p=0.95)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without captured steps; test_graphs.py tests graphs."""
    monkeypatch.setenv("BASS_GRAPHS", "0")


def looks(name: str) -> bool:
    """Whether the host reads how sure the draft is: of "adaptive", with a head."""
    draft = table.DRAFTS[name]
    return draft.drafter == "adaptive" and draft.kind in ("head", "ahead")


@pytest.mark.parametrize("case", table.cases(1), ids=str)
def test_every_choice_writes_the_cpus_text(case: table.Case) -> None:
    out = run(case)
    assert texts(out) == [text[:TOKENS] for text in case.expected()]
    # AMUSD's draft reads each of its tokens, and a tree its candidates, once a level.
    if case.length in table.TREES:
        assert ledger.reads.total() >= out.metrics.target_forwards
    elif not METHODS[case.method].outside and case.method != "amusd" and not looks(case.draft):
        assert ledger.reads.total() == out.metrics.target_forwards
    assert not ledger.races


@pytest.mark.parametrize(
    ("name", "method"), zip(table.DRAFTS, cycle(["bass", "bass", "speculative"]), strict=False)
)
def test_sampled_text_of_the_rejection_rule_is_the_cpus(name: str, method: str) -> None:
    draft = table.DRAFTS[name]
    asked: dict[str, Any] = {
        "method": method,
        "drafter": draft.drafter,
        "draft_length": 3,
        "max_new_tokens": TOKENS,
        "sampling": WARM,
        "seed": 11,
    }
    rows = table.PROMPTS["different"][:3]
    wanted = texts(generate(table.pair("llama", draft.kind), rows, **asked))
    ledger.clear()
    written: list[list[int]] = [[] for _ in rows]
    for round_ in stream(pair("llama", draft.kind), rows, **asked):
        for row in round_.rows:
            written[row.sequence] += row.tokens
        # At length 3 the head asks once whether to draft on, and once how much was drafted.
        asks = 2 if looks(name) and round_.kind != "prefill" else 0
        assert bool(round_.rows) <= ledger.reads.total() <= bool(round_.rows) + asks
        assert round_.kind == "prefill" or not ledger.uploads["blocking"]
        assert not ledger.races
        ledger.clear()
    assert written == wanted

"""Every method on an emulated device writes the CPU's texts, mixes no devices, and waits once per round.

The cases are those of the conformance suite that cover each choice, with --all every two choices, and sampled
cases under the rejection rule.
With any drafter, a round reads only the result of its verification, and never waits for a copy to the device.
Sampled trees read more here, because torch walks them; on a GPU a kernel does.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

from bass_core import METHODS, SamplingParams, generate, stream
from bass_core.draft import registry
from bass_core.draft.tree import TreePlanner
from tests.support.models import texts_of

from ..conformance import table
from .emulation import ledger
from .emulation.models import TOKENS, pair, run

pytestmark = pytest.mark.slow

WARM = SamplingParams(0.9, top_k=30, top_p=0.95)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch captured steps off. test_graphs.py tests them."""
    monkeypatch.setenv("BASS_GRAPHS", "0")


@pytest.mark.parametrize("case", table.cases(1, states=False), ids=str)
def test_every_choice_writes_the_cpus_text(case: table.Case) -> None:
    check(case)


@pytest.mark.demand
@pytest.mark.parametrize("part", range(6))
def test_every_two_choices_write_the_cpus_text(part: int) -> None:
    for case in table.cases(2, states=False)[part::6]:
        ledger.clear()
        check(case)


def check(case: table.Case) -> None:
    out = run(case)
    assert texts_of(out) == [text[:TOKENS] for text in case.expected()]
    # AMUSD has more reads: its draft reads each token that it drafts.
    if not METHODS[case.method].outside and case.method != "amusd":
        assert ledger.reads.total() == out.metrics.target_forwards
    assert not ledger.races


@pytest.mark.parametrize(
    ("name", "method"), zip(table.DRAFTS, cycle(["bass", "bass", "speculative"]), strict=False)
)
def test_sampled_texts_equal_the_cpus(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On an accelerator a head does not stop when it is unsure, so keep it from stopping on the CPU too.
    monkeypatch.setattr(registry, "CONFIDENCE", 0.0)
    draft = table.DRAFTS[name]
    options: dict[str, Any] = {
        "method": method,
        "drafter": draft.drafter,
        "draft_length": 3,
        "max_new_tokens": TOKENS,
        "sampling": WARM,
        "seed": 11,
    }
    rows = table.PROMPTS["different"][:3]
    expected = texts_of(generate(table.pair("llama", draft.kind), rows, **options))
    ledger.clear()
    written: list[list[int]] = [[] for _ in rows]
    for round_ in stream(pair("llama", draft.kind), rows, **options):
        for row in round_.rows:
            written[row.sequence] += row.tokens
        assert ledger.reads.total() == bool(round_.rows)
        assert round_.kind == "prefill" or not ledger.uploads["blocking"]
        assert not ledger.races
        ledger.clear()
    assert written == expected


TREES = [name for name, draft in table.DRAFTS.items() if draft.drafter in ("model", "adaptive")]
RULES = {"greedy": (SamplingParams(), "auto"), "coupled": (WARM, "coupled"), "sampled": (WARM, "rejection")}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", TREES)
def test_a_round_of_trees_waits_once(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting a tree never reads, and its verification reads once (more often in sampled rounds)."""
    draft, (sampling, verification) = table.DRAFTS[name], RULES[rule]
    drafting: list[int] = []
    propose = TreePlanner.propose

    def counted(*arguments: Any) -> Any:
        before = ledger.reads.total()
        proposal = propose(*arguments)
        drafting.append(ledger.reads.total() - before)
        return proposal

    monkeypatch.setattr(TreePlanner, "propose", counted)
    options: dict[str, Any] = {"drafter": draft.drafter, "tree": (2, 2, 1), "max_new_tokens": TOKENS}
    rows, written = table.PROMPTS["different"][:3], 0
    ledger.clear()
    for round_ in stream(pair("llama", draft.kind), rows, sampling=sampling, verification=verification, **options):
        assert rule == "sampled" or ledger.reads.total() == bool(round_.rows)
        assert round_.kind == "prefill" or not ledger.uploads["blocking"]
        written += sum(len(row.tokens) for row in round_.rows)
        ledger.clear()
    assert written == 3 * TOKENS and drafting and not any(drafting) and not ledger.races

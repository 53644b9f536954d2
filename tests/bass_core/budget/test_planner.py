"""The planner: with costs made by hand, what it drafts, what it learns, and what its bill says.

Contract: a table of costs and what was drafted and accepted decide everything, so a run repeats. Which text is
written never depends on it (tests/conformance).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from bass_core import ModelPair, SamplingParams, generate, stream
from bass_core.budget.base import Feedback
from bass_core.budget.cost_table import CostTable
from bass_core.budget.levels import FIRST_WAIT
from bass_core.budget.planner import MOST, MOST_A_ROW, Planner
from bass_core.budget.trees import COPY_CHANCE, Draft

from ...models import NEAR, perturbed, prompts, tiny


def table(token: float, level: float = 0.3, start: float = 10.0) -> CostTable:
    """A step costs `start` ms and `token` more for each of its tokens, whatever the rows."""
    points = [(1, start + token), (101, start + 101 * token)]
    return CostTable({1: points, 64: points}, {1: level, 64: level}, padded=False)


FREE, FAIR, DEAR = table(0.01), table(0.5), table(30.0, start=0.1)
WORTHS = [0.9, 0.7, 0.6, 0.4, 0.2, 0.1, 0.05, 0.01]


def draft(kind: str, raw: float = 0.5, parent: int = -1, depth: int = 1, row: int = 0) -> Draft:
    return Draft(row, 1, parent, depth, kind, raw, raw)


def played(planner: Planner, drafts: list[Draft], path: list[int], rounds: int = 60) -> None:
    """Rounds of one row in which these drafts are verified and these accepted."""
    for _ in range(rounds):
        planner.grown([drafts], 1)
        parents = [one.parent for one in drafts]
        planner.observe_trees(Feedback([9], [len(drafts)], [len(path)], 1, [parents], [path]))


def taken(planner: Planner, worths: list[list[float]]) -> int:
    """How many drafts of rows that have these, and no others, are verified."""
    return sum(planner.counts([[] for _ in worths], worths, 1))


@pytest.mark.parametrize("rows", [1, 4])
def test_a_draft_is_taken_while_it_pays(rows: int) -> None:
    """Against every number of drafts; the cheaper a token, the more."""
    counts = []
    for costs in (DEAR, FAIR, FREE):
        planner = Planner(costs, rows)
        rates = [
            (rows + sum(WORTHS[:n])) / (costs.verify_ms(rows, rows + n) + costs.levels_ms(rows, 1))
            for n in range(len(WORTHS) + 1)
        ]
        counts.append(taken(planner, [[], WORTHS, *[[]] * (rows - 2)] if rows > 1 else [WORTHS]))
        assert counts[-1] == rates.index(max(rates))
    assert counts[0] == 0 and counts == sorted(counts) and counts[2] == len(WORTHS) and 0 < counts[1] < counts[2]


def test_what_was_drawn_is_never_left_out_and_a_round_has_an_end() -> None:
    assert Planner(DEAR).counts([WORTHS[:3]], [WORTHS[3:]], 1) == [0]
    assert taken(Planner(FREE, 90), [[0.9] * 20] * 90) == MOST_A_ROW * 90
    assert taken(Planner(FREE, 2), [[0.9] * 400] * 2) == MOST


def test_the_last_rows_have_the_step_to_themselves() -> None:
    """A step has room for eight tokens: each row gets more of it the fewer there are."""
    costs = CostTable({1: [(1, 10), (8, 10.2), (40, 90)], 8: [(8, 10.2), (40, 90)]}, {1: 0.1, 8: 0.1}, False)
    shares = [taken(Planner(costs, rows), [WORTHS] * rows) / rows for rows in (8, 4, 2, 1)]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 7


def test_the_best_drafts_of_all_rows_are_taken_and_where_padding_costs_as_many_of_each_row() -> None:
    worths = [[0.9, 0.8, 0.7], [0.6, 0.01], [0.02]]
    costs = table(1.5, level=0.0)
    assert Planner(costs, 3).counts([[], [], []], worths, 0) == [3, 1, 0]
    padded = CostTable(costs.verify, costs.draft, padded=True)
    rates = [(3 + sum(sum(row[:n]) for row in worths)) / costs.verify_ms(3, 3 * (1 + n)) for n in range(4)]
    width = rates.index(max(rates))
    assert 0 < width < 3 and Planner(padded, 3).counts([[], [], []], worths, 0) == [
        min(width, len(row)) for row in worths
    ]
    # What is fixed makes a row as wide as it is: up to there the others' drafts are free.
    fixed = [[0.1, 0.1, 0.1], [], []]
    assert Planner(padded, 3).counts(fixed, [[0.05], [0.6, 0.01], [0.02]], 0) == [0, 2, 1]


def test_it_learns_what_copies_are_worth() -> None:
    right, wrong = Planner(FAIR), Planner(FAIR)
    assert right.chance("copied", 1, 1.0) == pytest.approx(COPY_CHANCE)
    played(right, [draft("copied")], [0])
    played(wrong, [draft("copied")], [])
    assert right.chance("copied", 1, 1.0) > 0.95 and wrong.chance("copied", 1, 1.0) < 0.1
    played(wrong, [draft("copied")], [0])
    assert wrong.chance("copied", 1, 1.0) > 0.4


def test_drafts_behind_rejected_ones_teach_nothing() -> None:
    planner = Planner(FAIR)
    before = planner.chance("likely", 2, 0.5)
    played(planner, [draft("likely"), draft("likely", parent=0, depth=2)], [])
    assert planner.chance("likely", 2, 0.5) == before and planner.chance("likely", 1, 0.5) < 0.1


def test_it_learns_of_children_by_what_was_known_before_the_draw() -> None:
    """How many children there were, and q's largest value; never what q said of the token that was drawn."""
    planner = Planner(FAIR)
    family = [draft("likely", 0.6), draft("drawn", 0.6)]
    first = planner.any_chance(2, 0.6)
    played(planner, family, [1])
    assert planner.any_chance(2, 0.6) > max(first, 0.9)
    assert planner.any_chance(3, 0.6) == Planner(FAIR).any_chance(3, 0.6)
    assert planner.chance("likely", 1, 0.6) < 0.1, "the likely one was not accepted"
    assert planner.chance("drawn", 1, 0.6) == 0.6, "nobody asks for the drawn one alone"


def test_a_level_that_does_not_pay_is_not_asked_for_and_tried_again_now_and_then() -> None:
    """And each time that it is, longer waits follow."""
    planner = Planner(table(0.5, level=500.0))
    asked = [planner.deeper([], [1.0], 1, 0) for _ in range(200)]
    tried = [at for at, yes in enumerate(asked) if yes]
    assert tried[0] == FIRST_WAIT - 1
    gaps = [b - a for a, b in pairwise(tried)]
    assert gaps and gaps == sorted(gaps) and gaps[0] > FIRST_WAIT
    assert all(Planner(FREE).deeper([], [1.0], 1, 0) for _ in range(3))
    assert not Planner(FREE).deeper([], [1.0], 1, Planner.LIMIT)


def test_a_level_that_brings_nothing_is_not_asked_for_again() -> None:
    planner, asked = Planner(table(0.1, level=2.0)), []
    for _ in range(60):
        asked.append(planner.deeper([], [1.0], 1, 0))
        if asked[-1]:
            planner.offered([[]])
    assert asked[:5] == [True] * 5 and 5 < sum(asked) < 50 and not any(asked[-5:])


@pytest.mark.parametrize("worths", [[], [0.4], [0.2, 0.9, 0.5]])
def test_the_bill_adds_up(worths: list[float]) -> None:
    planner = Planner(FAIR, 2)
    rows = [[draft("likely", one, row=r) for one in part] for r, part in enumerate((worths[:1], worths[1:]))]
    planner.grown(rows, 2)
    bill = planner.bill
    assert bill is not None
    assert bill.worths == sorted(worths, reverse=True) and bill.expected == pytest.approx(2 + sum(worths))
    assert bill.tokens == 2 + len(worths) and bill.levels == 2 and bill.draft_ms == FAIR.levels_ms(2, 2)
    assert all(ms == FAIR.verify_ms(2, tokens) for tokens, ms in bill.curve)
    assert bill.curve[0] == (2, bill.plain_ms) and len(bill.prices) == len(bill.curve) - 1
    total = dict(bill.curve)[bill.tokens] + bill.draft_ms
    steps = [behind[1] - before[1] for before, behind in pairwise(bill.curve)]
    assert bill.prices == pytest.approx([step * bill.expected / total for step in steps])


TARGET = tiny("llama")
PAIR = ModelPair(TARGET, perturbed(TARGET, NEAR["llama"]))


@pytest.mark.parametrize("drafter", ["model", "cascade"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_run_repeats_and_no_draft_reaches_past_a_rows_end(temperature: float, drafter: str) -> None:
    rows = [prompt * 2 for prompt in prompts(4)]
    same: dict[str, Any] = {
        "max_new_tokens": 30, "sampling": SamplingParams(temperature),
        "draft_length": Planner(FREE), "drafter": drafter,
    }  # fmt: skip
    runs = []
    for _ in range(2):
        left, lines = [30] * 4, []
        for round_ in stream(PAIR, rows, **same):
            for one in round_.rows:
                depths: list[int] = []
                for parent in one.parents or range(-1, len(one.drafted) - 1):
                    depths.append(1 + (depths[parent] if parent >= 0 else 0))
                assert max([0, *depths]) < max(left[one.sequence], 1)
                left[one.sequence] -= len(one.tokens)
                lines.append((one.sequence, one.drafted, one.parents, one.tokens))
            if round_.bill is not None:
                verified = sum(1 + len(one.drafted) for one in round_.rows)
                assert round_.bill.tokens == verified == len(round_.rows) + len(round_.bill.worths)
        runs.append(lines)
    assert runs[0] == runs[1] and any(parents is not None for _, _, parents, _ in runs[0])


def test_where_a_token_costs_more_than_it_brings_nothing_is_drafted() -> None:
    out = generate(PAIR, prompts(3), max_new_tokens=12, draft_length=Planner(DEAR))
    assert out.metrics.drafted == 0 and out.metrics.rounds == 11
    assert [s.token_ids for s in out.sequences] == [
        s.token_ids for s in generate(PAIR, prompts(3), max_new_tokens=12, method="regular").sequences
    ]


def test_costs_that_differ_by_machine_do_not_change_the_text() -> None:
    texts = []
    for costs in (FREE, FAIR, DEAR):
        out = generate(PAIR, prompts(3), max_new_tokens=20, draft_length=Planner(costs), verification="coupled",
                       sampling=SamplingParams(0.9))  # fmt: skip
        texts.append([s.token_ids for s in out.sequences])
    assert texts[0] == texts[1] == texts[2]

"""Numbers that are no numbers bias nothing: drafts that cannot be judged are cut, unused logits count for nothing.

Contract: the law of a block's text is enumerated in float64 with the shipped functions; the whole of `verify` and
`verify_tree` is counted over many rows, by every rule.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bass_core.sample.distribution import probabilities
from bass_core.sample.draw import draw
from bass_core.sample.noise import NoiseKeys, Role
from bass_core.sample.params import SamplingParams
from bass_core.sequence import RowRound
from bass_core.verify.acceptance import UNSOUND, judged_drafts
from bass_core.verify.draft_tree import DraftTree
from bass_core.verify.rejection import verify
from bass_core.verify.rules import VERIFICATIONS
from bass_core.verify.tree import verify_tree

from .enumeration import Chain, Chances, Judged, written
from .test_block import as_shipped, by_rejection

WARM, NAN = SamplingParams(1.0), math.nan
P, Q = torch.tensor([[0.4, 0.6], [0.5, 0.5], [0.3, 0.7]]), torch.tensor([[0.8, 0.2], [0.9, 0.1]])
ROWS = 20_000


def keys_of(rows: int) -> NoiseKeys:
    return NoiseKeys(0, torch.arange(rows), torch.full((rows,), 5))


@pytest.mark.parametrize("broken", ["q", "p"])
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("rule", [as_shipped, by_rejection])
def test_the_law_is_the_targets_whichever_place_is_broken(rule: type, place: int, broken: str) -> None:
    given = Chances(1, 3, 4)

    def judge(chain: Chain) -> Judged:
        sound, q = torch.ones(1, len(chain) + 1, dtype=torch.bool), torch.full((1, len(chain), 3), 0.25)
        if broken == "p":
            sound[0, place:] = False
        else:
            q[0, place : place + 1, 1] = NAN
        count = int(judged_drafts(sound, q, torch.tensor([len(chain)]))[0])
        assert count == min(place, len(chain))
        chances, following = rule(given)(chain[:count])
        return chances + [0.0] * (len(chain) - count), [*following, *[given.p[chain]] * (len(chain) - count)]

    drafted = list(given.drafts(3, lambda given, chain: False))
    found, _ = written(given, drafted, judge, 4)
    assert (found - given.target(4)).abs().sum() / 2 < 1e-12


def first_of(place: int, rule: str, tree: bool) -> Tensor:
    """The first token of many rows, whose two drafts were drawn from Q; that of `place` has a NaN in its q."""
    keys = keys_of(ROWS)
    streams = keys.stream(Role.DRAFT)
    drafts = torch.stack(
        [
            draw(Q[i].expand(ROWS, 2).contiguous(), 0, keys.sequence_ids, keys.positions + i, streams)
            for i in range(2)
        ],
        1,
    )
    q = Q.clone()
    if place >= 0:
        q[place, 1] = NAN
    logits = P.log().expand(ROWS, 3, 2).contiguous()
    if tree:
        made = DraftTree(drafts.tolist(), [[-1, 0]] * ROWS, [[0, 1]] * ROWS, q)
        outcomes = verify_tree(logits, made, keys, WARM, VERIFICATIONS[rule])
    else:
        counts = torch.full((ROWS,), 2)
        outcomes = verify(
            logits,
            drafts,
            q.expand(ROWS, 2, 2).contiguous(),
            counts,
            keys,
            WARM,
            verification=VERIFICATIONS[rule],
        ).host()
    drafted = drafts[:, 0].tolist()
    return torch.tensor([d if o.accepted else o.next_token for o, d in zip(outcomes, drafted, strict=True)])


@pytest.mark.parametrize(("rule", "tree"), [("rejection", False), ("block", False), ("rejection", True)])
@pytest.mark.parametrize("place", [-1, 0, 1])
def test_whole_verifications_write_the_targets_first_token(rule: str, tree: bool, place: int) -> None:
    """Four standard deviations of the count."""
    found = first_of(place, rule, tree)
    assert set(found.tolist()) == {0, 1}
    assert abs((found == 0).sum().item() - 0.4 * ROWS) < 4 * math.sqrt(ROWS * 0.24)


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled", "greedy"])
def test_logits_end_a_row_only_where_it_used_them(rule: str) -> None:
    """Behind a rejected draft, in a padded column, behind an accepted one, and at the newest token."""
    good, bad, low = [-50.0, 50.0, 0.0], [NAN, 0.0, 0.0], 1
    logits = torch.tensor([[good, bad, bad], [good, good, bad], [good, bad, good], [bad, good, good]])
    drafts = torch.tensor([[0, 0], [low, 0], [low, low], [low, low]])
    counts = torch.tensor([2, 1, 2, 2])
    params, name = (SamplingParams(), "auto") if rule == "greedy" else (WARM, rule)
    outcome = verify(logits, drafts, None, counts, keys_of(4), params, verification=VERIFICATIONS[name])
    assert outcome.accepted.tolist() == [0, 1, 1, 0]
    assert outcome.next_token.tolist() == [1, 1, UNSOUND, UNSOUND]


def test_what_was_not_judged_is_told_so() -> None:
    logits, q = torch.zeros(1, 3, 2), torch.tensor([[[NAN, 0.5], [0.5, 0.5]]])
    (outcome,) = verify(logits, torch.tensor([[1, 1]]), q, torch.tensor([2]), keys_of(1), WARM).host()
    assert outcome.accepted == 0
    assert all(math.isnan(test.p) and math.isnan(test.q) and test.chance == 0 for test in outcome.tests)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_draft_whose_q_is_0_stands_where_p_is_above_0(rule: str) -> None:
    """In chains and trees alike."""
    logits, q = torch.tensor([[[0.0, 0.0, -math.inf]] * 2]), torch.tensor([[0.0, 1.0, 0.0]])
    for token, stands in ((0, 1), (2, 0)):
        drafts = torch.tensor([[token]])
        chain = verify(
            logits, drafts, q[None], torch.tensor([1]), keys_of(1), WARM, verification=VERIFICATIONS[rule]
        ).host()[0]
        tree = verify_tree(
            logits, DraftTree([[token]], [[-1]], [[0]], q), keys_of(1), WARM, VERIFICATIONS["auto"]
        )[0]
        assert (chain.accepted, tree.accepted) == (stands, stands)
        assert (chain.tests[0].chance, tree.tests[0].chance) == (stands, stands)


def test_coupled_trees_tell_the_q_that_was_drawn_from() -> None:
    q = torch.tensor([[0.6, 0.3, 0.1]])
    tree = DraftTree([[0, 2]], [[-1, -1]], [[0, -1]], q)
    (outcome,) = verify_tree(torch.zeros(1, 3, 3), tree, keys_of(1), WARM, VERIFICATIONS["coupled"])
    assert [test.q for test in outcome.tests] == pytest.approx([0.6, 1.0])


def test_a_greedy_tree_saves_nothing() -> None:
    """Its first node is refused, the second stands: node order says nothing of what a rule would have lost."""
    logits = torch.tensor([[[0.0, 5.0, 0.0], [0.0, 0.0, 5.0], [0.0, 0.0, 5.0]]])
    (outcome,) = verify_tree(
        logits, DraftTree([[0, 1]], [[-1, -1]]), keys_of(1), SamplingParams(), VERIFICATIONS["auto"]
    )
    p, q, u = ([getattr(test, name) for test in outcome.tests] for name in "pqu")
    made = RowRound(
        0, [0, 1], p, q, u, outcome.accepted, [1, 2], ["accepted", "bonus"], None, parents=[-1, -1], path=[1]
    )
    assert (outcome.accepted, made.one_by_one, made.saved) == (1, 1, 0)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("temperature", [1e38, 1e44, 1e45, 1e300])
def test_no_temperature_gives_nan(temperature: float, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is masked stays masked, and top-k selects among logits that no temperature made equal."""
    if not compiled:
        monkeypatch.setattr("bass_core.sample.distribution.compiled", lambda rows: False)
    logits = torch.tensor([[1.0, 2.0, 3.0, -math.inf]])
    assert probabilities(logits, SamplingParams(temperature))[0].tolist() == pytest.approx([1 / 3] * 3 + [0])
    assert probabilities(logits * 1e-9, SamplingParams(temperature, top_k=1))[0].tolist() == [0, 0, 1, 0]
    assert probabilities(logits, SamplingParams(temperature, top_k=2))[0].tolist() == [0, 0.5, 0.5, 0]


@pytest.mark.parametrize(
    ("params", "verification"), [(SamplingParams(), "rejection"), (WARM, "coupled"), (WARM, "rejection")]
)
def test_a_row_whose_numbers_are_not_finite_is_marked(params: SamplingParams, verification: str) -> None:
    """Behind a draft that stands; the other rows are not touched."""
    tree = DraftTree([[0, 1]] * 3, [[-1, -1]] * 3)
    logits = torch.full((3, 3, 4), -200.0)
    logits[:, 0, 1] = 0.0
    logits[:, 2, 3] = 0.0
    logits[1, 2], logits[2, 2] = float("nan"), float("-inf")
    fine, *broken = verify_tree(logits, tree, keys_of(3), params, VERIFICATIONS[verification])
    assert fine.path == [1] and fine.next_token == 3
    assert [row.next_token for row in broken] == [UNSOUND] * 2


def test_a_draft_of_no_probability_is_never_accepted() -> None:
    """Not even by the smallest coin: what has probability 0 under the target is not written."""
    tree = DraftTree([[2]], [[-1]], [[0]], torch.tensor([[0.0, 0.0, 1.0, 0.0]]))
    logits = torch.tensor([[[0.0, 0.0, float("-inf"), 0.0], [0.0, 0.0, 0.0, 0.0]]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bass_core.verify.tree.uniform", lambda *_: torch.zeros(1))
        (outcome,) = verify_tree(logits, tree, keys_of(1), WARM, VERIFICATIONS["rejection"])
    assert outcome.path == [] and outcome.next_token != 2

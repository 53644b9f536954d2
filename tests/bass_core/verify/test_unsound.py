"""NaN and infinite numbers cause no bias: drafts that cannot be verified are cut, and unused logits are ignored.

The text's distribution is enumerated in float64, and `verify` and `verify_tree` are counted over many rows.
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
from bass_core.verify.rejection import verify
from bass_core.verify.rules import VERIFICATIONS
from bass_core.verify.tree import verify_tree
from bass_core.verify.tree_shape import JudgedTree

from .enumeration import Chain, Chances, Judged, written
from .test_block import as_implemented, by_rejection

SAMPLED, NAN = SamplingParams(1.0), math.nan
P, Q = torch.tensor([[0.4, 0.6], [0.5, 0.5], [0.3, 0.7]]), torch.tensor([[0.8, 0.2], [0.9, 0.1]])
ROWS = 20_000


def keys_of(rows: int) -> NoiseKeys:
    return NoiseKeys(0, torch.arange(rows), torch.full((rows,), 5))


@pytest.mark.parametrize("broken", ["q", "p"])
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("rule", [as_implemented, by_rejection])
def test_the_distribution_is_the_targets_whichever_place_is_nan(rule: type, place: int, broken: str) -> None:
    probs = Chances(1, 3, 4)

    def judge(chain: Chain) -> Judged:
        sound, q = torch.ones(1, len(chain) + 1, dtype=torch.bool), torch.full((1, len(chain), 3), 0.25)
        if broken == "p":
            sound[0, place:] = False
        else:
            q[0, place : place + 1, 1] = NAN
        count = int(judged_drafts(sound, q, torch.tensor([len(chain)]))[0])
        assert count == min(place, len(chain))
        chances, following = rule(probs)(chain[:count])
        return chances + [0.0] * (len(chain) - count), [*following, *[probs.p[chain]] * (len(chain) - count)]

    drafted = list(probs.drafts(3, lambda probs, chain: False))
    distribution, _ = written(probs, drafted, judge, 4)
    assert (distribution - probs.target(4)).abs().sum() / 2 < 1e-12


def first_of(place: int, rule: str, tree: bool) -> Tensor:
    """Return the first tokens of many rows with two drafts drawn from Q; q of the draft at `place` has a NaN."""
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
        draft_tree = JudgedTree(drafts.tolist(), [[-1, 0]] * ROWS, [[0, 1]] * ROWS, q)
        outcomes = verify_tree(logits, draft_tree, keys, SAMPLED, VERIFICATIONS[rule])
    else:
        counts = torch.full((ROWS,), 2)
        outcomes = verify(
            logits,
            drafts,
            q.expand(ROWS, 2, 2).contiguous(),
            counts,
            keys,
            SAMPLED,
            verification=VERIFICATIONS[rule],
        ).host()
    drafted = drafts[:, 0].tolist()
    return torch.tensor([d if o.accepted else o.next_token for o, d in zip(outcomes, drafted, strict=True)])


@pytest.mark.parametrize(("rule", "tree"), [("rejection", False), ("block", False), ("rejection", True)])
@pytest.mark.parametrize("place", [-1, 0, 1])
def test_the_first_token_has_the_targets_distribution(rule: str, tree: bool, place: int) -> None:
    """The token's count is within four standard deviations of the expected one."""
    tokens = first_of(place, rule, tree)
    assert set(tokens.tolist()) == {0, 1}
    assert abs((tokens == 0).sum().item() - 0.4 * ROWS) < 4 * math.sqrt(ROWS * 0.24)


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled", "greedy"])
def test_only_nan_logits_that_a_row_used_end_it(rule: str) -> None:
    """Four rows: NaN after a rejected draft, in a padded column, after an accepted draft, and at the newest token.

    Only the last two rows used their NaN logits.
    """
    good, bad, low = [-50.0, 50.0, 0.0], [NAN, 0.0, 0.0], 1
    logits = torch.tensor([[good, bad, bad], [good, good, bad], [good, bad, good], [bad, good, good]])
    drafts = torch.tensor([[0, 0], [low, 0], [low, low], [low, low]])
    counts = torch.tensor([2, 1, 2, 2])
    params, name = (SamplingParams(), "auto") if rule == "greedy" else (SAMPLED, rule)
    outcome = verify(logits, drafts, None, counts, keys_of(4), params, verification=VERIFICATIONS[name])
    assert outcome.accepted.tolist() == [0, 1, 1, 0]
    assert outcome.next_token.tolist() == [1, 1, UNSOUND, UNSOUND]


def test_drafts_that_were_not_verified_have_nan_in_their_tests() -> None:
    logits, q = torch.zeros(1, 3, 2), torch.tensor([[[NAN, 0.5], [0.5, 0.5]]])
    (outcome,) = verify(logits, torch.tensor([[1, 1]]), q, torch.tensor([2]), keys_of(1), SAMPLED).host()
    assert outcome.accepted == 0
    assert all(math.isnan(test.p) and math.isnan(test.q) and test.chance == 0 for test in outcome.tests)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_draft_with_q_0_is_accepted_if_p_is_above_0(rule: str) -> None:
    logits, q = torch.tensor([[[0.0, 0.0, -math.inf]] * 2]), torch.tensor([[0.0, 1.0, 0.0]])
    for token, accepted in ((0, 1), (2, 0)):
        drafts = torch.tensor([[token]])
        chain = verify(
            logits, drafts, q[None], torch.tensor([1]), keys_of(1), SAMPLED, verification=VERIFICATIONS[rule]
        ).host()[0]
        tree = verify_tree(
            logits, JudgedTree([[token]], [[-1]], [[0]], q), keys_of(1), SAMPLED, VERIFICATIONS["auto"]
        )[0]
        assert (chain.accepted, tree.accepted) == (accepted, accepted)
        assert (chain.tests[0].chance, tree.tests[0].chance) == (accepted, accepted)


def test_coupled_trees_report_the_q_of_drawn_drafts() -> None:
    q = torch.tensor([[0.6, 0.3, 0.1]])
    tree = JudgedTree([[0, 2]], [[-1, -1]], [[0, -1]], q)
    (outcome,) = verify_tree(torch.zeros(1, 3, 3), tree, keys_of(1), SAMPLED, VERIFICATIONS["coupled"])
    assert [test.q for test in outcome.tests] == pytest.approx([0.6, 1.0])


def test_a_greedy_tree_saves_nothing() -> None:
    """`saved` applies only to chains, so it is 0 although one draft of the tree is accepted and one rejected."""
    logits = torch.tensor([[[0.0, 5.0, 0.0], [0.0, 0.0, 5.0], [0.0, 0.0, 5.0]]])
    (outcome,) = verify_tree(
        logits, JudgedTree([[0, 1]], [[-1, -1]]), keys_of(1), SamplingParams(), VERIFICATIONS["auto"]
    )
    p, q, u = ([getattr(test, name) for test in outcome.tests] for name in "pqu")
    record = RowRound(
        0, [0, 1], p, q, u, outcome.accepted, [1, 2], ["accepted", "bonus"], None, parents=[-1, -1], path=[1]
    )
    assert (outcome.accepted, record.one_by_one, record.saved) == (1, 1, 0)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("temperature", [1e38, 1e44, 1e45, 1e300])
def test_no_temperature_gives_nan(temperature: float, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A huge temperature makes all logits equal, but masked tokens stay masked, and top-k selects before that."""
    if not compiled:
        monkeypatch.setattr("bass_core.sample.distribution.compiled", lambda rows: False)
    logits = torch.tensor([[1.0, 2.0, 3.0, -math.inf]])
    assert probabilities(logits, SamplingParams(temperature))[0].tolist() == pytest.approx([1 / 3] * 3 + [0])
    assert probabilities(logits * 1e-9, SamplingParams(temperature, top_k=1))[0].tolist() == [0, 0, 1, 0]
    assert probabilities(logits, SamplingParams(temperature, top_k=2))[0].tolist() == [0, 0.5, 0.5, 0]


@pytest.mark.parametrize(
    ("params", "verification"), [(SamplingParams(), "rejection"), (SAMPLED, "coupled"), (SAMPLED, "rejection")]
)
def test_a_row_with_non_finite_numbers_is_marked(params: SamplingParams, verification: str) -> None:
    """In two rows, the logits after an accepted draft are NaN or -inf; the third row stays valid."""
    tree = JudgedTree([[0, 1]] * 3, [[-1, -1]] * 3)
    logits = torch.full((3, 3, 4), -200.0)
    logits[:, 0, 1] = 0.0
    logits[:, 2, 3] = 0.0
    logits[1, 2], logits[2, 2] = float("nan"), float("-inf")
    fine, *broken = verify_tree(logits, tree, keys_of(3), params, VERIFICATIONS[verification])
    assert fine.path == [1] and fine.next_token == 3
    assert [row.next_token for row in broken] == [UNSOUND] * 2


def test_a_draft_of_no_probability_is_never_accepted() -> None:
    """A draft with p = 0 is rejected even if u is 0."""
    tree = JudgedTree([[2]], [[-1]], [[0]], torch.tensor([[0.0, 0.0, 1.0, 0.0]]))
    logits = torch.tensor([[[0.0, 0.0, float("-inf"), 0.0], [0.0, 0.0, 0.0, 0.0]]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bass_core.verify.tree.uniform", lambda *_: torch.zeros(1))
        (outcome,) = verify_tree(logits, tree, keys_of(1), SAMPLED, VERIFICATIONS["rejection"])
    assert outcome.path == [] and outcome.next_token != 2

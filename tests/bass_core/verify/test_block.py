"""Text under block verification has the target's distribution.

For a vocabulary of 3, the tests enumerate in float64 every chain and every number of accepted drafts. The total
variation distance to the target must be below 1e-12. tests/conformance enumerates whole rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bass_core.sample.noise import NoiseKeys
from bass_core.sample.params import SamplingParams
from bass_core.verify import rejection
from bass_core.verify.acceptance import RowOutcome
from bass_core.verify.block import chances, residual
from bass_core.verify.rejection import verify
from bass_core.verify.rules import VERIFICATIONS
from tests.support.rows import check_rows_alone

from .enumeration import Chain, Chances, Judged, Stop, largest, normalised, prefix, written

VOCAB = 3
STOPS: dict[str, Stop] = {
    "fixed": lambda probs, chain: False,
    "unsure": lambda probs, chain: float(probs.q[chain].max()) < 0.6,
    "after an unlikely token": lambda probs, chain: bool(chain) and probs.q[chain[:-1]][chain[-1]].item() < 0.3,
}


def by_the_paper(probs: Chances) -> Callable[[Chain], Judged]:
    """Return Algorithm 2 of arXiv 2403.10444 in Python floats; h of the last draft is p_g, as in equation 4."""

    def judge(chain: Chain) -> Judged:
        reach, h, following = 1.0, [], []
        for i, token in enumerate(chain):
            p, q = probs.p[chain[:i]], probs.q[chain[:i]]
            following.append(normalised((reach * p - q).clamp(min=0)))
            reach = min(1.0, reach * float(p[token]) / float(q[token]))
            if i + 1 == len(chain):
                h.append(reach)
                continue
            more = float((reach * probs.p[chain[: i + 1]] - probs.q[chain[: i + 1]]).clamp(min=0).sum())
            h.append(more / (more + 1 - reach) if more + 1 - reach > 0 else 1.0)
        return largest(h), [*following, probs.p[chain]]

    return judge


def by_rejection(probs: Chances) -> Callable[[Chain], Judged]:
    """Return the rejection rule, which tests draft by draft."""

    def judge(chain: Chain) -> Judged:
        pairs = [(probs.p[chain[:i]], probs.q[chain[:i]]) for i in range(len(chain))]
        h = [min(1.0, float(p[token] / q[token])) for (p, q), token in zip(pairs, chain, strict=True)]
        return prefix(h), [*(normalised((p - q).clamp(min=0)) for p, q in pairs), probs.p[chain]]

    return judge


def as_implemented(probs: Chances, points: bool = False) -> Callable[[Chain], Judged]:
    """Return the library's block verification, applied to rows with two columns of padding."""

    def judge(chain: Chain) -> Judged:
        width, count = len(chain) + 2, torch.tensor([len(chain)])
        p = torch.full((1, width + 1, probs.vocab), 0.5, dtype=torch.float64)
        q = torch.full((1, width, probs.vocab), 0.25, dtype=torch.float64)
        for i in range(len(chain) + 1):
            p[0, i] = probs.p[chain[:i]]
        for i in range(len(chain)):
            q[0, i] = probs.q[chain[:i]]
        drafts = torch.tensor([[*chain, 0, 0]])
        chosen = [each.gather(2, drafts[..., None])[..., 0] for each in (p[:, :width], q)]
        h, reach = chances(p, *chosen, q, count)
        following = [
            normalised(residual(p[:, i], q[:, i], reach[:, i])[0]) if i < len(chain) else p[0, i]
            for i in range(len(chain) + 1)
        ]
        return largest(h[0, : len(chain)].tolist()), following

    return judge


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_the_text_is_distributed_as_the_targets(seed: int, length: int, stop: str) -> None:
    probs = Chances(seed, VOCAB, length + 1)
    drafted = list(probs.drafts(length, STOPS[stop]))
    assert abs(sum(chance for _, chance in drafted) - 1) < 1e-12
    distribution, accepted = written(probs, drafted, as_implemented(probs), length + 1)
    assert (distribution - probs.target(length + 1)).abs().sum() / 2 < 1e-12
    _, accepted_by_rejection = written(probs, drafted, by_rejection(probs), length + 1)
    assert accepted > accepted_by_rejection - 1e-12
    if length == 1:
        assert abs(accepted - accepted_by_rejection) < 1e-12
    elif stop == "fixed":
        assert accepted > accepted_by_rejection + 1e-4, (
            "block verification accepts no more than the rejection rule"
        )


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("seed", range(2))
def test_decisions_are_those_of_the_paper(seed: int, stop: str) -> None:
    probs = Chances(seed, VOCAB, 4)
    for chain, _ in probs.drafts(3, STOPS[stop]):
        (ours, next_ours), (theirs, next_theirs) = as_implemented(probs)(chain), by_the_paper(probs)(chain)
        assert ours == pytest.approx(theirs, abs=1e-12)
        for share, our_weights, paper_weights in zip(theirs, next_ours, next_theirs, strict=True):
            assert share == 0 or torch.allclose(our_weights, paper_weights, atol=1e-12)


def random_rows(rows: int, width: int, vocab: int, seed: int, near: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the target's logits [B, l+1, V], the draft's q, and drafts drawn from it."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width + 1, vocab, generator=generator) * 2
    q = (logits[:, :width] + near * torch.randn(rows, width, vocab, generator=generator)).softmax(-1)
    drafts = torch.multinomial(q.view(-1, vocab), 1, generator=generator).view(rows, width)
    return logits, q, drafts


def judged(logits: Tensor, drafts: Tensor, q: Tensor | None, counts: Tensor, keys: NoiseKeys) -> list[RowOutcome]:
    return verify(logits, drafts, q, counts, keys, SamplingParams(1.0), verification=VERIFICATIONS["block"]).host()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("soft", [True, False])
def test_the_reported_tests_explain_the_decision(
    soft: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accepted` counts the drafts up to the last one with u below its chance; the chances follow the formula."""
    if not compiled:
        monkeypatch.setattr(rejection, "compiled", lambda rows: False)
    rows, width, vocab = 60, 4, 5000
    logits, q, drafts = random_rows(rows, width, vocab, seed=3)
    counts = torch.arange(rows) % (width + 1)
    keys = NoiseKeys(7, torch.arange(rows), torch.arange(rows) * 3)
    outcomes = judged(logits, drafts, q if soft else None, counts, keys)
    p = logits.double().softmax(-1)
    full_q = q.double() if soft else torch.zeros_like(q).scatter_(2, drafts[..., None], 1.0).double()
    p_drafts, q_drafts = (each.gather(2, drafts[..., None])[..., 0] for each in (p[:, :width], full_q))
    h, _ = chances(p, p_drafts, q_drafts, full_q, counts)
    jumped = 0
    for row, outcome in enumerate(outcomes):
        tests = outcome.tests[: int(counts[row])]
        passed = [i for i, test in enumerate(tests, start=1) if test.u < test.chance]
        assert outcome.accepted == max(passed, default=0)
        assert [test.chance for test in tests] == pytest.approx(h[row, : len(tests)].tolist(), abs=2e-6)
        jumped += len(passed) < outcome.accepted
    assert jumped > 3 or not soft


def test_the_recovered_token_is_drawn_from_the_residual() -> None:
    """Of 6,000 rows with the same three drafts, those that accepted equally many are tested together."""
    rows, drafts = 6000, torch.tensor([2, 2, 0])
    p = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.35, 0.25], [0.3, 0.3, 0.4], [0.2, 0.2, 0.6]])
    q = torch.tensor([[0.4, 0.3, 0.3], [0.2, 0.5, 0.3], [0.6, 0.2, 0.2]])
    keys = NoiseKeys(5, torch.arange(rows), torch.full((rows,), 9))
    shared = (each.expand(rows, *each.shape) for each in (p.log(), drafts, q))
    outcomes = judged(*shared, torch.full((rows,), 3), keys)
    chosen = (each[:3].gather(1, drafts[:, None])[:, 0][None] for each in (p, q))
    h, reach = chances(p[None], *chosen, q[None], torch.tensor([3]))
    seen = Counter((outcome.accepted, outcome.next_token) for outcome in outcomes)
    for accepted, share in enumerate(largest(h[0].tolist())):
        weights = residual(p[accepted], q[accepted], reach[:, accepted])[0] if accepted < 3 else p[3]
        expected = (rows * share * normalised(weights)).tolist()
        for token, count in enumerate(expected):
            assert abs(seen[accepted, token] - count) < 4 * count**0.5 + 1e-9, (accepted, token)


def test_a_rows_verdict_does_not_depend_on_its_neighbours() -> None:
    """A row has the same bits by itself, among other rows, in another order, and next to rows with more drafts."""
    rows, width, vocab = 9, 4, 9000
    logits, q, drafts = random_rows(rows, width, vocab, seed=5)
    counts = torch.tensor([4, 0, 3, 4, 1, 2, 4, 3, 2])

    def verdicts(subset: list[int]) -> list[tuple[Any, ...]]:
        n, ids = int(counts[subset].max()), torch.tensor(subset)
        keys = NoiseKeys(1, ids, ids + 40)
        outcomes = judged(logits[subset, : n + 1], drafts[subset, :n], q[subset, :n], counts[subset], keys)
        return [
            (outcome.tests[: counts[row]], outcome.accepted, outcome.next_token)
            for row, outcome in zip(subset, outcomes, strict=True)
        ]

    together = check_rows_alone(verdicts, rows)
    assert 0 < sum(accepted for _, accepted, _ in together) < counts.sum()


def test_a_draft_with_p_and_q_0_is_rejected() -> None:
    """A user's drafter may report q = 0. If p is 0 too, the draft is rejected, and its token is never written."""
    p = torch.tensor([0.0, 0.5, 0.5])
    logits = p.log().expand(1, 3, 3)
    q = torch.tensor([0.0, 1.0, 0.0]).expand(1, 2, 3)
    for row in range(50):
        keys = NoiseKeys(row, torch.tensor([0]), torch.tensor([1]))
        (outcome,) = judged(logits, torch.tensor([[0, 1]]), q, torch.tensor([2]), keys)
        assert outcome.accepted == 0 and outcome.next_token in (1, 2)
        assert outcome.tests[0].chance == 0

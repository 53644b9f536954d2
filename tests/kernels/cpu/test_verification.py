"""Verification in one compiled call makes the decisions of bass_core/verify/rejection.py, the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bass_core.machine import cpu_kernels
from bass_core.sample.distribution import probabilities, spread
from bass_core.sample.draw import draw
from bass_core.sample.noise import NoiseKeys, Role
from bass_core.sample.params import SamplingParams
from bass_core.verify import rejection
from bass_core.verify.acceptance import UNSOUND, Outcome, RowOutcome
from bass_core.verify.rejection import plain, verify
from bass_core.verify.rules import VERIFICATIONS

if not cpu_kernels.available():
    pytest.skip("numba is not there", allow_module_level=True)

RULES = ["rejection", "block", "coupled"]
WAYS = [
    SamplingParams(0.7),
    SamplingParams(0.7, top_p=0.95),
    SamplingParams(1.3, top_k=5, min_p=0.02),
    SamplingParams(1.0, top_k=40, top_p=0.6),
]
ROWS, WIDTH = 60, 4


def keys_of(rows: int, epochs: bool = False) -> NoiseKeys:
    at = torch.arange(rows)
    return NoiseKeys(2**62 + 5, at * (2**35 + 3), at * 7 + 2, at * 3 if epochs else None)


def a_round(size: int, params: SamplingParams, keys: NoiseKeys, coupled: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, drafts and what they were drawn from: near the target's distribution, padding included."""
    torch.manual_seed(size)
    logits = torch.randn(ROWS, WIDTH + 1, size) * 3
    q = probabilities(logits[:, :WIDTH] + torch.randn(ROWS, WIDTH, size) * 0.7, params)
    # Some drafts are drawn from exactly what the target says.
    q[::5] = probabilities(logits[::5, :WIDTH], params)
    streams = keys.stream(Role.TARGET if coupled else Role.DRAFT)[:, None]
    return logits, draw(q, keys.seed, *keys.at(WIDTH), streams), q


def by_reference(monkeypatch: pytest.MonkeyPatch, *given: object, **ways: object) -> Outcome:
    """The outcome of torch's rules on distributions that are compiled, as ours are."""
    with monkeypatch.context() as patch:
        patch.setattr(rejection, "compiled", lambda rows: False)
        return verify(*given, **ways)


def assert_alike(ours: Outcome, theirs: Outcome) -> None:
    for name in ("accepted", "next_token", "judged"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert torch.equal(ours.next_p.nan_to_num(-1), theirs.next_p.nan_to_num(-1))
    for one, other in zip(ours.host(), theirs.host(), strict=True):
        assert _rounded(one, ours) == _rounded(other, ours)


def _rounded(outcome: RowOutcome, of: Outcome) -> list[tuple[object, ...]]:
    """What a reader sees of the drafts that were tested; sums of a chance have their own order."""
    judged = outcome.tests[: int(of.judged.max())] if of.judged is not None else outcome.tests
    return [(t.token, _said(t.p), _said(t.q), _said(t.u), _said(t.chance, 5)) for t in judged]


def _said(value: float, digits: int = 9) -> float | None:
    return None if math.isnan(value) else round(value, digits)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("params", WAYS)
@pytest.mark.parametrize("size", [3, 700])
def test_decisions_are_the_reference_s(
    size: int, params: SamplingParams, rule: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(ROWS, epochs=size == 3)
    logits, drafts, q = a_round(size, params, keys, rule == "coupled")
    counts = torch.arange(ROWS) % (WIDTH + 1)
    for draft_probs in (q, None, q.transpose(0, 1).contiguous().transpose(0, 1)):
        given = (logits, drafts, draft_probs, counts, keys, params)
        ours = verify(*given, verification=VERIFICATIONS[rule])
        assert_alike(ours, by_reference(monkeypatch, *given, verification=VERIFICATIONS[rule]))
        assert 0 < ours.accepted.sum() < counts.sum()
        one = slice(7, 8)
        epochs = None if keys.epochs is None else keys.epochs[one]
        alone = verify(
            logits[one], drafts[one], None if draft_probs is None else draft_probs[one], counts[one],
            NoiseKeys(keys.seed, keys.sequence_ids[one], keys.positions[one], epochs), params,
            verification=VERIFICATIONS[rule],
        )  # fmt: skip
        assert alone.next_token == ours.next_token[7] and torch.equal(alone.p[0], ours.p[7])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_unsound_numbers_cut_a_row_s_drafts(rule: str, bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    params, keys = SamplingParams(1.0, top_p=0.9), keys_of(ROWS)
    logits, drafts, q = a_round(50, params, keys, rule == "coupled")
    for row in range(ROWS):
        place = row % (WIDTH + 1)
        if row % 3 == 0:
            logits[row, place, row % 50] = bad
        elif row % 3 == 1:
            q[row, min(place, WIDTH - 1), row % 50] = bad
        else:
            logits[row, place] = -math.inf
    counts = torch.full((ROWS,), WIDTH)
    given = (logits, drafts, q, counts, keys, params)
    ours = verify(*given, verification=VERIFICATIONS[rule])
    assert_alike(ours, by_reference(monkeypatch, *given, verification=VERIFICATIONS[rule]))
    assert (ours.next_token == UNSOUND).any() and (ours.next_token != UNSOUND).any()


def test_a_plain_round_draws_what_a_chain_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, params = keys_of(ROWS), SamplingParams(0.8, top_p=0.9)
    logits = torch.randn(ROWS, 900) * 3
    logits[4, 7] = math.nan
    ours = plain(logits, keys, params)
    monkeypatch.setattr(rejection, "compiled", lambda rows: False)
    for one, other in zip(ours, plain(logits, keys, params), strict=True):
        assert one.next_token == other.next_token and _said(one.next_p) == _said(other.next_p)
    assert ours[4].next_token == UNSOUND


def test_a_reduced_vocabulary_is_spread() -> None:
    q, ids = torch.rand(2, 3, 5), torch.tensor([7, 0, 3, 9, 4])
    found = spread(q, ids, 11)
    assert torch.equal(found, torch.zeros(2, 3, 11).index_copy_(-1, ids, q))

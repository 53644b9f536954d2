"""The compiled verification makes the decisions of its reference, bass_core/verify/rejection.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bass_core.machine import cpu_kernels
from bass_core.sample.distribution import ColumnProbs, probabilities, scatter_columns
from bass_core.sample.draw import draw
from bass_core.sample.noise import NoiseKeys, Role
from bass_core.sample.params import SamplingParams
from bass_core.sample.rows import RaggedRows
from bass_core.verify import rejection
from bass_core.verify.acceptance import UNSOUND, Outcome, RowOutcome
from bass_core.verify.rejection import plain, verify
from bass_core.verify.rules import VERIFICATIONS

if not cpu_kernels.available():
    pytest.skip("numba is not installed", allow_module_level=True)

RULES = ["rejection", "block", "coupled"]
PARAMS = [
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
    """Return logits, drafts and the q of the drafts, which is near p. Padding tokens are drawn in the same way."""
    torch.manual_seed(size)
    logits = torch.randn(ROWS, WIDTH + 1, size) * 3
    q = probabilities(logits[:, :WIDTH] + torch.randn(ROWS, WIDTH, size) * 0.7, params)
    # Some drafts are drawn from p itself.
    q[::5] = probabilities(logits[::5, :WIDTH], params)
    streams = keys.stream(Role.TARGET if coupled else Role.DRAFT)[:, None]
    return logits, draw(q, keys.seed, *keys.at(WIDTH), streams), q


def by_reference(monkeypatch: pytest.MonkeyPatch, *arguments: object, **options: object) -> Outcome:
    """Return the outcome with the rules in torch. The distributions still come from the CPU kernels."""
    with monkeypatch.context() as patch:
        patch.setattr(rejection, "compiled", lambda rows: False)
        return verify(*arguments, **options)


def assert_alike(ours: Outcome, theirs: Outcome) -> None:
    for name in ("accepted", "next_token", "judged"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert torch.equal(ours.next_p.nan_to_num(-1), theirs.next_p.nan_to_num(-1))
    for mine, reference in zip(ours.host(), theirs.host(), strict=True):
        assert _shown_tests(mine, ours) == _shown_tests(reference, ours)


def _shown_tests(outcome: RowOutcome, of: Outcome) -> list[tuple[object, ...]]:
    """Return the numbers of the tested drafts. Chances have 5 digits, since their sums are rounded differently."""
    judged = outcome.tests[: int(of.judged.max())] if of.judged is not None else outcome.tests
    return [(t.token, _shown(t.p), _shown(t.q), _shown(t.u), _shown(t.chance, 5)) for t in judged]


def _shown(value: float, digits: int = 9) -> float | None:
    return None if math.isnan(value) else round(value, digits)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("size", [3, 700])
def test_decisions_equal_the_reference(
    size: int, params: SamplingParams, rule: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(ROWS, epochs=size == 3)
    logits, drafts, q = a_round(size, params, keys, rule == "coupled")
    counts = torch.arange(ROWS) % (WIDTH + 1)
    for draft_probs in (q, None, q.transpose(0, 1).contiguous().transpose(0, 1)):
        arguments = (logits, drafts, draft_probs, counts, keys, params)
        ours = verify(*arguments, verification=VERIFICATIONS[rule])
        assert_alike(ours, by_reference(monkeypatch, *arguments, verification=VERIFICATIONS[rule]))
        assert 0 < ours.accepted.sum() < counts.sum()
        row = slice(7, 8)
        epochs = None if keys.epochs is None else keys.epochs[row]
        alone = verify(
            logits[row], drafts[row], None if draft_probs is None else draft_probs[row], counts[row],
            NoiseKeys(keys.seed, keys.sequence_ids[row], keys.positions[row], epochs), params,
            verification=VERIFICATIONS[rule],
        )  # fmt: skip
        assert alone.next_token == ours.next_token[7] and torch.equal(alone.p[0], ours.p[7])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("min_p", [0.0, 0.01])
def test_flat_and_peaked_distributions_decide_like_the_reference(
    rule: str, min_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of peaked distributions top-p keeps few tokens, in several chunks. The flat ones are written completely."""
    rows, width, size, params = 12, 2, 12_288, SamplingParams(0.9, top_p=0.95, min_p=min_p)
    keys = keys_of(rows)
    torch.manual_seed(rows)
    logits = torch.randn(rows, width + 1, size) * torch.tensor([0.0, 0.3, 2.0, 4.0]).repeat(3)[:, None, None]
    ids, columns = torch.randperm(size)[:6000], torch.full((size,), -1)
    columns[ids] = torch.arange(len(ids))
    values = probabilities(logits[:, :width, ids] + torch.randn(rows, width, len(ids)) * 0.5, params)
    streams = keys.stream(Role.TARGET if rule == "coupled" else Role.DRAFT)[:, None]
    drafts = ids[draw(values, keys.seed, *keys.at(width), streams)]
    options, counts = {"verification": VERIFICATIONS[rule]}, torch.full((rows,), width)
    for q in (ColumnProbs(values, ids, columns), scatter_columns(values, ids, size), None):
        arguments = (logits, drafts, q, counts, keys, params)
        ours = verify(*arguments, **options)
        assert_alike(ours, by_reference(monkeypatch, *arguments, **options))
        # With q = 1 a draft is accepted with probability p, which is small here.
        assert (0 if q is None else 1) <= ours.accepted.sum() < counts.sum()


def test_greedy_decisions_equal_the_reference(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft may be the likeliest token, also in padding; some logits are unsound."""
    torch.manual_seed(0)
    logits = torch.randn(ROWS, WIDTH + 1, 5000)
    logits[torch.arange(ROWS), torch.arange(ROWS) % 7 % (WIDTH + 1), 9] = torch.tensor(
        [math.nan, math.inf, 0] * 20
    )
    drafts, counts = logits[:, :WIDTH].argmax(-1), torch.arange(ROWS) % (WIDTH + 1)
    drafts[::3, 1:] += 1
    drafts[1::6, 2] += 1
    ours = verify(logits, drafts, None, counts, keys_of(ROWS), SamplingParams())
    theirs = by_reference(monkeypatch, logits, drafts, None, counts, keys_of(ROWS), SamplingParams())
    assert_alike(ours, theirs)
    assert (ours.accepted == counts).any() and (ours.accepted < ours.judged).any()
    assert (ours.judged < counts).any() and (ours.next_token == UNSOUND).any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("greedy", [False, True])
def test_logits_without_padding_and_q_without_zeros_decide_alike(rule: str, greedy: bool, threads: int) -> None:
    """Every third row has copied drafts, which are point masses, and these rows are wider than the others."""
    params, keys, size = SamplingParams(0.0 if greedy else 0.7, top_p=0.95), keys_of(ROWS), 700
    logits, drafts, _ = a_round(size, SamplingParams(0.7), keys, rule == "coupled")
    ids, narrow = torch.randperm(size)[:300], WIDTH - 1
    columns = torch.full((size,), -1).scatter(0, ids, torch.arange(300))
    values = probabilities(logits[:, :narrow, ids] + torch.randn(ROWS, narrow, 300), SamplingParams(0.7))
    values[4, 0, 7] = math.nan
    is_copied = (torch.arange(ROWS) % 3 == 0)[:, None]
    drafts[:, :narrow] = ids[draw(values.nan_to_num(), 3, *keys.at(narrow), keys.stream(Role.DRAFT)[:, None])]
    drafts[::6, :2] = logits[::6, :2].argmax(-1)
    q = ColumnProbs(values, ids, columns).with_points(drafts.where(is_copied, -1))
    counts = (torch.arange(ROWS) % (WIDTH + 1)).where(is_copied[:, 0], torch.arange(ROWS) % WIDTH)
    real = (torch.arange(WIDTH + 1) <= counts[:, None]).flatten().nonzero()[:, 0]
    ragged = RaggedRows(logits.flatten(0, 1)[real], [0, *(counts + 1).cumsum(0).tolist()], WIDTH + 1, real)
    assert torch.equal(ragged.padded().flatten(0, 1)[real], ragged.rows)
    options = {"verification": VERIFICATIONS[rule]}
    ours = verify(ragged, drafts, q, counts, keys, params, **options)
    expected = verify(logits, drafts, q.dense(), counts, keys, params, **options)
    assert 0 < ours.accepted.sum() < counts.sum() and torch.equal(ours.next_token, expected.next_token)
    assert torch.equal(ours.accepted, expected.accepted) and torch.equal(ours.judged, expected.judged)
    for row, (mine, theirs) in enumerate(zip(ours.host(), expected.host(), strict=True)):
        assert str(mine.tests[: counts[row]]) == str(theirs.tests[: counts[row]]) and mine.next_p == theirs.next_p


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_unsound_numbers_discard_the_later_drafts_of_a_row(
    rule: str, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    arguments = (logits, drafts, q, counts, keys, params)
    ours = verify(*arguments, verification=VERIFICATIONS[rule])
    assert_alike(ours, by_reference(monkeypatch, *arguments, verification=VERIFICATIONS[rule]))
    assert (ours.next_token == UNSOUND).any() and (ours.next_token != UNSOUND).any()


def test_a_plain_round_draws_the_tokens_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, params = keys_of(ROWS), SamplingParams(0.8, top_p=0.9)
    logits = torch.randn(ROWS, 900) * 3
    logits[4, 7] = math.nan
    ours = plain(logits, keys, params)
    monkeypatch.setattr(rejection, "compiled", lambda rows: False)
    for mine, reference in zip(ours, plain(logits, keys, params), strict=True):
        assert mine.next_token == reference.next_token and _shown(mine.next_p) == _shown(reference.next_p)
    assert ours[4].next_token == UNSOUND


def test_probabilities_of_a_reduced_vocabulary_go_to_its_ids() -> None:
    q, ids = torch.rand(2, 3, 5), torch.tensor([7, 0, 3, 9, 4])
    full = scatter_columns(q, ids, 11)
    assert torch.equal(full, torch.zeros(2, 3, 11).index_copy_(-1, ids, q))

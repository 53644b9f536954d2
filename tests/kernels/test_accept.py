"""The accept kernel decides like bass_core/verify/rejection.py, and its top-p threshold is the one of a sort.

Both get the same p, q, noise and counts. Rows with a u within rounding of p / q are left out, since for them
either answer is right.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from bass_core.sample import distribution as sampling
from bass_core.sample.distribution import probabilities
from bass_core.sample.draw import draw
from bass_core.sample.noise import (
    NoiseKeys,
    Role,
    exponentials,
    stream,
    to_uniform,
    token_uniforms,
    uniform,
    words,
)
from bass_core.sample.params import SamplingParams
from bass_core.verify import rejection
from bass_core.verify.acceptance import UNSOUND
from bass_core.verify.block import chances
from bass_core.verify.rejection import verify
from bass_core.verify.rejection_triton import verify_on_device
from bass_core.verify.rules import VERIFICATIONS
from kernels.triton import accept as kernel
from kernels.triton import block, nucleus
from kernels.triton import noise as device
from tests.support.models import slow_but

SEED = 0x1234_5678_9ABC_DEF1
SOFT = SamplingParams(temperature=1.0)


@triton.jit
def hashes(
    sequences, positions, streams, seed, first, second, third, fourth, uniforms, spread, noise, V: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    low = tl.load(seed).to(tl.uint32)
    high = (tl.load(seed) >> 32).to(tl.uint32)
    sequence, position = tl.load(sequences + row), tl.load(positions + row)
    a, b, c, d = device.words(low, high, sequence, position, tl.load(streams + row))
    tl.store(first + row, a.to(tl.int64))
    tl.store(second + row, b.to(tl.int64))
    tl.store(third + row, c.to(tl.int64))
    tl.store(fourth + row, d.to(tl.int64))
    tl.store(uniforms + row, device.to_uniform(a))
    token = tl.arange(0, V)
    u = device.token_uniforms(a, b, token)
    tl.store(spread + row * V + token, u)
    tl.store(noise + row * V + token, device.exponential(u))


def test_noise_has_the_bits_of_the_reference() -> None:
    sequences = torch.tensor([0, 1, 2**31, 2**40 + 5, 2**62])
    positions = torch.tensor([0, 7, 2**20, 4096, 2**33 + 1])
    begins = torch.tensor([0, 5, 2**20 - 3, 2**29 - 1, 2**33])
    streams = stream(Role.RESIDUAL, begins)
    hashed = [torch.zeros(5, dtype=torch.int64) for _ in range(4)]
    uniforms, spread, noise = torch.zeros(5), torch.zeros(5, 4096), torch.zeros(5, 4096)
    hashes[(5,)](sequences, positions, streams, torch.tensor([SEED]), *hashed, uniforms, spread, noise, V=4096)
    for ours, theirs in zip(hashed, words(SEED, sequences, positions, streams), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(uniforms, uniform(SEED, sequences, positions, streams))
    assert torch.equal(spread, token_uniforms(SEED, sequences, positions, streams, 4096))
    expected = exponentials(SEED, sequences, positions, streams, 4096)
    torch.testing.assert_close(noise, expected, rtol=4e-7, atol=0)


@triton.jit
def convert(words_, uniforms, noise, N: tl.constexpr):
    at = tl.arange(0, N)
    u = device.to_uniform(tl.load(words_ + at).to(tl.uint32))
    tl.store(uniforms + at, u)
    tl.store(noise + at, device.exponential(u))


def test_extreme_words_become_the_reference_s_numbers() -> None:
    """Words are at both ends of the range, near the point at which float32 starts to round, ties, or random."""
    ends = [word + i for word in (0, 2**23, 2**24, 2**25, 2**31, 2**32) for i in range(-9, 10)]
    some = torch.randint(0, 2**32, (4096,), generator=torch.Generator().manual_seed(0)).tolist()
    tested = torch.tensor([*(word for word in ends if 0 <= word < 2**32), *some][:4096])
    uniforms, noise = torch.zeros(4096), torch.zeros(4096)
    convert[(1,)](tested, uniforms, noise, N=4096)
    assert torch.equal(uniforms, to_uniform(tested.float()))
    assert uniforms.min() == 2.0**-33 and uniforms.max() == 1 - 2.0**-24
    torch.testing.assert_close(noise.double(), -torch.log1p(-uniforms.double()), rtol=4e-7, atol=0)


def both(
    p_logits: Tensor, drafts: Tensor, q: Tensor | None, counts: Tensor, keys: NoiseKeys, rule: str = "rejection"
) -> tuple:
    """Return the reference's result and the kernel's."""
    p = probabilities(p_logits, SOFT)
    ours = kernel.accept(
        p,
        q,
        drafts,
        counts,
        None,
        keys.sequence_ids,
        keys.positions,
        torch.tensor([keys.seed]),
        begins=keys.begins,
        verification=kernel.AcceptRule[rule.upper()],
        block=block.chances(p, q, drafts, counts) if rule == "block" else None,
    )
    return verify(p_logits, drafts, q, counts, keys, SOFT, verification=VERIFICATIONS[rule]), ours


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 24),
    width=st.integers(1, 5),
    vocab=st.sampled_from([7, 96, 2500]),
    soft=st.booleans(),
    near=st.sampled_from([0.0, 0.3, 2.0]),
    epochs=st.booleans(),
    seed=st.integers(0, 2**62),
)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_decisions_equal_the_reference(
    rule: str, batch: int, width: int, vocab: int, soft: bool, near: float, epochs: bool, seed: int
) -> None:
    """If `near` is 0, q equals p, so the residual max(0, p - q) is zero."""
    generator = torch.Generator().manual_seed(seed % 2**31)
    p_logits = torch.randn(batch, width + 1, vocab, generator=generator) * 2
    noise = torch.randn(batch, width, vocab, generator=generator)
    q = probabilities(p_logits[:, :width] + near * noise, SOFT)
    ids = torch.randint(0, 2**40, (batch,), generator=generator)
    at = torch.randint(0, 5000, (batch,), generator=generator)
    keys = NoiseKeys(seed, ids, at, at - 3 if epochs else None)
    rows, steps = keys.at(width)
    drafts = draw(q, seed, rows.expand_as(steps), steps, keys.stream(Role.DRAFT)[:, None].expand_as(steps))
    counts = torch.randint(0, width + 1, (batch,), generator=generator)
    theirs, ours = both(p_logits, drafts, q if soft else None, counts, keys, rule)
    clear = ((theirs.u * theirs.q - theirs.p).abs() > 1e-6).all(dim=1)
    if theirs.chance is not None:
        clear = ((theirs.u - theirs.chance).abs() > 1e-5).all(dim=1)
    assert torch.equal(ours[0][clear], theirs.accepted[clear])
    assert torch.equal(ours[1][clear], theirs.next_token[clear])
    # Drafts past the counts are padding.
    drafted = torch.arange(width) < counts[:, None]
    for mine, reference in zip(ours[2:], (theirs.p, theirs.q, theirs.u), strict=True):
        assert torch.equal(mine[drafted], reference[drafted])


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_batch_without_drafts_equals_the_reference(rule: str) -> None:
    keys = NoiseKeys(SEED, torch.arange(4), torch.arange(4))
    logits = torch.randn(4, 1, 30)
    none = torch.zeros(4, 0, dtype=torch.long)
    theirs, ours = both(logits, none, None, torch.zeros(4, dtype=torch.long), keys, rule)
    assert torch.equal(ours[0], theirs.accepted) and torch.equal(ours[1], theirs.next_token)


def test_draws_equal_the_reference() -> None:
    torch.manual_seed(5)
    weights = torch.rand(6, 3, 700) ** 4
    ids = torch.randperm(5000)[:700]
    keys = torch.arange(6)[:, None].expand(6, 3), torch.arange(18).view(6, 3), torch.ones(6, 3, dtype=torch.long)
    for names in (None, ids):
        mine = kernel.draw(weights, *keys, torch.tensor([SEED]), names)
        assert torch.equal(mine, draw(weights, SEED, *keys, names))


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled", "synthetic"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_verification_on_a_device_equals_the_reference(verification: str, temperature: float) -> None:
    """Rounds begin before the position of their first draft, as in AMUSD (`begins`). One row has NaN logits."""
    torch.manual_seed(7)
    params = SamplingParams(temperature)
    logits = torch.randn(12, 4, 50) * 3
    near = probabilities(logits[:, :3] + torch.randn(12, 3, 50) * 0.5, SOFT)
    at = torch.arange(12) * 7 + 9
    keys = NoiseKeys(SEED, torch.arange(12) * 2**33, at, at - 4)
    ids, positions = keys.at(3)
    role = Role.TARGET if verification == "coupled" else Role.DRAFT
    streams = keys.stream(role)[:, None].expand(12, 3)
    drafts = draw(near, SEED, ids.expand(12, 3), positions, streams) if temperature else near.argmax(-1)
    counts = torch.randint(0, 4, (12,))
    options = {"synthetic": 0.7} if verification == "synthetic" else {"verification": VERIFICATIONS[verification]}
    if temperature:
        logits[3] = torch.nan
    arguments = logits, drafts, near if temperature else None, counts, keys, params
    theirs, ours = verify(*arguments, **options), verify_on_device(*arguments, **options)
    for name in ("accepted", "next_token"):
        mine, reference = getattr(ours, name), getattr(theirs, name)
        sound = torch.ones(12, dtype=torch.bool) if not temperature else torch.arange(12) != 3
        assert torch.equal(mine[sound], reference[sound]), name
    assert 0 < theirs.accepted.sum() < counts.sum()
    if temperature:
        assert theirs.next_token[3] == ours.next_token[3] == UNSOUND
    if verification in ("rejection", "block") and temperature:
        assert torch.equal(ours.u, theirs.u)
    if verification == "block" and temperature:
        known = (torch.arange(3) < counts[:, None]) & sound[:, None]
        torch.testing.assert_close(ours.chance[known], theirs.chance[known], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("soft", [True, False])
def test_chances_equal_the_reference(soft: bool) -> None:
    """The rows have 0 to 4 drafts, some with p = 0 or q = 0. The tokens make two blocks."""
    torch.manual_seed(9)
    vocab, counts = 2500, torch.arange(20) % 5
    p = (torch.randn(20, 5, vocab) * 3).softmax(-1)
    q = (p[:, :4].log() + torch.randn(20, 4, vocab)).softmax(-1)
    drafts = torch.multinomial(q.view(-1, vocab), 1).view(20, 4)
    p[3, 1, drafts[3, 1]] = q[4, 0, drafts[4, 0]] = 0
    p[9, 2, drafts[9, 2]] = q[9, 2, drafts[9, 2]] = 0
    mine, reached = block.chances(p, q if soft else None, drafts, counts)
    chosen = (probs.gather(2, drafts[..., None])[..., 0] for probs in (p[:, :4], q))
    p_drafts, q_drafts = chosen if soft else (next(chosen), torch.ones(20, 4))
    h, reach = chances(p, p_drafts, q_drafts, q if soft else None, counts)
    known = torch.arange(4) < counts[:, None]
    torch.testing.assert_close(mine[known], h[known], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(reached[:, 1:][known], reach[:, 1:][known])
    assert (h[known] < 1).any() and h[known].isfinite().all()


def test_recovered_tokens_of_a_block_equal_the_reference() -> None:
    """Many rows end after an unlikely draft.

    In these rows the residual of block verification differs most from p - q.
    """
    torch.manual_seed(4)
    rows, vocab = 160, 12
    logits = torch.randn(rows, 5, vocab)
    q = probabilities(logits[:, :4] + torch.randn(rows, 4, vocab), SOFT)
    drafts = torch.multinomial(q.view(-1, vocab), 1).view(rows, 4)
    keys = NoiseKeys(SEED, torch.arange(rows), torch.arange(rows) * 5)
    counts = torch.full((rows,), 4)
    theirs, ours = both(logits, drafts, q, counts, keys, "block")
    assert theirs.chance is not None
    clear = ((theirs.u - theirs.chance).abs() > 1e-5).all(dim=1)
    assert torch.equal(ours[0][clear], theirs.accepted[clear])
    assert torch.equal(ours[1][clear], theirs.next_token[clear])
    assert ((theirs.accepted > 0) & (theirs.accepted < 4)).sum() > 30


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_device_handles_unsound_numbers_like_the_reference(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most rows have NaN in one q (one number or all), and some have NaN logits at the last position."""
    generator = torch.Generator().manual_seed(2)
    rows, width, vocab = 40, 4, 30
    logits = torch.randn(rows, width + 1, vocab, generator=generator) * 2
    q = probabilities(logits[:, :width] + torch.randn(rows, width, vocab, generator=generator) / 2, SOFT)
    keys = NoiseKeys(SEED, torch.arange(rows), torch.arange(rows) * 3)
    ids, at = keys.at(width)
    drafts = draw(q, SEED, ids.expand_as(at), at, keys.stream(Role.DRAFT)[:, None].expand_as(at))
    for row in range(rows):
        q[row, row % (width + 1) : row % (width + 1) + 1, : vocab if row % 2 else 1] = torch.nan
    logits[::3, width] = torch.nan
    counts = torch.full((rows,), width)
    theirs = verify(logits, drafts, q, counts, keys, SOFT, verification=VERIFICATIONS[rule])
    monkeypatch.setattr(rejection, "is_accelerator", lambda device: True)
    monkeypatch.setattr(rejection, "available", lambda device: True)
    ours = verify(logits, drafts, q, counts, keys, SOFT, verification=VERIFICATIONS[rule])
    assert torch.equal(ours.accepted, theirs.accepted) and torch.equal(ours.next_token, theirs.next_token)
    assert ours.judged is not None and torch.equal(ours.judged, torch.arange(rows) % (width + 1))
    assert (ours.accepted <= ours.judged).all() and (ours.accepted == ours.judged).sum() > 5
    # Unsound last logits end only the rows that reached them.
    ended = ours.next_token == UNSOUND
    assert torch.equal(ended, (torch.arange(rows) % 3 == 0) & (ours.accepted == width)) and ended.any()


@pytest.mark.parametrize(
    ("spread", "vocab"),
    slow_but([(2.0, 2500), (2.0, 20000)], product([0.1, 2.0, 30.0], [3, 2500, 20000])),
)
def test_the_threshold_equals_that_of_a_sort(spread: float, vocab: int) -> None:
    torch.manual_seed(0)
    probs = probabilities(torch.randn(2, 3, vocab) * spread, SamplingParams(1.0))
    decided = 0
    for top_p in (1e-3, 0.3, 0.9, 0.999):
        threshold = nucleus.threshold(probs, top_p)
        expected = sampling._threshold(probs, top_p)
        # The kernel may choose another threshold only if the likelier tokens sum to top_p within rounding.
        likelier = torch.where(probs > expected, probs, 0).double().sum(-1, keepdim=True)
        equal = torch.where(probs == expected, probs, 0).double().sum(-1, keepdim=True)
        clear = ((likelier - top_p).abs() > 2e-6) & ((likelier + equal - top_p).abs() > 2e-6)
        assert torch.equal(threshold[clear], expected[clear])
        decided += int(clear.sum())
        mass = torch.where(probs >= threshold, probs, 0).double().sum(-1)
        above = torch.where(probs > threshold, probs, 0).double().sum(-1)
        assert ((mass > top_p - 1e-5) & (above < top_p + 1e-5)).all()
    assert decided >= 12


def test_the_threshold_at_ties_extremes_and_nan() -> None:
    rows = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0], [0.5, 0.3, 0.2, 0.0]])
    assert nucleus.threshold(rows, 0.5).tolist() == [[0.25], [1.0], [0.5]]
    assert torch.equal(nucleus.threshold(rows, 0.501), torch.tensor([[0.25], [1.0], [0.3]]))
    assert nucleus.threshold(rows[:, None], 0.9).shape == (3, 1, 1)
    assert nucleus.threshold(rows[:0], 0.9).shape == (0, 1)
    nucleus.threshold(torch.full((1, 5), torch.nan), 0.9)
    # A top_p that is 0 in float32 keeps the likeliest token.
    assert nucleus.threshold(rows, 1e-300).tolist() == [[0.25], [1.0], [0.5]]


def test_the_threshold_of_rows_that_are_read_in_blocks() -> None:
    """More equal tokens than are collected; a row that needs two passes before it collects; and NaN."""
    vocab = 3 * nucleus.BLOCK_V
    equal, near = torch.full((vocab,), 2.0**-15), torch.full((vocab,), 2.0**-15)
    equal[vocab // 2 :] = 2.0**-16
    near[: vocab // 2] += torch.arange(vocab // 2) * 2.0**-30
    rows = torch.stack((equal / equal.sum(), near / near.sum(), torch.full((vocab,), torch.nan)))
    for top_p in (0.2, 0.5, 0.9):
        expected = sampling._threshold(rows[:2], top_p)
        assert torch.equal(nucleus.threshold(rows, top_p)[:2], expected)


@pytest.mark.parametrize("spread", [4.0, 8.0])
def test_a_peaked_row_is_read_twice_in_large_blocks(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, load = [], interpreter._interpreter.load

    def counted(pointers: Any, mask: Any, *rest: Any) -> Any:
        reads.append(int(mask.sum()))
        return load(pointers, mask, *rest)

    monkeypatch.setattr(interpreter._interpreter, "load", counted)
    torch.manual_seed(0)
    nucleus.threshold(torch.softmax(torch.randn(1, 128 * 1024) * spread, -1), 0.9)
    collected = reads.pop()
    assert reads == [8192] * 32 and 0 < collected < 8192


def test_top_p_on_an_accelerator_equals_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows keep few tokens; one keeps more than the largest number of likeliest tokens that is sorted."""
    torch.manual_seed(1)
    logits = torch.randn(4, 3000) * torch.tensor([8.0, 3.0, 1.0, 0.01])[:, None]
    params = SamplingParams(1.0, top_p=0.95)
    expected = probabilities(logits, params)
    monkeypatch.setattr(sampling, "is_accelerator", lambda device: True)
    filtered = probabilities(logits, params)
    selected = expected > 0
    assert selected.sum(-1).min() < 200 and selected.sum(-1).max() > 2000
    # Rounding of the sum may keep one token more or less.
    assert ((filtered > 0) != selected).sum(-1).max() <= 1
    torch.testing.assert_close(filtered, expected, atol=4e-4, rtol=1e-3)

"""The noise, known answers and independence across seeds, ids, positions and tokens; and what it draws from."""

from __future__ import annotations

import random
from itertools import combinations, product

import numpy as np
import torch
from scipy import stats

from bass_core.sample.distribution import argmax, probabilities
from bass_core.sample.noise import Role, exponentials, philox, stream, to_uniform, token_uniforms, uniform, words
from bass_core.sample.params import COLDEST, SamplingParams
from tests.support.rows import check_rows_alone

MASK = 0xFFFFFFFF


def test_philox_known_answers():
    """The published test vectors of Philox4x32-10 (Random123's kat_vectors)."""
    zeros = philox(tuple(torch.zeros(1, dtype=torch.long) for _ in range(4)), (0, 0))
    assert [int(word) for word in zeros] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = philox(tuple(torch.full((1,), MASK) for _ in range(4)), (MASK, MASK))
    assert [int(word) for word in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def plain_philox(counter, key):
    """The ten rounds of Philox4x32-10 (Salmon et al., SC 2011) in Python integers."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = right >> 32 ^ b ^ k, right & MASK, left >> 32 ^ d ^ m, left & MASK
        k, m = k + 0x9E3779B9 & MASK, m + 0xBB67AE85 & MASK
    return a, b, c, d


def test_words_of_any_key():
    """Seeds and ids of more than 32 bits are used in full."""
    draw = random.Random(0)
    for _ in range(200):
        seed, key = draw.getrandbits(63), draw.getrandbits(63)
        position, role, begin = draw.getrandbits(31), draw.choice(list(Role)), draw.getrandbits(29)
        second = 0 if role == Role.TARGET else role + 8 * begin
        counter = (position, second, key & MASK, key >> 32)
        expected = plain_philox(counter, (seed & MASK, seed >> 32))
        made = words(seed, torch.tensor([key]), torch.tensor([position]), stream(role, torch.tensor([begin])))
        assert tuple(int(word) for word in made) == expected


def _tokens(seed=0, ids=1, positions=1, role=Role.TARGET, size=4096, begin=0):
    ids, positions = torch.arange(ids)[:, None], torch.arange(positions)
    return token_uniforms(seed, ids, positions, stream(role, torch.tensor(begin)), size)


def test_uniform_and_strictly_inside():
    sample = _tokens(ids=4, positions=8)
    assert sample.min() > 0 and sample.max() < 1
    assert stats.kstest(sample.flatten().numpy(), "uniform").pvalue > 1e-3
    many = uniform(3, torch.arange(200)[:, None], torch.arange(200), stream(Role.ACCEPT, torch.arange(200)))
    assert stats.kstest(many.flatten().numpy(), "uniform").pvalue > 1e-3


def test_streams_are_independent():
    """Of roles, rounds, seeds, positions, tokens and rows. A number does not depend on what it is made with."""
    base = _tokens(ids=8).flatten()
    roles = [role for role in Role if role != Role.TARGET]
    others = {
        **{role.name: _tokens(ids=8, role=role).flatten() for role in roles},
        **{f"round {begin}": _tokens(ids=8, role=Role.DRAFT, begin=begin).flatten() for begin in (1, 2, 5)},
        "seed": _tokens(seed=1, ids=8).flatten(),
        "high seed": _tokens(seed=1 << 40, ids=8).flatten(),
        "position": _tokens(ids=8, positions=2)[:, 1].flatten(),
        "neighbouring token": base.roll(1),
        "neighbouring row": _tokens(ids=9)[1:].flatten(),
    }
    for (name, one), (also, other) in combinations({"base": base, **others}.items(), 2):
        correlation = torch.corrcoef(torch.stack((one, other)))[0, 1].abs()
        assert correlation < 4.5 / len(base) ** 0.5, (name, also)
    alone = token_uniforms(0, torch.tensor([3]), torch.tensor([2]), torch.tensor([0]), 4096)
    assert torch.equal(_tokens(ids=5, positions=3)[3, 2], alone[0])


def test_a_round_has_noise_of_its_own_but_for_the_targets_draws():
    begins = torch.arange(50)
    together = [set(stream(role, begins).tolist()) for role in Role]
    assert [len(one) for one in together] == [1 if role == Role.TARGET else 50 for role in Role]
    assert not any(one & other for one, other in combinations(together, 2))


EXTREMES = [0, 1, 2, 0xFF, 2**23, 2**24 - 1, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 2**7, 2**32 - 2, 2**32 - 1]


def test_the_extreme_words():
    """From 2**-33 to 1 - 2**-24, rounded to nearest at each step, whatever integer type the words have."""
    made = to_uniform(torch.tensor(EXTREMES).float())
    for word, u in zip(EXTREMES, made.tolist(), strict=True):
        nearest = np.float32(word) * np.float32(2**-32) + np.float32(2**-33)
        assert u == float(min(nearest, np.float32(1 - 2**-24))) and 0 < u < 1
    assert made[0] == 2.0**-33 and made[-1] == 1 - 2.0**-24 and made.diff().min() >= 0
    wrapped = torch.tensor([word - (1 << 32) if word >= 1 << 31 else word for word in EXTREMES], dtype=torch.int32)
    assert torch.equal(to_uniform(wrapped.view(torch.uint32).float()), made)


def test_exponentials_are_fine_where_they_are_small():
    """None is 0 or infinite, and unlikely tokens are drawn as often as they should be, down to 2**-32."""
    u = to_uniform(torch.tensor(EXTREMES).float())
    small = torch.log1p(-u)
    assert small.isfinite().all() and small.max() < 0
    keys = torch.arange(16)[:, None], torch.arange(64), torch.tensor(0)
    many, uniforms = exponentials(9, *keys, 4096), token_uniforms(9, *keys, 4096)
    torch.testing.assert_close(many.double(), -torch.log1p(-uniforms.double()), rtol=1e-6, atol=0)
    assert stats.kstest(many.flatten()[::16].numpy(), "expon").pvalue > 1e-3
    for below in (2.0**-10, 2.0**-16, 2.0**-19):
        expected = many.numel() * below
        assert abs(int((many < below).sum()) - expected) < 4 * expected**0.5
    # On a grid of 2**-23, these thousands of values would be only a few hundred distinct numbers.
    smallest = many[many < 2.0**-11]
    assert len(smallest.unique()) > 0.99 * len(smallest) > 1000


def test_pairs_of_neighbours_fill_the_square():
    """Correlation only sees linear dependence: here pairs of neighbours must fill 16 x 16 cells evenly."""
    sample = _tokens(ids=64, positions=64, size=64)
    neighbours = {
        "tokens": (sample[..., :-1], sample[..., 1:]),
        "positions": (sample[:, :-1], sample[:, 1:]),
        "ids": (sample[:-1], sample[1:]),
    }
    for name, (one, other) in neighbours.items():
        cells = (one.flatten() * 16).long() * 16 + (other.flatten() * 16).long()
        assert stats.chisquare(torch.bincount(cells, minlength=256).numpy()).pvalue > 1e-3, name


def test_the_largest_of_many_is_no_favourite():
    """As Gumbel-max needs: over positions, each of 50 tokens wins equally often."""
    winners = _tokens(ids=100, positions=200, size=50).argmax(-1).flatten()
    assert stats.chisquare(torch.bincount(winners, minlength=50).numpy()).pvalue > 1e-3


def test_argmax_is_torchs_takes_the_lowest_of_equals_and_reads_slices() -> None:
    torch.manual_seed(0)
    for shape, dtype in product([(7,), (1, 49152), (3, 5, 1000), (2, 0, 9)], [torch.float32, torch.bfloat16]):
        random = torch.randn(shape).to(dtype)
        assert torch.equal(argmax(random), random.argmax(-1)) and argmax(random).dtype == torch.int64
    values = torch.zeros(4, 3, 20)
    values[:, :, [5, 17]] = 1.0
    assert argmax(values).eq(5).all()
    assert argmax(values[..., 6:]).eq(11).all() and argmax(values[1:3, 0]).shape == (2,)
    with torch.inference_mode():
        assert argmax(torch.ones(2, 9)).tolist() == [0, 0]


def test_the_coldest_temperature_that_is_drawn_with() -> None:
    """vLLM's bound; below it, and at 0, the likeliest token is taken."""
    assert SamplingParams(COLDEST) != SamplingParams() and not SamplingParams(COLDEST).greedy
    assert all(SamplingParams(t).greedy for t in (0, 0.0, 5e-324, 1e-46, 0.999e-5))
    logits = torch.tensor([[3.0, 3.0, -2.0], [1.0, 1.0 + 2**-20, -3e38]])
    for temperature in (COLDEST, 1e-4, 1.0, 1e9):
        p = probabilities(logits, SamplingParams(temperature))
        assert p.isfinite().all() and torch.allclose(p.sum(-1), torch.ones(2))
        assert p[0, 0] == p[0, 1] and p[1, 1] >= p[1, 0]
    assert probabilities(logits, SamplingParams(1e-46)).tolist() == [[1, 0, 0], [0, 1, 0]]


def test_a_row_has_the_same_probabilities_alone_and_among_others() -> None:
    before = torch.get_num_threads()
    logits = torch.randn(6, 49_152, generator=torch.Generator().manual_seed(0)) * 3
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            check_rows_alone(lambda rows: probabilities(logits[rows], SamplingParams(1.0, top_p=0.9)), 6)
    finally:
        torch.set_num_threads(before)

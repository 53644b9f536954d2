"""Random numbers equal known values and do not depend on each other; argmax and probabilities."""

from __future__ import annotations

import random
from itertools import combinations, product

import numpy as np
import torch
from scipy import stats

from bass_core.sample.distribution import argmax, probabilities
from bass_core.sample.noise import (
    NoiseKeys,
    Role,
    exponentials,
    philox,
    stream,
    to_uniform,
    token_uniforms,
    uniform,
    words,
)
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


def test_words_equal_philox():
    """Seeds and ids of more than 32 bits are used in full."""
    rng = random.Random(0)
    for _ in range(200):
        seed, key = rng.getrandbits(63), rng.getrandbits(63)
        position, role, begin = rng.getrandbits(31), rng.choice(list(Role)), rng.getrandbits(29)
        second = 0 if role == Role.TARGET else role + 8 * begin
        counter = (position, second, key & MASK, key >> 32)
        expected = plain_philox(counter, (seed & MASK, seed >> 32))
        output = words(seed, torch.tensor([key]), torch.tensor([position]), stream(role, torch.tensor([begin])))
        assert tuple(int(word) for word in output) == expected


def _tokens(seed=0, ids=1, positions=1, role=Role.TARGET, size=4096, begin=0):
    ids, positions = torch.arange(ids)[:, None], torch.arange(positions)
    return token_uniforms(seed, ids, positions, stream(role, torch.tensor(begin)), size)


def test_numbers_are_uniform_and_strictly_between_0_and_1():
    sample = _tokens(ids=4, positions=8)
    assert sample.min() > 0 and sample.max() < 1
    assert stats.kstest(sample.flatten().numpy(), "uniform").pvalue > 1e-3
    many = uniform(3, torch.arange(200)[:, None], torch.arange(200), stream(Role.ACCEPT, torch.arange(200)))
    assert stats.kstest(many.flatten().numpy(), "uniform").pvalue > 1e-3


def test_streams_are_independent():
    """The numbers of different roles, rounds, seeds, positions, tokens and rows are not correlated.

    A number is also the same whether it's computed by itself or together with others.
    """
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
    for (name, sample), (other_name, other_sample) in combinations({"base": base, **others}.items(), 2):
        correlation = torch.corrcoef(torch.stack((sample, other_sample)))[0, 1].abs()
        assert correlation < 4.5 / len(base) ** 0.5, (name, other_name)
    single = token_uniforms(0, torch.tensor([3]), torch.tensor([2]), torch.tensor([0]), 4096)
    assert torch.equal(_tokens(ids=5, positions=3)[3, 2], single[0])


def test_each_round_has_new_noise_except_for_the_targets_draws():
    begins = torch.arange(50)
    streams = [set(stream(role, begins).tolist()) for role in Role]
    assert [len(values) for values in streams] == [1 if role == Role.TARGET else 50 for role in Role]
    assert not any(values & other for values, other in combinations(streams, 2))


EXTREMES = [0, 1, 2, 0xFF, 2**23, 2**24 - 1, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 2**7, 2**32 - 2, 2**32 - 1]


def test_the_extreme_words_stay_between_0_and_1():
    """Words of any integer type become numbers from 2**-33 to 1 - 2**-24, rounded to nearest at each step."""
    uniforms = to_uniform(torch.tensor(EXTREMES).float())
    for word, u in zip(EXTREMES, uniforms.tolist(), strict=True):
        nearest = np.float32(word) * np.float32(2**-32) + np.float32(2**-33)
        assert u == float(min(nearest, np.float32(1 - 2**-24))) and 0 < u < 1
    assert uniforms[0] == 2.0**-33 and uniforms[-1] == 1 - 2.0**-24 and uniforms.diff().min() >= 0
    wrapped = torch.tensor([word - (1 << 32) if word >= 1 << 31 else word for word in EXTREMES], dtype=torch.int32)
    assert torch.equal(to_uniform(wrapped.view(torch.uint32).float()), uniforms)


def test_small_exponentials_have_full_precision():
    """No exponential is 0 or infinite, and small ones are as frequent as they should be."""
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
    # If the values were multiples of 2**-23, these thousands of values would contain only a few hundred different
    # numbers.
    smallest = many[many < 2.0**-11]
    assert len(smallest.unique()) > 0.99 * len(smallest) > 1000


def test_pairs_of_neighbours_fill_the_square():
    """Correlation detects only linear dependence; these pairs must also fill 16 x 16 cells evenly."""
    sample = _tokens(ids=64, positions=64, size=64)
    neighbours = {
        "tokens": (sample[..., :-1], sample[..., 1:]),
        "positions": (sample[:, :-1], sample[:, 1:]),
        "ids": (sample[:-1], sample[1:]),
    }
    for name, (one, other) in neighbours.items():
        cells = (one.flatten() * 16).long() * 16 + (other.flatten() * 16).long()
        assert stats.chisquare(torch.bincount(cells, minlength=256).numpy()).pvalue > 1e-3, name


def test_each_token_has_the_largest_number_equally_often():
    """Each of 50 tokens has the largest number at equally many positions. Gumbel-max sampling needs this."""
    winners = _tokens(ids=100, positions=200, size=50).argmax(-1).flatten()
    assert stats.chisquare(torch.bincount(winners, minlength=50).numpy()).pvalue > 1e-3


def test_argmax_is_torchs_with_the_lowest_index_on_ties() -> None:
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


def test_temperatures_below_the_coldest_are_greedy() -> None:
    """Below this bound, which is vLLM's, the most likely token is taken, as at temperature 0."""
    assert SamplingParams(COLDEST) != SamplingParams() and not SamplingParams(COLDEST).greedy
    assert all(SamplingParams(t).greedy for t in (0, 0.0, 5e-324, 1e-46, 0.999e-5))
    logits = torch.tensor([[3.0, 3.0, -2.0], [1.0, 1.0 + 2**-20, -3e38]])
    for temperature in (COLDEST, 1e-4, 1.0, 1e9):
        p = probabilities(logits, SamplingParams(temperature))
        assert p.isfinite().all() and torch.allclose(p.sum(-1), torch.ones(2))
        assert p[0, 0] == p[0, 1] and p[1, 1] >= p[1, 0]
    assert probabilities(logits, SamplingParams(1e-46)).tolist() == [[1, 0, 0], [0, 1, 0]]


def test_a_rows_probabilities_do_not_depend_on_other_rows() -> None:
    before = torch.get_num_threads()
    logits = torch.randn(6, 49_152, generator=torch.Generator().manual_seed(0)) * 3
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            check_rows_alone(lambda rows: probabilities(logits[rows], SamplingParams(1.0, top_p=0.9)), 6)
    finally:
        torch.set_num_threads(before)


def test_inner_rounds_share_no_numbers():
    """Not even those of rows whose ids differ only in the upper half of their bits."""
    ids, begins = ([part.flatten() for part in torch.meshgrid(
        torch.tensor([5 + (high << 32) for high in range(8)]), torch.arange(1, 9), indexing="ij"
    )])  # fmt: skip
    inner = NoiseKeys(3, ids, begins).inner(begins + 2)
    assert len({*inner.sequence_ids.tolist(), *ids.tolist()}) == 64 + 8

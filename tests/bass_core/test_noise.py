"""The noise: known answers, uniformity, and independence of what it must be independent of."""

import random
from itertools import combinations

import torch
from scipy import stats

from bass_core.noise import Role, philox, token_uniforms, uniform, words

MASK = 0xFFFFFFFF


def test_philox_known_answers():
    """The published vectors of Philox4x32-10 (Random123's kat_vectors)."""
    zeros = philox(tuple(torch.zeros(1, dtype=torch.long) for _ in range(4)), (0, 0))
    assert [int(word) for word in zeros] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = philox(tuple(torch.full((1,), MASK) for _ in range(4)), (MASK, MASK))
    assert [int(word) for word in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def plain_philox(counter, key):
    """The ten rounds of Salmon et al. (SC 2011) in Python's own integers."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = right >> 32 ^ b ^ k, right & MASK, left >> 32 ^ d ^ m, left & MASK
        k, m = k + 0x9E3779B9 & MASK, m + 0xBB67AE85 & MASK
    return a, b, c, d


def test_words_of_any_key():
    """Seeds and ids of more than 32 bits count whole."""
    draw = random.Random(0)
    for _ in range(200):
        seed, key = draw.getrandbits(63), draw.getrandbits(63)
        position, role = draw.getrandbits(31), draw.randrange(5)
        counter = (position, role, key & MASK, key >> 32)
        expected = plain_philox(counter, (seed & MASK, seed >> 32))
        made = words(seed, torch.tensor([key]), torch.tensor([position]), torch.tensor([role]))
        assert tuple(int(word) for word in made) == expected


def _tokens(seed=0, ids=1, positions=1, role=Role.TARGET, size=4096):
    ids, positions = torch.arange(ids)[:, None], torch.arange(positions)
    return token_uniforms(seed, ids, positions, torch.tensor(int(role)), size)


def test_uniform_and_strictly_inside():
    sample = _tokens(ids=4, positions=8)
    assert sample.min() > 0 and sample.max() < 1
    assert stats.kstest(sample.flatten().numpy(), "uniform").pvalue > 1e-3
    many = uniform(3, torch.arange(200)[:, None], torch.arange(200), Role.ACCEPT)
    assert stats.kstest(many.flatten().numpy(), "uniform").pvalue > 1e-3


def test_streams_are_independent():
    base = _tokens(ids=8, size=4096).flatten()
    others = {
        "role": _tokens(ids=8, role=Role.RESIDUAL).flatten(),
        "seed": _tokens(seed=1, ids=8).flatten(),
        "high seed": _tokens(seed=1 << 40, ids=8).flatten(),
        "position": _tokens(ids=8, positions=2)[:, 1].flatten(),
        "neighbouring token": base.roll(1),
        "neighbouring row": _tokens(ids=9)[1:].flatten(),
    }
    for name, other in others.items():
        correlation = torch.corrcoef(torch.stack((base, other)))[0, 1].abs()
        assert correlation < 4 / len(base) ** 0.5, name


def test_same_key_same_number_in_any_batch():
    whole = _tokens(ids=5, positions=3)
    one = token_uniforms(0, torch.tensor([3]), torch.tensor([2]), torch.tensor([0]), 4096)
    assert torch.equal(whole[3, 2], one[0])


def test_no_two_roles_share_a_stream():
    ids, positions = torch.arange(100)[:, None], torch.arange(100)
    streams = [uniform(7, ids, positions, role).flatten() for role in Role]
    for one, other in combinations(streams, 2):
        assert torch.corrcoef(torch.stack((one, other)))[0, 1].abs() < 4 / 100
    per_token = [_tokens(ids=20, role=role).flatten() for role in Role]
    for one, other in combinations(per_token, 2):
        assert torch.corrcoef(torch.stack((one, other)))[0, 1].abs() < 4 / len(one) ** 0.5


def test_pairs_of_neighbours_fill_the_square():
    """Correlation sees lines alone: here neighbouring tokens, positions and ids fall evenly into 16 x 16 cells."""
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
    """What Gumbel-max reads: each of 50 tokens wins equally often, over positions."""
    winners = _tokens(ids=100, positions=200, size=50).argmax(-1).flatten()
    assert stats.chisquare(torch.bincount(winners, minlength=50).numpy()).pvalue > 1e-3

"""The noise: known answers, uniformity, and independence of what it must be independent of."""

import torch
from scipy import stats

from bass_core.noise import Role, philox, token_uniforms, uniform

MASK = 0xFFFFFFFF


def test_philox_known_answers():
    """The published vectors of Philox4x32-10 (Random123's kat_vectors)."""
    zeros = philox(tuple(torch.zeros(1, dtype=torch.long) for _ in range(4)), (0, 0))
    assert [int(word) for word in zeros] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = philox(tuple(torch.full((1,), MASK) for _ in range(4)), (MASK, MASK))
    assert [int(word) for word in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


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

"""Softmax, draws and noise on a CPU equal torch's, with the same bits for any batch and number of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bass_core.machine import cpu_kernels
from bass_core.sample import distribution, noise
from bass_core.sample.distribution import argmax, probabilities, top
from bass_core.sample.draw import draw
from bass_core.sample.params import COLDEST, SamplingParams
from tests.support.rows import check_rows_alone

if not cpu_kernels.available():
    pytest.skip("numba is not installed", allow_module_level=True)
import numba

from kernels.cpu.sampling import calls

SHAPES = [(1, 1), (3, 7), (17, 33), (3, 4097), (17, 12_288), (1, 49_152)]
SLOW_SIZES = [pytest.param(size, marks=pytest.mark.slow) for size in (49_152, 200_000)]
SEED = 2**62 + 12_345


def keys(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sequence ids (some over 32 bits), positions and streams of the rows."""
    at = torch.arange(rows)
    return at * (2**40 + 77), at * 3 + 5, at * 8 + 3


def plain(logits: Tensor, temperature: float) -> Tensor:
    """Return the softmax in float64."""
    return torch.softmax((logits.double() - logits.double().amax(-1, keepdim=True)) / temperature, -1)


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_the_softmax_is_close_to_float64(rows: int, size: int, threads: int) -> None:
    torch.manual_seed(size)
    logits = torch.randn(rows, size) * 5
    for temperature in (0.7, 1.0):
        params = SamplingParams(temperature)
        p = torch.stack(check_rows_alone(lambda some, params=params: probabilities(logits[some], params), rows))
        assert p.dtype == torch.float32 and p.shape == logits.shape
        torch.testing.assert_close(p.double(), plain(logits, temperature), rtol=2e-5, atol=1e-37)
        torch.testing.assert_close(p.double().sum(-1), torch.ones(rows).double(), rtol=0, atol=1e-6)


FILTERS = [
    {"top_p": 0.95}, {"top_p": 1e-6}, {"top_p": 1e-300}, {"top_p": 1 - 1e-7}, {"top_p": 0.5, "min_p": 0.1},
    {"top_k": 1}, {"top_k": 50}, {"top_k": 10**30}, {"top_k": 300, "top_p": 0.9}, {"min_p": 0.02}, {"min_p": 1.0},
]  # fmt: skip


def rows_of_all_kinds(size: int) -> Tensor:
    """Return flat, usual, peaked and constant rows, rows with forbidden tokens or ties, and unsound rows."""
    torch.manual_seed(size)
    logits = torch.randn(9, size) * torch.tensor([0.1, 1.0, 3.0, 9.0, 3.0, 3.0, 0.0, 1.0, 1.0])[:, None]
    logits[4, ::3] = -torch.inf
    logits[5] = (logits[5] * 2).round() / 2
    logits[7, size // 2], logits[8, size // 3] = torch.nan, torch.inf
    logits[4, 0] = 1.0
    return logits


@pytest.mark.parametrize("size", [1, 2, 63, 700, 4097, *SLOW_SIZES])
def test_filters_equal_the_reference(size: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens are kept. Probabilities may differ by rounding, since their sum is rounded differently."""
    logits = rows_of_all_kinds(size)
    for params in (SamplingParams(warmth, **some) for some in FILTERS for warmth in (0.7, 1e300)):
        filtered = probabilities(logits, params)
        selected = logits
        if 0 < params.top_k < size:
            selected = logits.masked_fill(logits < logits.topk(params.top_k).values[:, -1:], -torch.inf)
        expected = probabilities(selected, SamplingParams(params.temperature))
        with monkeypatch.context() as patch:
            patch.setattr(cpu_kernels, "available", lambda: False)
            if params.temperature > 1:  # torch's own softmax has the same bits here
                assert torch.equal(probabilities(logits[:7], params) > 0, filtered[:7] > 0)
        expected = expected if params.top_p == 1 else distribution._nucleus(expected, params.top_p)
        expected = expected if params.min_p == 0 else distribution._likely(expected, params.min_p)
        assert torch.equal(filtered[:7] > 0, expected[:7] > 0) and filtered[7:].isnan().all()
        torch.testing.assert_close(filtered[:7], expected[:7], rtol=2e-6, atol=0)
        assert all(torch.equal(filtered[row], probabilities(logits[row], params)) for row in range(7))


@pytest.mark.parametrize("compiled", [True, False])
def test_top_k_selects_before_the_temperature(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After division by the temperature, these logits are equal."""
    if not compiled:
        monkeypatch.setattr(cpu_kernels, "available", lambda: False)
    logits = torch.tensor([0.1, 0.2, 0.3, -torch.inf]) * 1e-9
    assert probabilities(logits, SamplingParams(1e300, top_k=1)).tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("size", [1, 5, 700, 49_152])
def test_the_largest_logit_is_numpy_s(size: int, threads: int) -> None:
    logits = rows_of_all_kinds(size)
    logits[3, size // 4] = torch.nan
    places, values = calls.largest(logits)
    assert np.array_equal(places.numpy(), logits.numpy().argmax(-1))
    assert np.array_equal(values, logits.numpy().max(-1), equal_nan=True)
    largest = top(logits[:3].exp(), min(size, 4))
    assert torch.equal(largest[0], logits[:3].exp().topk(min(size, 4)).values)


def test_rows_are_scattered_among_rows_of_zeros(threads: int) -> None:
    rows, places = torch.randn(3, 2, 5), torch.tensor([1, 2, 5])
    assert torch.equal(calls.scatter_rows(rows, places, 7), torch.zeros(7, 2, 5).index_copy_(0, places, rows))
    assert torch.equal(calls.scatter_rows(rows[:0], places[:0], 2), torch.zeros(2, 2, 5))


@pytest.mark.parametrize("size", [5, 64, 49_150])
@pytest.mark.parametrize("words", [1, 1540])
def test_masks_keep_the_numbers_with_a_bit(size: int, words: int, threads: int) -> None:
    """Rows may be parts of wider ones, and no other number changes."""
    logits, random = torch.randn(2, 4, size + 3), np.random.default_rng(size)
    bits = random.integers(-(2**31), 2**31, (3, words), dtype=np.int64).astype(np.int32)
    bits[1, ::2], bits[2, ::3] = -1, 0
    places, before = [6, 0, 3], logits.clone()
    calls.keep_allowed(logits[..., :size], places, bits)
    for place, mask in zip(places, bits, strict=True):
        allowed = np.zeros(size, bool)
        known = np.unpackbits(mask.view(np.uint8), bitorder="little")[:size]
        allowed[: len(known)] = known
        before.flatten(0, 1)[place, :size][~torch.from_numpy(allowed)] = -torch.inf
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_draws_equal_the_argmax_over_stored_noise(rows: int, size: int, threads: int) -> None:
    torch.manual_seed(size)
    weights = torch.softmax(torch.randn(rows, size) * 3, -1)
    weights[:, ::5] = 0 if size > 5 else weights[:, ::5]
    ids = torch.randperm(size) * 3
    for tokens in (None, ids):
        random = noise.exponentials(SEED, *keys(rows), size if tokens is None else tokens)
        drawn = draw(weights, SEED, *keys(rows), tokens)
        assert drawn.dtype == torch.int64 and torch.equal(drawn, argmax(weights / random))
        for row in range(rows):
            sequence, at, stream = (key[row] for key in keys(rows))
            single = draw(weights[row], SEED, sequence, at, stream, tokens)
            assert single == drawn[row]


def test_many_draws_equal_the_argmax_over_stored_noise() -> None:
    """Weights are flat, peaked, tiny or huge, because these decide how many tokens a draw can skip."""
    torch.manual_seed(0)
    at = torch.arange(300)
    for spread, scale in ((0.0, 1.0), (1.0, 1e-30), (12.0, 1.0), (3.0, 1e30)):
        weights = torch.softmax(torch.randn(5000) * spread, -1) * scale
        random = noise.exponentials(SEED, at, at, 0 * at, 5000)
        assert torch.equal(draw(weights.expand(300, -1), SEED, at, at, 0 * at), argmax(weights / random))


def test_the_lowest_of_equal_weights_and_the_first_nan_are_drawn() -> None:
    at = torch.arange(2)
    assert draw(torch.zeros(2, 9000), 1, at, at, at).tolist() == [0, 0]
    for places in ([0], [4095, 8999], [4096, 5000], [8999]):
        weights = torch.rand(2, 9000)
        weights[1, places] = torch.nan
        assert draw(weights, 1, at, at, at)[1] == places[0]
        weights[1, places] = torch.inf
        assert draw(weights, 1, at, at, at)[1] == places[0]
    weights[1, 8000] = torch.nan
    assert draw(weights, 1, at, at, at)[1] == 8000


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("size", [7, 9000])
def test_only_unsound_rows_become_nan(bad: float, size: int) -> None:
    logits = torch.zeros(3, size)
    logits[1, size - 2] = bad
    p = probabilities(logits, SamplingParams(1.0))
    assert p[1].isnan().all() and p[[0, 2]].isfinite().all()
    logits[1] = -torch.inf
    assert probabilities(logits, SamplingParams(1.0))[1].isnan().all()
    logits[1, 3] = 2.0
    assert torch.equal(probabilities(logits, SamplingParams(1.0))[1], (torch.arange(size) == 3).float())


def test_equal_logits_are_equally_likely_wherever_they_are() -> None:
    logits = torch.linspace(-20, 0, 9000)
    logits[[3, 4500, 8998]] = 0.5
    for temperature in (COLDEST, 0.3, 1.0, 1e9, 1e300):
        p = probabilities(logits, SamplingParams(temperature))
        assert p[3] == p[4500] == p[8998] == p.max() and abs(p.double().sum() - 1) < 1e-6


def test_the_words_of_keys_equal_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = torch.arange(6)[:, None] * 2**33, torch.arange(4) + 2**31, torch.tensor(11)
    for seed in (0, SEED, 2**64 - 3):
        compiled = noise.words(seed, *shapes)
        with monkeypatch.context() as patch:
            patch.setattr(cpu_kernels, "available", lambda: False)
            expected = noise.words(seed, *shapes)
        for mine, reference in zip(compiled, expected, strict=True):
            assert mine.dtype == torch.int64 and torch.equal(mine, reference)


def test_the_uniforms_of_tokens_equal_the_reference() -> None:
    from kernels.cpu.sampling.noise import hashed, uniform

    first, second, _, _ = (int(word) for word in noise.words(SEED, *(torch.tensor(9),) * 3))
    expected = noise.token_uniforms(SEED, *(torch.tensor(9),) * 3, 500).numpy()
    uniforms = np.empty(500, np.float32)

    @numba.njit  # Python can't call functions that numba only inlines into kernels
    def fill(first, second, out):
        for i in range(len(out)):
            out[i] = uniform(hashed(np.uint32(i), first, second))

    fill(np.uint32(first), np.uint32(second), uniforms)
    assert np.array_equal(uniforms, expected)


def test_views_and_empty_batches() -> None:
    logits = torch.randn(4, 3, 40)
    part = logits[:, 1:, 7:]
    assert torch.equal(
        probabilities(part, SamplingParams(0.5)), probabilities(part.contiguous(), SamplingParams(0.5))
    )
    at = torch.arange(3)
    weights = torch.rand(3, 80)[:, ::2]
    assert torch.equal(draw(weights, 1, at, at, at), draw(weights.contiguous(), 1, at, at, at))
    assert draw(torch.rand(0, 40), 1, at[:0], at[:0], at[:0]).shape == (0,)
    assert probabilities(torch.rand(0, 40), SamplingParams(1.0)).shape == (0, 40)

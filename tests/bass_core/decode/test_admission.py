"""The memory estimate covers the peak use, and the refusal of a too large request names one that fits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from bass_core import DEFAULT_LANES, METHODS, RequestError, SamplingParams, generate, race
from bass_core.decode import admission as admission_module
from bass_core.decode.admission import estimate_bytes
from bass_core.decode.request import make_request
from kernels.triton import attention as fused_attention
from tests.support.memory import peak_bytes
from tests.support.models import tiny_pair

PAIR = tiny_pair()
PROMPT = [5, 6, 7]


def _make_available(monkeypatch: pytest.MonkeyPatch, needed: int) -> None:
    """Make exactly `needed` bytes available to a request."""
    free = needed / admission_module._HEADROOM + 1
    monkeypatch.setattr(admission_module, "available_bytes", lambda _: free)


@pytest.mark.parametrize(("rows", "tokens"), [(40, 400), (11, 500)])
def test_the_refusal_names_the_largest_request_that_fits(
    rows: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for 10 rows, the refusal names 10 rows, or fewer tokens; one more row or token would not fit."""
    request = make_request(PAIR, PROMPT, n=rows, max_new_tokens=tokens)
    _make_available(monkeypatch, estimate_bytes(PAIR, request, (METHODS["bass"],), 10))
    with pytest.raises(RequestError, match="a batch of 10 would fit, or") as refusal:
        generate(PAIR, PROMPT, n=rows, max_new_tokens=tokens)
    shorter = int(str(refusal.value).split(" new tokens would fit")[0].split()[-1])
    assert 0 < shorter < tokens
    admission_module.admit(PAIR, make_request(PAIR, PROMPT, n=10, max_new_tokens=tokens), (METHODS["bass"],))
    admission_module.admit(PAIR, make_request(PAIR, PROMPT, n=rows, max_new_tokens=shorter), (METHODS["bass"],))
    for n, new_tokens in ((11, tokens), (rows, shorter + 1)):
        with pytest.raises(RequestError):
            admission_module.admit(
                PAIR, make_request(PAIR, PROMPT, n=n, max_new_tokens=new_tokens), (METHODS["bass"],)
            )


def test_if_fewer_rows_or_tokens_do_not_suffice_the_refusal_names_fewer_of_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = make_request(PAIR, PROMPT, n=64, max_new_tokens=60)
    _make_available(monkeypatch, estimate_bytes(PAIR, request, (METHODS["bass"],), 1))
    with pytest.raises(RequestError, match=r"free: a batch of 1 with \d+ new tokens would fit\."):
        generate(PAIR, PROMPT, n=400, max_new_tokens=500)


@pytest.mark.parametrize("scheduling", ["fair", "overlap", "in_turn"])
def test_a_race_too_large_for_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch, scheduling: str) -> None:
    """With memory for 10 rows, a race refuses 11 rows and names 10."""
    lanes = ("regular", "bass")
    request = make_request(PAIR, PROMPT, n=11, max_new_tokens=400)
    together = [METHODS[name] for name in (lanes if scheduling != "in_turn" else ("bass",))]
    _make_available(monkeypatch, estimate_bytes(PAIR, request, together, 10))
    with pytest.raises(RequestError, match=r"a batch of 10 would fit"):
        race(PAIR, PROMPT, n=11, max_new_tokens=400, lanes=lanes, scheduling=scheduling)
    race(PAIR, PROMPT, n=10, max_new_tokens=400, lanes=lanes, scheduling=scheduling).close()


def test_if_nothing_fits_the_refusal_asks_for_fewer_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "available_bytes", lambda _: 1000)
    with pytest.raises(RequestError, match="fewer tokens"):
        generate(PAIR, PROMPT, n=4)


def test_the_estimate_covers_the_caches() -> None:
    request = make_request(PAIR, PROMPT, n=3, max_new_tokens=100)
    length = request.longest
    per_model = [2 * layers * 3 * 2 * length * 16 * 4 for layers in (2, 2)]
    assert estimate_bytes(PAIR, request, (METHODS["bass"],), 3) >= sum(per_model)


@pytest.mark.slow
def test_the_estimate_covers_a_run(tmp_path: Path) -> None:
    """Compare the estimate with the peak allocation that torch's profiler records, for a prompt of 300 tokens."""
    options: dict[str, Any] = {"n": 32, "max_new_tokens": 24, "draft_length": 4, "sampling": SamplingParams(1.0)}
    request = make_request(PAIR, PROMPT * 100, **options)
    peak = peak_bytes(lambda: generate(PAIR, PROMPT * 100, **options), tmp_path)
    estimate = estimate_bytes(PAIR, request, (METHODS["bass"],), 32)
    assert estimate / 3 < peak <= estimate


def _qwen3(layers: int, **sizes: int) -> tuple[Any, Any]:
    """Return a model with a Qwen3 config, and a step that knows the size of its bfloat16 cache."""
    config = Qwen3Config(num_hidden_layers=layers, num_key_value_heads=8, head_dim=128, **sizes)
    per_token = 2 * layers * 8 * 128 * 2
    step = SimpleNamespace(
        cache_bytes=lambda rows, length, prefixes=0, of=0: (rows * length + prefixes * of) * per_token,
        cache_dtype=torch.bfloat16,
        head_dim=128,
        min_shared_tokens=16,
        context=40960,
        device=torch.device("cuda"),
        capturable=False,
    )
    return SimpleNamespace(config=config), step


def _on_a_large_gpu(prompts: list[list[int]], new: int, backend: str) -> int:
    """Estimate the bytes for three lanes with Qwen3-8B and a 0.6B draft on an H100."""
    target, target_step = _qwen3(36, hidden_size=4096, num_attention_heads=32)
    _, draft_step = _qwen3(28, hidden_size=1024, num_attention_heads=16)
    pair: Any = SimpleNamespace(
        target=target, target_step=target_step, draft_step=draft_step, vocab=151936, device=torch.device("cuda")
    )
    request = make_request(PAIR, [1], max_new_tokens=new)
    request = replace(request, prompts=prompts, backend=backend, drafter="model", context=40960)
    return estimate_bytes(pair, request, [METHODS[name] for name in DEFAULT_LANES], len(prompts))


def test_a_short_prompt_needs_little_memory_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 MiB are enough: fused and flash attention store no scores, and 30 tokens are far less than a chunk."""
    short, mib, gib = [[7] * 30], 2**20, 2**30
    for backend in ("fused", "flash"):
        assert 10 * mib < _on_a_large_gpu(short, 1, backend) < 100 * mib
        assert _on_a_large_gpu([[row] * 64 for row in range(4)], 64, backend) < gib
        long = _on_a_large_gpu([list(range(8192))], 64, backend)
        assert 3 * 8192 * 147456 < long < 9 * gib
    # A prompt shared by all rows is prefilled once.
    same, different = ([[row * i] * 2048 for row in range(4)] for i in (0, 1))
    assert _on_a_large_gpu(same, 1, "flash") < _on_a_large_gpu(different, 1, "flash")
    # With torch's softmax (pad), scores of 8192 x 8192 are stored.
    assert _on_a_large_gpu([list(range(8192))], 64, "pad") > 3 * 32 * 8192 * 8192 * 8


def test_the_estimate_covers_the_parts_of_fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's partial results never exceed the estimate; for one shape, they fill over 90 % of it."""
    monkeypatch.setattr(fused_attention, "processors", lambda device: 132)
    closest, device = 0.0, torch.device("cuda")
    for batch, queries, columns in itertools.product((1, 3, 8, 64), (1, 5, 33, 999), (64, 2000, 40960)):
        tile = fused_attention.tiles(128, 4 * queries, 2)[0]
        programs = -(-4 * queries // tile["BLOCK_M"]) * 8 * batch
        segments, heads = -(-columns // fused_attention.SEGMENT), batch * queries * 32
        numbers = segments * heads * 130
        for shares in (False, True):
            parts = fused_attention.in_parts(device, programs, 4 * queries, segments, shares, numbers)
            estimated = admission_module._attention_bytes("fused", heads, columns, 128)
            assert 4 * numbers * parts <= estimated
            closest = max(closest, 4 * numbers * parts / estimated)
    assert closest > 0.9

"""A row's logits have the same bits whatever stands beside it: rows, tokens, other prompts, chunks, threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bass_core.model.llama_cpu import LlamaCompiled

from .shapes import DOTS, compiled, fed, made, tokens

KINDS = [(torch.float16, False), *((torch.bfloat16, dot) for dot in DOTS)]
WIDTHS = [1, 2, 3, 4, 5, 1, 3, 5, 2, 4, 5, 1, 2, 3, 4, 5]
LENGTHS = [1 + 9 * row for row in range(16)]


@pytest.fixture(params=KINDS, ids=str)
def model(request: Any, monkeypatch: pytest.MonkeyPatch) -> LlamaCompiled:
    dtype, dot = request.param
    return compiled(made("qwen3 of 64, heads of 20", dtype), dot, monkeypatch)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_alone_and_among_sixteen(model: LlamaCompiled, threads: int) -> None:
    torch.set_num_threads(threads)
    prompts, step = tokens(16, max(LENGTHS), 1), tokens(16, 5, 2)
    cache = model.new_cache(16, 160)
    fed(model, cache, prompts, [0] * 16, counts=LENGTHS, eager=True)
    together = fed(model, cache, step, LENGTHS, counts=WIDTHS)
    torch.set_num_threads(1)
    for row, (length, width) in enumerate(zip(LENGTHS, WIDTHS, strict=True)):
        alone = model.new_cache(1, 160)
        fed(model, alone, prompts[row : row + 1, :length], [0])
        found = fed(model, alone, step[row : row + 1, :width], [length])
        assert torch.equal(found[0], together[row, :width])
        # Token by token, as regular decoding feeds them.
        for at in range(width):
            assert torch.equal(
                fed(model, alone, step[row : row + 1, at : at + 1], [length + at])[0], found[0, at : at + 1]
            )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("beside", [0, 3])
def test_a_prompt_in_chunks_of_any_width(model: LlamaCompiled, beside: int, threads: int) -> None:
    torch.set_num_threads(threads)
    prompts = tokens(1 + beside, 100, 3)
    alone = model.new_cache(1, 100)
    whole = fed(model, alone, prompts[:1], [0])[0]
    for chunk in (1, 7, 33, 64, 100):
        cache = model.new_cache(1 + beside, 100)
        parts: list[Tensor] = []
        for start in range(0, 100, chunk):
            parts.append(fed(model, cache, prompts[:, start : start + chunk], [start] * (1 + beside))[0])
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(cache.buffer[:, :, :1], alone.buffer)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("window", [None, 64])
def test_rows_of_one_prefix_and_a_row_alone(model: LlamaCompiled, window: int | None, threads: int) -> None:
    torch.set_num_threads(threads)
    text, own, step = tokens(1, 560, 4), tokens(3, 40, 5), tokens(3, 3, 6)
    cache = model.new_cache(3, 50, 1, 560)
    assert cache.prefix is not None
    fed(model, cache.prefix, text, [0])
    for row in range(3):
        cache.attach(row, 0, 560)
    counts = [40, 7, 0]
    first = fed(model, cache, own, [560] * 3, counts=counts)
    lengths = [560 + count for count in counts]
    found = fed(model, cache, step, lengths, window=window)
    for row, count in enumerate(counts):
        alone = model.new_cache(1, 640)
        whole = torch.cat((text, own[row : row + 1, :count]), 1)
        assert torch.equal(fed(model, alone, whole, [0])[0, 560:], first[row, :count])
        logits = fed(model, alone, step[row : row + 1], lengths[row : row + 1], window=window)
        assert torch.equal(logits[0], found[row])


def test_a_cache_takes_the_bytes_that_the_model_says(model: LlamaCompiled) -> None:
    for size in ((1, 1), (3, 33), (2, 16, 3, 48)):
        assert model.new_cache(*size).nbytes == model.cache_bytes(*size)
    assert 16 * model.cost.kv_bytes == model.cache_bytes(1, 16)

"""The compiled forward is the model's own: odd shapes, ragged steps, states, embeddings, long texts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bass_core import ModelError, ModelPair, PairError, generate
from bass_core.model.base import HiddenStateTap
from bass_core.model.forward import ForwardBatch
from bass_core.model.llama_cpu import LlamaCompiled
from tests.support.models import slow_but

from .shapes import KINDS, SHAPES, compiled, exact, fed, made, tokens


def close(found: Tensor, expected: Tensor, dot: bool) -> None:
    """Within float32's rounding, or within bfloat16's; relative to the largest number."""
    assert found.shape == expected.shape and found.dtype == torch.float32
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < (0.06 if dot else 3e-5), error


@pytest.mark.parametrize(
    ("shape", "dtype", "fast", "dot"),
    slow_but([(list(SHAPES)[5], *KINDS[-1])], [(shape, *kind) for shape in SHAPES for kind in KINDS]),
)
def test_prompts_and_ragged_steps(
    shape: str, dtype: torch.dtype, fast: bool, dot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(shape, dtype)
    ours, theirs = compiled(model, fast, dot, monkeypatch), exact(model)
    a, b = ours.new_cache(3, 200), theirs.new_cache(3, 200)
    # Over two blocks of columns and into a third.
    ids = tokens(3, 140)
    close(fed(ours, a, ids, [0] * 3), fed(theirs, b, ids, [0] * 3), dot)
    lengths, counts = [140, 63, 1], [1, 5, 3]
    ids = tokens(3, 5, 1)
    mine, own = fed(ours, a, ids, lengths, counts=counts), fed(theirs, b, ids, lengths)
    real = torch.arange(5) < torch.tensor(counts)[:, None]
    close(mine[real], own[real], dot)
    lengths, take = [141, 68, 4], [0, 2, 1]
    ids = tokens(3, 3, 2)
    mine = fed(ours, a, ids, lengths, counts=[1, 3, 2], take=take)
    close(mine, fed(theirs, b, ids, lengths, take=take), dot)


@pytest.mark.parametrize(
    ("layers", "dtype", "fast", "dot"),
    slow_but([((1, 2), *KINDS[-1])], [(at, *kind) for at in ((), (0, 1), (1, 2), (2,)) for kind in KINDS]),
)
def test_states(
    layers: tuple[int, ...], dtype: torch.dtype, fast: bool, dot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made("qwen3 of 36, heads of 16, biases", dtype, layers=3)
    ours, theirs = compiled(model, fast, dot, monkeypatch), exact(model)
    ours.readout = theirs.readout = HiddenStateTap(layers)
    ids, counts = tokens(2, 7), [4, 7]
    mine, own = (
        one.forward(ForwardBatch(ids, [0, 0], counts, return_states=True), one.new_cache(2, 9))
        for one in (ours, theirs)
    )
    real = torch.arange(7) < torch.tensor(counts)[:, None]
    close(mine.require_states()[real], own.require_states()[real], dot)
    close(mine.logits[real], own.logits[real], dot)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_are_read_and_never_changed(dtype: torch.dtype) -> None:
    ours = LlamaCompiled(made("llama of 32, heads of 8", torch.bfloat16))
    ids = tokens(2, 6)
    embedded = torch.nn.functional.embedding(ids, ours.embedding).to(dtype)
    before = embedded.clone()
    logits = fed(ours, ours.new_cache(2, 8), embedded, [0, 0])
    assert torch.equal(embedded, before)
    assert torch.equal(logits, fed(ours, ours.new_cache(2, 8), ids, [0, 0]))
    turned = embedded[:1].mT.contiguous().mT
    assert torch.equal(fed(ours, ours.new_cache(1, 8), turned, [0]), logits[:1])


@pytest.mark.slow
def test_columns_behind_the_context_harm_nothing() -> None:
    model = made("llama of 32, heads of 8", torch.float16)
    ours, theirs = LlamaCompiled(model), exact(model)
    a, b = ours.new_cache(2, 300), theirs.new_cache(2, 300)
    ids = tokens(2, 250)
    close(fed(ours, a, ids, [0, 0]), fed(theirs, b, ids, [0, 0]), False)
    assert len(ours._rope_until(270)) >= 270 * ours.head_dim
    ids = tokens(2, 20, 1)
    found, expected = fed(ours, a, ids, [250, 100]), fed(theirs, b, ids, [250, 100])
    close(found[0, :6], expected[0, :6], False)
    close(found[1], expected[1], False)


def test_a_step_may_have_rows_without_tokens() -> None:
    ours = LlamaCompiled(made("llama of 32, heads of 8", torch.bfloat16))
    ids, cache = tokens(3, 2), ours.new_cache(3, 8)
    whole = fed(ours, cache, ids, [0, 0, 0])
    part = fed(ours, ours.new_cache(3, 8), ids, [0, 0, 0], counts=[2, 0, 1])
    assert torch.equal(part[0], whole[0]) and torch.equal(part[2, 0], whole[2, 0])
    assert fed(ours, cache, ids, [0, 0, 0], counts=[0, 0, 0]).shape == whole.shape


@pytest.mark.parametrize(
    ("where", "dtype"),
    [
        ("model.layers.1.mlp.up_proj", torch.float16),
        ("model.layers.0.self_attn.k_proj", torch.bfloat16),
        ("lm_head", torch.bfloat16),
    ],
)
def test_a_model_that_breaks_is_an_error_and_no_text(where: str, dtype: torch.dtype) -> None:
    model = made("qwen3 of 64, heads of 20", dtype)
    model.get_submodule(where).weight[7, 5] = float("nan")
    with pytest.raises((ModelError, PairError), match="NaN or infinite"):
        generate(ModelPair(model), tokens(1, 5)[0].tolist(), method="regular", max_new_tokens=8)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "fast", "dot"), KINDS)
def test_a_window(dtype: torch.dtype, fast: bool, dot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("qwen3 of 64, heads of 20", dtype)
    ours, theirs = compiled(model, fast, dot, monkeypatch), exact(model)
    ids, more, lengths = tokens(2, 240), tokens(2, 2, 1), [240, 33]
    logits = []
    for one in (ours, theirs):
        cache = one.new_cache(2, 242)
        fed(one, cache, ids, [0, 0])
        logits.append([fed(one, cache, more, lengths, window=window) for window in (None, 70)])
    close(logits[0][1], logits[1][1], dot)
    assert not torch.equal(logits[0][0][0], logits[0][1][0])
    assert torch.equal(logits[0][0][1], logits[0][1][1])

"""The compiled forward equals transformers': odd shapes, ragged steps, states, embeddings, long texts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bass_core import ModelError, ModelPair, PairError, generate
from bass_core.model.base import HiddenStateTap
from bass_core.model.forward import ForwardBatch
from bass_core.model.llama_cpu import LlamaCompiled
from tests.support.models import slow_but

from .shapes import FAMILIES, KINDS, SHAPES, compiled, exact, forward_logits, make_model, tokens


def assert_close(found: Tensor, expected: Tensor, dot: bool) -> None:
    """Check equality within the rounding of float32, or bfloat16 with `dot`, relative to the largest number."""
    assert found.shape == expected.shape and found.dtype == torch.float32
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < (0.06 if dot else 3e-5), error


@pytest.mark.parametrize(
    ("shape", "dtype", "fast", "dot"),
    slow_but(
        [(list(SHAPES)[5], *KINDS[-1]), *((family, *KINDS[0]) for family in FAMILIES)],
        [(shape, *kind) for shape in SHAPES for kind in KINDS],
    ),
)
def test_prompts_and_ragged_steps_equal_transformers(
    shape: str, dtype: torch.dtype, fast: bool, dot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(shape, dtype)
    ours, theirs = compiled(model, fast, dot, monkeypatch), exact(model)
    a, b = ours.new_cache(3, 200), theirs.new_cache(3, 200)
    # 140 columns fill two blocks and a part of a third.
    ids = tokens(3, 140)
    assert_close(forward_logits(ours, a, ids, [0] * 3), forward_logits(theirs, b, ids, [0] * 3), dot)
    lengths, counts = [140, 63, 1], [1, 5, 3]
    ids = tokens(3, 5, 1)
    mine, reference = forward_logits(ours, a, ids, lengths, counts=counts), forward_logits(theirs, b, ids, lengths)
    real = torch.arange(5) < torch.tensor(counts)[:, None]
    assert_close(mine[real], reference[real], dot)
    lengths, columns = [141, 68, 4], [0, 2, 1]
    ids = tokens(3, 3, 2)
    mine = forward_logits(ours, a, ids, lengths, counts=[1, 3, 2], wanted_columns=columns)
    assert_close(mine, forward_logits(theirs, b, ids, lengths, wanted_columns=columns), dot)


@pytest.mark.parametrize(
    ("layers", "dtype", "fast", "dot"),
    slow_but([((1, 2), *KINDS[-1])], [(at, *kind) for at in ((), (0, 1), (1, 2), (2,)) for kind in KINDS]),
)
def test_states_equal_transformers(
    layers: tuple[int, ...], dtype: torch.dtype, fast: bool, dot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("qwen3, hidden size 36, heads of 16, biases", dtype, layers=3)
    ours, theirs = compiled(model, fast, dot, monkeypatch), exact(model)
    ours.readout = theirs.readout = HiddenStateTap(layers)
    ids, counts = tokens(2, 7), [4, 7]
    mine, reference = (
        step.forward(ForwardBatch(ids, [0, 0], counts, return_states=True), step.new_cache(2, 9))
        for step in (ours, theirs)
    )
    real = torch.arange(7) < torch.tensor(counts)[:, None]
    assert_close(mine.require_states()[real], reference.require_states()[real], dot)
    assert_close(mine.logits[real], reference.logits[real], dot)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_can_be_fed_and_are_not_changed(dtype: torch.dtype) -> None:
    ours = LlamaCompiled(make_model("llama, hidden size 32, heads of 8", torch.bfloat16))
    ids = tokens(2, 6)
    embedded = torch.nn.functional.embedding(ids, ours.embedding).to(dtype)
    before = embedded.clone()
    logits = forward_logits(ours, ours.new_cache(2, 8), embedded, [0, 0])
    assert torch.equal(embedded, before)
    assert torch.equal(logits, forward_logits(ours, ours.new_cache(2, 8), ids, [0, 0]))
    turned = embedded[:1].mT.contiguous().mT
    assert torch.equal(forward_logits(ours, ours.new_cache(1, 8), turned, [0]), logits[:1])


@pytest.mark.slow
def test_columns_past_the_context_do_not_change_results() -> None:
    model = make_model("llama, hidden size 32, heads of 8", torch.float16)
    ours, theirs = LlamaCompiled(model), exact(model)
    a, b = ours.new_cache(2, 300), theirs.new_cache(2, 300)
    ids = tokens(2, 250)
    assert_close(forward_logits(ours, a, ids, [0, 0]), forward_logits(theirs, b, ids, [0, 0]), False)
    assert len(ours._rope_until(270)) >= 270 * ours.head_dim
    ids = tokens(2, 20, 1)
    output, expected = forward_logits(ours, a, ids, [250, 100]), forward_logits(theirs, b, ids, [250, 100])
    assert_close(output[0, :6], expected[0, :6], False)
    assert_close(output[1], expected[1], False)


def test_a_step_can_have_rows_without_tokens() -> None:
    ours = LlamaCompiled(make_model("llama, hidden size 32, heads of 8", torch.bfloat16))
    ids, cache = tokens(3, 2), ours.new_cache(3, 8)
    whole = forward_logits(ours, cache, ids, [0, 0, 0])
    part = forward_logits(ours, ours.new_cache(3, 8), ids, [0, 0, 0], counts=[2, 0, 1])
    assert torch.equal(part[0], whole[0]) and torch.equal(part[2, 0], whole[2, 0])
    assert forward_logits(ours, cache, ids, [0, 0, 0], counts=[0, 0, 0]).shape == whole.shape


@pytest.mark.parametrize(
    ("where", "dtype"),
    [
        ("model.layers.1.mlp.up_proj", torch.float16),
        ("model.layers.0.self_attn.k_proj", torch.bfloat16),
        ("lm_head", torch.bfloat16),
    ],
)
def test_a_broken_model_raises_an_error(where: str, dtype: torch.dtype) -> None:
    model = make_model("qwen3, hidden size 64, heads of 20", dtype)
    model.get_submodule(where).weight[7, 5] = float("nan")
    with pytest.raises((ModelError, PairError), match="NaN or infinite"):
        generate(ModelPair(model), tokens(1, 5)[0].tolist(), method="regular", max_new_tokens=8)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "fast", "dot"), KINDS)
def test_a_window_equals_transformers(
    dtype: torch.dtype, fast: bool, dot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("qwen3, hidden size 64, heads of 20", dtype)
    ours, theirs = compiled(model, fast, dot, monkeypatch), exact(model)
    ids, more, lengths = tokens(2, 240), tokens(2, 2, 1), [240, 33]
    logits = []
    for step in (ours, theirs):
        cache = step.new_cache(2, 242)
        forward_logits(step, cache, ids, [0, 0])
        logits.append([forward_logits(step, cache, more, lengths, window=window) for window in (None, 70)])
    assert_close(logits[0][1], logits[1][1], dot)
    assert not torch.equal(logits[0][0][0], logits[0][1][0])
    assert torch.equal(logits[0][0][1], logits[0][1][1])

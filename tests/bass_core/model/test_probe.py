"""The trial of a model at load, and the checks of its config and masks.

tests/zoo tries whole architectures; the tests here are for cases that it doesn't cover.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from transformers.utils import ModelOutput

from bass_core import ModelPair, PairError, RequestError, generate
from bass_core.draft.base import Drafter
from bass_core.model import base, probe
from bass_core.model.weights.shape import context_of
from kernels.backends import BACKENDS
from kernels.plan import AttentionPlan, Chunks, TreeMask
from tests.support.models import reference, tiny, tiny_pair

from ...zoo.making import make

ORIGINAL = 32
SIZES: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "initializer_range": 0.4},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}


def longrope() -> Any:
    """Return a Phi-3 whose rotation changes for all rows once any text in the batch is longer than ORIGINAL."""
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "long_factor": [4.0, 3.0, 2.0, 8.0], "short_factor": [1.0] * 4}
    config = tf.Phi3Config(
        **SIZES,
        num_key_value_heads=2,
        max_position_embeddings=256,
        original_max_position_embeddings=ORIGINAL,
        rope_scaling=rope,
    )
    return tf.Phi3ForCausalLM(config).eval()


def test_a_text_does_not_depend_on_the_length_of_other_texts():
    model = longrope()
    row = list(range(3, 11))
    expected = reference(model, row, 8)
    model(torch.arange(3, 43)[None])  # After this call the model has the rotation for long texts.
    inv_freq = model.model.rotary_emb.inv_freq.clone()
    pair = ModelPair(model)
    written = generate(pair, [row, list(range(3, 23))], max_new_tokens=8, eos_token_id=None, method="regular")
    assert written.sequences[0].token_ids == expected
    assert torch.equal(model.model.rotary_emb.inv_freq, inv_freq)
    assert pair.context_length == ORIGINAL
    with pytest.raises(RequestError, match=f"40 tokens and the model holds {ORIGINAL}"):
        generate(pair, [list(range(3, 43))], max_new_tokens=8)


def test_a_model_that_computes_other_logits_is_refused_at_load():
    # transformers' own code adds ALiBi twice here, except with torch's attention.
    model = tf.FalconForCausalLM(tf.FalconConfig(**SIZES, alibi=True)).eval()
    with pytest.raises(PairError, match="computes other logits than by itself"):
        ModelPair(model)


def test_a_model_whose_own_code_fails_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch):
    model = tiny("gpt2")

    def broken(*args: Any, **kwargs: Any) -> None:
        raise KeyError("position")

    monkeypatch.setattr(type(model.transformer.h[0].mlp), "forward", broken)
    with pytest.raises(PairError, match="GPT2LMHeadModel is not supported: its own code can't run it"):
        ModelPair(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_removed_layers_are_left_out_or_refused(dtype: torch.dtype) -> None:
    model: Any = tiny("llama").to(dtype)
    layers, row = model.model.layers, [5, 6, 7]
    model.model.layers = layers[:1]
    written = generate(ModelPair(model), [row], max_new_tokens=8, eos_token_id=None, draft_length=2)
    assert written.sequences[0].token_ids == reference(model, row, 8)
    # Without its first layer, transformers' own cache counts no tokens.
    model.model.layers = layers[1:]
    with pytest.raises(PairError, match="layer_idx"):
        ModelPair(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_that_only_transformers_cache_knows_is_refused(dtype: torch.dtype) -> None:
    """A Llama's masks show all tokens whatever its config says, but the cache drops those outside the window."""
    model: Any = tiny("llama").to(dtype)
    model.config.sliding_window = context_of(model.config)
    ModelPair(model)
    model.config.sliding_window -= 1
    with pytest.raises(PairError, match="its cache forgets what its masks still show"):
        ModelPair(model)


def test_the_cache_is_found_if_it_has_only_its_newer_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.40 drops the older name from the models' outputs, too."""
    monkeypatch.delattr(ModelOutput, "past_key_values", raising=False)
    expected = probe.expect(tiny("llama"), "llama", 64)
    assert expected is not None and expected.sizes[0] == tiny("llama").config.num_hidden_layers


@pytest.mark.parametrize("kind", ["afmoe", "hunyuan_v1_moe"])
def test_a_models_code_can_read_the_weights_of_packed_layers(kind: str):
    model = make(kind).to(torch.bfloat16)
    row = list(range(3, 13))
    written = generate(ModelPair(model), [row], max_new_tokens=4, eos_token_id=None)
    assert len(written.sequences[0].token_ids) == 4


def test_tokens_see_only_their_own_chunk():
    plan = AttentionPlan(torch.tensor([5, 2]), [5, 2], 3)
    seen = (~plan.mask(Chunks(4))).int().tolist()
    assert seen[0] == [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1, 1]]
    assert seen[1] == [[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0]]
    # The newest token is in column 3. The two drafts that follow it are siblings at the start of the next chunk,
    # where each sees only itself.
    tree = TreeMask(torch.tensor([[1, 3, 5]]), torch.tensor([[0, 1, 1]]), torch.tensor([0]))
    forked = AttentionPlan(torch.tensor([3]), [3], 3, tree=tree)
    assert (~forked.mask(Chunks(4))).int().tolist()[0] == [
        [1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


class Branching(Drafter):
    """A user's drafter that proposes trees."""

    branches = True


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_models_whose_alibi_depends_on_columns_refuse_trees(kind: str):
    model = make(kind)
    pair = tiny_pair(0.02, target=model)
    options: list[dict[str, Any]] = [{"tree": (3, 3, 2)}, {"drafter": Branching()}]
    for option in options:
        with pytest.raises(RequestError, match=f"{type(model).__name__} can't attend over trees of drafts"):
            generate(pair, [5, 6, 7], max_new_tokens=8, **option)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("big_bird", "does not go through transformers' attention interface"),
        ("moshi", "its cache forgets what its masks still show"),
        ("deepseek_v3", "larger than its config says"),
        ("gpt2", None),
        ("bloom", None),
    ],
)
def test_without_a_trial_a_model_is_right_or_refused(
    kind: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(base, "on_zero_gpu", lambda: True)
    model, row = make(kind), list(range(3, 23))
    options: Any = {"max_new_tokens": 12, "eos_token_id": None, "method": "regular"}
    if reason is None:
        assert generate(ModelPair(model), row, **options).sequences[0].token_ids == reference(model, row, 12)
        return
    with pytest.raises(PairError, match=reason):
        generate(ModelPair(model), row, **options)


def test_without_a_trial_falcons_alibi_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "on_zero_gpu", lambda: True)
    with pytest.raises(PairError, match="attention interface"):
        ModelPair(tf.FalconForCausalLM(tf.FalconConfig(**SIZES, alibi=True)).eval())


def test_the_context_of_mpt_ends_with_its_alibi():
    assert context_of(tf.MptConfig(max_seq_len=65536)) == 65536
    assert context_of(tf.MptConfig(max_seq_len=64)) == 64


def test_nan_logits_differ_only_where_the_models_own_are_finite():
    nan, inf = float("nan"), float("inf")
    theirs = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, nan], [nan, nan], [1.0, -inf]])
    ours = torch.tensor([[1.0, 2.0], [nan, 2.0], [1.0, 5.0], [1.0, 2.0], [2.0, -inf]])
    assert probe._apart(ours, theirs).tolist() == [0, inf, 0, 0, 1]


def test_a_model_that_computes_nan_with_our_attention_is_refused(monkeypatch: pytest.MonkeyPatch):
    def broken(query: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.full_like(query.transpose(1, 2), float("nan"))

    monkeypatch.setitem(BACKENDS, "sdpa", broken)
    with pytest.raises(PairError, match="computes NaN or infinite logits"):
        ModelPair(tiny("gpt2"))

"""Models of several families by the CPU's kernels: precision, rows, drafts, and why others don't fit.

test_forward.py compares their float32 products with transformers.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from bass_core import ModelPair, SamplingParams, generate
from bass_core.model.base import CausalModel, HiddenStateTap
from bass_core.model.forward import ForwardBatch
from bass_core.model.llama_cpu import LlamaCompiled, why_not
from bass_core.model.llama_cuda import LlamaCuda, fits
from bass_core.model.weights.quantized import QuantizedLinear, QuantizedModule, quantise_model
from bass_core.model.weights.shape import Architecture, describe
from tests.support.models import slow_but, texts_of, tiny_eagle

from .shapes import FAMILIES, exact, forward_logits, make_model, tokens

PRECISIONS = ["bfloat16", "float16", "int8", "int4"]
# int4 needs inputs in blocks of 32. Heads of 16 numbers, of which Phi-3 rotates 12.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "layers": 3,
}
FACTORS = {"short_factor": [1.0, 1.2, 1.4, 1.6, 1.8, 2.0], "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]}
PHI3 = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75} | FACTORS
QUICK = [(family, "bfloat16") for family in FAMILIES]
QUICK += [("qwen2", "int8"), ("phi3", "int4"), ("granite", "int8"), ("olmo2", "int8")]
ALL = [(family, precision) for family in FAMILIES for precision in PRECISIONS]


@cache
def model_of(family: str, precision: str) -> Any:
    rope = {"rope_parameters": PHI3} if family == "phi3" else {}
    dtype = torch.float16 if precision == "float16" else torch.bfloat16
    model = make_model(family, dtype, **SIZES, **rope)
    if precision.startswith("int"):
        quantise_model(model, precision)
    return model


@cache
def step_of(family: str, precision: str) -> LlamaCompiled:
    step = ModelPair(model_of(family, precision)).target_step
    assert isinstance(step, LlamaCompiled)
    return step


def dequantised(model: Any) -> Any:
    """Return a copy whose quantised layers are plain ones with the same numbers, in float32."""
    plain = copy.deepcopy(model)
    for name, module in list(plain.named_modules()):
        if isinstance(module, QuantizedModule):
            rows, inputs = module.weight.shape
            biased = isinstance(module, QuantizedLinear) and module.bias is not None
            layer: Any = (
                nn.Linear(inputs, rows, biased)
                if isinstance(module, QuantizedLinear)
                else nn.Embedding(rows, inputs)
            )
            layer.load_state_dict({"weight": module.weight} | ({"bias": module.bias} if biased else {}))
            plain.set_submodule(name, layer)
    return plain.eval().requires_grad_(False).float()


def divergence(expected: Tensor, logits: Tensor) -> Tensor:
    """Return the mean KL divergence of the logits' distributions [N, V] from the expected ones."""
    exact_logs, logs = (part.double().log_softmax(-1) for part in (expected, logits))
    return (exact_logs.exp() * (exact_logs - logs)).sum(-1).mean()


@pytest.mark.parametrize(("family", "precision"), slow_but(QUICK, ALL))
def test_log_probabilities_are_nearer_to_float32_than_transformers_own(family: str, precision: str) -> None:
    """With quantised weights the products' inputs are bytes, so their bound is a tenth of the logits' norm."""
    model, step, ids = model_of(family, precision), step_of(family, precision), tokens(3, 60)
    expected = forward_logits(exact(dequantised(model)), exact(dequantised(model)).new_cache(3, 60), ids, [0] * 3)
    logits = forward_logits(step, step.new_cache(3, 60), ids, [0] * 3)
    if precision.startswith("int"):
        assert (logits - expected).norm() / expected.norm() < 0.1
    else:
        assert divergence(expected, logits) < divergence(expected, model(ids).logits)


@pytest.mark.parametrize(("family", "precision"), slow_but(QUICK, ALL))
def test_a_row_has_the_same_bits_by_itself_and_among_others(family: str, precision: str) -> None:
    step, ids, more = step_of(family, precision), tokens(5, 50), tokens(5, 4, 1)
    lengths, counts = [50, 1, 17, 33, 49], [4, 1, 3, 2, 4]
    cache = step.new_cache(5, 56)
    forward_logits(step, cache, ids, [0] * 5, counts=lengths, eager=True)
    together = forward_logits(step, cache, more, lengths, counts=counts)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        alone = step.new_cache(1, 56)
        forward_logits(step, alone, ids[row : row + 1, :length], [0])
        for at in range(count):
            logits = forward_logits(step, alone, more[row : row + 1, at : at + 1], [length + at])
            assert torch.equal(logits[0, 0], together[row, at])


@pytest.mark.parametrize("family", slow_but(["olmo2"], FAMILIES))
def test_states_equal_transformers(family: str) -> None:
    ours, theirs = step_of(family, "float16"), exact(model_of(family, "float16"))
    ids, counts = tokens(2, 7), [4, 7]
    tap = HiddenStateTap((0, 1, 2))
    results = []
    for step in (ours, theirs):
        before, step.readout = step.readout, tap
        batch = ForwardBatch(ids, [0, 0], counts, return_states=True)
        results.append(step.forward(batch, step.new_cache(2, 9)).require_states())
        step.readout = before
    real = torch.arange(7) < torch.tensor(counts)[:, None]
    torch.testing.assert_close(results[0][real], results[1][real], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("drafter", ["model", "eagle"])
@pytest.mark.parametrize("family", slow_but(["qwen2"], FAMILIES))
def test_drafts_change_no_text(family: str, drafter: str) -> None:
    target = model_of(family, "bfloat16")
    draft: Any = target if drafter == "model" else tiny_eagle(target)
    pair = ModelPair(target, draft)
    assert isinstance(pair.target_step, LlamaCompiled)
    rows = [tokens(1, length, length)[0].tolist() for length in (9, 4, 14)]
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None, "sampling": SamplingParams()}
    regular = generate(pair, rows, method="regular", **options)
    drafted = generate(pair, rows, draft_length=3, **options)
    assert texts_of(drafted) == texts_of(regular)
    assert drafted.metrics.drafted
    assert drafter == "eagle" or (drafted.metrics.accepted and isinstance(pair.draft_step, LlamaCompiled))


def test_a_description_tells_how_a_model_differs_from_a_plain_llama() -> None:
    plain = Architecture(False, False, False, (8, 8))
    scores: Any = pytest.approx(0.6 * 8**0.5)
    expected = {
        "mistral": plain,
        "qwen2": Architecture(False, False, False, (12, 12)),
        "phi3": Architecture(True, False, False, (8, 8)),
        "smollm3": Architecture(False, False, False, (0, 8)),
        "granite": Architecture(False, False, False, (8, 8), 3.0, scores, 0.4, 0.2),
        "olmo2": Architecture(False, True, True, (12, 12)),
    }
    models = {family: make_model(family, torch.bfloat16) for family in FAMILIES}
    assert {family: describe(model) for family, model in models.items()} == expected
    assert [family for family, model in models.items() if fits(model)] == ["mistral"]


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("mistral", {"sliding_window": 255}, "its window of 255 is smaller than its context"),
        ("phi3", {"sliding_window": 199}, "its window of 199 is smaller than its context"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, "its window of 9"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 9}, "its window of 9"),
        ("olmo2", {"hidden_act": "gelu"}, "the activation gelu"),
        ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "type dynamic"),
    ],
)
def test_what_a_description_cannot_say_runs_on_the_model_s_own_code(
    family: str, settings: dict[str, Any], reason: str
) -> None:
    model = make_model(family, torch.bfloat16, **settings)
    assert reason in (why_not(model) or "")
    assert type(ModelPair(model).target_step) is CausalModel


YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}


@pytest.mark.parametrize("settings", [{}, {"head_dim": 16, "rope_parameters": YARN}])
def test_the_forward_for_gpus_computes_a_mistral(settings: dict[str, Any]) -> None:
    model = make_model("mistral", torch.float32, **settings)
    assert fits(model)
    ours, theirs = LlamaCuda(model), CausalModel(model)
    ours.has_kernels = False
    logits, expected = (forward_logits(step, step.new_cache(1, 20), tokens(1, 20), [0]) for step in (ours, theirs))
    torch.testing.assert_close(logits, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


def test_additional_linear_layers_are_noticed() -> None:
    model = make_model("qwen2", torch.bfloat16)
    model.model.adapter = nn.Linear(36, 36, dtype=torch.bfloat16)
    assert why_not(model) == "it has 16 linear layers instead of its config's 15, e.g. because of an adapter"


def test_yarn_and_windows_as_long_as_the_context_are_computed() -> None:
    for family, settings in (("smollm3", {"rope_parameters": YARN}), ("phi3", {"sliding_window": 200})):
        model = make_model(family, torch.float16, **settings)
        ours, theirs = LlamaCompiled(model), exact(model)
        logits, expected = (
            forward_logits(step, step.new_cache(1, 60), tokens(1, 60), [0]) for step in (ours, theirs)
        )
        torch.testing.assert_close(logits, expected, atol=1e-3 * float(expected.abs().max()), rtol=0)


def test_layers_with_other_scales_are_noticed() -> None:
    model = make_model("granite", torch.bfloat16)
    model.model.layers[1].residual_multiplier = 0.9
    assert "has another residual_multiplier" in ModelPair(model).computed_by
    stray = tf.LlamaConfig(**{**make_model("mistral", torch.float16).config.to_dict(), "logits_scaling": 8.0})
    assert describe(tf.LlamaForCausalLM(stray)) == Architecture(False, False, False, (8, 8))

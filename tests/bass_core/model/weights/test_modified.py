"""A model whose modules, hooks or weights were changed runs with these changes."""

from __future__ import annotations

import copy
import gc
import ntpath
import pickle
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import AttentionInterface, masking_utils, modeling_flash_attention_utils
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from bass_core import ModelPair, PairError, generate, stream
from bass_core.machine import cpu_kernels
from bass_core.model import attention, select
from bass_core.model.base import CausalModel
from bass_core.model.forward import ForwardBatch
from bass_core.model.llama_cpu import LlamaCompiled
from bass_core.model.llama_cuda import LlamaCuda
from bass_core.model.weights import own_code
from bass_core.model.weights.modified import Watch
from bass_core.model.weights.own_code import attention_code, model_code
from bass_core.model.weights.quantized import quantise_model, weight_or_none
from tests.support.models import prompts, texts_of, tiny, tiny_head
from tests.zoo.making import make

needs_kernels = pytest.mark.skipif(not cpu_kernels.available(), reason="numba is not there")
IDS = torch.tensor([[3, 1, 4, 1, 5]])
Change = Callable[[Any, pytest.MonkeyPatch], None]


def bfloat16_model(architecture: str = "llama", seed: int = 0) -> Any:
    return tiny(architecture, seed).to(torch.bfloat16)


def logits_of(model: Any) -> Tensor:
    """Return the model's own logits, float32 [1, S, V]."""
    with torch.no_grad():
        return model(IDS).logits.float()


def pair_logits(model: Any) -> Tensor:
    """Return the logits of the code that a pair runs."""
    step = ModelPair(model).target_step
    return step.forward(ForwardBatch(IDS, [0], eager=True), step.new_cache(1, 8)).logits.float()


def texts(pair: ModelPair, **options: Any) -> list[list[int]]:
    output = generate(pair, prompts(2), max_new_tokens=8, eos_token_id=None, draft_length=2, **options)
    return texts_of(output)


class Doubled(nn.Module):
    """A module that wraps another one, like an adapter."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = 2 * self.module(x)
        return out


class ScaledEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return -super().forward(input)


def hooked(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: 3 * out)


def hooked_before(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.norm.register_forward_pre_hook(lambda module, args: (-args[0],))


def hooked_everywhere(model: Any, patch: pytest.MonkeyPatch) -> None:
    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        return 3 * out if type(module).__name__ == "LlamaMLP" else None

    patch.setitem(nn.modules.module._global_forward_hooks, 10**9, hook)


def own_forward(model: Any, patch: pytest.MonkeyPatch) -> None:
    mlp = model.model.layers[1].mlp
    mlp.forward = MethodType(lambda self, x: -self.down_proj(self.up_proj(x)), mlp)


def patched_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    forward = modeling_llama.LlamaMLP.forward

    @wraps(forward)
    def doubled(self: Any, x: Tensor) -> Tensor:
        return 2 * forward(self, x)

    patch.setattr(modeling_llama.LlamaMLP, "forward", doubled)


def patched_function(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Change a function that no module or class owns."""
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda query, key, *rotation: (query, key))


def replaced_mlp(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].mlp = Doubled(model.model.layers[0].mlp)


def replaced_norm(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.norm = nn.LayerNorm(64).to(torch.bfloat16)


def replaced_head(model: Any, patch: pytest.MonkeyPatch) -> None:
    class Capped(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * torch.tanh(super().forward(input))

    model.lm_head.__class__ = Capped


def replaced_embedding(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.embed_tokens.__class__ = ScaledEmbedding


def replaced_activation(model: Any, patch: pytest.MonkeyPatch) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ReLU()


def another_scale(model: Any, patch: pytest.MonkeyPatch) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.01


def another_epsilon(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.norm.variance_epsilon = 100.0


def edited_config(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Edit the config. Modules read it only when they are created, so the model's outputs do not change."""
    model.config.rms_norm_eps = 100.0


def one_bias(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Give only the value projection a bias. Packing looks for a bias only in the query projection."""
    projection = model.model.layers[0].self_attn.v_proj
    projection.bias = nn.Parameter(torch.full((projection.out_features,), 5.0, dtype=torch.bfloat16))


def layers_swapped(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Swap the layers' indices, not the layers."""
    first, second = model.model.layers
    first.self_attn.layer_idx, second.self_attn.layer_idx = 1, 0


CHANGES = {
    "its module model.layers.0.mlp has a hook": hooked,
    "its module model.norm has a hook": hooked_before,
    "a hook is registered for all modules": hooked_everywhere,
    "its module model.layers.1.mlp has a forward of its own": own_forward,
    "its module model.layers.0.mlp has a class whose forward was replaced": patched_class,
    "apply_rotary_pos_emb in transformers.models.llama.modeling_llama was replaced": patched_function,
    "its module model.layers.0.mlp.act_fn is missing": replaced_mlp,
    "its module model.norm is a LayerNorm": replaced_norm,
    "its module lm_head is a Capped": replaced_head,
    "its module model.embed_tokens is a ScaledEmbedding": replaced_embedding,
    "its module model.layers.0.mlp.act_fn is a ReLU": replaced_activation,
    "its module model.layers.0.self_attn has another scaling": another_scale,
    "its module model.norm has another variance_epsilon": another_epsilon,
    "its module model.layers.0.input_layernorm has another variance_epsilon": edited_config,
    "its module model.layers.0.self_attn.v_proj has a bias": one_bias,
    "its module model.layers.0.self_attn has another layer_idx": layers_swapped,
}


@needs_kernels
@pytest.mark.parametrize("reason", CHANGES)
def test_a_changed_model_runs_its_own_code(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bfloat16_model()
    before = logits_of(model)
    CHANGES[reason](model, monkeypatch)
    expected = logits_of(model)
    if CHANGES[reason] not in (edited_config, layers_swapped):
        assert (expected - before).norm() > 0.15 * before.norm(), "the change is too small to be seen"
    pair = ModelPair(model)
    assert type(pair.target_step) is CausalModel
    assert pair.computed_by == f"transformers' own model ({reason})" and reason in repr(pair)
    assert (pair_logits(model) - expected).norm() < 0.05 * expected.norm()


def patched_call(model: Any, patch: pytest.MonkeyPatch) -> None:
    call = nn.Module.__call__
    patch.setattr(modeling_llama.LlamaMLP, "__call__", lambda *args: 3 * call(*args), raising=False)


@needs_kernels
@pytest.mark.parametrize("change", [patched_class, patched_call, patched_function])
def test_patched_classes_and_functions_count_after_pairing_too(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bfloat16_model()
    pair = ModelPair(model)
    change(model, monkeypatch)
    pair.refresh()
    assert type(pair.target_step) is CausalModel
    assert pair.computed_by == ModelPair(model).computed_by


@needs_kernels
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_an_unchanged_model_runs_our_kernels(architecture: str, quantised: bool) -> None:
    """Training, and the hooks that transformers leaves after returning hidden states, change nothing."""
    model = bfloat16_model(architecture)
    model(IDS, output_hidden_states=True)
    model.train()
    model.lm_head.register_full_backward_hook(lambda module, before, after: None)
    model.gradient_checkpointing_enable()
    model.config.pad_token_id = 0
    if quantised:
        quantise_model(model, "int8")
    assert type(ModelPair(model).target_step) is LlamaCompiled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_and_output_layers_may_be_modules_without_a_weight(dtype: torch.dtype) -> None:
    for change in ("embedding", "head"):
        model: Any = tiny("llama").to(dtype)
        before = texts(ModelPair(model))
        if change == "embedding":
            model.model.embed_tokens = Doubled(model.model.embed_tokens)
            model.model.layers[0].input_layernorm = nn.Identity()
        else:
            model.lm_head = nn.Sequential(model.lm_head, nn.ReLU(), nn.Linear(96, 96, dtype=dtype))
        assert (pair_logits(model) - logits_of(model)).norm() < 0.05 * logits_of(model).norm()
        if dtype == torch.float32:
            pair = ModelPair(model)
            assert texts(pair) == texts(pair, method="transformers") != before
        with pytest.raises(PairError, match="has other modules in their place"):
            tiny_head(model)


@needs_kernels
def test_a_hook_on_a_head_norm_of_qwen3_is_kept() -> None:
    model = bfloat16_model("qwen3")
    assert isinstance(model.model.layers[0].self_attn.q_norm, modeling_qwen3.Qwen3RMSNorm)
    model.model.layers[0].self_attn.q_norm.register_forward_hook(lambda module, args, out: 4 * out)
    assert (pair_logits(model) - logits_of(model)).norm() < 0.05 * logits_of(model).norm()


@needs_kernels
def test_a_subclass_of_the_same_name_runs_its_own_code() -> None:
    class LlamaForCausalLM(modeling_llama.LlamaForCausalLM):
        def forward(self, *args: Any, **others: Any) -> Any:
            out = super().forward(*args, **others)
            out.logits = -out.logits
            return out

    model = bfloat16_model()
    model.__class__ = LlamaForCausalLM
    assert (pair_logits(model) - logits_of(model)).norm() < 0.05 * logits_of(model).norm()


@needs_kernels
def test_a_hook_on_a_linear_layer_of_any_16_bit_model_is_kept() -> None:
    model = bfloat16_model("gpt_neox")
    model.gpt_neox.layers[0].mlp.dense_4h_to_h.register_forward_hook(lambda module, args, out: -3 * out)
    assert (pair_logits(model) - logits_of(model)).norm() < 0.05 * logits_of(model).norm()


@needs_kernels
@pytest.mark.parametrize("everywhere", [False, True])
def test_patches_of_nn_linear_and_hooks_for_all_modules_are_kept(
    everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = bfloat16_model()
    head = tiny_head(target).to(torch.bfloat16)
    model, forward = bfloat16_model("gpt_neox"), nn.Linear.forward
    if everywhere:
        hook = lambda module, args, out: -3 * out if isinstance(module, nn.Linear) else None  # noqa: E731
        monkeypatch.setitem(nn.modules.module._global_forward_hooks, 10**9, hook)
    else:
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: -3 * forward(self, x))
    assert (pair_logits(model) - logits_of(model)).norm() < 0.05 * logits_of(model).norm()
    head.pack()
    assert type(head.layer("fuse")) is nn.Linear


def test_package_folders_are_recognised_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_code, "os", SimpleNamespace(path=ntpath))
    folder = own_code._folder(r"C:\Python\site-packages\torch\__init__.py")
    assert r"C:\Python\site-packages\torch\nn\modules\linear.py".startswith(folder)
    assert not r"C:\Python\site-packages\torchvision\ops\misc.py".startswith(folder)


def stranger(*arguments: Any, **options: Any) -> Any:
    """Stand in for any function of transformers, as a package's or a user's function does."""
    raise AssertionError("no trial is needed to see that this function isn't transformers' own")


# The implementation of attention, the object and the name or key that is replaced, and what the refusal names.
REPLACED: list[tuple[str, Any, str, str]] = [
    (
        "mine",
        ALL_ATTENTION_FUNCTIONS._global_mapping,
        "mine",
        'the attention function of "mine", stranger in tests',
    ),
    (
        "sdpa",
        ALL_ATTENTION_FUNCTIONS._local_mapping,
        "sdpa",
        'the attention function of "sdpa", stranger in tests',
    ),
    ("sdpa", ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", 'the attention function of "sdpa"'),
    ("eager", ALL_ATTENTION_FUNCTIONS._local_mapping, "eager", 'the attention function of "eager"'),
    ("sdpa", ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, "sdpa", 'the mask function of "sdpa"'),
    ("eager", modeling_llama, "eager_attention_forward", "eager_attention_forward in transformers.models.llama"),
    ("eager", modeling_llama, "repeat_kv", "repeat_kv in transformers.models.llama"),
    ("eager", nn.functional, "softmax", "softmax in torch.nn.functional"),
    ("sdpa", nn.functional, "scaled_dot_product_attention", "scaled_dot_product_attention in torch.nn.functional"),
    ("sdpa", modeling_llama, "ALL_ATTENTION_FUNCTIONS", "ALL_ATTENTION_FUNCTIONS in transformers.models.llama"),
    ("sdpa", modeling_llama, "create_causal_mask", "create_causal_mask in transformers.models.llama"),
    ("sdpa", masking_utils, "causal_mask_function", "causal_mask_function in transformers.masking_utils"),
    ("sdpa", AttentionInterface, "get_interface", "AttentionInterface.get_interface in transformers"),
    ("sdpa", DynamicLayer, "update", "DynamicLayer.update in transformers.cache_utils"),
]


def replace_at(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    patch.setitem(owner, name, stranger) if isinstance(owner, dict) else patch.setattr(owner, name, stranger)


@pytest.mark.parametrize("implementation, owner, name, shown", REPLACED)
def test_attention_masks_and_caches_that_are_not_transformers_own_are_refused(
    implementation: str, owner: Any, name: str, shown: str
) -> None:
    """Our attention would run in their place, and their effect may begin after more tokens than a trial has."""
    model = tiny("llama")
    model.config._attn_implementation = "sdpa" if implementation == "mine" else implementation
    pair = ModelPair(model)
    with pytest.MonkeyPatch.context() as patch:
        replace_at(patch, owner, name)
        model.config._attn_implementation = implementation
        for use in (lambda: ModelPair(model), pair.refresh, pair.refresh):
            with pytest.raises(PairError, match="is not transformers' own") as refusal:
                use()
            assert shown in str(refusal.value)
    model.config._attn_implementation = "sdpa"
    pair.refresh()
    assert ModelPair(model).computed_by == pair.computed_by


@needs_kernels
@pytest.mark.parametrize("function", ["rotate_half", "apply_rotary_pos_emb"])
def test_a_small_change_of_a_function_is_followed(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results differ by less than the trial's bound."""
    original = getattr(modeling_llama, function)

    @wraps(original)
    def changed(*arguments: Any, **options: Any) -> Any:
        out = original(*arguments, **options)
        return type(out)(1.01 * part for part in out) if isinstance(out, tuple) else out

    for later in (False, True):
        model = bfloat16_model()
        pair = ModelPair(model) if later else None
        with monkeypatch.context() as patch:
            patch.setattr(modeling_llama, function, changed)
            pair = pair or ModelPair(model)
            pair.refresh()
            assert type(pair.target_step) is CausalModel
            assert f"({function} in transformers.models.llama.modeling_llama was replaced)" in repr(pair)
        pair.refresh()
        assert type(pair.target_step) is LlamaCompiled


@needs_kernels
@pytest.mark.parametrize("name", ["silu", "linear"])
def test_a_replaced_function_of_torch_is_followed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(nn.functional, name)
    pair = ModelPair(bfloat16_model())
    monkeypatch.setattr(nn.functional, name, lambda *arguments, **options: original(*arguments, **options))
    pair.refresh()
    assert f"({name} in torch.nn.functional was replaced)" in repr(pair)


def test_wrappers_of_torch_and_new_code_are_changes() -> None:
    model, original = tiny("llama"), modeling_llama.rotate_half
    watch = Watch(model, numbers=False)
    for wrapper in (torch.autocast("cpu", dtype=torch.bfloat16), torch.vmap, contextmanager(lambda: iter([0]))()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modeling_llama, "rotate_half", wrapper(original))
            assert str(model_code(model).replaced).startswith("rotate_half in transformers")
    assert not watch.changed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(original, "__code__", (lambda x: 2 * x).__code__)
        assert watch.changed()
    assert not watch.changed() and model_code(model).replaced is None


OWN_EAGER = """
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import repeat_kv

def transposed(x):
    return x.transpose(2, 3)

def eager_attention_forward(module, query, key, value, mask, scaling, **others):
    scores = query @ transposed(repeat_kv(key, module.num_key_value_groups)) * scaling + mask
    return nn.functional.softmax(scores, -1) @ repeat_kv(value, module.num_key_value_groups), None
"""


def test_the_eager_attention_of_a_users_own_file_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("modeling_mine")
    exec(OWN_EAGER, vars(module))
    monkeypatch.setitem(sys.modules, "modeling_mine", module)

    def replaced() -> str | None:
        own_code._add_attention(links := own_code.CodeLinks(), "modeling_mine", ["eager"])
        return links.replaced

    assert replaced() is None
    for owner, name in ((nn.functional, "softmax"), (module, "repeat_kv"), (module, "eager_attention_forward")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stranger)
            assert str(replaced()).startswith(name)


def test_the_functions_of_unchanged_models_are_transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their files import functions, wrap them, cache them, and bind some of other packages when they first run."""
    for architecture in ("llama", "qwen3", "gpt2", "gpt_neox", "gemma2", "bloom", "falcon", "deepseek_v3"):
        model = make(architecture)
        monkeypatch.setattr(modeling_flash_attention_utils, "_flash_fn", stranger)
        monkeypatch.setattr(torch, "arange", stranger)  # as ZeroGPU's package does, but that one computes the same
        assert model_code(model).replaced is None
        for implementation in ("sdpa", "eager", "flash_attention_2", "flex_attention"):
            attention.switch(model, implementation)
            assert attention_code(model).replaced is None
        assert len(model_code(model).links) > 20
        monkeypatch.undo()


def test_layers_that_quantise_all_texts_together_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(tiny("llama"), {nn.Linear}, dtype=torch.qint8)
    assert weight_or_none(model.lm_head) is None, "its weight is packed"
    with pytest.raises(PairError, match="each would depend on the others"):
        ModelPair(model)


def test_a_changed_model_with_joined_weights_runs_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "is_accelerator", lambda device: True)
    monkeypatch.setattr(select.llama_cuda, "has_room", lambda model: True)
    model = tiny("llama")
    assert type(ModelPair(model).target_step) is LlamaCuda
    for change in (hooked, partial(patched_function, model)):
        with pytest.MonkeyPatch.context() as patch:
            change(model, patch) if change is hooked else change(patch)
            assert type(ModelPair(model).target_step) is CausalModel
            torch.testing.assert_close(pair_logits(model), logits_of(model), atol=1e-3, rtol=1e-3)


def test_a_hook_that_is_an_object_is_not_copied() -> None:
    class Steering:
        strength = 0.0

        def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
            return out + self.strength

    steering, model = Steering(), tiny("llama")
    model.model.layers[0].mlp.register_forward_hook(steering)
    pair = ModelPair(model)
    before, steering.strength = texts(pair), 3.0
    assert texts(pair) == texts(ModelPair(model)) != before


class Gain:
    value = 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_of_a_users_forward_is_not_copied(dtype: torch.dtype) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.seen.append(x.shape)
        return self.gain.value * type(self).forward(self, x)

    model = tiny("llama").to(dtype)
    mlp = model.model.layers[0].mlp
    mlp.gain, mlp.seen, mlp.forward = Gain(), [], MethodType(forward, mlp)
    pair = ModelPair(model)
    before, calls = texts(pair), len(mlp.seen)
    mlp.gain.value = -3.0
    assert texts(pair) == texts(ModelPair(model)) != before
    assert len(mlp.seen) > calls


def pruned(model: Any) -> None:
    """Make a weight the result of a computation, which copy.deepcopy refuses to copy."""
    prune.l1_unstructured(model.requires_grad_().model.layers[0].mlp.down_proj, "weight", 0.5)


def locked(model: Any) -> None:
    model.model.layers[0].mlp.lock = threading.Lock()
    model.generator = torch.Generator()


@pytest.mark.parametrize("change", [pruned, locked])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attributes_that_cannot_be_copied_are_shared(change: Callable[[Any], None], dtype: torch.dtype) -> None:
    model = tiny("llama").to(dtype)
    change(model)
    assert (pair_logits(model) - logits_of(model)).norm() < 0.05 * logits_of(model).norm()


def renewed(model: Any) -> Any:
    return tiny("llama", seed=7).to(model.dtype)


def load_state_dict(model: Any) -> None:
    model.load_state_dict(renewed(model).state_dict())


def through_data(model: Any) -> None:
    """Change weights through `.data`, which torch does not count as a change of the tensor."""
    for parameter, new in zip(model.parameters(), renewed(model).parameters(), strict=True):
        parameter.data.copy_(new)


def other_data(model: Any) -> None:
    for parameter, new in zip(model.parameters(), renewed(model).parameters(), strict=True):
        parameter.data = new.data


def other_parameters(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(renewed(model).lm_head.weight.detach())


def other_module(model: Any) -> None:
    model.model.layers[1] = renewed(model).model.layers[1]


def removed_hook(model: Any) -> None:
    model.model.layers[0].mlp._forward_hooks.clear()


def late_hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: 3 * out)


def late_forward(model: Any) -> None:
    own_forward(model, None)  # type: ignore[arg-type]


def late_scale(model: Any) -> None:
    another_scale(model, None)  # type: ignore[arg-type]


def late_rotation(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.3)


def replaced_hook(model: Any) -> None:
    """Replace a hook, so that the number of hooks stays the same."""
    removed_hook(model)
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: -2 * out)


def late_global_hook(model: Any) -> None:
    nn.modules.module.register_module_forward_hook(
        lambda module, args, out: 3 * out if type(module).__name__ == "LlamaMLP" else None
    )


LATER = [
    load_state_dict, through_data, other_data, other_parameters, other_module, removed_hook, replaced_hook,
    late_hook, late_global_hook, late_forward, late_scale, late_rotation,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", LATER)
def test_changes_after_pairing_take_effect_at_the_next_call(
    change: Callable[[Any], None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.modules.module, "_global_forward_hooks", OrderedDict())
    model = tiny("llama").to(dtype)
    if change in (removed_hook, replaced_hook):
        hooked(model, None)  # type: ignore[arg-type]
    pair = ModelPair(model, model)
    before = texts(pair)
    change(model)
    for method in ("regular", "bass"):
        assert texts(pair, method=method) == texts(ModelPair(model, model), method=method) != before


def logits_of_draft(pair: ModelPair) -> Tensor:
    """Return the logits of a draft head, including its input layers, for fixed tokens and states."""
    head, step = pair.draft, pair.draft_step
    assert head is not None and step is not None
    states = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    fed = head.inputs(IDS, states)
    return step.forward(ForwardBatch(fed, [0], eager=True), step.new_cache(1, 8)).logits.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_follows_its_own_weights_and_its_targets(dtype: torch.dtype) -> None:
    target = tiny("llama").to(dtype)
    pair = ModelPair(target, tiny_head(target).to(dtype))
    other = tiny_head(target, seed=6).to(dtype)
    for change in (
        lambda: pair.draft.load_state_dict(other.own_weights(), strict=False),
        lambda: load_state_dict(target),
    ):
        before = logits_of_draft(pair)
        change()
        pair.refresh()
        same_head = tiny_head(target).to(dtype)
        same_head.load_state_dict(pair.draft.own_weights(), strict=False)
        expected = logits_of_draft(ModelPair(target, same_head))
        assert torch.equal(logits_of_draft(pair), expected) and not torch.equal(expected, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_created_in_inference_mode_follows_its_target(dtype: torch.dtype) -> None:
    target = tiny("llama").to(dtype)
    with torch.inference_mode():
        head = tiny_head(target).to(dtype)
    pair = ModelPair(target, head)
    rows = head.body.lm_head.weight
    before = rows.clone()
    load_state_dict(target)
    pair.refresh()
    assert torch.equal(head.body.lm_head.weight, target.lm_head.weight[head.vocabulary])
    assert torch.equal(rows, before), "a running lane reads these rows"


def test_a_head_follows_a_target_of_another_vocabulary() -> None:
    target = tiny("llama")
    pair = ModelPair(target, tiny_head(target))
    target.resize_token_embeddings(112)
    pair.refresh()
    head: Any = pair.draft
    assert head.columns.shape == (112,) and torch.equal(head.column_of(head.vocabulary), torch.arange(40))
    assert texts(pair) == texts(pair, method="regular")
    target.resize_token_embeddings(int(head.vocabulary.max()))
    for _ in range(2):
        with pytest.raises(PairError, match="choose another draft"):
            texts(pair)


@needs_kernels
@pytest.mark.parametrize("reads_layers", [(), (0,)])
def test_a_running_lane_keeps_its_layers_during_a_refresh(reads_layers: tuple[int, ...]) -> None:
    """Only the next lane sees the change: it runs unpacked layers, because a layer with a hook is not packed."""
    target = bfloat16_model()
    head = tiny_head(target, reads_layers=reads_layers).to(torch.bfloat16)
    pair = ModelPair(target, head)
    options: Any = {"max_new_tokens": 24, "eos_token_id": None, "draft_length": 2}
    expected = texts_of(generate(pair, prompts(2), method="regular", **options))
    assert head.compiled_inputs is not None
    steps = stream(pair, prompts(2), **options)
    written = [row.tokens for row in next(steps).rows]
    head.fuse.register_forward_hook(lambda module, args, out: -out)
    pair.refresh()
    assert head.compiled_inputs is None
    for row in (row for round_ in steps for row in round_.rows):
        written[row.sequence] += row.tokens
    assert written == expected


@needs_kernels
def test_a_hook_on_a_heads_layer_is_kept() -> None:
    target = bfloat16_model()
    head = tiny_head(target).to(torch.bfloat16)
    plain = logits_of_draft(ModelPair(target, head))
    head.fuse.register_forward_hook(lambda module, args, out: -out)
    assert not torch.equal(logits_of_draft(ModelPair(target, head)), plain)
    handle = head.body.model.layers[0].mlp.register_forward_hook(lambda module, args, out: 5 * out)
    pair = ModelPair(target, head)
    assert pair.draft_step is not None and type(pair.draft_step) is CausalModel
    assert "for the draft transformers' own model (its module model.layers.0.mlp has a hook)" in repr(pair)
    handle.remove()
    assert texts(pair) == texts(ModelPair(target, head))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_calls_do_not_count_as_changes(architecture: str, dtype: torch.dtype) -> None:
    model = tiny(architecture).to(dtype)
    pair = ModelPair(model, model)
    steps = pair.target_step, pair.draft_step
    for method in ("regular", "speculative", "bass", "amusd", "transformers"):
        texts(pair, method=method)
    model.train().eval()
    pair.refresh()
    assert (pair.target_step, pair.draft_step) == steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_the_copy_of_a_pair_follows_its_own_model(
    copied: Callable[[ModelPair], ModelPair], dtype: torch.dtype
) -> None:
    model = tiny("llama").to(dtype)
    pair = ModelPair(model, model, name="mine", default_drafter="prompt_lookup")
    before = texts(pair)
    other = copied(pair)
    assert texts(other) == before and other.draft is other.target
    assert (other.name, other.default_drafter) == ("mine", "prompt_lookup")
    late_hook(other.target)
    assert texts(pair) == before != texts(other)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_pair_whose_model_was_replaced_is_refused(name: str) -> None:
    model = tiny("llama")
    pair = ModelPair(model, model)
    setattr(pair, name, tiny("llama", seed=1))
    with pytest.raises(PairError, match="target or draft was replaced"):
        texts(pair)


def test_models_that_no_longer_fit_are_refused() -> None:
    target, draft = tiny("llama"), tiny("llama", seed=1)
    pair = ModelPair(target, draft)
    draft.resize_token_embeddings(80)
    for _ in range(2):
        with pytest.raises(PairError, match="80 ids"):
            texts(pair)


def test_a_change_during_a_refresh_takes_effect_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, changes = bfloat16_model(), [load_state_dict]
    pair = ModelPair(model)

    def select_and_change(*args: Any) -> CausalModel:
        step = select.select_model(*args)
        if changes:
            changes.pop()(model)
        return step

    monkeypatch.setattr("bass_core.model.pair.select_model", select_and_change)
    late_hook(model)
    for _ in range(2):
        after = texts(pair)
    assert not changes and after == texts(ModelPair(model))


def test_refreshes_of_two_pairs_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first refresh waits here until the second is done."""
    first, second = ModelPair(tiny("llama")), ModelPair(tiny("llama", seed=1))
    done = threading.Event()

    def refresh() -> None:
        second.refresh()
        done.set()

    def select_meanwhile(*args: Any) -> CausalModel:
        thread = threading.Thread(target=refresh, daemon=True)
        thread.start()
        assert done.wait(60)
        return select.select_model(*args)

    monkeypatch.setattr("bass_core.model.pair.select_model", select_meanwhile)
    late_hook(first.target)
    first.refresh()


def test_a_refresh_does_not_try_a_capture_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a capture is tried, torch raises at any synchronisation, also in the threads of other lanes."""
    model, tried = tiny("llama"), []
    monkeypatch.setattr(select, "mark_capturable", tried.append)
    pair = ModelPair(model, model)
    assert tried == [pair.target_step, pair.draft_step]
    pair.target_step.capturable = False
    late_hook(model)
    pair.refresh()
    assert len(tried) == 2 and not pair.target_step.capturable
    assert pair.draft_step is not None and pair.draft_step.capturable


@needs_kernels
def test_a_model_that_changes_class_in_a_refresh_is_not_captured() -> None:
    pair = ModelPair(bfloat16_model())
    assert pair.target_step.capturable
    late_hook(pair.target)
    pair.refresh()
    assert type(pair.target_step) is CausalModel and not pair.target_step.capturable


def test_a_watch_does_not_keep_replaced_weights_alive() -> None:
    weight = (model := tiny("llama")).lm_head.weight
    numbers = weight.detach().numpy().copy()
    weight.data, memory = torch.from_numpy(numbers), weakref.ref(numbers)
    del numbers
    watch = Watch(model, numbers=True)
    weight.data = weight.detach().clone()
    gc.collect()
    assert memory() is None and watch.changed()


def test_a_watch_without_numbers_ignores_new_values() -> None:
    model = tiny("llama")
    watch = Watch(model, numbers=False)
    load_state_dict(model)
    assert not watch.changed()
    model.config.update({"rms_norm_eps": 1e-3})
    assert watch.changed()

"""A model whose modules, hooks or weights differ from its class and config is still the model that runs."""

from __future__ import annotations

import gc
import ntpath
import pickle
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from bass_core import ModelPair, PairError, generate, stream
from bass_core.machine import cpu_kernels
from bass_core.model import select
from bass_core.model.base import CausalModel
from bass_core.model.forward import ForwardBatch
from bass_core.model.llama_cpu import LlamaCompiled
from bass_core.model.llama_cuda import LlamaCuda
from bass_core.model.weights import modified
from bass_core.model.weights.modified import Watch
from bass_core.model.weights.quantized import quantise_model
from tests.support.models import prompts, texts_of, tiny, tiny_head

compiled = pytest.mark.skipif(not cpu_kernels.available(), reason="numba is not there")
IDS = torch.tensor([[3, 1, 4, 1, 5]])
Change = Callable[[Any, pytest.MonkeyPatch], None]


def half(architecture: str = "llama", seed: int = 0) -> Any:
    return tiny(architecture, seed).to(torch.bfloat16)


def of(model: Any) -> Tensor:
    """The model's own logits [1, S, V] in float32."""
    with torch.no_grad():
        return model(IDS).logits.float()


def ours(model: Any) -> Tensor:
    """The same from what a pair runs."""
    step = ModelPair(model).target_step
    return step.forward(ForwardBatch(IDS, [0], eager=True), step.new_cache(1, 8)).logits.float()


def texts(pair: ModelPair, **options: Any) -> list[list[int]]:
    made = generate(pair, prompts(2), max_new_tokens=8, eos_token_id=None, draft_length=2, **options)
    return texts_of(made)


class Doubled(nn.Module):
    """A module around another one, as an adapter puts it there."""

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
    """Modules and classes are untouched: only a trial shows it."""
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
    """Read when the modules were made, and never again: the model does not change."""
    model.config.rms_norm_eps = 100.0


def one_bias(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Packed queries, keys and values take their biases from the first of them."""
    projection = model.model.layers[0].self_attn.v_proj
    projection.bias = nn.Parameter(torch.full((projection.out_features,), 5.0, dtype=torch.bfloat16))


def layers_swapped(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Their indices say that they are in another order."""
    first, second = model.model.layers
    first.self_attn.layer_idx, second.self_attn.layer_idx = 1, 0


CHANGES = {
    "its module model.layers.0.mlp has a hook": hooked,
    "its module model.norm has a hook": hooked_before,
    "a hook is registered for all modules": hooked_everywhere,
    "its module model.layers.1.mlp has a forward of its own": own_forward,
    "its module model.layers.0.mlp has a class whose forward was replaced": patched_class,
    "our kernels compute other logits than its own code": patched_function,
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


@compiled
@pytest.mark.parametrize("reason", CHANGES)
def test_a_changed_model_runs_by_its_own_code(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = half()
    before = of(model)
    CHANGES[reason](model, monkeypatch)
    wanted = of(model)
    if CHANGES[reason] not in (edited_config, layers_swapped):
        assert (wanted - before).norm() > 0.15 * before.norm(), "the change is too small to be seen"
    pair = ModelPair(model)
    assert type(pair.target_step) is CausalModel
    assert pair.computed_by == f"transformers' own model ({reason})" and reason in repr(pair)
    assert (ours(model) - wanted).norm() < 0.05 * wanted.norm()


@compiled
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_an_unchanged_model_runs_by_our_kernels(architecture: str, quantised: bool) -> None:
    """Also one that returned hidden states, for which transformers leaves hooks, and one that was in training."""
    model = half(architecture)
    model(IDS, output_hidden_states=True)
    model.train()
    model.gradient_checkpointing_enable()
    model.config.pad_token_id = 0
    if quantised:
        quantise_model(model, "int8")
    assert type(ModelPair(model).target_step) is LlamaCompiled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ends_without_a_weight(dtype: torch.dtype) -> None:
    for change in ("embedding", "head"):
        model: Any = tiny("llama").to(dtype)
        before = texts(ModelPair(model))
        if change == "embedding":
            model.model.embed_tokens = Doubled(model.model.embed_tokens)
            model.model.layers[0].input_layernorm = nn.Identity()
        else:
            model.lm_head = nn.Sequential(model.lm_head, nn.ReLU(), nn.Linear(96, 96, dtype=dtype))
        assert (ours(model) - of(model)).norm() < 0.05 * of(model).norm()
        if dtype == torch.float32:
            pair = ModelPair(model)
            assert texts(pair) == texts(pair, method="transformers") != before
        with pytest.raises(PairError, match="has other modules in their place"):
            tiny_head(model)


@compiled
def test_a_qwen3_with_a_hook_on_a_head_norm() -> None:
    model = half("qwen3")
    assert isinstance(model.model.layers[0].self_attn.q_norm, modeling_qwen3.Qwen3RMSNorm)
    model.model.layers[0].self_attn.q_norm.register_forward_hook(lambda module, args, out: 4 * out)
    assert (ours(model) - of(model)).norm() < 0.05 * of(model).norm()


@compiled
def test_a_class_of_the_same_name_is_another_class() -> None:
    class LlamaForCausalLM(modeling_llama.LlamaForCausalLM):
        def forward(self, *given: Any, **others: Any) -> Any:
            out = super().forward(*given, **others)
            out.logits = -out.logits
            return out

    model = half()
    model.__class__ = LlamaForCausalLM
    assert (ours(model) - of(model)).norm() < 0.05 * of(model).norm()


@compiled
def test_a_hook_on_a_linear_layer_of_any_16_bit_model_is_kept() -> None:
    model = half("gpt_neox")
    model.gpt_neox.layers[0].mlp.dense_4h_to_h.register_forward_hook(lambda module, args, out: -3 * out)
    assert (ours(model) - of(model)).norm() < 0.05 * of(model).norm()


@compiled
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_patched_linear_class_and_a_hook_for_all_modules_of_any_16_bit_model_are_kept(
    everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = half()
    head = tiny_head(target).to(torch.bfloat16)
    model, forward = half("gpt_neox"), nn.Linear.forward
    if everywhere:
        hook = lambda module, args, out: -3 * out if isinstance(module, nn.Linear) else None  # noqa: E731
        monkeypatch.setitem(nn.modules.module._global_forward_hooks, 10**9, hook)
    else:
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: -3 * forward(self, x))
    assert (ours(model) - of(model)).norm() < 0.05 * of(model).norm()
    head.pack()
    assert type(head.layer("fuse")) is nn.Linear


def test_folders_of_packages_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modified, "os", SimpleNamespace(path=ntpath))
    folder = modified._folder(r"C:\Python\site-packages\torch\__init__.py")
    assert r"C:\Python\site-packages\torch\nn\modules\linear.py".startswith(folder)
    assert not r"C:\Python\site-packages\torchvision\ops\misc.py".startswith(folder)


def test_attention_of_the_users_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """We put our attention in its place, which the trial sees in float32 as well."""
    from transformers import AttentionInterface

    def upside_down(module: Any, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> Any:
        out, weights = modeling_llama.eager_attention_forward(module, query, key, value, mask, **others)
        return -out, weights

    AttentionInterface.register("upside_down", upside_down)
    model = tiny("llama")
    model.config._attn_implementation = "upside_down"
    with pytest.raises(PairError, match="computes other logits"):
        ModelPair(model)


def test_a_joined_model_with_a_hook_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "is_accelerator", lambda device: True)
    monkeypatch.setattr(select.llama_cuda, "has_room", lambda model: True)
    model = tiny("llama")
    assert type(ModelPair(model).target_step) is LlamaCuda
    for change in (hooked, partial(patched_function, model)):
        with pytest.MonkeyPatch.context() as patch:
            change(model, patch) if change is hooked else change(patch)
            assert type(ModelPair(model).target_step) is CausalModel
            torch.testing.assert_close(ours(model), of(model), atol=1e-3, rtol=1e-3)


def test_an_object_that_hooks_a_model_is_the_users_own() -> None:
    class Steering:
        strength = 0.0

        def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
            return out + self.strength

    steering, model = Steering(), tiny("llama")
    model.model.layers[0].mlp.register_forward_hook(steering)
    pair = ModelPair(model)
    before, steering.strength = texts(pair), 3.0
    assert texts(pair) == texts(ModelPair(model)) != before


def renewed(model: Any) -> Any:
    return tiny("llama", seed=7).to(model.dtype)


def load_state_dict(model: Any) -> None:
    model.load_state_dict(renewed(model).state_dict())


def through_data(model: Any) -> None:
    """torch counts no change of a tensor that is made through `.data`."""
    for own, new in zip(model.parameters(), renewed(model).parameters(), strict=True):
        own.data.copy_(new)


def other_data(model: Any) -> None:
    for own, new in zip(model.parameters(), renewed(model).parameters(), strict=True):
        own.data = new.data


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
    """As many hooks as before."""
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
def test_a_model_that_changes_after_it_was_paired(
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
    """Of a draft head's body and of the layers before it, for tokens and states that are always the same."""
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
        again = tiny_head(target).to(dtype)
        again.load_state_dict(pair.draft.own_weights(), strict=False)
        wanted = logits_of_draft(ModelPair(target, again))
        assert torch.equal(logits_of_draft(pair), wanted) and not torch.equal(wanted, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_was_made_in_inference_mode_follows_its_target(dtype: torch.dtype) -> None:
    target = tiny("llama").to(dtype)
    with torch.inference_mode():
        head = tiny_head(target).to(dtype)
    pair = ModelPair(target, head)
    rows = head.body.lm_head.weight
    before = rows.clone()
    load_state_dict(target)
    pair.refresh()
    assert torch.equal(head.body.lm_head.weight, target.lm_head.weight[head.vocabulary])
    assert torch.equal(rows, before), "a lane that is running reads these"


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


@compiled
@pytest.mark.parametrize("reads_layers", [(), (0,)])
def test_a_refresh_leaves_a_running_lane_the_layers_that_it_began_with(reads_layers: tuple[int, ...]) -> None:
    """Of which the next lane has other forms: a layer with a hook is not packed."""
    target = half()
    head = tiny_head(target, reads_layers=reads_layers).to(torch.bfloat16)
    pair = ModelPair(target, head)
    options: Any = {"max_new_tokens": 24, "eos_token_id": None, "draft_length": 2}
    wanted = texts_of(generate(pair, prompts(2), method="regular", **options))
    assert head.compiled_inputs is not None
    steps = stream(pair, prompts(2), **options)
    written = [row.tokens for row in next(steps).rows]
    head.fuse.register_forward_hook(lambda module, args, out: -out)
    pair.refresh()
    assert head.compiled_inputs is None
    for row in (row for round_ in steps for row in round_.rows):
        written[row.sequence] += row.tokens
    assert written == wanted


@compiled
def test_a_hook_on_a_heads_layer_is_kept() -> None:
    target = half()
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
def test_calls_change_nothing(architecture: str, dtype: torch.dtype) -> None:
    model = tiny(architecture).to(dtype)
    pair = ModelPair(model, model)
    steps = pair.target_step, pair.draft_step
    for method in ("regular", "speculative", "bass", "amusd", "transformers"):
        texts(pair, method=method)
    model.train().eval()
    pair.refresh()
    assert (pair.target_step, pair.draft_step) == steps


def test_a_pair_can_be_copied_and_its_copy_follows_its_own_model() -> None:
    pair = ModelPair(tiny("llama"))
    other = pickle.loads(pickle.dumps(pair))
    before = texts(pair)
    assert texts(other) == before
    late_hook(other.target)
    assert texts(pair) == before != texts(other)


def test_models_that_no_longer_fit_are_refused() -> None:
    target, draft = tiny("llama"), tiny("llama", seed=1)
    pair = ModelPair(target, draft)
    draft.resize_token_embeddings(80)
    for _ in range(2):
        with pytest.raises(PairError, match="80 ids"):
            texts(pair)


def test_a_change_during_a_refresh_takes_effect_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, changes = half(), [load_state_dict]
    pair = ModelPair(model)

    def select_and_change(*given: Any) -> CausalModel:
        step = select.select_model(*given)
        if changes:
            changes.pop()(model)
        return step

    monkeypatch.setattr("bass_core.model.pair.select_model", select_and_change)
    late_hook(model)
    for _ in range(2):
        after = texts(pair)
    assert not changes and after == texts(ModelPair(model))


def test_a_refresh_of_one_pair_does_not_wait_for_another_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first is packed, which the second's refresh ends."""
    first, second = ModelPair(tiny("llama")), ModelPair(tiny("llama", seed=1))
    done = threading.Event()

    def refresh() -> None:
        second.refresh()
        done.set()

    def select_meanwhile(*given: Any) -> CausalModel:
        thread = threading.Thread(target=refresh, daemon=True)
        thread.start()
        assert done.wait(60)
        return select.select_model(*given)

    monkeypatch.setattr("bass_core.model.pair.select_model", select_meanwhile)
    late_hook(first.target)
    first.refresh()


def test_a_refresh_does_not_try_a_capture_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check would make waits in the threads of other lanes raise."""
    model, tried = tiny("llama"), []
    monkeypatch.setattr(select, "mark_capturable", tried.append)
    pair = ModelPair(model, model)
    assert tried == [pair.target_step, pair.draft_step]
    pair.target_step.capturable = False
    late_hook(model)
    pair.refresh()
    assert len(tried) == 2 and not pair.target_step.capturable
    assert pair.draft_step is not None and pair.draft_step.capturable


@compiled
def test_a_model_that_another_class_runs_after_a_refresh_is_not_captured() -> None:
    pair = ModelPair(half())
    assert pair.target_step.capturable
    late_hook(pair.target)
    pair.refresh()
    assert type(pair.target_step) is CausalModel and not pair.target_step.capturable


def test_a_watch_keeps_no_memory_of_weights_that_were_replaced() -> None:
    weight = (model := tiny("llama")).lm_head.weight
    numbers = weight.detach().numpy().copy()
    weight.data, memory = torch.from_numpy(numbers), weakref.ref(numbers)
    del numbers
    watch = Watch(model, numbers=True)
    weight.data = weight.detach().clone()
    gc.collect()
    assert memory() is None and watch.changed()


def test_a_watch_of_weights_that_nobody_copied_ignores_their_numbers() -> None:
    model = tiny("llama")
    watch = Watch(model, numbers=False)
    load_state_dict(model)
    assert not watch.changed()
    model.config.update({"rms_norm_eps": 1e-3})
    assert watch.changed()

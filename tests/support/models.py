"""Tiny random models whose greedy texts don't become repetitive: `tiny`, `tiny_head` and `tiny_pair` build them.

All are float32 and the same for a seed. Their weights are scaled up from the usual initialisation: with small
weights every position would prefer the same token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as bpe
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from bass_core import ModelPair
from bass_core.decode import calibrate
from bass_core.draft import registry
from bass_core.draft import window as drafting_window
from bass_core.model.draft_head import DraftHead, HeadConfig
from bass_core.model.eagle import EagleConfig, EagleHead
from kernels import plan
from kernels.reference import prefix

VOCAB = 96


def _builder(name: str, **sizes: Any) -> Callable[..., PreTrainedModel]:
    """Return a function that builds the architecture with a given number of layers and, if given, other sizes."""

    def build(layers: int, **others: Any) -> PreTrainedModel:
        types = ["sliding_attention", "full_attention"] * (layers // 2) + ["sliding_attention"] * (layers % 2)
        layer_types = {"layer_types": types} if "sliding_window" in sizes else {}
        if name in _STATEFUL:
            layer_types = {"layer_types": (["linear_attention", "full_attention"] * layers)[-layers:]}
        config: Any = getattr(tf, f"{name}TextConfig" if name in ("Gemma3", *_STATEFUL) else f"{name}Config")
        plain = {"tie_word_embeddings": False, "num_hidden_layers": layers}
        ids = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
        model: Any = getattr(tf, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
        return model(config(**plain, **ids, **layer_types, **(_SIZES | sizes | others)))

    return build


_SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
_GROUPED = {"intermediate_size": 128, "num_key_value_heads": 2}
_LINEAR_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_LINEAR = _LINEAR_HEADS | {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_STATEFUL = ("Qwen3_5",)
BUILDERS = {
    "llama": _builder("Llama", **_GROUPED),
    "qwen3": _builder("Qwen3", **_GROUPED, head_dim=32),
    "opt": _builder("OPT", ffn_dim=128, word_embed_proj_dim=64, dropout=0.0),
    "gpt2": _builder("GPT2"),
    "gpt_neox": _builder("GPTNeoX", intermediate_size=128),
    "gemma3": _builder("Gemma3", **_GROUPED, head_dim=32, sliding_window=8),
    "qwen3_5": _builder("Qwen3_5", **_GROUPED, head_dim=32, **_LINEAR),
}
# The architectures with layers that keep a state, which older versions of transformers can't hand out.
STATEFUL = {"qwen3_5"}
if not hasattr(tf.cache_utils.Cache, "get_conv_state"):
    del BUILDERS["qwen3_5"]
# Weight scale as a multiple of the usual initialisation. With these scales, greedy texts don't repeat themselves,
# and float32 rounding is a hundred times smaller than the gap between the logits of the two likeliest tokens.
SCALES = {"llama": 12.0, "qwen3": 16.0, "opt": 16.0, "gpt2": 20.0, "gpt_neox": 24.0, "gemma3": 8.0}
SCALES |= {"qwen3_5": 6.0}
# With this noise, a `perturbed` copy chooses the model's greedy token at about three of four positions.
NEAR = {
    "llama": 0.025,
    "qwen3": 0.04,
    "opt": 0.03,
    "gpt2": 0.03,
    "gpt_neox": 0.03,
    "gemma3": 0.07,
    "qwen3_5": 0.04,
}


def tiny(
    architecture: str, seed: int = 0, layers: int = 2, scale: float | None = None, **sizes: Any
) -> PreTrainedModel:
    """Return a float32 model in eval mode.

    Args:
        architecture: A key of BUILDERS.
        seed: Seed of the weights.
        layers: The number of layers.
        scale: Factor by which matrices exceed the usual initialisation; by default that of SCALES.
        sizes: Settings of the model's config, e.g. vocab_size=5.
    """
    torch.manual_seed(seed)
    model = BUILDERS[architecture](layers, **sizes).eval()
    factor = SCALES[architecture] if scale is None else scale
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.requires_grad_(False)


def perturbed(model: PreTrainedModel, amount: float, seed: int = 1) -> PreTrainedModel:
    """Return a copy with noise of `amount` standard deviations in each matrix, so that it agrees only in part."""
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * amount)
    return other


def tiny_head(
    target: PreTrainedModel,
    layers: int = 1,
    reads_states: bool = True,
    reads_layers: tuple[int, ...] = (),
    size: int = 40,
    seed: int = 5,
    qk_norm: bool = False,
) -> DraftHead:
    """Return an untrained head over `size` of the target's tokens. Some drafts are right, so that rows diverge."""
    torch.manual_seed(seed)
    config = HeadConfig(layers, target.config.hidden_size, reads_states, reads_layers, qk_norm)
    head = DraftHead(target, config, torch.randperm(target.config.vocab_size)[:size].sort().values)
    with torch.no_grad():
        head.fuse.weight.normal_(std=0.2)
        for parameter in head.body.model.layers.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
        head.pointer.weight.normal_(std=0.05)
        for name, weight in head.body.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                weight.normal_(1.0, 0.3)
    return head.eval().requires_grad_(False)


def tiny_eagle(
    target: PreTrainedModel, reads_layers: tuple[int, ...] = (0, 1), size: int = 40, seed: int = 5, **options: Any
) -> EagleHead:
    """Return a random EAGLE-3 head over `size` of the target's tokens; other arguments as for `eagle_parts`."""
    return EagleHead(target, *eagle_parts(target, reads_layers, size, seed, **options))


def eagle_parts(
    target: PreTrainedModel,
    reads_layers: tuple[int, ...],
    size: int = 40,
    seed: int = 5,
    layers: int = 1,
    own_table: bool = False,
    **flags: bool,
) -> tuple[EagleConfig, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the config, vocabulary and weights of a random EAGLE-3 head. `flags` are those of EagleConfig."""
    torch.manual_seed(seed)
    size_of, hidden, streams = target.config.vocab_size, target.config.hidden_size, len(reads_layers)
    half, mlp = hidden // 2, 2 * hidden
    shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, streams * hidden), "norm": (hidden,)}
    shapes["lm_head"] = (size, hidden)
    for layer in range(layers):
        inputs = hidden if layer else 2 * hidden
        rows = {"q": (hidden, inputs), "k": (half, inputs), "v": (half, inputs), "o": (hidden, hidden)}
        shapes |= {f"layers.{layer}.self_attn.{name}_proj": shape for name, shape in rows.items()}
        rows = {"gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp)}
        shapes |= {f"layers.{layer}.mlp.{name}_proj": shape for name, shape in rows.items()}
        shapes |= {f"layers.{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        if flags.get("head_norms"):
            shapes |= {f"layers.{layer}.self_attn.{name}_norm": (hidden // 4,) for name in "qk"}
    shapes["layers.0.hidden_norm"] = (hidden,)
    if flags.get("norm_before_fc"):
        shapes["input_norm"] = (streams * hidden,)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{stream}": (hidden,) for stream in range(streams)}
    if own_table:
        shapes["embed_tokens"] = (size_of, hidden)
    weights = {
        f"{name}.weight": 0.2 * torch.randn(shape) if len(shape) > 1 else 1 + 0.3 * torch.randn(shape)
        for name, shape in shapes.items()
    }
    shape = tf.LlamaConfig(
        vocab_size=size, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        pad_token_id=None, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    vocabulary = torch.randperm(size_of)[:size].sort().values
    return EagleConfig("the tiny head", shape, reads_layers, hidden, **flags), vocabulary, weights


def tiny_pair(
    draft: str | float | None = "perturbed",
    *,
    architecture: str = "llama",
    target: PreTrainedModel | None = None,
    to: torch.dtype | torch.device | str | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> ModelPair:
    """Return a tiny target with a draft.

    Args:
        draft: "perturbed" chooses the target's token at about three of four positions, "self" is the target,
            "random" another model of one layer, "head" an untrained head that reads the target's first layer,
            "eagle" a random EAGLE-3 head.
            A number is the noise of a perturbed copy; None, or "none", is no draft.
        architecture: A key of BUILDERS.
        target: This model instead of the architecture's.
        to: The dtype or the device to move both models to.
        tokenizer: The pair's tokenizer.
    """
    model = tiny(architecture) if target is None else target
    other: Any = None
    if draft == "perturbed":
        other = perturbed(model, NEAR[architecture])
    elif draft == "random":
        other = tiny(architecture, seed=5, layers=1)
    elif draft == "head":
        other = tiny_head(model, reads_layers=(0,))
    elif draft == "eagle":
        other = tiny_eagle(model)
    elif draft == "self":
        other = model
    elif draft not in ("none", None):
        other = perturbed(model, float(draft))
    if to is not None:
        model = model.to(to)
        other = other if other is None else other.to(to)
    return ModelPair(model, other, tokenizer)


def slow_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return parameters for a test. Those that are not quick are marked slow. A tuple fills several parameters."""
    chosen, slow = list(quick), pytest.mark.slow
    each = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [pytest.param(*arguments, marks=() if value in chosen else slow) for value, arguments in each]


def each_once(*axes: Iterable[Any]) -> list[Any]:
    """Return the product of the axes as parameters for a test. A tuple fills several parameters.

    Those without a mark contain each value of each axis. The others run if captured rounds have changed.
    """
    values = [[value if isinstance(value, tuple) else (value,) for value in axis] for axis in axes]
    chosen = {tuple(i % len(axis) for axis in values) for i in range(max(map(len, values)))}
    every = product(*(range(len(axis)) for axis in values))
    return [
        pytest.param(
            *(part for axis, i in zip(values, places, strict=True) for part in axis[i]),
            marks=() if places in chosen else pytest.mark.demand("graphs"),
        )
        for places in every
    ]


def small_window(patch: pytest.MonkeyPatch, sinks: int = 4, unit: int = 4, window: int = 8) -> None:
    """Shrink sinks and window, so that windowed drafts leave out a gap between them even in short texts."""
    for module in (plan, prefix, drafting_window):
        patch.setattr(module, "SINKS", sinks)
    patch.setattr(plan, "_GAP_UNIT", unit)
    for user in (registry, drafting_window, calibrate):
        patch.setattr(user, "WINDOW", window)


def prompts(count: int, seed: int = 0, longest: int = 24) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def reference(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    """Return the tokens that transformers' greedy `generate` writes after the prompt."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def texts_of(out: Any) -> list[list[int]]:
    return [sequence.token_ids for sequence in out.sequences]


def byte_tokenizer(corpus: tuple[str, ...] = (), merges: int = 0) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE: two special tokens, 256 bytes, and up to `merges` merges learnt from a corpus."""
    tokenizer = Tokenizer(bpe.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=258 + merges,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")

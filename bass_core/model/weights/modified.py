"""Whether a model's modules still are what its class makes of its config, and whether a model has changed since.

Contract: reads modules and weights, and changes nothing. Our own forwards (llama_cpu.py, llama_cuda.py) read
weights and a config and never call the modules: ask `why_modified` before one of them runs a model. `Watch` tells
at the start of a call whether the user has changed the model since it was packed.
"""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .quantized import QuantizedEmbedding, QuantizedLinear

# Attention that transformers itself computes; another name is the user's own function.
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
# Attributes that no forward pass in eval mode reads, or that only repeat the shape of a weight.
_WITHOUT_EFFECT = {
    "training", "gradient_checkpointing", "attention_dropout", "padding_idx", "vocab_size", "in_features",
    "out_features", "num_embeddings", "embedding_dim", "max_seq_len_cached", "original_max_seq_len",
}  # fmt: skip
_QUANTIZED = {QuantizedLinear: nn.Linear, QuantizedEmbedding: nn.Embedding}
_HARMLESS = ("output_capturing_hook", "make_inputs_require_grads")
_CONTENTS = ("_modules", "_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def _folder(file: str) -> str:
    """The folder of a file, with the separator at its end."""
    return os.path.join(os.path.dirname(file), "")


_PACKAGES = tuple(_folder(package.__file__ or "") for package in (transformers, torch))


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """A module's dictionaries of forward hooks."""
    return [vars(module)[name] for name in _HOOKS]


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module does more than its class's forward.

    Two hooks of transformers' own change no number, and stay in a model once they were asked for: those that
    return hidden states, and the one that lets adapters be trained under gradient checkpointing.
    """
    hooks = [hook for some in hooks_of(module) for hook in some.values()]
    return "forward" in vars(module) or not all(map(_is_harmless, hooks))


def hooked_everywhere() -> bool:
    """Whether a forward hook is registered for all modules."""
    return any(_global_hooks())


def _global_hooks() -> list[dict[int, Any]]:
    everywhere = nn.modules.module
    return [dict(everywhere._global_forward_hooks), dict(everywhere._global_forward_pre_hooks)]


def is_patched(kind: Any) -> bool:
    """Whether the forward of a class comes neither from transformers nor from torch."""
    code = getattr(kind.forward, "__code__", None)
    return code is None or not code.co_filename.startswith(_PACKAGES)


def _is_harmless(hook: Any) -> bool:
    name = getattr(hook, "__qualname__", "").rpartition(".")[2]
    return getattr(hook, "__module__", "").startswith("transformers.") and name in _HARMLESS


def why_modified(model: PreTrainedModel) -> str | None:
    """How a model differs from what its class makes of its config, as a clause; None if it does not.

    Weights and buffers may hold anything, and linear layers may be quantised.
    """
    if hooked_everywhere():
        return "a hook is registered for all modules"
    attention = getattr(model.config, "_attn_implementation", None)
    if attention not in (*_ATTENTION, None):
        return f"its attention is {attention!r}"
    with torch.device("meta"):
        fresh = type(model)(copy.deepcopy(model.config))
    wanted = dict(fresh.named_modules(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    if differing := sorted(wanted.keys() ^ modules.keys()):
        return f"its module {differing[0]} is {'missing' if differing[0] in wanted else 'not of its class'}"
    for name, module in modules.items():
        if reason := _difference(module, wanted[name]):
            return f"{f'its module {name}' if name else 'it'} {reason}"
    return None


def _difference(module: nn.Module, fresh: nn.Module) -> str | None:
    """How calling a module differs from calling a fresh one, as the rest of a clause."""
    if is_hooked(module):
        return "has a forward of its own" if "forward" in vars(module) else "has a hook"
    kind: Any = type(module)
    if kind is not type(fresh):
        return None if _QUANTIZED.get(kind) is type(fresh) else f"is a {kind.__name__}"
    if is_patched(kind):
        return "has a class whose forward was replaced"
    for name, parameter in fresh._parameters.items():
        if (module._parameters.get(name) is None) != (parameter is None):
            return f"has {'a' if parameter is None else 'no'} {name}"
    for name, value in vars(fresh).items():
        plain = value is None or isinstance(value, bool | int | float)
        if plain and name not in _WITHOUT_EFFECT and vars(module).get(name) != value:
            return f"has another {name}"
    return None


class Watch:
    """Remembers what a model is made of. `changed` takes about a millisecond for hundreds of modules.

    It sees modules, hooks and forwards that were added, removed or replaced, parameters and buffers that were
    replaced, plain attributes and configs. Of the numbers in a tensor it sees every change that torch counts, and
    changes that torch does not count (through `.data` or NumPy) if they touch one of the sampled numbers.

    Args:
        model: what is watched.
        numbers: whether the numbers in parameters count, because somebody keeps copies of them. Those in buffers
            always do.
    """

    def __init__(self, model: nn.Module, numbers: bool) -> None:
        self._modules = list(model.modules())
        self._types = list(map(type, self._modules))
        self._classes: list[Any] = list(set(self._types))
        self._forwards = [kind.forward for kind in self._classes]
        self._everywhere = _global_hooks()
        # Each has as many entries as before: children, hooks, and attributes, of which a forward may be one.
        self._dicts: list[dict[Any, Any]] = [vars(module) for module in self._modules]
        self._dicts += [children for module in self._modules if (children := vars(module)["_modules"])]
        self._dicts += [hooks for module in self._modules for hooks in hooks_of(module)]
        self._sizes = list(map(len, self._dicts))
        slots = [slot for module in self._modules for slot in _slots(module)]
        self._owners, self._names, self._values = (list(column) for column in zip(*slots, strict=True))
        self._lists = [(owner, name, copy.copy(value)) for owner, name, value in slots if _is_plain_list(value)]
        configs = {id(value): value for _, _, value in slots if isinstance(value, PreTrainedConfig)}
        self._configs = [(vars(config), dict(vars(config))) for config in configs.values()]
        tensors = {id(one): one for module in self._modules for one in _tensors(module)}
        counted = [one for one in tensors.values() if numbers or not isinstance(one, nn.Parameter)]
        self._counted = [one for one in counted if not one.is_inference()]
        self._tensors = list(tensors.values())
        self._places, self._versions = self._where(), self._counts()
        # The tensors and not views of their memory, which would keep it after `.data` was replaced.
        self._sources = counted
        self._sampled = self._read()

    def changed(self) -> bool:
        """Whether the model is another one than when the watch began."""
        return not (
            list(map(type, self._modules)) == self._types
            and _global_hooks() == self._everywhere
            and list(map(len, self._dicts)) == self._sizes
            and all(map(operator.is_, map(dict.get, self._owners, self._names), self._values))
            and all(kind.forward is forward for kind, forward in zip(self._classes, self._forwards, strict=True))
            and all(owner.get(name) == value for owner, name, value in self._lists)
            and all(now == before for now, before in self._configs)
            and self._where() == self._places
            and self._counts() == self._versions
            and self._read() == self._sampled
        )

    def moved(self) -> None:
        """Accept where the tensors lie now: on an accelerator, packing joins weights in memory."""
        self._places = self._where()

    def _where(self) -> list[int]:
        return [one.data_ptr() for one in self._tensors]

    def _counts(self) -> list[int]:
        """How often torch has counted a change of each tensor whose numbers matter."""
        return [one._version for one in self._counted]

    def _read(self) -> bytes:
        return b"".join(sample.tobytes() for one in self._sources if (sample := _sample(one)) is not None)


def _slots(module: nn.Module) -> Iterator[tuple[dict[Any, Any], Any, Any]]:
    """(dictionary, key, value) of all that a module is made of."""
    own = vars(module)
    for name in _CONTENTS:
        yield from ((own[name], key, value) for key, value in own[name].items())
    for hooks in hooks_of(module):
        yield from ((hooks, key, hook) for key, hook in hooks.items())
    for name, value in own.items():
        if name not in _BOOKKEEPING and name not in _WITHOUT_EFFECT:
            yield own, name, value


# What every module has, what transformers notes about a model without reading it in a forward pass, and what a
# draft head packs.
_BOOKKEEPING = {*vars(nn.Module()), "_is_hf_initialized", "warnings_issued", "generation_config", "_packed"}


def _is_plain_list(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return items is not None and all(isinstance(one, bool | int | float | str | None) for one in items)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors that are plain attributes, those of a quantised weight included."""
    own = vars(module)
    quantized = vars(own["quantized"]) if "quantized" in own and own["quantized"] is not None else {}
    for values in (own["_parameters"], own["_buffers"], own, quantized):
        yield from (value for value in values.values() if isinstance(value, Tensor))


def _sample(tensor: Tensor) -> np.ndarray[Any, Any] | None:
    """Up to four words of eight bytes, spread over a tensor in the host's memory: a view of them."""
    data = tensor.data
    if type(data) is not Tensor or not data.is_cpu or not data.is_contiguous():
        return None
    raw = data.view(-1).view(torch.uint8).numpy()
    words: np.ndarray[Any, Any] = raw[: len(raw) // 8 * 8].view(np.int64) if len(raw) >= 8 else raw
    return words[:: max(1, len(words) // 4)][:4]

"""Detect changes of a model: against what its class makes of its config, and since it was packed.

Our own forwards (llama_cpu.py, llama_cuda.py) read weights and a config but never call the modules. So ask
`why_modified` before you use one. At the start of each call, `Watch` detects whether the user has changed the
model since it was packed. Nothing here changes a model.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from ctypes import string_at
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .own_code import CALLS, attention_code, is_from_packages, model_code, parts_of
from .quantized import QuantizedEmbedding, QuantizedLinear

# Attributes that a forward pass in eval mode does not read, or that only repeat the shape of a weight.
_WITHOUT_EFFECT = {
    "training", "gradient_checkpointing", "attention_dropout", "padding_idx", "vocab_size", "in_features",
    "out_features", "num_embeddings", "embedding_dim", "max_seq_len_cached", "original_max_seq_len",
    "_is_full_backward_hook",
}  # fmt: skip
_QUANTIZED = {QuantizedLinear: nn.Linear, QuantizedEmbedding: nn.Embedding}
_HARMLESS = ("output_capturing_hook", "make_inputs_require_grads")
_CONTENTS = ("_modules", "_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """Return the module's dictionaries of forward hooks."""
    return [vars(module)[name] for name in _HOOKS]


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the module's plain attributes, without those that every module has."""
    return {name: value for name, value in vars(module).items() if name not in _BOOKKEEPING}


def is_hooked(module: nn.Module) -> bool:
    """Return whether calling the module does more than its class's forward.

    Two of transformers' own hooks are harmless. They change no number and stay in a model after their first use:
    one returns hidden states, the other lets adapters train under gradient checkpointing.
    """
    hooks = [hook for hooks_by_id in hooks_of(module) for hook in hooks_by_id.values()]
    return "forward" in vars(module) or not all(map(_is_harmless, hooks))


def hooked_everywhere() -> bool:
    """Return whether a forward hook is registered for all modules."""
    return any(_global_hooks())


def _global_hooks() -> list[dict[int, Any]]:
    torch_module = nn.modules.module
    return [dict(torch_module._global_forward_hooks), dict(torch_module._global_forward_pre_hooks)]


def is_patched(kind: Any) -> bool:
    """Return whether the class's forward, or the call of it, comes neither from transformers nor from torch."""
    return not all(is_from_packages(getattr(kind, name)) for name in CALLS)


def hash_of_code(model: nn.Module | None) -> str:
    """Return a hash of each module's class, and of whether calling it runs a hook or a replaced forward."""
    modules = [] if model is None else model.modules()
    code = [f"{type(module).__qualname__} {is_hooked(module) or is_patched(type(module))}" for module in modules]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]


def _is_harmless(hook: Any) -> bool:
    name = getattr(hook, "__qualname__", "").rpartition(".")[2]
    return getattr(hook, "__module__", "").startswith("transformers.") and name in _HARMLESS


def why_modified(model: PreTrainedModel) -> str | None:
    """Return how a model differs from what its class makes of its config, as a clause, or None if it doesn't.

    Weights and buffers may hold any numbers, and linear layers may be quantised.
    """
    if hooked_everywhere():
        return "a hook is registered for all modules"
    with torch.device("meta"):
        fresh = type(model)(copy.deepcopy(model.config))
    expected = dict(fresh.named_modules(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    if differing := sorted(expected.keys() ^ modules.keys()):
        return f"its module {differing[0]} is {'missing' if differing[0] in expected else 'not of its class'}"
    for name, module in modules.items():
        if reason := _difference(module, expected[name]):
            return f"{f'its module {name}' if name else 'it'} {reason}"
    replaced = model_code(model).replaced
    return f"{replaced} was replaced" if replaced else None


def _difference(module: nn.Module, fresh: nn.Module) -> str | None:
    """Return how calling a module differs from calling a fresh one, as the rest of a clause, or None."""
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
    """Remember a model's state, to detect changes cheaply: about a millisecond for hundreds of modules.

    It detects:
    - modules, hooks and forwards that were added, removed or replaced
    - replaced functions, or their code, that the model, its attention or its masks call (own_code.py)
    - parameters and buffers that were replaced, and changes of plain attributes and configs
    - writes to a tensor that torch counts; other writes (through `.data` or NumPy) only if they change a sampled
    number

    Attributes:
        numbers: whether to watch the numbers in parameters, because a forward uses copies of them. It may be
            set at any time. Those in buffers are always watched.
    """

    def __init__(self, model: nn.Module, numbers: bool = True) -> None:
        self.numbers = numbers
        self._modules = list(model.modules())
        self._types = list(map(type, self._modules))
        calls: list[tuple[Any, str]] = [(kind, name) for kind in set(self._types) for name in CALLS]
        self._calls = [(kind, name, getattr(kind, name)) for kind, name in calls]
        links = [*model_code(model).links, *attention_code(model).links]
        self._codes = [(part, part.__code__) for link in links for part in parts_of(link.value)]
        self._global_hooks = _global_hooks()
        # Dictionaries whose sizes must not change: attributes (which may include a forward), children and hooks.
        self._dicts: list[dict[Any, Any]] = [vars(module) for module in self._modules]
        self._dicts += [children for module in self._modules if (children := vars(module)["_modules"])]
        self._dicts += [hooks for module in self._modules for hooks in hooks_of(module)]
        self._sizes = list(map(len, self._dicts))
        self._slots: list[tuple[Mapping[Any, Any], Any, Any]] = [*links]
        self._slots += [slot for module in self._modules for slot in _slots(module)]
        configs = {id(value): value for _, _, value in self._slots if isinstance(value, PreTrainedConfig)}
        self._configs = [(vars(config), dict(vars(config))) for config in configs.values()]
        self._tensors = list(
            {id(tensor): tensor for module in self._modules for tensor in _tensors(module)}.values()
        )
        self.moved()

    def changed(self) -> bool:
        """Return whether the model has changed since the watch began."""
        return not (
            list(map(type, self._modules)) == self._types
            and _global_hooks() == self._global_hooks
            and list(map(len, self._dicts)) == self._sizes
            and all([names.get(key) is value for names, key, value in self._slots])
            and all([getattr(kind, name) == call for kind, name, call in self._calls])
            and all([part.__code__ is code for part, code in self._codes])
            and all([now == before for now, before in self._configs])
            and [tensor.data_ptr() for tensor in self._tensors] == self._addresses
            and not self._buffers.changed()
            and not (self.numbers and self._parameters.changed())
        )

    def moved(self) -> None:
        """Accept the tensors' new addresses: packing on an accelerator joins weights in memory."""
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        parameters: list[Tensor] = [tensor for tensor in self._tensors if isinstance(tensor, nn.Parameter)]
        self._parameters = _Numbers(parameters)
        self._buffers = _Numbers([tensor for tensor in self._tensors if not isinstance(tensor, nn.Parameter)])


class _Numbers:
    """The numbers in some tensors, known by torch's counts of changes and by samples.

    A sample is up to four 8-byte words per tensor in host memory, spread over it. It is read by address: read it
    only while the tensors have the addresses that they had at first.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        # Keep no arrays, which would keep old memory alive after `.data` is replaced.
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self._words = [word for tensor in tensors for word in _sampled_words(tensor.data)]
        self._known = self._read()

    def changed(self) -> bool:
        return self._read() != self._known

    def _read(self) -> tuple[list[int], list[bytes]]:
        """Return each tensor's count, and the sample."""
        return [tensor._version for tensor in self._counted], [string_at(*word) for word in self._words]


def _sampled_words(data: Tensor) -> list[tuple[int, int]]:
    """Return the addresses and sizes in bytes of a tensor's sampled words; none if it isn't plain host memory."""
    if type(data) is not Tensor or not data.is_cpu or not data.is_contiguous():
        return []
    words = range(0, data.nbytes - 7, 8) if data.nbytes >= 8 else range(min(1, data.nbytes))
    return [(data.data_ptr() + at, min(8, data.nbytes)) for at in words[:: max(1, len(words) // 4)][:4]]


def _slots(module: nn.Module) -> Iterator[tuple[dict[Any, Any], Any, Any]]:
    """Yield (dictionary, key, value) for everything that a module consists of."""
    attributes = vars(module)
    for name in _CONTENTS:
        yield from ((attributes[name], key, value) for key, value in attributes[name].items())
    for hooks in hooks_of(module):
        yield from ((hooks, key, hook) for key, hook in hooks.items())
    for name, value in attributes_of(module).items():
        if name not in _WITHOUT_EFFECT:
            yield attributes, name, value


# Attributes to ignore: those that every module has, transformers' notes that no forward reads, and a draft head's
# packed layers.
_BOOKKEEPING = {*vars(nn.Module()), "_is_hf_initialized", "warnings_issued", "generation_config", "_packed"}


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield parameters, buffers and tensors in plain attributes or in a quantised weight."""
    attributes = vars(module)
    quantized = (
        vars(attributes["quantized"]) if "quantized" in attributes and attributes["quantized"] is not None else {}
    )
    for values in (attributes["_parameters"], attributes["_buffers"], attributes, quantized):
        yield from (value for value in values.values() if isinstance(value, Tensor))

"""Tell transformers' own code from functions that a user or a package put in its place.

`CodeLinks` collects the functions that a model, its attention or its masks call by name: those of its file of
transformers, what they call in turn, and what all of these use of torch.nn.functional. A function is transformers'
own if its code is what the file's source compiles to, and torch's own if it comes from a file of torch. Other
functions of torch, methods of tensors, and modes that intercept torch's operators are not looked at.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedConfig, masking_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.utils.generic import GeneralInterface

_MODELS = "transformers.models."
# Files that define base classes, but no attention of a model.
_WITHOUT_ATTENTION = ("torch.", "builtins", "transformers.modeling_", "transformers.generation", "bass_core.")
# Files that bind functions of other packages when they first run.
_BOUND_LATER = (
    "transformers.modeling_flash_attention_utils",
    "transformers.integrations.flash",
    "transformers.integrations.flex",
)
_TORCH = ("torch", "torch.nn", "torch.nn.functional")
# The wrappers of torch and Python that transformers' files apply, such as @torch.no_grad(): module and function.
_WRAPPERS = {("torch.utils._contextlib", "decorate_context"), ("contextlib", "helper")}
_CACHED = type(cache(len))  # the class of functions with a cache
# The methods that run when a module is called.
CALLS = ("__call__", "_call_impl", "forward")


def _folder(file: str) -> str:
    """Return the folder of a file, with a separator at its end."""
    return os.path.join(os.path.dirname(file), "")


_PACKAGES = tuple(_folder(package.__file__ or "") for package in (transformers, torch))


class Link(NamedTuple):
    """A function that code finds under a name in a module, class or table."""

    names: Mapping[str, Any]
    name: str
    value: Any


class CodeLinks:
    """The functions that some code calls by name, in its own module and in those that it calls.

    Attributes:
        links: all of them, to detect later changes.
        replaced: the first that is not transformers' or torch's own, e.g. "rotate_half in transformers.models...";
            None if there is none.
    """

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.replaced: str | None = None
        self._seen: set[tuple[str, str]] = set()

    def add_class(self, kind: type, only: Collection[str] | None = None) -> None:
        """Add a class's own functions, or only those of these names, and the code that they call."""
        for name, value in vars(kind).items():
            if only is None or name in only:
                for function in _functions_of(value):
                    self._add(Link(vars(kind), name, value), function, kind.__module__, f"{kind.__qualname__}.")

    def add(self, module: str, name: str) -> None:
        """Add the function of this name in a module, and the code that it calls."""
        names = vars(sys.modules[module])
        self._add(Link(names, name, names.get(name)), names.get(name), module)

    def add_entry(self, table: GeneralInterface, key: str | None) -> bool:
        """Add what a table of attention functions or masks has for a name; return whether it has the name."""
        names = [table._local_mapping, table._global_mapping]
        self.links += [Link(mapping, str(key), mapping.get(key)) for mapping in names]
        if key not in table:
            return False
        parts = _wrapped(table[key])
        if not parts or not all(map(_is_unchanged, parts)):
            kind = "mask" if isinstance(table, AttentionMaskInterface) else "attention"
            self._note(f'the {kind} function of "{key}", {_title(table[key])},')
        self._follow(parts)
        return True

    def _note(self, replaced: str) -> None:
        self.replaced = self.replaced or replaced

    def _add(self, link: Link, function: Any, module: str, prefix: str = "") -> None:
        if (module, prefix + link.name) in self._seen:
            return
        self._seen.add((module, prefix + link.name))
        self.links.append(link)
        if not _is_own(function, module, prefix + link.name):
            self._note(f"{prefix}{link.name} in {module}")
        self._follow(_wrapped(function), module)

    def _follow(self, parts: list[FunctionType], caller: str = "") -> None:
        """Add the functions that a function calls, given its parts (`_wrapped`) and the module that calls it."""
        for part in parts:
            module = _module_of(part)
            known = module.startswith(("transformers.", "torch.nn.modules."))
            if (known and not module.startswith(_BOUND_LATER)) or (module == caller and _is_outside(module)):
                self._add_called(module, part.__globals__, _names(part.__code__))

    def _add_called(self, module: str, names: dict[str, Any], called: frozenset[str]) -> None:
        """Add the functions of these names in a module, and in torch.nn.functional if it refers to that."""
        for name in called & names.keys():
            value = names[name]
            if isinstance(value, ModuleType):
                # From torch to torch.nn and torch.nn.functional, never back.
                if value.__name__ in _TORCH and (module not in _TORCH or value.__name__ > module):
                    self._add_called(value.__name__, vars(value), called)
            elif module not in _TORCH[:2] and not isinstance(value, type) and callable(value):
                self._add(Link(names, name, value), value, module)


def model_code(model: nn.Module) -> CodeLinks:
    """Collect the functions that a model's modules call, from the files of transformers that define them."""
    links = CodeLinks()
    for kind in _kinds(model):
        if kind.__module__.startswith(("transformers.", "torch.")):
            links.add_class(kind, None if kind.__module__.startswith(_MODELS) else CALLS)
    return links


def attention_code(model: nn.Module) -> CodeLinks:
    """Collect the functions that our attention, masks and cache replace when they run this model."""
    links, names = CodeLinks(), _attention_names(model)
    files = {kind.__module__ for kind in _kinds(model)} & sys.modules.keys()
    for file in sorted(file for file in files if not file.startswith(_WITHOUT_ATTENTION)):
        _add_attention(links, file, names)
    for name in names:
        links.add_entry(ALL_MASK_ATTENTION_FUNCTIONS, name)
    kinds: list[type] = [AttentionInterface, AttentionMaskInterface, GeneralInterface]
    for kind in [*kinds, Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer]:
        links.add_class(kind)
    for module in model.modules():
        # The models whose attention we replace although they don't go through the interface (attention.switch).
        if type(module).__name__ == "GPTNeoSelfAttention":
            links.add_class(type(module), ("_attn",))
    return links


def _add_attention(links: CodeLinks, file: str, implementations: Collection[str | None]) -> None:
    """Add the attention functions and masks that the models of this file look up."""
    for name, value in list(vars(sys.modules[file]).items()):
        if name in _defined(masking_utils.__name__):
            links.add(file, name)
        elif name.endswith("ALL_ATTENTION_FUNCTIONS"):
            links.links.append(Link(vars(sys.modules[file]), name, value))
            if type(value) is not AttentionInterface:
                links._note(f"{name} in {file}")
            elif not all([links.add_entry(value, key) for key in implementations]):
                eager = [other for other in vars(sys.modules[file]) if other.endswith("eager_attention_forward")]
                for other in eager:
                    links.add(file, other)


def _is_outside(module: str) -> bool:
    """Return whether a module is neither transformers' nor torch's. A user's model may be defined there."""
    return module.partition(".")[0] not in ("transformers", "torch")


def _attention_names(model: nn.Module) -> list[str | None]:
    """Return the names of the attention implementations that the model's modules ask for."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    names = {config._attn_implementation for config in configs if isinstance(config, PreTrainedConfig)}
    return sorted(names, key=str)


def _kinds(model: nn.Module) -> list[type]:
    """Return the classes of the model's modules, and those that they are derived from."""
    return list(dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__))


def _title(function: Any) -> str:
    """Return a function's name and module."""
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{name} in {getattr(function, '__module__', None) or type(function).__module__}"


def _functions_of(value: Any) -> Iterator[Any]:
    """Yield the functions that an attribute of a class consists of."""
    parts = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
    yield from (part for part in parts if callable(part) and not isinstance(part, type))


def _wrapped(function: Any) -> list[FunctionType]:
    """Return a function and those that it wraps (functools.wraps), the innermost last; [] for anything else."""
    parts: list[FunctionType] = []
    while isinstance(function, partial | MethodType):
        function = function.func if isinstance(function, partial) else function.__func__
    while isinstance(function, FunctionType | _CACHED) and function not in parts:
        parts += [function] if isinstance(function, FunctionType) else []
        function = vars(function).get("__wrapped__")
    return parts


def parts_of(value: Any) -> list[FunctionType]:
    """Return all functions that the value of a link consists of, wrappers and wrapped ones."""
    return [part for function in _functions_of(value) for part in _wrapped(function)]


def _module_of(function: FunctionType) -> str:
    """Return the module whose file holds the function's code; `__module__` is that of the function it wraps."""
    return str(function.__globals__.get("__name__", ""))


def _is_own(function: Any, module: str, name: str) -> bool:
    """Return whether transformers or torch itself put this function under this name [Class.]name in the module."""
    if name in _defined(module):
        inner = next(reversed(_wrapped(function)), None)
        if inner is None or (_module_of(inner), inner.__qualname__) != (module, name):
            return False
        return not isinstance(function, partial) and all(map(_is_applied, _wrapped(function)))
    if module in _TORCH and not _is_named(function, name):
        return False
    if not _wrapped(function):
        return type(function).__module__.partition(".")[0] in ("torch", "transformers", *sys.stdlib_module_names)
    imported = [_package(part) in _imports(module) for part in _wrapped(function)]
    if _is_outside(module) and name not in _defined(masking_utils.__name__):
        # A user's model has functions of its own, which replace nothing.
        imported = [_module_of(part) == module for part in _wrapped(function)]
    return all(imported) or all(map(_is_unchanged, _wrapped(function)))


def _is_named(function: Any, name: str) -> bool:
    """Return whether torch offers this function under this name; logsigmoid is called log_sigmoid."""
    plain = isinstance(function, FunctionType | BuiltinFunctionType) or type(function).__module__.startswith(
        "torch."
    )
    return plain and getattr(function, "__name__", name).replace("_", "") == name.replace("_", "")


def _is_unchanged(function: FunctionType) -> bool:
    """Return whether a function's code is that of its file in transformers, or comes from torch or Python."""
    codes = _codes(_module_of(function)) if _package(function) == "transformers" else None
    if codes is not None:
        return function.__code__ in codes
    return is_from_packages(function) or _package(function) in sys.stdlib_module_names


def _is_applied(function: FunctionType) -> bool:
    """Return whether a part of a function of transformers is unchanged, and no wrapper that others applied."""
    wrapper = _module_of(function), function.__code__.co_name
    return _is_unchanged(function) and (_package(function) == "transformers" or wrapper in _WRAPPERS)


def is_from_packages(function: Any) -> bool:
    """Return whether a function's code comes from a file of transformers or torch."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_PACKAGES)


def _package(function: FunctionType) -> str:
    return _module_of(function).partition(".")[0]


@cache
def _source(module: str) -> CodeType | None:
    """Return the code that a module of transformers compiles to, from its file; None if there is no such code."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    try:
        return spec.loader.get_code(module)  # type: ignore[union-attr, no-any-return]
    except (AttributeError, ImportError, OSError):
        return None


@cache
def _codes(module: str) -> frozenset[CodeType] | None:
    """Return the code of all functions in a module's file, or None if its source is not known."""
    source = _source(module)
    return None if source is None else frozenset(_inner(source))


def _inner(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inner(constant)


@cache
def _defined(module: str) -> frozenset[str]:
    """Return the functions and [Class.]methods that a module of transformers defines itself."""
    source = _source(module) if module.startswith("transformers.") else None
    if source is None:
        return frozenset()
    classes = [code for code in source.co_consts if isinstance(code, CodeType)]
    names = [code.co_name for code in classes]
    names += [
        f"{kind.co_name}.{code.co_name}"
        for kind in classes
        for code in kind.co_consts
        if isinstance(code, CodeType)
    ]
    return frozenset(names)


@cache
def _imports(module: str) -> frozenset[str]:
    """Return the packages that a module of transformers imports at its start, without torch and transformers."""
    source = _source(module) if module.startswith("transformers.") else None
    names = {name.partition(".")[0] for name in source.co_names} if source else set()
    return frozenset(names - {"torch", "transformers"})


@cache
def _names(code: CodeType) -> frozenset[str]:
    """Return all names that a function's code refers to, also those of the functions within it."""
    return frozenset(code.co_names).union(*(part.co_names for part in _inner(code)))

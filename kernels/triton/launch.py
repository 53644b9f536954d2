"""How every kernel is launched, and which launches could not be compiled.

`launch(kernel, grid, *arguments, **options)` is `kernel[grid](*arguments, **options)`. Inside `collected()`
nothing runs: each launch goes to a list, from which it can be compiled. If a launch's name is in `left_out`,
CompileFailed (kernels/support.py) is raised, and its caller takes other sizes, or torch. Names are those of
Triton's variants: the kernel, the arguments' types, and the compile-time constants.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..support import CompileFailed, interpreting

# Names of launches that the compiler died of or refused; no process may try them again.
left_out: set[str] = set()
_collecting: list[Launch] | None = None


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch, without its grid."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Return the name of the compiled variant, which all launches that run the same code share."""
        named_arguments = zip(self.arguments, self.kernel.arg_names, strict=False)
        unspecialised = _unspecialised(self.kernel)
        types = [_type(value, name not in unspecialised) for value, name in named_arguments]
        options = [f"{name}={value}" for name, value in sorted(self.options.items())]
        return f"{self.kernel.__name__} {','.join(types)} {' '.join(options)}"

    def compile(self) -> Any:
        """Compile for the active driver's target into Triton's cache, as the launch itself would."""
        return self.kernel.warmup(*self.arguments, grid=(1,), **self.options)


def _unspecialised(kernel: Any) -> list[str]:
    """Return the names of the arguments on whose values a kernel is not specialised.

    Under Triton's interpreter, a kernel has these names in its keyword arguments, not in an attribute.
    """
    named = kernel.kwargs.get("do_not_specialize") if interpreting() else kernel.do_not_specialize
    return list(named or ())


def _type(value: Any, specialised: bool) -> str:
    """Return an argument's type as Triton specialises it: "1" and multiples of 16 differ from other integers."""
    if isinstance(value, Tensor):
        return str(value.dtype)[6:]
    if isinstance(value, float) or not specialised:
        return type(value).__name__
    return "1" if value == 1 else "16" if value % 16 == 0 else "int"


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel, or collect the launch.

    Raises:
        CompileFailed: if it can't be compiled.
    """
    if left_out and (name := Launch(kernel, arguments, options).name) in left_out:
        raise CompileFailed(name)
    if _collecting is not None:
        _collecting.append(Launch(kernel, arguments, options))
    else:
        kernel[grid](*arguments, **options)


@contextmanager
def collected() -> Iterator[list[Launch]]:
    """Collect the block's launches, of any thread, instead of running them."""
    global _collecting
    launches: list[Launch] = []
    _collecting = launches
    try:
        yield launches
    finally:
        _collecting = None

"""How every kernel is launched, and what is known of launches that could not be compiled.

Contract: `launch(kernel, grid, *arguments, **options)` is `kernel[grid](*arguments, **options)`. Inside
`collected()` nothing runs: each launch goes to a list, from which it can be compiled. A launch whose name is in
`left_out` raises LeftOut (kernels/support.py): its caller takes other sizes, or torch. Names are those of Triton's
variants: the kernel, the arguments' types, and what is compiled in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..support import LeftOut, interpreting

# Names of launches that no process may compile: the compiler died of them, or raised.
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
        """The same for all launches that Triton compiles once."""
        given = zip(self.arguments, self.kernel.arg_names, strict=False)
        types = [_type(value, name not in _unspecialised(self.kernel)) for value, name in given]
        options = [f"{name}={value}" for name, value in sorted(self.options.items())]
        return f"{self.kernel.__name__} {','.join(types)} {' '.join(options)}"

    def compile(self) -> Any:
        """Let Triton compile it for its active driver's target, into its cache, as the launch itself would."""
        return self.kernel.warmup(*self.arguments, grid=(1,), **self.options)


def _unspecialised(kernel: Any) -> list[str]:
    """The arguments for whose values a kernel is not compiled again; an interpreted one keeps its options."""
    named = kernel.kwargs.get("do_not_specialize") if interpreting() else kernel.do_not_specialize
    return list(named or ())


def _type(value: Any, specialised: bool) -> str:
    """An argument's type as Triton specialises it: integers that are 1, or multiples of 16, are told apart."""
    if isinstance(value, Tensor):
        return str(value.dtype)[6:]
    if isinstance(value, float) or not specialised:
        return type(value).__name__
    return "1" if value == 1 else "16" if value % 16 == 0 else "int"


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel, or collect the launch. Raises LeftOut for one that can't be compiled."""
    if left_out and (name := Launch(kernel, arguments, options).name) in left_out:
        raise LeftOut(name)
    if _collecting is not None:
        _collecting.append(Launch(kernel, arguments, options))
    else:
        kernel[grid](*arguments, **options)


@contextmanager
def collected() -> Iterator[list[Launch]]:
    """Collect the block's launches, of any thread, in place of running them."""
    global _collecting
    found: list[Launch] = []
    _collecting = found
    try:
        yield found
    finally:
        _collecting = None

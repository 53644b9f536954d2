"""`python -m kernels.triton.ahead ORDER`: compile launches ahead of time, in a process that the compiler may kill.

ORDER is a JSON object {"card", "shapes", "first", "step", "of", "left_out", "only"}. `of`, "module:function",
names the function that lists what is compiled for a shape and a card: `launches` of needed.py, or a test's. The
launch at `first` and every `step`-th one after it are compiled into Triton's cache. `left_out` has the names of
launches that can't be compiled. If `only` is not null, it has the names of the only launches to compile.

The process prints a JSON line {"total"}, and for each launch {"at", "name"} before it and {"at", "error",
"passing"} after it. So if the process dies, the reader knows which launch it was compiling. "passing" is true if
the machine may be the cause of the error, not the launch. No device is touched: Triton's driver is replaced by a
`Target` that names the card.

An entry's key in Triton's cache is a hash of Triton, the function's source, the arguments' types and attributes,
compile-time constants, ptxas, target, options and some environment variables (`get_cache_key` and `ASTSource.hash`
in Triton 3.7.1 and 3.9.0). `JITFunction.warmup` computes all these as a launch does, so a launch finds its entry.
`triton.compile(ASTSource(...))` would need the same attributes written by hand, including an empty list for each
argument that has none.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from subprocess import CalledProcessError
from typing import Any

from ..shapes import Card, Shape
from ..support import PASSING_SIGNALS
from .launch import Launch, left_out


class Target:
    """What Triton needs of a driver to compile, without a device."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        # A kernel keeps its compiled code per device.
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def aim_at(card: Card) -> None:
    """Make Triton compile for this card from now on, in this process."""
    from triton.runtime.driver import driver

    driver.set_active(Target(card.capability))


def compile_one(launch: Launch) -> tuple[str | None, bool]:
    """Compile a launch for the card of `aim_at`; return the error or None, and whether a later try may succeed."""
    try:
        launch.compile()
    except Exception as error:
        # In some versions the first line has only the class, so take the end of the message.
        return f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}", passing(error)
    return None, False


def passing(error: BaseException | None) -> bool:
    """Return whether the machine caused the error: files, memory, or a signal to ptxas from outside."""
    while error is not None:
        if isinstance(error, (OSError, MemoryError)):
            return True
        if isinstance(error, CalledProcessError) and -error.returncode in PASSING_SIGNALS:
            return True
        error = error.__cause__ or error.__context__
    return False


def main(order: dict[str, Any]) -> None:
    """Compile the launches of an order, and print what happens."""
    card = Card(**order["card"])
    left_out.update(order["left_out"])
    module, function = order["of"].split(":")
    listed = getattr(import_module(module), function)
    shapes = [Shape(**{**fields, "windows": tuple(fields["windows"])}) for fields in order["shapes"]]
    named = {launch.name: launch for shape in shapes for launch in listed(shape, card)}
    only = named if order["only"] is None else set(order["only"])
    launches = [launch for name, launch in named.items() if name in only and name not in left_out]
    print(json.dumps({"total": len(launches)}), flush=True)
    aim_at(card)
    for at in range(order["first"], len(launches), order["step"]):
        print(json.dumps({"at": at, "name": launches[at].name}), flush=True)
        error, may_pass = compile_one(launches[at])
        print(json.dumps({"at": at, "error": error, "passing": may_pass}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

"""`python -m kernels.triton.ahead ORDER`: compile launches ahead, in a process that the compiler may end.

Contract: ORDER is a JSON object {"card", "shapes", "first", "step", "of", "left_out"}. `of`, "module:function",
lists what is compiled for a shape and a card: `launches` of needed.py, or a test's own. Of that list the `first`
launch and every `step`-th after it are compiled into Triton's cache; `left_out`: launches that can't be. Prints a
JSON line {"total"}, and for each launch {"at", "name"} before it and {"at", "error", "passing"} after it: so the
reader knows of what a process has died. passing: the machine may be the cause, not the launch. No device is
touched: Triton's driver is a stand-in that names the card's target.

An entry's key in Triton's cache is a hash of Triton, the function's source, the arguments' types and attributes,
what is compiled in, ptxas, target, options and some environment variables (`get_cache_key` and `ASTSource.hash` in
Triton 3.7.1 and 3.9.0). `JITFunction.warmup` makes all these as a launch does, so its entry is the one that the
launch finds. `triton.compile(ASTSource(...))` finds it only where a caller writes the same attributes by hand, an
empty list of those for each argument that has none included.
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
    """What Triton asks of a driver in order to compile, and nothing that needs a device."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        # Of each device a kernel keeps what it has compiled.
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def aim_at(card: Card) -> None:
    """Let Triton compile for this card from now on, in this process."""
    from triton.runtime.driver import driver

    driver.set_active(Target(card.capability))


def compile_one(launch: Launch) -> tuple[str | None, bool]:
    """Why the launch can't be compiled for the card that `aim_at` chose, or None; and whether that may pass."""
    try:
        launch.compile()
    except Exception as error:
        # In some versions the first line holds only the class, so take the end of the message.
        return f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}", passing(error)
    return None, False


def passing(error: BaseException | None) -> bool:
    """Whether files, memory or a signal from outside to ptxas, and no fault of the compiler, caused the error."""
    while error is not None:
        if isinstance(error, (OSError, MemoryError)):
            return True
        if isinstance(error, CalledProcessError) and -error.returncode in PASSING_SIGNALS:
            return True
        error = error.__cause__ or error.__context__
    return False


def main(order: dict[str, Any]) -> None:
    """Compile and print."""
    card = Card(**order["card"])
    left_out.update(order["left_out"])
    module, function = order["of"].split(":")
    listed = getattr(import_module(module), function)
    shapes = [Shape(**{**one, "windows": tuple(one["windows"])}) for one in order["shapes"]]
    named = {one.name: one for shape in shapes for one in listed(shape, card)}
    launches = [one for name, one in named.items() if name not in left_out]
    print(json.dumps({"total": len(launches)}), flush=True)
    aim_at(card)
    for at in range(order["first"], len(launches), order["step"]):
        print(json.dumps({"at": at, "name": launches[at].name}), flush=True)
        error, may_pass = compile_one(launches[at])
        print(json.dumps({"at": at, "error": error, "passing": may_pass}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

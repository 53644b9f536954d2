"""Runs the command and builds the page as on another system.

`python -m tests.support.emulated_system NAME TARGET DRAFT`: NAME is win32 or darwin. Once torch and the other
packages are imported, everything that system lacks is removed: functions and modules that only Linux has, /proc,
/sys and control groups, and Triton. The default encoding of files becomes a Windows code page. The packages' own
behaviour on that system is not emulated.
"""

from __future__ import annotations

import builtins
import io
import os
import pathlib
import sys
from typing import Any

LACKS = {
    # os.sysconf stays, although Windows lacks it: psutil needs it, and none of our code uses it.
    "win32": ("fork", "forkpty", "register_at_fork", "getuid", "geteuid", "sched_getaffinity"),
    "darwin": ("sched_getaffinity", "sched_setaffinity"),
}
CODE_PAGE = "cp1252"
MODULES = {"win32": ("fcntl", "resource", "pwd", "grp", "termios", "triton"), "darwin": ("triton",)}


def become(system: str) -> None:
    for name in LACKS[system]:
        if hasattr(os, name):
            delattr(os, name)
    for name in MODULES[system]:
        sys.modules[name] = None  # type: ignore[assignment]
    real, real_open = pathlib.Path.exists, io.open

    def absent(path: object) -> bool:
        return str(path).startswith(("/proc", "/sys"))

    def opened(file: Any, *arguments: Any, **named: Any) -> Any:
        mode = arguments[0] if arguments else named.get("mode", "r")
        # psutil reads these files as bytes; on the real system it has other ways.
        if absent(file) and "b" not in mode:
            raise FileNotFoundError(2, "No such file or directory", str(file))
        if "b" not in mode and named.get("encoding") in (None, "locale") and len(arguments) < 3:
            named["encoding"] = CODE_PAGE
        return real_open(file, *arguments, **named)

    pathlib.Path.exists = lambda path, **named: not absent(path) and real(path, **named)  # type: ignore[method-assign]
    io.open = builtins.open = opened  # type: ignore[assignment]
    sys.platform = system


def main() -> int:
    """Generate, race and build the page with the pair in these folders, as on that system; return 0 on success."""
    system, target, draft = sys.argv[1:]
    import gradio as gradio
    import transformers as transformers
    from filelock import FileLock as FileLock
    from transformers import AutoTokenizer as AutoTokenizer
    from transformers import LlamaForCausalLM as LlamaForCausalLM

    from kernels.cpu.calls import jit

    # Load the kernels now, compiled for the real system: if they were compiled later, they would call the other
    # system's functions.
    jit.has_tiles()

    become(system)
    import app
    from bass_core.__main__ import main as command

    pair = ("--pair", target, "--draft", draft, "--device", "cpu", "--max-new-tokens", "16")
    status = 0
    for dtype in ("float32", "bfloat16"):
        status |= command(["generate", "Gr\xf6\xdfe", *pair, "--dtype", dtype, "--temperature", "1"])
    lanes = ("--lanes", "regular", "bass", "amusd")
    status |= command(["race", "Hello", *pair, "--dtype", "float32", "-n", "2", *lanes])
    _, about = app.replay_page(app.parse(["--replay", "win"]))
    print(about)
    return status


if __name__ == "__main__":
    sys.exit(main())

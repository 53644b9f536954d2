"""A subprocess in which a generated program runs its tests and can only compute. Call `run(source)`.

The program runs in `python -I -S` with an empty temporary folder as cwd and no environment. CPU seconds, address
space and open files are limited. It can't write to any file, start a process, open a socket, send a signal or read
stdin; after `wall_s` seconds its whole process group is killed. It can read files, but their content can't leave
the sandbox.

The layers that enforce this depend on the kernel, and `protection()` lists them: separate user, network, IPC and
PID namespaces (the `unshare` command), Landlock (files), a seccomp filter (processes, sockets, signals; x86-64
only), and resource.setrlimit, which is always available. The sandbox does not defend against kernel exploits, and
does not notice a program that cheats on its tests.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CHILD = Path(__file__).with_name("sandbox_child.py")
LAYERS = ("namespace", "landlock", "seccomp")
UNSHARE = ("unshare", "--user", "--net", "--ipc", "--pid", "--fork", "--kill-child")
# We read at most this many bytes of a child's answer. An honest child writes two lines, which are far shorter.
_LONGEST_ANSWER = 4096


@dataclass(frozen=True)
class SandboxLimits:
    """SandboxLimits of one program.

    Attributes:
        cpu_s: seconds of CPU time.
        memory_mb: megabytes of address space.
        wall_s: seconds of wall time.
    """

    cpu_s: int = 4
    memory_mb: int = 512
    wall_s: float = 15.0


@dataclass(frozen=True)
class ProgramOutcome:
    """The outcome of a program.

    Attributes:
        passed: whether it ran to its end.
        reason: "passed", an exception's name, "time limit" or "ended early".
        closed: the protection layers that were active in the child.
    """

    passed: bool
    reason: str
    closed: tuple[str, ...] = ()


def run(source: str, limits: SandboxLimits | None = None, layers: Iterable[str] = LAYERS) -> ProgramOutcome:
    """Execute a program and return its verdict.

    Args:
        source: the program.
        limits: by default `SandboxLimits()`.
        layers: the layers to use; setrlimit and the wall clock always apply.

    Raises:
        OSError: if no process can be started.
    """
    limits = limits or SandboxLimits()
    layers = list(layers)
    isolated = "namespace" in layers and namespaces()
    key = secrets.token_hex(16)
    document = {"source": source, "key": key, "cpu_s": limits.cpu_s, "memory_mb": limits.memory_mb}
    command = [*(UNSHARE if isolated else ()), sys.executable, "-I", "-S", str(CHILD)]
    # We read the answer from a pipe, so that we can stop reading, and pass the input in a file, so that we never
    # block.
    answer, theirs = os.pipe()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as question:
        question.write(json.dumps({**document, "layers": layers, "isolated": isolated}).encode())
        question.seek(0)
        try:
            process = subprocess.Popen(
                command,
                stdin=question,
                stdout=theirs,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": os.defpath},
                start_new_session=True,
            )
        except OSError:
            os.close(answer)
            raise
        finally:
            os.close(theirs)
        try:
            output, ended = _listen(answer, limits.wall_s)
        finally:
            os.close(answer)
            _kill(process)
    return _verdict(output, ended, key)


def protection() -> dict[str, str]:
    """Describe the protection of this machine's network, files and processes against a program."""
    probe = run("pass")
    if not probe.passed:
        raise RuntimeError(
            f"The sandbox does not work on this machine: an empty program ended with {probe.reason}."
        )
    isolated, seccomp = namespaces(), "seccomp" in probe.closed
    network = [name for name, active in (("own network namespace", isolated), ("seccomp", seccomp)) if active]
    processes = [name for name, active in (("seccomp", seccomp), ("own PID namespace", isolated)) if active]
    files = (
        "Landlock: none can be changed" if "landlock" in probe.closed else "no bytes can be written (setrlimit)"
    )
    return {
        "network": " and ".join(network) or "socket disabled in the child's Python",
        "files": files,
        "processes": " and ".join([*processes, "setrlimit" if os.getuid() else "setrlimit (no limit for root)"]),
    }


@cache
def namespaces() -> bool:
    """Return whether this machine lets us create namespaces with the `unshare` command."""
    try:
        return subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _listen(answer: int, wall_s: float) -> tuple[bytes, bool]:
    """Return the child's output until the child ends or its time is up, and whether it ended."""
    output, deadline = b"", time.monotonic() + wall_s
    while len(output) < _LONGEST_ANSWER:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([answer], [], [], left)[0]:
            return output, False
        piece = os.read(answer, _LONGEST_ANSWER)
        if not piece:
            break
        output += piece
    return output, True


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the whole process group; unshare's `--kill-child` kills processes that left the group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _verdict(output: bytes, ended: bool, key: str) -> ProgramOutcome:
    first, *rest = output.decode(errors="replace").splitlines() or [""]
    closed = tuple(name for name in first.split(",") if name)
    if not ended:
        return ProgramOutcome(False, "time limit", closed)
    reason = rest[-1].removeprefix(f"{key} ") if rest and rest[-1].startswith(f"{key} ") else "ended early"
    return ProgramOutcome(reason == "passed", reason, closed)

"""A subprocess in which a generated program runs its tests, and what it may do there: nothing but compute.

Contract: `run(source)` executes a Python program in `python -I -S` with an empty temporary folder as cwd and no
environment, and says whether it came to its end. The program gets CPU seconds, address space and a few open
files; it can't write to any file, start a process, open a socket, send a signal or read stdin; after `wall_s` its
whole process group is killed. Which layers hold that depends on the kernel, and `protection()` says it: own user,
network, IPC and PID namespaces (the `unshare` command), Landlock (files), a seccomp filter (processes, sockets,
signals; x86-64), and resource.setrlimit, which is always there. Reading files is not forbidden; nothing that was
read can leave.
Non-goals: a defence against someone with a hole in the kernel; catching a program that cheats on its own tests.
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
# More than the two lines of an honest answer.
_LONGEST_ANSWER = 4096


@dataclass(frozen=True)
class Limits:
    """CPU seconds, megabytes of address space, and seconds by the clock on the wall."""

    cpu_s: int = 4
    memory_mb: int = 512
    wall_s: float = 15.0


@dataclass(frozen=True)
class Verdict:
    """`passed`: it ran to its end. `reason`: "passed", an exception's name, "time limit" or "ended early".

    `closed` names the layers of the child that were in force.
    """

    passed: bool
    reason: str
    closed: tuple[str, ...] = ()


def run(source: str, limits: Limits | None = None, layers: Iterable[str] = LAYERS) -> Verdict:
    """Execute a program. `layers` leaves some out, for tests; setrlimit and the wall clock always hold.

    Raises OSError where no process can be started.
    """
    limits = limits or Limits()
    layers = list(layers)
    isolated = "namespace" in layers and namespaces()
    key = secrets.token_hex(16)
    document = {"source": source, "key": key, "cpu_s": limits.cpu_s, "memory_mb": limits.memory_mb}
    command = [*(UNSHARE if isolated else ()), sys.executable, "-I", "-S", str(CHILD)]
    # A pipe for the answer: no more of it is read than we want. A file for the question: nobody waits for it.
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
            said, ended = _listen(answer, limits.wall_s)
        finally:
            os.close(answer)
            _kill(process)
    return _verdict(said, ended, key)


def protection() -> dict[str, str]:
    """In words, what protects this machine from a program here: network, files, processes."""
    probe = run("pass")
    if not probe.passed:
        raise RuntimeError(
            f"The sandbox does not work on this machine: an empty program ended with {probe.reason}."
        )
    space, seccomp = namespaces(), "seccomp" in probe.closed
    network = [name for name, there in (("own network namespace", space), ("seccomp", seccomp)) if there]
    processes = [name for name, there in (("seccomp", seccomp), ("own PID namespace", space)) if there]
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
    """Whether this machine lets us make namespaces with the `unshare` command."""
    try:
        return subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _listen(answer: int, wall_s: float) -> tuple[bytes, bool]:
    """What the child says until it ends or its time is up; whether it ended."""
    said, deadline = b"", time.monotonic() + wall_s
    while len(said) < _LONGEST_ANSWER:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([answer], [], [], left)[0]:
            return said, False
        piece = os.read(answer, _LONGEST_ANSWER)
        if not piece:
            break
        said += piece
    return said, True


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The whole group; `--kill-child` takes what left it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _verdict(said: bytes, ended: bool, key: str) -> Verdict:
    first, *rest = said.decode(errors="replace").splitlines() or [""]
    closed = tuple(name for name in first.split(",") if name)
    if not ended:
        return Verdict(False, "time limit", closed)
    reason = rest[-1].removeprefix(f"{key} ") if rest and rest[-1].startswith(f"{key} ") else "ended early"
    return Verdict(reason == "passed", reason, closed)

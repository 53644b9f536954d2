"""The process inside the sandbox, started by bench/passk/sandbox.py: it activates the layers and runs one program.

It reads one JSON document {"source", "key", "cpu_s", "memory_mb", "layers", "isolated"} from stdin. It writes to
stdout one line with the names of the active layers, then `KEY passed` or `KEY EXCEPTION`; if the program ends the
process itself, there is no second line. It uses only the standard library, because it runs as `python -I -S FILE`.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from types import ModuleType
from typing import Any

NO_NEW_PRIVS, SET_SECCOMP, FILTER_MODE = 38, 22, 2
# Landlock's system calls, with the same numbers on every architecture (Linux 5.13), and a flag.
LANDLOCK_CREATE, LANDLOCK_RESTRICT, ASK_VERSION = 444, 446, 1
# Landlock access rights (linux/landlock.h): WRITES is WRITE_FILE (bit 1) and REMOVE_DIR (4) to MAKE_SYM (12).
WRITES, REFER, TRUNCATE = sum(1 << bit for bit in (1, *range(4, 13))), 1 << 13, 1 << 14

# System calls of x86-64 (asm/unistd_64.h) that a puzzle's solution does not need.
DENIED = {
    "socket": 41, "connect": 42, "socketpair": 53, "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "kill": 62,
    "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "ptrace": 101, "setpgid": 109,
    "setsid": 112, "prctl": 157, "setrlimit": 160, "mount": 165, "setxattr": 188, "lsetxattr": 189,
    "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "tkill": 200, "tgkill": 234,
    "utimes": 235, "fchownat": 260, "futimesat": 261, "fchmodat": 268, "unshare": 272, "utimensat": 280,
    "perf_event_open": 298, "prlimit64": 302, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
    "bpf": 321, "execveat": 322, "pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_open": 434, "clone3": 435,
    "fchmodat2": 452,
}  # fmt: skip
X86_64, X32_BIT = 0xC000003E, 0x40000000
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # REFUSE: EPERM
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06


def limit(cpu_s: int, memory_mb: int) -> None:
    """Limit CPU seconds, address space, file size (0), new processes (0) and open files with setrlimit."""
    memory = memory_mb << 20
    for kind, most in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(kind, (most, most))


def close_files(libc: Any) -> bool:
    """Forbid writing, creating, renaming and removing files from now on.

    We use a Landlock ruleset without any rule, so it allows none of these operations anywhere.

    Returns:
        Whether the kernel supports it.
    """
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ASK_VERSION)
    if version < 1:
        return False
    rights = WRITES | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    wanted = ctypes.create_string_buffer(struct.pack("=Q", rights), 8)
    rules = libc.syscall(LANDLOCK_CREATE, wanted, ctypes.c_size_t(8), 0)
    return rules >= 0 and libc.syscall(LANDLOCK_RESTRICT, rules, 0) == 0


def close_calls(libc: Any) -> bool:
    """Refuse the calls in DENIED by a seccomp filter, on x86-64 only.

    Returns:
        Whether the filter is active.
    """
    if platform.machine() != "x86_64" or sys.maxsize < 2**32:
        return False
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, X86_64), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    code += [(AT_LEAST, 0, 1, X32_BIT), (RETURN, 0, 0, KILL)]
    for number in DENIED.values():
        code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    code.append((RETURN, 0, 0, ALLOW))
    steps = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(steps)))
    return bool(libc.prctl(SET_SECCOMP, FILTER_MODE, program, 0, 0) == 0)


def close(layers: list[str], isolated: bool) -> list[str]:
    """Activate the layers that this kernel supports and return their names."""
    closed = []
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
        if "landlock" in layers and close_files(libc):
            closed.append("landlock")
        if "seccomp" in layers and close_calls(libc):
            closed.append("seccomp")
    if not isolated and "seccomp" not in closed:
        # As a last resort, block the modules that could open a socket. This stops only careless programs.
        for name in ("socket", "_socket", "ctypes", "_ctypes", "_posixsubprocess"):
            sys.modules[name] = None  # type: ignore[assignment]
        closed.append("no socket module")
    return closed


def execute(source: str) -> str:
    """Run a program as a separate module; return "passed" or the name of the exception."""
    module = ModuleType("program")
    sys.modules["program"] = module
    try:
        exec(compile(source, "program", "exec"), module.__dict__)
    except BaseException as error:
        return type(error).__name__
    return "passed"


def main() -> None:
    """Read the input, activate and report the layers, run the program, report its outcome."""
    document = json.load(sys.stdin)
    answer = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
    limit(document["cpu_s"], document["memory_mb"])
    os.write(answer, (",".join(close(document["layers"], document["isolated"])) + "\n").encode())
    key, source = document["key"], document["source"]
    document.clear()
    outcome = execute(source)
    os.write(answer, f"{key} {outcome}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main()

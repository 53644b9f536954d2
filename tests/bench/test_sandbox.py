"""A program in the sandbox can only compute; anything else is stopped and counted as a failure."""

import os
import socket
import sys
import time

import pytest

from bench.passk import sandbox
from bench.passk.sandbox import LAYERS, SandboxLimits, run

linux = pytest.mark.skipif(sys.platform != "linux", reason="namespaces, Landlock and seccomp are Linux's")
SHORT = SandboxLimits(cpu_s=1, wall_s=20)
FORK = "import os\npid = os.fork()\nif pid == 0:\n    os._exit(0)\nos.waitpid(pid, 0)"
LOUD = """
import os
def say(what):
    for number in range(3, 9):
        try:
            os.write(number, what)
        except OSError:
            pass
"""
FORGED = f"{LOUD}say(b'passed')\nos._exit(0)"

pytestmark = pytest.mark.slow  # each test starts processes


def test_a_program_that_computes_passes():
    assert run("import math, collections, re, itertools\nassert math.gcd(12, 18) == 6").passed


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("def (", "SyntaxError"),
        ("while True: pass", "ended early"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("x = []\nwhile True: x.append('y' * 1000000)", "MemoryError"),
        ("input()", "EOFError"),
        ("import sys\nassert sys.stdin.read() == 'something'", "AssertionError"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("import os\nos._exit(0)", "ended early"),
        ("import os\nos.abort()", "ended early"),
        ("def f(n): return f(n + 1)\nf(0)", "RecursionError"),
        (FORGED, "ended early"),
    ],
)
def test_a_failing_program_has_a_reason(source, reason):
    # Other programs get the usual limits, because on a busy machine a program that fills memory can exceed SHORT's
    # CPU time.
    verdict = run(source, SHORT if reason == "ended early" else SandboxLimits())
    assert (verdict.passed, verdict.reason) == (False, reason)


def test_a_program_that_sleeps_is_killed_after_its_wall_time():
    start = time.monotonic()
    verdict = run("import time\ntime.sleep(1000)", SandboxLimits(wall_s=2))
    assert (verdict.passed, verdict.reason) == (False, "time limit")
    assert time.monotonic() - start < 60


def test_endless_output_is_not_read_to_its_end():
    assert not run(f"{LOUD}while True: say(b'x' * 65536)", SHORT).passed


@pytest.mark.parametrize("layers", [LAYERS, ()])
def test_no_bytes_reach_a_file(tmp_path, layers):
    """Landlock prevents creating files; without it, setrlimit keeps them empty."""
    file = tmp_path / "out"
    source = f"with open({str(file)!r}, 'wb', buffering=0) as file:\n    file.write(b'x' * (1 << 30))"
    assert not run(source, SHORT, layers).passed
    assert not file.exists() or file.stat().st_size == 0
    assert not run("open('here', 'w').write('x' * (1 << 24))", SHORT, layers).passed


@linux
def test_existing_files_stay_unchanged(tmp_path):
    if "landlock" not in run("pass").closed:
        pytest.skip("this kernel has no Landlock")
    file = tmp_path / "precious"
    file.write_text("old")
    file.chmod(0o600)
    name = str(file)
    for attempt in (
        f"os.remove({name!r})",
        f"open({name!r}, 'w')",
        f"os.rename({name!r}, {name + '2'!r})",
        f"os.truncate({name!r}, 0)",
        f"os.symlink('/', {name + '3'!r})",
        f"os.mkdir({name + '4'!r})",
        f"os.chmod({name!r}, 0)",
    ):
        assert run(f"import os\n{attempt}", SHORT).reason == "PermissionError", attempt
    assert [(f.name, f.read_text(), f.stat().st_mode & 0o777) for f in tmp_path.iterdir()] == [
        ("precious", "old", 0o600)
    ]


@linux
@pytest.mark.parametrize("layers", [LAYERS, ("seccomp",), ("namespace",), ()])
def test_no_program_starts_another(layers):
    closed = run("pass", layers=layers).closed
    if os.getuid() == 0 and "seccomp" not in closed:
        pytest.skip("root's processes are not limited by setrlimit")
    for attempt in (FORK, "import subprocess\nsubprocess.run(['true'])"):
        refused = ("PermissionError", "BlockingIOError", "ModuleNotFoundError")
        assert run(attempt, SHORT, layers).reason in refused, attempt


@linux
@pytest.mark.parametrize("layers", [LAYERS, ("seccomp",), ("namespace",), ()])
def test_no_program_reaches_the_network(layers):
    """No program connects to this test's server on localhost, even if one layer or no layer protects it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        source = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=5)"
        verdict = run(source, SHORT, layers)
        assert not verdict.passed and verdict.reason != "time limit"
        with pytest.raises(TimeoutError):
            server.accept()


@linux
def test_a_program_can_neither_signal_others_nor_raise_its_limits():
    if "seccomp" not in run("pass").closed:
        pytest.skip("no seccomp filter here")
    for attempt in (
        f"import os\nos.kill({os.getpid()}, 0)",
        "import os\nos.setsid()",
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))",
    ):
        assert run(attempt, SHORT).reason in ("PermissionError", "ProcessLookupError", "ValueError", "error")


def test_protection_describes_network_files_and_processes():
    protection = sandbox.protection()
    assert protection.keys() == {"network", "files", "processes"} and all(protection.values())


def test_protection_is_only_a_disabled_socket_module_if_the_kernel_offers_nothing(monkeypatch):
    monkeypatch.setattr(sandbox, "namespaces", lambda: False)
    monkeypatch.setattr(
        sandbox, "run", lambda source: sandbox.ProgramOutcome(True, "passed", ("no socket module",))
    )
    assert sandbox.protection()["network"] == "socket disabled in the child's Python"

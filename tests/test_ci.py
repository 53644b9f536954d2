"""What .ci/run uses: the other Pythons, the audit, and the choice of tests.

Small programs play the Pythons: one fails like a shim, one works, and one fails the smoke test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import ROOT, seconds, tested

SCRIPT = ROOT / ".ci" / "pythons"
SHIM = "echo 'python3.99: command not found' >&2; exit 127"
# A script that acts as Python 3.99: it reports this version, creates an environment, and answers the smoke test.
WORKING = """
case "$1" in
  -c) exec REAL -c "import sys; sys.version_info = (3, 99, 1); $2" ;;
  -m) if [ "$2" = pytest ]; then exit TESTS; fi
      if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$0" "$3/bin/pip"; exit 0; fi
      for last; do :; done; echo '{"claims": [{"name": "it works", "holds": VERDICT}]}' > "$last"; exit 0 ;;
  install) echo "$@" >&2; cp "$0" "$(dirname "$0")/uv"; exit 0 ;;
  pip) echo "$@" >&2; exit 0 ;;
  -) exec REAL "$@" ;;
esac
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def working(verdict: str, tests: int = 0) -> str:
    return WORKING.replace("VERDICT", verdict).replace("REAL", sys.executable).replace("TESTS", str(tests))


def run(folder: Path, version: str = "3.99", **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(folder / "path"), os.environ["PATH"]))
    env = {**os.environ, "PATH": path, "PYENV_ROOT": str(folder / "pyenv"), "TMPDIR": str(folder), **environment}
    return subprocess.run(["bash", str(SCRIPT), version], env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_a_python_of_another_version_is_not_used(tmp_path: Path) -> None:
    program(tmp_path / "path" / "python3.99", working("true").replace("(3, 99, 1)", "(3, 98, 1)"))
    assert "Python 3.99: none on this machine works" in run(tmp_path).stdout


@pytest.mark.slow
def test_a_failing_shim_is_skipped_and_a_pyenv_version_is_used(tmp_path: Path) -> None:
    program(tmp_path / "path" / "python3.99", SHIM)
    program(tmp_path / "pyenv" / "versions" / "3.99.1" / "bin" / "python", working("true"))
    done = run(tmp_path, BASS_REQUIRE_PYTHONS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pyenv/versions/3.99.1/bin/python" in done.stdout and "the smoke test passed" in done.stdout
    assert "install -c .ci/constraints.txt -r requirements.txt" in done.stderr
    assert not list(tmp_path.glob("bass-python-*")), "the environment is left"


@pytest.mark.parametrize("verdict", ["false", "null"])
@pytest.mark.slow
def test_a_false_claim_fails(tmp_path: Path, verdict: str) -> None:
    program(tmp_path / "path" / "python3.99", working(verdict))
    done = run(tmp_path)
    assert done.returncode == 1 and "missed: it works" in done.stderr and "FAILED" in done.stdout


@pytest.mark.slow
def test_a_python_that_cannot_be_set_up_fails(tmp_path: Path) -> None:
    program(tmp_path / "path" / "python3.99", 'if [ "$1" = -c ]; then exit 0; fi; exit 3')
    assert run(tmp_path).returncode == 1


@pytest.mark.parametrize(("required", "code"), [("", 0), ("1", 1)])
@pytest.mark.slow
def test_a_missing_python_fails_only_if_one_is_required(tmp_path: Path, required: str, code: int) -> None:
    program(tmp_path / "path" / "python3.99", SHIM)
    done = run(tmp_path, BASS_REQUIRE_PYTHONS=required)
    assert done.returncode == code and "Python 3.99: none on this machine works" in done.stdout


@pytest.mark.parametrize("tests", [0, 1])
@pytest.mark.slow
def test_the_oldest_python_gets_the_lowest_versions_and_the_tests(tmp_path: Path, tests: int) -> None:
    program(tmp_path / "path" / "python3.10", working("true", tests).replace("(3, 99, 1)", "(3, 10, 1)"))
    done = run(tmp_path, "3.10")
    assert "--resolution lowest-direct -r requirements.txt" in done.stderr
    assert done.returncode == tests and ("the smoke test passed" in done.stdout) is not bool(tests)
    program(tmp_path / "path" / "python3.99", working("true", tests))
    assert run(tmp_path).returncode == 0, "newer Pythons run only the smoke test"


AUDIT = ROOT / ".ci" / "audit.py"
FINE = {"name": "gguf", "version": "0.17", "vulns": []}
HOLE = {"name": "torch", "version": "2.8", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.9"], "aliases": []}]}
OPEN = {"name": "psutil", "version": "6", "vulns": [{"id": "PYSEC-2", "fix_versions": []}]}
SKIPPED = {"name": "triton", "skip_reason": "could not be found on the index"}


@pytest.mark.parametrize(
    ("packages", "last", "status"),
    [
        ([FINE], "1 of 1 packages were looked up; known holes in them: 0.", 0),
        ([FINE, HOLE, OPEN], "3 of 3 packages were looked up; known holes in them: 2.", 1),
        ([FINE, SKIPPED], "1 of 2 packages were looked up; known holes in them: 0.", 1),
        ([SKIPPED, SKIPPED], "None of the 2 packages could be looked up: that is no result.", 1),
        ([], "None of the 0 packages could be looked up: that is no result.", 1),
        (None, "pip-audit gave no report (no network, or its database did not answer): no result.", 1),
    ],
)
@pytest.mark.slow
def test_the_last_line_counts_lookups_and_vulnerabilities(packages: Any, last: str, status: int) -> None:
    text = "" if packages is None else json.dumps({"dependencies": packages, "fixes": []})
    ended = subprocess.run([sys.executable, AUDIT], input=text, capture_output=True, text=True)
    *lines, summary = ended.stdout.splitlines()
    assert (summary, ended.returncode, ended.stderr) == (last, status, "")
    assert ("torch 2.8: PYSEC-1, mended in 2.9" in lines) == (HOLE in (packages or []))
    assert ("psutil 6: PYSEC-2, mended in no version yet" in lines) == (OPEN in (packages or []))
    assert ("triton: not looked up: could not be found on the index" in lines) == (SKIPPED in (packages or []))


def test_a_part_is_due_until_its_present_state_has_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(any(ROOT.glob(pattern)) for patterns, _ in tested.PARTS.values() for pattern in patterns)
    assert not [file for file in tested.WITHIN if "bass_core" in (ROOT / file).read_text(encoding="utf-8")]
    monkeypatch.setattr(tested, "FILE", tmp_path / "tested.json")
    monkeypatch.setattr(tested, "PARTS", {"a": (("*.txt",), ("pytest",)), "b": ((), ("torch",))})
    states = []
    for content in (b"one", b"two", b"two\r\n", b"two\n"):
        (tmp_path / "file.txt").write_bytes(content)
        states.append(tested.state("a", tmp_path))
    assert len(set(states)) == 3 and states[2] == states[3] and pytest.__version__ in states[0]
    assert tested.due() == ["a", "b"]
    for outcome, ends, due in (
        ({"when": "call", "skipped": True, "failed": False}, 0, ["a"]),
        ({"when": "call", "skipped": False, "failed": True}, 1, ["a"]),
        ({"when": "???", "skipped": False, "failed": True}, 1, ["a", "b"]),
        ({"when": "call", "skipped": False, "failed": False}, 2, ["a", "b"]),
    ):
        (tmp_path / "tested.json").unlink(missing_ok=True)
        stamp = tested.Stamp(["a", "b"])
        properties = [] if outcome["when"] == "???" else [["parts", ["a"]]]
        stamp.pytest_runtest_logreport(SimpleNamespace(**outcome, user_properties=properties))
        stamp.pytest_sessionfinish(ends)
        assert tested.due() == due
    tested.passed({"b": tested.state("b")})
    tested.passed({"a": tested.state("a")})
    monkeypatch.setattr(tested, "version", lambda name: "0")
    assert tested.due() == ["a", "b"]


@pytest.mark.parametrize(("whole", "run"), [(False, ["plain", "due"]), (True, ["plain", "due", "done", "bench"])])
def test_demanded_tests_run_if_their_part_is_due(
    whole: bool, run: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = {"plain": None, "due": ("zoo",), "done": ("cpu",), "bench": ()}
    items = [
        SimpleNamespace(
            nodeid=name,
            user_properties=[],
            get_closest_marker=lambda _, args=args: None if args is None else SimpleNamespace(args=args),
        )
        for name, args in marks.items()
    ]
    monkeypatch.setattr(tested, "due", lambda: ["zoo"])
    left_out: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    ours = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    ours.pytest_collection_modifyitems(SimpleNamespace(option=SimpleNamespace(all=whole), hook=hook), items)
    assert [item.nodeid for item in items] == run and len(items) + len(left_out) == len(marks)


def test_seconds_are_summed_per_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"tests/a.py::one": 1.0, "tests/a.py::two[x]": 7.0, "tests/b.py::three": 2.5}
    text = seconds.table(times, times | {"tests/b.py::three": 0.5}, "a machine")
    assert (
        text.startswith("CPU seconds of 3 tests, without collection: 10.")
        and "     8.0     2 tests/a.py\n" in text
    )
    assert text.endswith("     7.0 tests/a.py::two[x]\n")
    monkeypatch.setattr(seconds, "FILE", tmp_path / "seconds.txt")
    assert not seconds.long_tests()
    seconds.FILE.write_text(text)
    assert seconds.long_tests() == {"tests/a.py::two[x]"}


def test_ray_is_hidden_here() -> None:
    assert importlib.util.find_spec("ray") is None
    with pytest.raises(ImportError):
        import ray  # noqa: F401

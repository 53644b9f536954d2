"""The script that runs the smoke test under other Pythons finds the working ones, and no others.

Small programs play the Pythons: one fails like a shim, one works, and one fails the smoke test.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT

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
    import sys

    return WORKING.replace("VERDICT", verdict).replace("REAL", sys.executable).replace("TESTS", str(tests))


def run(folder: Path, version: str = "3.99", **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(folder / "path"), os.environ["PATH"]))
    env = {**os.environ, "PATH": path, "PYENV_ROOT": str(folder / "pyenv"), "TMPDIR": str(folder), **environment}
    return subprocess.run(["bash", str(SCRIPT), version], env=env, capture_output=True, text=True)


def test_a_python_of_another_version_is_not_used(tmp_path: Path) -> None:
    program(tmp_path / "path" / "python3.99", working("true").replace("(3, 99, 1)", "(3, 98, 1)"))
    assert "Python 3.99: none on this machine works" in run(tmp_path).stdout


def test_a_failing_shim_is_skipped_and_a_pyenv_version_is_used(tmp_path: Path) -> None:
    program(tmp_path / "path" / "python3.99", SHIM)
    program(tmp_path / "pyenv" / "versions" / "3.99.1" / "bin" / "python", working("true"))
    done = run(tmp_path, BASS_REQUIRE_PYTHONS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pyenv/versions/3.99.1/bin/python" in done.stdout and "the smoke test passed" in done.stdout
    assert "install -c .ci/constraints.txt -r requirements.txt" in done.stderr
    assert not list(tmp_path.glob("bass-python-*")), "the environment is left"


@pytest.mark.parametrize("verdict", ["false", "null"])
def test_a_false_claim_fails(tmp_path: Path, verdict: str) -> None:
    program(tmp_path / "path" / "python3.99", working(verdict))
    done = run(tmp_path)
    assert done.returncode == 1 and "missed: it works" in done.stderr and "FAILED" in done.stdout


def test_a_python_that_cannot_be_set_up_fails(tmp_path: Path) -> None:
    program(tmp_path / "path" / "python3.99", 'if [ "$1" = -c ]; then exit 0; fi; exit 3')
    assert run(tmp_path).returncode == 1


@pytest.mark.parametrize(("required", "code"), [("", 0), ("1", 1)])
def test_a_missing_python_fails_only_if_one_is_required(tmp_path: Path, required: str, code: int) -> None:
    program(tmp_path / "path" / "python3.99", SHIM)
    done = run(tmp_path, BASS_REQUIRE_PYTHONS=required)
    assert done.returncode == code and "Python 3.99: none on this machine works" in done.stdout


@pytest.mark.parametrize("tests", [0, 1])
def test_the_oldest_python_gets_the_lowest_versions_and_the_tests(tmp_path: Path, tests: int) -> None:
    program(tmp_path / "path" / "python3.10", working("true", tests).replace("(3, 99, 1)", "(3, 10, 1)"))
    done = run(tmp_path, "3.10")
    assert "--resolution lowest-direct -r requirements.txt" in done.stderr
    assert done.returncode == tests and ("the smoke test passed" in done.stdout) is not bool(tests)
    program(tmp_path / "path" / "python3.99", working("true", tests))
    assert run(tmp_path).returncode == 0, "newer Pythons run only the smoke test"

"""torch's idle threads: set before torch is loaded, unless the user has, and never for a child process."""

import os
import subprocess
import sys

import pytest

# What libgomp would read at this moment, when torch is loaded, and what is set afterwards.
PROGRAM = """
import os, sys
class Loaded:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            raise SystemExit
sys.meta_path.insert(0, Loaded())
import bass_core
"""


def said(program: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if "OMP_" not in name} | variables
    run = [sys.executable, "-c", program]
    return subprocess.run(run, capture_output=True, text=True, env=environment, timeout=300).stdout.strip()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "None")],
)
def test_it_is_set_before_torch_is_loaded_unless_the_user_has(variables: dict[str, str], expected: str) -> None:
    assert said(PROGRAM, **variables) == expected


def test_no_child_inherits_it() -> None:
    assert said("import os, bass_core; print('GOMP_SPINCOUNT' in os.environ)") == "False"

"""The audit's report names each vulnerability, and fails if a package could not be looked up."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support import ROOT

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
def test_the_last_line_counts_lookups_and_vulnerabilities(packages: Any, last: str, status: int) -> None:
    text = "" if packages is None else json.dumps({"dependencies": packages, "fixes": []})
    ended = subprocess.run([sys.executable, AUDIT], input=text, capture_output=True, text=True)
    *lines, summary = ended.stdout.splitlines()
    assert (summary, ended.returncode, ended.stderr) == (last, status, "")
    assert ("torch 2.8: PYSEC-1, mended in 2.9" in lines) == (HOLE in (packages or []))
    assert ("psutil 6: PYSEC-2, mended in no version yet" in lines) == (OPEN in (packages or []))
    assert ("triton: not looked up: could not be found on the index" in lines) == (SKIPPED in (packages or []))

"""CPU seconds per test, of the test's process and of the children that it waited for: the option --seconds.

tests/seconds.txt is such a list of a whole run. Its long tests are slow (tests/conftest.py).
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest

from tests.support import ROOT

FILE = ROOT / "tests" / "seconds.txt"
# A test that takes this many seconds is long.
LONG = 1.5


def used() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def long_tests() -> set[str]:
    """Return the names of the long tests in the list of the last whole run."""
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    return {match[1] for line in lines if (match := re.fullmatch(r" *[\d.]+ (.+::.+)", line))}


class Seconds:
    """Measures in each process that runs tests, and writes the sums in the process that started them."""

    def __init__(self, config: pytest.Config) -> None:
        self.file, self.last = config.option.seconds, 0.0
        self.tests: dict[str, float] = defaultdict(float)
        self.calls: dict[str, float] = {}

    def pytest_collection_finish(self) -> None:
        self.last = used()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report: Any = yield
        now = used()
        report.cpu_seconds, self.last = now - self.last, now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        seconds = getattr(report, "cpu_seconds", 0.0)
        self.tests[report.nodeid] += seconds
        if report.when == "call":
            self.calls[report.nodeid] = seconds

    def pytest_sessionfinish(self) -> None:
        if self.file is not None and "PYTEST_XDIST_WORKER" not in os.environ:
            import torch  # not earlier: tests/conftest.py must run before torch

            from bass_core.machine.monitor import device_name

            machine = f"{device_name(torch.device('cpu'))}, {os.cpu_count()} cores"
            self.file.write_text(table(self.tests, self.calls, machine), encoding="utf-8")


def table(tests: dict[str, float], calls: dict[str, float], machine: str) -> str:
    """Return a document: seconds and number of tests per file, and the long tests without their fixtures."""
    files: dict[str, list[float]] = defaultdict(list)
    for name, seconds in tests.items():
        files[name.partition("::")[0]].append(seconds)
    by_file = sorted(((sum(times), len(times), file) for file, times in files.items()), reverse=True)
    long_tests = sorted(((s, name) for name, s in calls.items() if s >= LONG), reverse=True)
    lines = [
        f"CPU seconds of {len(tests)} tests, without collection: {sum(tests.values()):.0f}. "
        "A file's models, caches and compiled code count for the test that first needs them.",
        f"`pytest {' '.join(sys.argv[1:])}`, {machine}, {date.today()}.\n",
        *(f"{seconds:8.1f} {count:5} {file}" for seconds, count, file in by_file),
        f"\nTests of at least {LONG:g} seconds:\n",
        *(f"{seconds:8.1f} {name}" for seconds, name in long_tests),
    ]
    return "\n".join(lines) + "\n"

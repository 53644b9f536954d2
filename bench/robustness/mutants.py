"""`python -m bench mutants [NAME ...]`: break the decoder in known ways and check that the tests fail each time.

Each mutant is one edit to a copy of the sources, tested in a separate process; its claim holds if the tests fail.
The unbroken copy must pass the same cases. With --quick we run only the smallest cases meant to catch a mutant,
otherwise all quick tests of the decoder. If a mutant survives, a test is missing. Tests that run longer than
QUICK_LIMIT_S or WHOLE_LIMIT_S are ended, and the mutant counts as not tested.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

# As in tests/conftest.py and bench/__main__.py. The variable must be set before torch is imported, because torch
# imports triton.
os.environ["TRITON_INTERPRET"] = "1"

import torch
from tqdm import tqdm

from ..report.report import CPU, ROOT, Row, alike, finish, parser
from .kernel_mutations import KERNEL_MUTANTS
from .mutations import MUTANTS, Mutant

KNOWN = MUTANTS + KERNEL_MUTANTS
# Time limits for the tests of one copy, in seconds, with --quick and without.
QUICK_LIMIT_S, WHOLE_LIMIT_S = 900.0, 3600.0
_TIMED_OUT = 124
_WHOLE = [
    "tests/conformance", "tests/kernels", "tests/faults/test_broken_models.py", "tests/bass_core/draft",
    "tests/bass_core/decode/amusd", "tests/bass_core/model", "tests/bass_core/verify",
]  # fmt: skip


def main(argv: list[str]) -> None:
    """Break, test, print and write."""
    options = parser("mutants", __doc__ or "")
    options.add_argument("names", nargs="*", metavar="NAME", help="only these mutants")
    arguments = options.parse_args(argv)
    chosen = [mutant for mutant in KNOWN if not arguments.names or mutant.name in arguments.names]
    if not hasattr(os, "fork"):
        options.error("mutants are tested in forked processes, which this system does not have.")
    if unknown := set(arguments.names) - {mutant.name for mutant in chosen}:
        options.error(f"there is no mutant {', '.join(sorted(unknown))}: see bench/robustness/mutations.py.")
    cases = {mutant.name: mutant.cases if arguments.quick else _WHOLE for mutant in chosen}
    unbroken = sorted({case for mutant in chosen for case in cases[mutant.name]})
    limit_s = QUICK_LIMIT_S if arguments.quick else WHOLE_LIMIT_S
    # Compute with one thread here, so that tests in forks may use several (see bass_core/machine/openmp.py).
    torch.set_num_threads(1)
    # Import the tests' modules once, before forking; otherwise each process would need seconds for that.
    _pytest(["--collect-only", "-m", "", *unbroken])
    code = _tests_on(None, unbroken, WHOLE_LIMIT_S)
    results: list[Row] = [{"mutant": "none", "tests": "pass" if code == 0 else _failure(code, WHOLE_LIMIT_S)}]
    claims = [alike("the unbroken decoder passes", float(code == 0))]
    for mutant in tqdm(chosen, desc="mutants"):
        code = _tests_on(mutant, cases[mutant.name], limit_s)
        # pytest exits with 1 when tests failed; any other status means that the mutant was not tested.
        results.append({"mutant": mutant.name, "tests": "fail" if code == 1 else _failure(code, limit_s)})
        claims.append(alike(f"caught: {mutant.name}", float(code == 1)))
    finish("mutants", arguments, CPU, results, claims)


def _failure(code: int, limit_s: float) -> str:
    return f"over {limit_s:g} s" if code == _TIMED_OUT else f"exit {code}"


def _tests_on(mutant: Mutant | None, cases: list[str], limit_s: float) -> int:
    """Return pytest's exit status on a copy of the sources with the mutant's edit (None: without any)."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in ("bass_core", "kernels", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if mutant is not None:
            mutant.apply(copy)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_run_tests, args=(copy, cases, 0 if mutant is None else 1))
        process.start()
        process.join(limit_s)
        if process.exitcode is None:
            assert process.pid is not None
            with suppress(ProcessLookupError):  # it has not made its group yet
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that its tests started
            process.kill()
            process.join()
            return _TIMED_OUT
        return process.exitcode


def _run_tests(copy: Path, cases: list[str], expected: int) -> None:
    os.setsid()
    os.chdir(copy)
    # Forget modules of the original tree. For example, transformers has already imported our `kernels`.
    for name in [name for name in sys.modules if name.split(".")[0] in ("bass_core", "kernels", "tests")]:
        del sys.modules[name]
    sys.path[:] = [str(copy), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
    torch.set_num_threads(1)
    # Run only the quick tests of the whole suite, but all named cases.
    os._exit(_pytest(["-x", *([] if cases == _WHOLE else ["-m", ""]), *cases], expected))


def _pytest(arguments: list[str], expected: int = 0) -> int:
    """Return pytest's exit status; print its output only if the status is not the expected one."""
    import pytest

    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()):
        code = int(pytest.main(["-q", "-n0", "-p", "no:cacheprovider", *arguments]))
    if code != expected:
        print(out.getvalue()[-4000:], file=sys.stderr, flush=True)
    return code

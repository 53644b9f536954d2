"""`python -m tests.kernels.compilation.compile_variants --capability 75 80`: compile every launch without a GPU.

kernels/triton/needed.py lists the launches for the shapes of people.py: about 1100, each of which takes one core
a second. They compile in processes that may die, as at a start (bass_core/machine/gpu_kernels.py), or with --here
in this one, which saves the start of two processes per capability. TRITON_INTERPRET must be unset.

Each launch and capability prints a JSON line, {"kernel", "variant", "capability", "registers", "local", "spills",
"set_aside", "shared", "shared_limit", "in_order"} or {"kernel", "variant", "capability", "error"}. "spills" counts
accesses to local memory inside loops, "set_aside" those outside. If a launch fails, spills, does not fit or lacks
a barrier (`in_order`), its line also goes to stderr and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton

from kernels.shapes import CAPABILITIES, Card
from kernels.triton import ahead
from kernels.triton.launch import Launch
from tests.kernels.compilation.people import SHAPES, all_launches

# The maximum number of local memory accesses outside loops.
SET_ASIDE = 16
# The maximum number of local memory accesses in loops, by capability; 0 for other capabilities. Those for 7.5
# matter little, because "auto" uses torch's attention on a T4 (bass_core/model/attention.py). On 8.0, float32
# attention to a shared prefix reloads three registers. On 9.0, the walk over sampled trees
# reloads one (Triton 3.7.1), and on 12.0 the gate of 64 rows. On 10.0, a wait whose slow path lies at the end of
# the code looks like a loop around a reload that is in none (Triton 3.7.1).
IN_LOOPS = {75: 3, 80: 3, 90: 1, 100: 1, 120: 1}


def resources(cubin: bytes) -> dict[str, int]:
    """Return the registers and the bytes of local memory per thread, and counts of local memory accesses.

    "spills" counts accesses inside loops. "set_aside" counts those outside, which have no measurable cost: a value
    is stored before a loop and reloaded after it.
    """
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"\b(REG|LOCAL):(\d+)", text))
    code = re.findall(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+ )?(\S+)(.*)", text, re.MULTILINE)
    assert len(code) > 10, "no disassembly"
    spills = [int(at, 16) for at, name, _ in code if name.startswith(("STL", "LDL"))]
    jumps = [(int(at, 16), re.search(r"0x[0-9a-f]+", rest)) for at, name, rest in code if name.startswith("BRA")]
    loops = [(int(to[0], 16), at) for at, to in jumps if to and int(to[0], 16) < at]
    inside = sum(any(start <= at <= end for start, end in loops) for at in spills)
    counts = {"spills": inside, "set_aside": len(spills) - inside}
    return {"registers": int(usage["REG"]), "local": int(usage["LOCAL"])} | counts


def kernels() -> list[str]:
    """Return the names of the kernels of the newest card, which has all of them."""
    return sorted({launch.kernel.__name__ for launch in all_launches(Card.of_capability(CAPABILITIES[-1]))})


def sample(card: Card, one_in: int) -> list[Launch]:
    """Return every `one_in`-th launch, and a launch of every seventh kernel.

    Each of the seven capabilities starts at another launch and at another kernel, so together they compile more of
    the list, and each kernel at least once.
    """
    launches, turn = all_launches(card), CAPABILITIES.index(card.capability)
    chosen = launches[turn * one_in // len(CAPABILITIES) :: one_in]
    of_kernel = {launch.kernel.__name__: launch for launch in launches}
    chosen += [of_kernel[name] for name in kernels()[turn :: len(CAPABILITIES)] if name in of_kernel]
    return list({launch.name: launch for launch in chosen}.values())


def in_order(ptx: str) -> bool:
    """Return whether a program's threads wait for each other where one reads, or counts, what others wrote.

    Triton's interpreter can't show this. A barrier must be between a program's stores and its next loads, between
    the stores of a segment's sums and the counting, and between the counting and the loads of other sums.
    """
    pattern = r"^\s*(?:@!?%p\d+ )?(st\.global|ld\.global|cp\.async\.c[ag]|atom\.global\S*|bar\.sync)"
    accesses = re.findall(pattern, ptx, re.MULTILINE)
    counted = [i for i, access in enumerate(accesses) if access.startswith("atom")]
    stored = False
    for access in accesses[: counted[0] + 1 if counted else None]:
        if stored and access not in ("st.global", "bar.sync"):
            return False
        stored = access == "st.global"
    return all("gpu.acq_rel" in accesses[i] and accesses[i + 1] == "bar.sync" for i in counted)


def compile_in_processes(card: Card, chosen: list[Launch]) -> dict[str, str]:
    """Compile into Triton's cache, and return the errors by the launches' names."""
    from bass_core.machine import gpu_kernels  # takes three seconds

    of = "tests.kernels.compilation.people:launches"
    failed = gpu_kernels.compile_all(card, SHAPES, of, [launch.name for launch in chosen])
    if failed is None:
        raise SystemExit("No process could compile: see the log.")
    return failed


def rows_of(card: Card, one_in: int, here: bool) -> Iterator[dict[str, Any]]:
    """Yield the line of each launch: its error or its resources."""
    chosen = sample(card, one_in)
    failed = {} if here else compile_in_processes(card, chosen)
    ahead.aim_at(card)
    for launch in chosen:
        row = {"kernel": launch.kernel.__name__, "variant": launch.name, "capability": card.capability}
        error = ahead.compile_one(launch)[0] if here else failed.get(launch.name)
        if error is not None:
            yield row | {"error": error}
            continue
        compiled = launch.compile()  # from Triton's cache
        used = {"shared": compiled.metadata.shared, "shared_limit": card.shared}
        ordered = {"in_order": row["kernel"] != "attend" or in_order(compiled.asm["ptx"])}
        yield row | resources(compiled.asm["cubin"]) | used | ordered


def faulty(row: dict[str, Any]) -> bool:
    """Return whether the launch fails to compile, spills, does not fit or lacks a barrier."""
    if "error" in row or row["local"] or row["shared"] > row["shared_limit"] or not row["in_order"]:
        return True
    return bool(row["spills"] > IN_LOOPS.get(row["capability"], 0) or row["set_aside"] > SET_ASIDE)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row of counts per capability: launches tried, compiled and spilling, and the most registers."""
    summaries = []
    for capability in dict.fromkeys(row["capability"] for row in rows):
        selected = [row for row in rows if row["capability"] == capability]
        compiled = [row for row in selected if "error" not in row]
        listed = len(all_launches(Card.of_capability(capability)))
        counts = {"triton": triton.__version__, "launches": os.environ.get("BASS_VARIANTS") or "all"}
        counts |= {"capability": capability, "listed": listed, "tried": len(selected)}
        counts |= {"compiled": len(compiled), "died": sum("signal" in row.get("error", "") for row in selected)}
        counts |= {"spill": sum(row["spills"] > 0 for row in compiled)}
        summaries.append(counts | {"most registers": max((row["registers"] for row in compiled), default=0)})
    return summaries


def write(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write the document of the launches compiled so far."""
    from bench.report.report import CPU, claim, document  # takes three seconds

    options.seed, options.quick = 0, False
    share = 1 - sum(map(faulty, rows)) / len(rows)
    claims = [claim("launches that compile and do not spill", share, "1", share == 1)]
    report = document("compile", options, CPU, summary(rows), claims)
    report["command"] = report["command"].replace("-m bench", "-m tests.kernels.compilation.compile_variants")
    options.json.write_text(json.dumps(report, indent=1) + "\n")


def main() -> int:
    """Compile the launches, print their lines and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--capability", type=int, nargs="+", choices=CAPABILITIES, default=list(CAPABILITIES), metavar="N"
    )
    parser.add_argument(
        "--one-in", type=int, default=1, metavar="N", help="compile only every Nth launch, and each kernel once"
    )
    parser.add_argument(
        "--here", action="store_true", help="compile in this process, which ends if the compiler dies"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write a document of bench/results")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for capability in options.capability:
        for row in rows_of(Card.of_capability(capability), options.one_in, options.here):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if faulty(row):
                print(json.dumps(row), file=sys.stderr, flush=True)
        if options.json:
            write(options, rows)
    return 1 if any(map(faulty, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())

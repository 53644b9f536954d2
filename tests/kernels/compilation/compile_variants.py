"""`python -m tests.kernels.compilation.compile_variants --capability 75 80`: compile every launch without a GPU.

Contract: compiles what kernels/triton/needed.py lists for the shapes of people.py with the Triton that is
imported, as a start does (bass_core/machine/gpu_kernels.py): in processes that may die of it. Must run without
TRITON_INTERPRET. Prints one JSON line for each launch and capability: {"kernel", "variant", "capability",
"registers", "local", "spills", "set_aside", "shared", "shared_limit"}, read from the cubin (spills: accesses to
local memory inside loops; set_aside: those outside), or {"kernel", "variant", "capability", "error"}. The line of
a launch that fails, spills, uses local memory or needs more shared memory than there is also goes to stderr, and
the exit status is then 1. With --json a document of bench/results: for each capability how many compiled, and what
they take. There are some 1100 launches, each about a second of one core: --one-in takes a part.
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

from bass_core.machine import gpu_kernels
from bench.report.report import CPU, claim, document
from kernels.shapes import CAPABILITIES, Card
from kernels.triton import ahead
from tests.kernels.compilation.people import SHAPES, all_launches

# Tolerated number of local memory accesses outside loops.
SET_ASIDE = 16
# Accesses in loops by capability: for a T4 "auto" takes torch's attention (bass_core/model/attention.py); for 10.0
# Triton 3.7.1 spills 3 to 6 in attention of 64 rows of 128 numbers over a prefix and a gap at once.
IN_LOOPS = {75: 3, 100: 8}


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of local memory per thread, and the instructions that access it in loops and outside.

    What the compiler stores before a loop and reloads after it has no measurable cost.
    """
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"\b(REG|LOCAL):(\d+)", text))
    code = re.findall(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+ )?(\S+)(.*)", text, re.MULTILINE)
    assert len(code) > 10, "no disassembly"
    spills = [int(at, 16) for at, name, _ in code if name.startswith(("STL", "LDL"))]
    jumps = [(int(at, 16), re.search(r"0x[0-9a-f]+", rest)) for at, name, rest in code if name.startswith("BRA")]
    loops = [(int(to[0], 16), at) for at, to in jumps if to and int(to[0], 16) < at]
    inside = sum(any(start <= at <= end for start, end in loops) for at in spills)
    counts = {"spills": inside, "set_aside": len(spills) - inside}
    return {"registers": int(found["REG"]), "local": int(found["LOCAL"])} | counts


def rows_of(card: Card, one_in: int, first: int) -> Iterator[dict[str, Any]]:
    """The line of each launch: those that could not be compiled, then what the others take."""
    chosen = all_launches(card)[first::one_in]
    of = "tests.kernels.compilation.people:launches"
    failed = gpu_kernels.compile_all(card, SHAPES, of, one_in, first)
    if failed is None:
        raise SystemExit("No process could compile: see the log.")
    ahead.aim_at(card)
    for launch in chosen:
        row = {"kernel": launch.kernel.__name__, "variant": launch.name, "capability": card.capability}
        if launch.name in failed:
            yield row | {"error": failed[launch.name]}
            continue
        compiled = launch.compile()  # out of Triton's cache
        used = {"shared": compiled.metadata.shared, "shared_limit": card.shared}
        yield row | resources(compiled.asm["cubin"]) | used


def faulty(row: dict[str, Any]) -> bool:
    """Whether the launch failed to compile, spills, or does not fit."""
    if "error" in row or row["local"] or row["shared"] > row["shared_limit"]:
        return True
    return bool(row["spills"] > IN_LOOPS.get(row["capability"], 0) or row["set_aside"] > SET_ASIDE)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By capability: launches tried, compiled, and of these that access local memory in loops; their most."""
    made = []
    for capability in dict.fromkeys(row["capability"] for row in rows):
        own = [row for row in rows if row["capability"] == capability]
        fine = [row for row in own if "error" not in row]
        listed = len(all_launches(Card.of_capability(capability)))
        counts = {"triton": triton.__version__, "launches": os.environ.get("BASS_VARIANTS") or "all"}
        counts |= {"capability": capability, "listed": listed, "tried": len(own)}
        counts |= {"compiled": len(fine), "died": sum("signal" in row.get("error", "") for row in own)}
        counts |= {"spill": sum(row["spills"] > 0 for row in fine)}
        made.append(counts | {"most registers": max((row["registers"] for row in fine), default=0)})
    return made


def write(asked: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """The document of what was compiled so far."""
    asked.seed, asked.quick = 0, False
    share = 1 - sum(map(faulty, rows)) / len(rows)
    fine = [claim("launches that compile and do not spill", share, "1", share == 1)]
    made = document("compile", asked, CPU, summary(rows), fine)
    made["command"] = made["command"].replace("-m bench", "-m tests.kernels.compilation.compile_variants")
    asked.json.write_text(json.dumps(made, indent=1) + "\n")


def main() -> int:
    """Compile and print the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--capability", type=int, nargs="+", choices=CAPABILITIES, default=list(CAPABILITIES), metavar="N"
    )
    parser.add_argument("--one-in", type=int, default=1, metavar="N", help="each Nth launch alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the document there")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for capability in asked.capability:
        # Each capability begins at another one.
        first = CAPABILITIES.index(capability) * asked.one_in // len(CAPABILITIES)
        for row in rows_of(Card.of_capability(capability), asked.one_in, first):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if faulty(row):
                print(json.dumps(row), file=sys.stderr, flush=True)
        if asked.json:
            write(asked, rows)
    return 1 if any(map(faulty, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())

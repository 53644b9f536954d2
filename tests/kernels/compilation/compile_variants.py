"""`python -m tests.kernels.compilation.compile_variants --capability 75 80`: compile every kernel without a GPU.

Contract: compiles each variant of variants.py with the installed Triton, for 75, 80, 89, 90 and 120 by default;
needs only torch and Triton, and must run without TRITON_INTERPRET. Prints one JSON line for each variant and
capability: {"kernel", "variant", "capability", "registers", "local", "spills", "set_aside", "shared",
"shared_limit"}, read from the cubin (spills: accesses to local memory inside loops; set_aside: those outside), or
{"kernel", "variant", "capability", "error"}. The line of a variant that fails, spills, uses local memory or needs
more shared memory than there is also goes to stderr, and the exit status is then 1.
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
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from tests.kernels.compilation.variants import SHARED, variants

# Tolerated number of local memory accesses outside loops.
SET_ASIDE = 8
# Accesses in loops by capability: for a T4 "auto" takes torch's attention (bass_core/model/attention.py).
IN_LOOPS = {75: 2}


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


def compile_one(capability: int, index: int) -> dict[str, Any]:
    """The resources of variant `index`, or the error that stopped its compilation."""
    variant = next(islice(variants(capability), index, None))
    row: dict[str, Any] = {
        "kernel": variant.function.__name__, "variant": variant.label, "capability": capability
    }  # fmt: skip
    target = GPUTarget("cuda", capability, 32)
    try:
        compiled = triton.compile(variant.source(), target=target, options=dict(variant.options))
    except Exception as error:
        # In some versions the first line holds only the class, so take the end of the message.
        return row | {"error": f"{type(error).__name__}: {' '.join(str(error).split())[-600:]}"}
    row |= resources(compiled.asm["cubin"])
    return row | {"shared": compiled.metadata.shared, "shared_limit": SHARED[capability]}


def faulty(row: dict[str, Any]) -> bool:
    """Whether the variant failed to compile, spills, or does not fit."""
    if "error" in row or row["local"] or row["shared"] > row["shared_limit"]:
        return True
    return bool(row["spills"] > IN_LOOPS.get(row["capability"], 0) or row["set_aside"] > SET_ASIDE)


def names(capability: int) -> list[str]:
    """The kernel of each variant."""
    return [variant.function.__name__ for variant in variants(capability)]


def chosen(capability: int, one_in: int) -> Iterator[int]:
    """Each `one_in`-th variant of every kernel, at least one; each capability begins at another one."""
    kernels, first = names(capability), list(SHARED).index(capability)
    for kernel in dict.fromkeys(kernels):
        own = [index for index, name in enumerate(kernels) if name == kernel]
        step = min(one_in, len(own))
        yield from own[first % step :: step]


def main() -> int:
    """Compile on all cores and print the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", type=int, nargs="+", choices=list(SHARED), default=list(SHARED))
    parser.add_argument("--kernel", help="this kernel alone, as attend")
    parser.add_argument("--one-in", type=int, default=1, metavar="N", help="each Nth variant of a kernel alone")
    asked = parser.parse_args()
    jobs = [
        (capability, index)
        for capability in asked.capability
        for index in chosen(capability, asked.one_in)
        if asked.kernel in (None, names(capability)[index])
    ]
    failed = 0
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for row in pool.map(compile_one, *zip(*jobs, strict=True), chunksize=4):
            print(json.dumps(row), flush=True)
            if faulty(row):
                failed += 1
                print(json.dumps(row), file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

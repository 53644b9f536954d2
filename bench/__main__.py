"""Find and run a bench: `python -m bench NAME ...`."""

import importlib
import os
import sys

if sys.argv[1:2] == ["mutants"]:
    # The tests of the mutants run Triton's kernels in its interpreter, which must be chosen before triton is
    # imported.
    os.environ["TRITON_INTERPRET"] = "1"

# isort: split
from bass_core import BassError  # must come before torch, see bass_core/machine/openmp.py

MODULES = {
    "batch": "cpu.batch",
    "default": "cpu.default",
    "episodes": "simulation.episodes",
    "film": "report.film",
    "floor": "cpu.floor",
    "gpu": "gpu",
    "host": "gpu.host",
    "larger": "cpu.larger",
    "load": "robustness.load",
    "mutants": "robustness.mutants",
    "page": "cpu.page",
    "passk": "passk.command",
    "peers": "peers.command",
    "pictures": "report.pictures",
    "precision": "cpu.precision",
    "presets": "cpu.presets",
    "readers": "report.readers",
    "record": "cpu.record",
    "rounds": "cpu.rounds",
    "simulate": "simulation.command",
    "smoke": "smoke",
    "space": "space",
    "spec": "cpu.spec",
    "start": "cpu.start",
    "states": "cpu.states",
    "structured": "cpu.structured",
}


def main() -> int:
    """Run the named bench with the remaining arguments; return 2 for an unknown name or a refusal."""
    if len(sys.argv) < 2 or sys.argv[1] not in MODULES:
        print(f"usage: python -m bench {{{','.join(MODULES)}}} [--json FILE] [--quick] ...", file=sys.stderr)
        return 2
    try:
        importlib.import_module(f"bench.{MODULES[sys.argv[1]]}").main(sys.argv[2:])
    except BassError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

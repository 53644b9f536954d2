"""`python -m bench NAME ...`: find the bench and run it."""

import importlib
import sys

import bass_core as bass_core  # before torch: bass_core/machine/openmp.py

MODULES = {
    "amusd": "cpu.amusd",
    "attention": "attention.backends",
    "batch": "cpu.batch",
    "block": "drafting.block",
    "default": "drafting.default",
    "exactness": "cpu.exactness",
    "floor": "cpu.floor",
    "fuzz": "robustness.fuzz",
    "gpu": "gpu",
    "latency": "cpu.latency",
    "load": "robustness.load",
    "mutants": "robustness.mutants",
    "outside": "cpu.outside",
    "overhead": "cpu.overhead",
    "page": "cpu.page",
    "passk": "passk.command",
    "peers": "peers.command",
    "pictures": "report.pictures",
    "placement": "scale.placement",
    "prompt": "attention.prompt",
    "ragged": "cpu.ragged",
    "record": "cpu.record",
    "rooms": "report.rooms",
    "simulate": "simulation.command",
    "smoke": "smoke",
    "start": "cpu.start",
    "turns": "report.turns",
    "window": "attention.window",
    "workers": "scale.workers",
}


def main() -> int:
    """Run the named bench with the remaining arguments; 2 for an unknown name."""
    if len(sys.argv) < 2 or sys.argv[1] not in MODULES:
        print(f"usage: python -m bench {{{','.join(MODULES)}}} [--json FILE] [--quick] ...", file=sys.stderr)
        return 2
    importlib.import_module(f"bench.{MODULES[sys.argv[1]]}").main(sys.argv[2:])
    return 0


if __name__ == "__main__":
    sys.exit(main())

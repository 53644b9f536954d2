"""`python -m bench NAME ...`: find the bench and run it."""

import importlib
import sys

NAMES = (
    "amusd",
    "batch",
    "draft-length",
    "exactness",
    "fuzz",
    "gpu",
    "latency",
    "load",
    "mutants",
    "overhead",
    "page",
    "passk",
    "ragged",
    "simulate",
    "smoke",
    "start",
)


def main() -> int:
    """Run the named bench with the remaining arguments; 2 for an unknown name."""
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print(f"usage: python -m bench {{{','.join(NAMES)}}} [--json FILE] [--quick] ...", file=sys.stderr)
        return 2
    module = sys.argv[1].replace("-", "_")
    importlib.import_module(f"bench.{module}").main(sys.argv[2:])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.support.warm`: fetch and convert the real model, and compile the CPU's kernels in processes.

Several test workers would otherwise compile the same kernels at the same time.
"""

from __future__ import annotations

from types import SimpleNamespace

from bass_core.model.loading.weights import ensure_smollm2
from kernels.cpu.calls import compilers


def main() -> None:
    # One dtype after the other: each has three processes.
    for dtype in ("bfloat16", "int8"):
        compilers.start(dtype)
        if dtype == "bfloat16":
            ensure_smollm2()
        compilers.finish(lambda count: SimpleNamespace(update=lambda: None, close=lambda: None), compilers.ALL)


if __name__ == "__main__":
    main()

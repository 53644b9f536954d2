"""Make torch's idle OpenMP threads stop spinning sooner; import this before torch, which reads the setting once.

By default, such a thread keeps a core busy for a while after each large torch operation, and the threads of our
own kernels, which come next, wait for that core. We don't turn spinning off, because that would slow down models
that run only in torch. The user's own settings take precedence, and child processes don't inherit ours. If your
program imports torch before bass_core, set GOMP_SPINCOUNT=10000 yourself.

To see the effect, run `python -m bench default` with and without GOMP_SPINCOUNT=300000.
"""

import os
import sys

# Whether this module has shortened the spinning.
_shortened = False

if "torch" not in sys.modules and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "10000"
    import torch as torch

    del os.environ["GOMP_SPINCOUNT"]
    _shortened = True


def idle_threads() -> str | None:
    """Return how torch's idle threads here differ from those in other programs, as a clause, or None."""
    if os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE":
        return "torch's idle threads sleep at once here"
    return "torch's idle threads sleep sooner here" if _shortened else None

"""Set up OpenMP, whose threads compute torch's operations; import this before torch.

torch's idle threads stop spinning sooner. By default, such a thread keeps a core busy for a while after each large
operation, and the threads of our own kernels, which come next, wait for that core. We don't turn spinning off,
because that would slow down models that run only in torch. The user's own settings take precedence, and child
processes don't inherit ours. If your program imports torch before bass_core, set GOMP_SPINCOUNT=10000 yourself.
To see the effect, run `python -m bench default` with and without GOMP_SPINCOUNT=300000.

A forked process computes with one thread. With more, GNU's OpenMP would wait in the fork for threads that only its
parent has, forever.
"""

import os
import sys

# Whether this module has shortened the spinning.
_shortened = False

if "torch" not in sys.modules and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "10000"
    import torch

    del os.environ["GOMP_SPINCOUNT"]
    _shortened = True
else:
    import torch


def idle_threads() -> str | None:
    """Return how torch's idle threads here differ from those in other programs, as a clause, or None."""
    if os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE":
        return "torch's idle threads sleep at once here"
    return "torch's idle threads sleep sooner here" if _shortened else None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))

"""How long torch's idle OpenMP threads spin: imported before torch, whose library reads it once.

Contract: what the user has set counts, and no child process inherits anything. By default such a thread keeps a
core busy for a while after each large operation of torch, and the threads of our own kernels, which come next,
wait for that core. A thread that never spins would slow down a model that runs in torch alone. A program that
imports torch before bass_core sets GOMP_SPINCOUNT=10000 itself, or does without. To see what it does:
`python -m bench default` with and without GOMP_SPINCOUNT=300000.
"""

import os
import sys

# Whether the lines below have shortened it.
_shortened = False

if "torch" not in sys.modules and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "10000"
    import torch as torch

    del os.environ["GOMP_SPINCOUNT"]
    _shortened = True


def idle_threads() -> str | None:
    """What torch's idle threads do here that they would not do in any program, as a clause; None for nothing."""
    if os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE":
        return "torch's idle threads sleep at once here"
    return "torch's idle threads sleep sooner here" if _shortened else None

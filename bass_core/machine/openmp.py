"""How long torch's idle OpenMP threads spin: imported before torch, whose library reads it once.

Contract: what the user has set counts, and no child process inherits anything. By default such a thread keeps a
core busy for a millisecond or more behind each large operation of torch, and the threads of our own kernels, which
come next, wait for that core: a round with one draft took 17.8 ms instead of 15.5 (batch 4, two cores). If they
never spun, a model that runs in torch alone would take a quarter longer. A program that imports torch before
bass_core sets GOMP_SPINCOUNT=10000 itself, or does without.
"""

import os
import sys

if "torch" not in sys.modules and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "10000"
    import torch as torch

    del os.environ["GOMP_SPINCOUNT"]

"""How long torch's idle OpenMP threads spin. Imported before torch, which reads it once.

Contract: a variable that the user has set counts. By default such a thread keeps a core busy for a millisecond or
more behind each large operation of torch, and the threads of our own kernels, which come next, wait for that core:
a round with one draft took 15.5 ms instead of 17.8 without it (batch 4, two cores). Threads that never spin would
slow down a model that runs in torch alone, by a quarter. Where a program imports torch before bass_core, it sets
GOMP_SPINCOUNT itself, or does without.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")

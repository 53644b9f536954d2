"""The conformance suite's models and cases on the emulated device: `pair`, `run`; and small tensors: `numbers`.

Each pair is made once and shares no models with the CPU's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from bass_core import ModelPair, generate
from bass_core.lanes.generate import Generation
from tests.support.models import tiny_pair

from ...conformance import table
from . import ledger

TYPE = "emul"
# New tokens per text. Fewer than in the conformance suite, because each operator of the device is a Python call.
TOKENS = 8


@cache
def pair(architecture: str, kind: str) -> ModelPair:
    """Return the conformance suite's pair of that kind, on the device."""
    models = tiny_pair(kind, architecture=architecture, to=TYPE)
    # Making a pair runs its models once: forget the reads of that run.
    ledger.clear()
    return models


def run(case: table.Case, **arguments: Any) -> Generation:
    """Return the case's generation on the device; `arguments` override the case's own."""
    draft = table.DRAFTS[case.draft]
    options = {
        "method": case.method,
        "drafter": draft.drafter,
        "attention": case.attention,
        **table.drafting_of(case.length),
        "max_new_tokens": TOKENS,
        "sampling": table.SAMPLING[case.text],
        "verification": "auto" if case.text == "greedy" else "coupled",
        "seed": table.SEED,
    }
    return generate(
        pair(case.architecture, draft.kind), table.PROMPTS[case.prompts][: case.batch], **{**options, **arguments}
    )


def numbers(count: int = 6) -> Tensor:
    """Return 0, 1, 2 ... as float32 on the device."""
    return torch.arange(count, dtype=torch.float32, device=TYPE)

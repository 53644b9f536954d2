"""The conformance suite's models and cases on the emulated device, and small tensors there.

Contract: `run` returns the text that a case writes there; a pair is made once and shares no models with the CPU's.
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
# New tokens per text, fewer than in the conformance suite: each operator of the device costs a Python call.
TOKENS = 8


@cache
def pair(architecture: str, kind: str) -> ModelPair:
    """The conformance suite's pair of that name, on the device.

    A model is tried when its pair is made; what that reads is forgotten.
    """
    made = tiny_pair(kind, architecture=architecture, to=TYPE)
    ledger.clear()
    return made


def run(case: table.Case, **arguments: Any) -> Generation:
    """The text that the case's method writes there; `arguments` override the case's own."""
    draft = table.DRAFTS[case.draft]
    asked = {
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
        pair(case.architecture, draft.kind), table.PROMPTS[case.prompts][: case.batch], **{**asked, **arguments}
    )


def numbers(count: int = 6) -> Tensor:
    """0, 1, 2 ... as float32 on the device."""
    return torch.arange(count, dtype=torch.float32, device=TYPE)

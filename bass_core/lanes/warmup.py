"""Warming up a pair before any lane's clock runs (`warm_up`).

It reads the memory-mapped weights, and makes libraries choose and load their kernels. Otherwise the first lane of
the first race would pay for work that all lanes share.
"""

from __future__ import annotations

import logging
import weakref

from kernels.support import is_accelerator, runtime

from ..decode.request import Request, make_request
from ..machine.torch_state import torch_defaults
from ..model.pair import ModelPair
from .build import build_bass

# Maximum numbers of rows and of prompt tokens to warm up with. They are enough for a real prefill, and take no
# longer than a few steps.
MAX_ROWS, MAX_TOKENS = 4, 16

_warm: weakref.WeakSet[ModelPair] = weakref.WeakSet()
_log = logging.getLogger(__name__)


@torch_defaults()
def warm_up(pair: ModelPair, request: Request) -> None:
    """Run one prefill and one round of drafting and verification, once per pair and process.

    An error is only logged here: the lanes will meet it too, and report it.
    """
    if pair in _warm:
        return
    _warm.add(pair)
    prompts = list(dict.fromkeys(tuple(prompt[:MAX_TOKENS]) for prompt in request.prompts))[:MAX_ROWS]
    try:
        small = make_request(
            pair,
            prompts,
            max_new_tokens=3,
            sampling=request.sampling,
            draft_length=1,
            drafter="prompt_lookup" if pair.draft is None else "model",
            attention=request.backend,
            verification=request.verification,
            eos_token_id=None,
        )
        decoder = build_bass(pair, small, small.sequences())
        while not decoder.finished and decoder.step().kind == "prefill":
            pass
    except Exception as error:
        _log.debug("warming up failed: %s", error)
        return
    if is_accelerator(pair.device):
        runtime(pair.device).current_stream(pair.device).synchronize()

"""Making a cold pair warm before any lane's clock runs.

Contract: `warm_up` runs target and draft once, over a few tokens of the request's prompts, and throws the result
away: weights that were only mapped are read, and libraries choose and load their kernels. Otherwise the first lane
of the first race would pay for what all lanes use. Once for each pair and process: a pair that has run stays warm
as far as the process can tell, and a warm-up for every request would delay each first token. What goes wrong here
goes wrong in the lanes too, where it is reported. Non-goals: shapes that must be captured or compiled (`prepare`,
machine/setup_time.py), AMUSD's draft process.
"""

from __future__ import annotations

import logging
import weakref

from kernels.support import is_accelerator, runtime

from ...decoding.request import Request, make_request
from ...models.pair import ModelPair
from .build import build_bass

# Long enough for a real prefill; the cost is that of a few steps.
MOST_ROWS, MOST_TOKENS = 4, 16

_warm: weakref.WeakSet[ModelPair] = weakref.WeakSet()
_log = logging.getLogger(__name__)


def warm_up(pair: ModelPair, request: Request) -> None:
    """Run a prefill and a round of drafting and verifying, unless this pair did before."""
    if pair in _warm:
        return
    _warm.add(pair)
    prompts = list(dict.fromkeys(tuple(prompt[:MOST_TOKENS]) for prompt in request.prompts))[:MOST_ROWS]
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

"""The speed-up to expect on this machine, from its stored costs. Call `expected_speedup`; no model runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..draft.registry import choose_drafter
from ..length.options import DraftLength, make_policy
from ..model.attention import choose_backend
from ..model.pair import ModelPair
from ..predict.rounds import Acceptance, predict
from ..sample.params import SamplingParams
from .calibrate import MeasuredCosts
from .cost_store import missing_coarse_sizes

TRIALS = 8


def expected_speedup(
    pair: ModelPair,
    acceptance: Sequence[float],
    *,
    rows: int,
    draft_length: DraftLength,
    temperature: float = 0.0,
    max_new_tokens: int = 64,
) -> float | None:
    """Predict BASS's speed-up over regular decoding from the costs that earlier races measured here.

    Args:
        pair: the models. Everything that the request leaves out has its default.
        acceptance: for each row, the probability that a draft is accepted if those before it are. With fewer
            entries than rows they repeat.
        rows: the batch size.
        draft_length: as in `generate`.
        temperature: 0 for greedy decoding.
        max_new_tokens: new tokens per row.

    Returns:
        The speed-up, or None if the costs for so many rows are not stored.
    """
    kind, backend = choose_drafter(pair, "auto"), choose_backend("auto", pair.device, pair.dtype)
    costs = MeasuredCosts(pair, kind, backend, SamplingParams(temperature=temperature)).table
    if costs is None or missing_coarse_sizes(costs, rows):
        return None
    chances = Acceptance(np.array([[rate] for rate in acceptance]))
    regular, bass = (
        predict(costs, make_policy(length, costs, timed=False), chances, rows, max_new_tokens, trials=TRIALS)
        for length in (0, draft_length)
    )
    return regular.ms_per_token / bass.ms_per_token

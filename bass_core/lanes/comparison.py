"""Where lanes of a race differ although their texts must be the same, and how near the tie was there.

Contract: greedy and coupled text is regular decoding's, so `comparison` holds each row of the other lanes against
the regular lane's as far as both reach. Where weights are multiplied in low precision, a token beside a row may
change the row's sums in their last bits, and with them the choice between two tokens that lie next to each other:
for such a row the target is run once more, over the prompt and the common text, outside every lane's clock.
Non-goals: text under the rejection rule, which no lane promises to repeat.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from kernels.support import is_accelerator

from ..decoding.request import Request
from ..engine.runner import ModelRunner
from ..models.pair import ModelPair
from ..sampling.distribution import probabilities
from ..sampling.noise import Role, exponentials
from ..sampling.params import SamplingParams
from ..verification.table import find_verification
from .lane import Lane
from .snapshot import Difference, Weighed

# What the extra forwards of one race may take: so many of them, of so many tokens together, a few seconds.
MOST_FORWARDS = 8
MOST_TOKENS = {"cpu": 1024, "accelerator": 32768}

_log = logging.getLogger(__name__)


def reference_lane(lanes: Seq[Lane]) -> Lane | None:
    """The lane that the others are compared with: the first whose method is a reference."""
    return next((lane for lane in lanes if lane.reference), None)


def comparison(pair: ModelPair, request: Request, lanes: Seq[Lane]) -> dict[str, list[Difference | None]] | None:
    """Each other lane's rows against the reference lane's, by method; None where no two lanes owe the same text.

    A row's entry is None where both texts agree as far as both reach. A Difference holds the index of the first
    token that differs and the two token ids, theirs the reference lane's; its p_ours, p_theirs and tie (`weigh`)
    are None beyond MOST_FORWARDS and MOST_TOKENS, or where the forward failed.
    """
    reference = reference_lane(lanes)
    others = [lane for lane in lanes if lane is not reference]
    repeats = request.sampling.greedy or find_verification(request.verification).coupled
    if reference is None or not others or not repeats or request.synthetic_acceptance is not None:
        return None
    target = _Target(pair, request)
    theirs = [sequence.token_ids for sequence in reference.sequences]
    return {
        lane.method: [
            target.difference(row, sequence.token_ids, theirs[row]) for row, sequence in enumerate(lane.sequences)
        ]
        for lane in others
    }


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """The first index at which both have a token and the two differ."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)


def weigh(
    logits: Tensor, params: SamplingParams, seed: int, sequence_id: int, position: int, tokens: tuple[int, int]
) -> Weighed:
    """How near two tokens (ours, theirs) are under the target's logits [V] at a position of its text.

    Greedy: p is the model's own distribution (temperature 1); else what was sampled from. `tie` is the smaller of
    the two scores over the larger, 1 being a tie. The score is what the largest was taken of: p, and with a
    temperature p / E, E being the position's own exponential number for that token (`draw`).
    """
    p = torch.softmax(logits.float(), -1) if params.greedy else probabilities(logits, params)
    p = p[list(tokens)].cpu()
    scores = p
    if not params.greedy:
        ids, positions = torch.tensor([sequence_id]), torch.tensor([position])
        streams = torch.full_like(positions, int(Role.TARGET))
        scores = p / exponentials(seed, ids, positions, streams, torch.tensor(tokens))[0]
    ours, theirs = p.tolist()
    tie = float(scores.min() / scores.max()) if scores.max() > 0 else None
    return {"p_ours": ours, "p_theirs": theirs, "tie": tie}


class _Target:
    """The target's logits behind a row's common text; equal texts are computed once."""

    def __init__(self, pair: ModelPair, request: Request) -> None:
        self.pair, self.request = pair, request
        self.known: dict[tuple[int, ...], Tensor | None] = {}
        self.forwards = MOST_FORWARDS
        self.tokens = MOST_TOKENS["accelerator" if is_accelerator(pair.device) else "cpu"]

    def difference(self, row: int, ours: list[int], theirs: list[int]) -> Difference | None:
        at = first_difference(ours, theirs)
        if at is None:
            return None
        request, tokens = self.request, (ours[at], theirs[at])
        text = [*request.prompts[row], *theirs[:at]]
        weighed: Weighed = {"p_ours": None, "p_theirs": None, "tie": None}
        try:
            logits = self._logits(text)
            if logits is not None:
                id_ = request.sequence_ids[row]
                weighed = weigh(logits, request.sampling, request.seed, id_, len(text), tokens)
        except (RuntimeError, MemoryError) as error:
            # The race has its texts, and lacks a footnote. No traceback: its frames would hold the cache.
            _log.warning("what the target says of a difference could not be computed: %s", error)
        return {"at": at, "ours": tokens[0], "theirs": tokens[1], **weighed}

    def _logits(self, text: list[int]) -> Tensor | None:
        key = tuple(text)
        if key not in self.known:
            self.known[key] = None
            if self.forwards > 0 and len(text) <= self.tokens:
                self.forwards -= 1
                self.tokens -= len(text)
                self.known[key] = next_logits(self.pair, text, self.request.backend)
        return self.known[key]


def next_logits(pair: ModelPair, text: list[int], backend: str) -> Tensor:
    """The target's logits [V] for the token behind the text, read alone, a bounded chunk at a time."""
    runner = ModelRunner(pair.target_step, 1, len(text) + 1, pair.vocab, backend)
    with torch.inference_mode():
        prefill = runner.prefill([text])
        while not prefill.done:
            prefill.step()
        return prefill.logits()[0]

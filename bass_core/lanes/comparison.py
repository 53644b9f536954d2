"""Differences between lanes of a race whose texts should be equal, and how close to a tie the two tokens were.

Call `comparison`. Under greedy or coupled decoding, every lane should produce the text of regular decoding, so
each row is compared with the regular lane's, up to the shorter of both texts. In low precision, the other tokens
of a batch can change the last bits of a row's sums, and so the choice between two nearly tied tokens. Therefore
the target runs once more over the prompt and the common text of each row that differs, outside every lane's
clock. Text under rejection sampling is not compared: it is not the same in each lane.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from kernels.support import is_accelerator

from ..decode.request import Request
from ..machine.torch_state import torch_defaults
from ..model.pair import ModelPair
from ..model.prefill import PrefillSteps
from ..model.runner import ModelRunner
from ..sample.distribution import probabilities
from ..sample.noise import Role, exponentials
from ..sample.params import SamplingParams
from ..sample.shaping import shaped
from ..sequence import Sequence
from .lane import Lane
from .snapshot import Difference, Weighed

# Limits on the extra forwards of one race, so that they take a few seconds at most: the maximum number of
# forwards, and for each kind of device the maximum number of tokens in all forwards together.
MAX_FORWARDS = 8
MAX_TOKENS = {"cpu": 1024, "accelerator": 32768}

_log = logging.getLogger(__name__)


def reference_lane(lanes: Seq[Lane]) -> Lane | None:
    """Return the lane that the others are compared with: the first whose method is a reference."""
    return next((lane for lane in lanes if lane.reference), None)


@torch_defaults()
def comparison(pair: ModelPair, request: Request, lanes: Seq[Lane]) -> dict[str, list[Difference | None]] | None:
    """Compare the rows of all other lanes with the reference lane's.

    Returns:
        For each method a list with one entry per row, None if both texts agree up to the end of the shorter one.
        A Difference has the index of the first differing token and both token ids (`theirs` is the reference
        lane's). Its p_ours, p_theirs and tie (see `weigh`) are None once the race's MAX_FORWARDS or MAX_TOKENS are
        used up, or if the forward failed. The result is None if no other lane has to give the reference lane's
        text.
    """
    reference = reference_lane(lanes)
    others = [lane for lane in lanes if lane is not reference]
    repeats = request.sampling.greedy or request.rule.coupled
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
    """Return the first index at which both lists have a token and the tokens differ, or None."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)


def weigh(
    logits: Tensor, params: SamplingParams, seed: int, sequence_id: int, position: int, tokens: tuple[int, int]
) -> Weighed:
    """Return how close two tokens are under the target's logits.

    The target chooses the token with the largest score. The score is p for greedy decoding, else p / E, where E is
    the exponential random number of that position and token (`draw`).

    Args:
        logits: [V], the target's logits at this position of its text.
        tokens: our token and the reference's.

    Returns:
        `p_ours` and `p_theirs`, the tokens' probabilities: at temperature 1 for greedy decoding, else in the
        distribution that is sampled. `tie` is the smaller score divided by the larger: 1 is an exact tie.
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
    """The target's logits after a row's common text, computed once for equal texts."""

    def __init__(self, pair: ModelPair, request: Request) -> None:
        self.pair, self.request = pair, request
        self.known: dict[tuple[int, ...], Tensor | None] = {}
        self.forwards = MAX_FORWARDS
        self.tokens = MAX_TOKENS["accelerator" if is_accelerator(pair.device) else "cpu"]

    def difference(self, row: int, ours: list[int], theirs: list[int]) -> Difference | None:
        at = first_difference(ours, theirs)
        if at is None:
            return None
        request, tokens = self.request, (ours[at], theirs[at])
        text = [*request.prompts[row], *theirs[:at]]
        weighed: Weighed = {"p_ours": None, "p_theirs": None, "tie": None}
        try:
            logits, id_ = self._logits(text), request.sequence_ids[row]
            if logits is not None:
                sequence = Sequence(row, id_, request.prompts[row], len(theirs), request.eos)
                if request.grammars and (grammar := request.grammars[row]) is not None:
                    sequence.grammar = grammar.matcher(request.eos)
                sequence.write(theirs[:at], ["sampled"] * at)
                logits = shaped(logits[None, None], request.sampling, [sequence])[0, 0]
                weighed = weigh(logits, request.sampling, request.seed, id_, len(text), tokens)
        except (RuntimeError, MemoryError) as error:
            # The race needs no p or tie, so go on without them. Don't log a traceback, because its frames would
            # keep the cache alive.
            _log.warning("The target's probabilities at a difference could not be computed: %s", error)
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
    """Return the target's logits [V] for the token after a text, prefilled as a batch of one, in chunks."""
    runner = ModelRunner(pair.target_step, 1, len(text) + 1, pair.vocab, backend)
    with torch.inference_mode():
        prefill = PrefillSteps(runner, [text])
        while not prefill.done:
            prefill.step()
        return prefill.logits()[0]

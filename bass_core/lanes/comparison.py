"""Where lanes of a race differ although their texts should be equal, and how close to a tie the two tokens were.

Contract: with greedy or coupled decoding every lane should produce regular decoding's text, so `comparison`
compares each row of the other lanes with the regular lane's, up to the shorter of the two. In low precision, the
other tokens in a batch can change the last bits of a row's sums, and so the choice between two tokens that are
nearly tied. For each row that differs, the target is therefore run once more over the prompt and the common text,
outside every lane's clock. Non-goals: text under rejection sampling, which no lane promises to repeat.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from kernels.support import is_accelerator

from ..decode.request import Request
from ..machine.torch_state import ours
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

# Limits on the extra forwards of one race: their number, and their total number of tokens by device. Chosen so
# that they take a few seconds at most.
MOST_FORWARDS = 8
MOST_TOKENS = {"cpu": 1024, "accelerator": 32768}

_log = logging.getLogger(__name__)


def reference_lane(lanes: Seq[Lane]) -> Lane | None:
    """The lane that the others are compared with: the first one whose method is a reference."""
    return next((lane for lane in lanes if lane.reference), None)


@ours()
def comparison(pair: ModelPair, request: Request, lanes: Seq[Lane]) -> dict[str, list[Difference | None]] | None:
    """Compare the other lanes' rows with the reference lane's, by method; None if no lane owes the same text.

    A row's entry is None if both texts agree up to the end of the shorter one. A Difference holds the index of the
    first differing token and the two token ids (`theirs` is the reference lane's). Its p_ours, p_theirs and tie
    (see `weigh`) are None once MOST_FORWARDS or MOST_TOKENS is used up, or if the forward failed.
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
    """The first index at which both lists have a token and the two tokens differ; None if there is none."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)


def weigh(
    logits: Tensor, params: SamplingParams, seed: int, sequence_id: int, position: int, tokens: tuple[int, int]
) -> Weighed:
    """How close two tokens (ours, theirs) are under the target's logits [V] at one position of its text.

    p: the model's distribution at temperature 1 for greedy decoding, else the distribution sampled from. `tie`:
    the smaller of the two scores divided by the larger; 1 is an exact tie. The token with the largest score is the
    one chosen; the score is p for greedy decoding, else p / E, where E is the exponential random number of that
    position and token (`draw`).
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
    """The target's logits after a row's common text; equal texts are computed once."""

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
            logits, id_ = self._logits(text), request.sequence_ids[row]
            if logits is not None:
                read = Sequence(row, id_, request.prompts[row], len(theirs), request.eos)
                read.write(theirs[:at], ["sampled"] * at)
                logits = shaped(logits[None, None], request.sampling, [read])[0, 0]
                weighed = weigh(logits, request.sampling, request.seed, id_, len(text), tokens)
        except (RuntimeError, MemoryError) as error:
            # The race's texts are complete without this figure. No traceback is logged: its frames would keep the
            # cache alive.
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
    """The target's logits [V] for the token after the text, run as a batch of one in bounded prefill chunks."""
    runner = ModelRunner(pair.target_step, 1, len(text) + 1, pair.vocab, backend)
    with torch.inference_mode():
        prefill = PrefillSteps(runner, [text])
        while not prefill.done:
            prefill.step()
        return prefill.logits()[0]

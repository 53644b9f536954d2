"""A lane of transformers' own `generate`, as an independent baseline.

`generate` is called once, in a thread (turns.py), with the target's own weights, dtype and attention, and a
dynamic cache. Prompts are padded on the left, as its documentation advises; a finished row continues as padding.
In float32 the greedy text is the same as in other lanes. In 16 bits it may choose another of two nearly tied
tokens.
"""

from __future__ import annotations

import logging
import traceback
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ...errors import BassError, ModelError, is_failure
from ...machine.memory import shortage_explained
from ...model.pair import ModelPair
from ...sample.grammar import refuse_stuck
from ...sample.params import SamplingParams
from ...sample.shaping import shaped
from ...sequence import Round, RowRound, Sequence
from ..request import Request
from .call import OwnNoise, call_generate, generate_options, plain_model, warm_up
from .turns import Turns

_warm: weakref.WeakSet[ModelPair] = weakref.WeakSet()
_log = logging.getLogger(__name__)


def build_transformers(pair: ModelPair, request: Request, sequences: list[Sequence]) -> TransformersDecoder:
    """Return the decoder of a request; for a pair's first request, first warm up `generate`."""
    model, options = plain_model(pair), generate_options(pair, request)
    if pair not in _warm:
        _warm.add(pair)
        warm_up(model, request.prompts)
    return TransformersDecoder(model, request, sequences, options)


class _TurnTaker(StoppingCriteria):
    """`generate` calls this after each token: it hands the tokens over, waits, and ends all rows if asked to."""

    def __init__(self, hand_over: Callable[[list[int]], bool], rows: int, device: torch.device) -> None:
        self._hand_over = hand_over
        self._verdicts = {ended: torch.full((rows,), ended, device=device) for ended in (False, True)}

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        go_on = self._hand_over(input_ids[:, -1].tolist())
        return self._verdicts[not go_on]


class _GrammarMasks(LogitsProcessor):
    """`generate` calls this before temperature, top-k, top-p and min-p, when the rows have all earlier tokens."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self._sequences = sequences

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # `generate` goes on with a row that has ended, but nobody reads it.
        rows = [row if row.finish_reason is None else replace(row, grammar=None) for row in self._sequences]
        masked = shaped(scores[:, None], SamplingParams(), rows)[:, 0]
        refuse_stuck(rows, [0 if left else -1 for left in (masked > -torch.inf).any(-1).tolist()], shaped=False)
        return masked


class TransformersDecoder:
    """Decodes with `generate`. `model` comes from plain_model, `options` from generate_options."""

    # No work goes on between steps.
    timeline = None

    def __init__(
        self, model: PreTrainedModel, request: Request, sequences: list[Sequence], options: dict[str, Any]
    ) -> None:
        self.sequences, self.target_forwards = sequences, 0
        self._noise = None if request.sampling.greedy else OwnNoise(request.seed, model.device)

        def work(hand_over: Callable[[list[int]], bool]) -> None:
            taker = _TurnTaker(hand_over, len(sequences), model.device)
            criteria = StoppingCriteriaList([taker])
            masks = LogitsProcessorList([_GrammarMasks(sequences)] if request.grammars else [])
            call_generate(model, request.prompts, stopping_criteria=criteria, logits_processor=masks, **options)

        self._turns: Turns[list[int]] = Turns(work, model.device, "bass-transformers")

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason for sequence in self.sequences)

    def prepare(self) -> None:
        """Do nothing: there are no graphs to capture."""

    def pause(self) -> None:
        """Do nothing: no work goes on between steps."""

    def close(self) -> None:
        """End `generate` and its thread."""
        self._turns.stop()

    def step(self) -> Round:
        """Let `generate` write one token per row; the first step also reads the prompts, in one forward.

        Raises:
            ModelError: if `generate` failed.
            MemoryShortage: if it ran out of memory.
        """
        kind = "plain" if self.target_forwards else "prefill"
        with nullcontext() if self._noise is None else self._noise.drawing():
            tokens = self._turn()
        self.target_forwards += 1
        rows = [
            _write(row, token)
            for row, token in zip(self.sequences, tokens, strict=True)
            if row.finish_reason is None
        ]
        return Round(kind, rows=rows)

    def _turn(self) -> list[int]:
        try:
            with shortage_explained():
                tokens = self._turns.take()
        except BaseException as error:
            if isinstance(error, BassError) or not is_failure(error):
                raise
            # Clear the traceback's frames, because they hold the cache and live as long as the log record.
            traceback.clear_frames(error.__traceback__)
            _log.error("transformers' generate failed", exc_info=error)
            raise ModelError(f"transformers' generate failed: {_first_line(error)}") from None
        if tokens is None:
            raise ModelError("transformers' generate ended before all texts did.")
        return tokens


def _write(row: Sequence, token: int) -> RowRound:
    row.write([token], ["sampled"])
    return RowRound(row.index, [], [], [], [], 0, [token], ["sampled"], row.finish_reason)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

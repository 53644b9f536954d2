"""Calling transformers' `generate` for a request, and what it can't answer as the other lanes do.

Contract: what a checked request becomes as arguments of `generate`, and the call; no clock and no thread here.
`refuse_transformers` runs no model and raises RequestError with one sentence that says what to do.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ...errors import RequestError
from ...model.base import shadow_of
from ...model.pair import ModelPair
from ...model.weights.placement import is_split
from ...model.weights.quantized import is_quantized
from ...sample.params import SamplingParams
from ..request import Request

# Rows, prompt tokens and new tokens of the call that warms transformers up: a prefill and a step.
_MOST_ROWS, _MOST_TOKENS, _NEW_TOKENS = 4, 16, 2

# Before a prompt the mask hides it, and after an end it is thrown away.
PAD = 0

_log = logging.getLogger(__name__)


def plain_model(pair: ModelPair) -> PreTrainedModel:
    """The target's modules, copied, with the target's own weights and an empty generation config."""
    model = shadow_of(pair.target)
    model.generation_config = GenerationConfig()
    return model


def generate_options(pair: ModelPair, request: Request) -> dict[str, Any]:
    """The keyword arguments of `generate` that ask for this request, without the prompts."""
    wide, ends = pair.target_step.vocab, sorted(request.eos)
    return {
        **_sampling_options(request.sampling),
        "max_new_tokens": max(request.new_tokens(prompt) for prompt in request.prompts),
        "eos_token_id": ends or None,
        "pad_token_id": PAD,
        # Rows of the vocabulary that only pad it, which the other lanes cut off as well.
        "suppress_tokens": list(range(pair.vocab, wide)) or None,
        "use_cache": True,
    }


def _sampling_options(sampling: SamplingParams) -> dict[str, Any]:
    if sampling.greedy:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": float(sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": float(sampling.top_p),
        "min_p": float(sampling.min_p) or None,
    }


def call_generate(model: Any, prompts: list[list[int]], **options: Any) -> Tensor:
    """transformers' `generate` for these prompts, padded on the left: int64 [B, padded prompt + new tokens]."""
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    ids = [[PAD] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]
    mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
    inputs, seen = (torch.tensor(rows, device=model.device) for rows in (ids, mask))
    written: Tensor = model.generate(inputs, attention_mask=seen, **options)
    return written


def warm_up(model: PreTrainedModel, prompts: list[list[int]]) -> None:
    """Let `generate` load what it needs, over the first tokens of some prompts; an error is only logged."""
    few = [prompt[:_MOST_TOKENS] for prompt in prompts[:_MOST_ROWS]]
    try:
        call_generate(model, few, do_sample=False, max_new_tokens=_NEW_TOKENS, pad_token_id=PAD)
    except Exception as error:
        _log.debug("warming up transformers' generate failed: %s", error)


def refuse_transformers(pair: ModelPair, request: Request) -> None:
    """Raises RequestError for weights, sampling or lengths that `generate` would treat otherwise than we do."""
    if is_split(pair.target):
        raise RequestError(
            'method="transformers" can\'t follow a target that is split over several devices: leave it out, or '
            "load the pair without a device_map."
        )
    if is_quantized(pair.target):
        raise RequestError(
            f'method="transformers" runs the weights as transformers loads them, and this pair holds '
            f'{pair.weight_dtype} weights: leave it out, or load the pair with dtype="float32" or "bfloat16".'
        )
    if not pair.target.can_generate():
        raise RequestError(
            f'method="transformers" needs a model with `generate`, and {type(pair.target).__name__} has none: '
            "leave it out."
        )
    if not request.sampling.greedy and request.rule.coupled:
        raise RequestError(
            'method="transformers" draws its own random numbers, so it can\'t write the same text as the others: '
            'leave it out, choose another verification than "coupled", or temperature 0.'
        )
    if request.logprobs:
        raise RequestError('method="transformers" gives no log-probabilities: leave out one of the two.')
    if request.sampling.shapes:
        raise RequestError(
            'method="transformers" would penalise the padding of shorter prompts: leave it out, or leave out '
            "penalties, logit_bias and bad_words."
        )
    longest, most = max(map(len, request.prompts)), max(map(request.new_tokens, request.prompts))
    if longest + most > request.context:
        raise RequestError(
            f'method="transformers" gives every row {most} new tokens, and behind the prompt of {longest} tokens '
            f"the model's context has room for {request.context - longest}: ask for at most that many, or leave "
            "it out."
        )

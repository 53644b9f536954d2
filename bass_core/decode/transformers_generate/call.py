"""Call transformers' `generate` for a request, and refuse requests that it can't answer like the other lanes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from kernels.support import is_accelerator, runtime

from ...errors import RequestError
from ...model.base import shadow_of
from ...model.pair import ModelPair
from ...model.weights.placement import is_split
from ...model.weights.quantized import is_quantized
from ...sample.params import SamplingParams
from ..request import Request

# Maximum rows, maximum prompt tokens and number of new tokens of the warm-up call. Two new tokens take a prefill
# and one step.
_WARM_UP_ROWS, _WARM_UP_PROMPT_TOKENS, _WARM_UP_NEW_TOKENS = 4, 16, 2

# Any id can be the padding: the mask hides it before a prompt, and we drop it after the end of a text.
PAD = 0

_log = logging.getLogger(__name__)


def plain_model(pair: ModelPair) -> PreTrainedModel:
    """Return a copy of the target's modules that shares its weights, with an empty generation config."""
    model = shadow_of(pair.target)
    model.generation_config = GenerationConfig()
    return model


def generate_options(pair: ModelPair, request: Request) -> dict[str, Any]:
    """Return the keyword arguments of `generate` for this request, without the prompts."""
    padded_vocab, ends = pair.target_step.vocab, sorted(request.eos)
    return {
        **_sampling_options(request.sampling),
        "max_new_tokens": max(request.new_tokens(prompt) for prompt in request.prompts),
        "eos_token_id": ends or None,
        "pad_token_id": PAD,
        # Suppress ids that only pad the vocabulary; the other lanes never write them either.
        "suppress_tokens": list(range(pair.vocab, padded_vocab)) or None,
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
    """Call `generate` with prompts padded on the left; returns int64 [B, padded prompt + new tokens]."""
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    ids = [[PAD] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]
    mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
    inputs, attention = (torch.tensor(rows, device=model.device) for rows in (ids, mask))
    written: Tensor = model.generate(inputs, attention_mask=attention, **options)
    return written


def warm_up(model: PreTrainedModel, prompts: list[list[int]]) -> None:
    """Call `generate` on the first tokens of some prompts, to load its kernels. Errors are only logged."""
    beginnings = [prompt[:_WARM_UP_PROMPT_TOKENS] for prompt in prompts[:_WARM_UP_ROWS]]
    try:
        call_generate(model, beginnings, do_sample=False, max_new_tokens=_WARM_UP_NEW_TOKENS, pad_token_id=PAD)
    except Exception as error:
        _log.debug("warming up transformers' generate failed: %s", error)


def refuse_transformers(pair: ModelPair, request: Request) -> None:
    """Raise RequestError unless `generate` treats the request's weights, sampling and lengths as we do."""
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
            f'method="transformers" gives every row {most} new tokens, and after the longest prompt ({longest} '
            f"tokens) the model's context has room for {request.context - longest}: ask for at most that many, or "
            "leave it out."
        )


class OwnNoise:
    """A lane's random numbers from torch's default generator, which leave the caller's numbers unchanged.

    Inside `drawing()`, the device's default generator has this object's own state: it starts at the seed and
    continues where the last `drawing()` ended. No other thread may draw from the generator inside `drawing()`.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        self._state = torch.Generator(device).manual_seed(seed).get_state()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        before = self._get()
        try:
            self._set(self._state)
            yield
            self._state = self._get()
        finally:
            self._set(before)

    def _get(self) -> torch.Tensor:
        if is_accelerator(self._device):
            state: torch.Tensor = runtime(self._device).get_rng_state(self._device)
            return state
        return torch.get_rng_state()

    def _set(self, state: torch.Tensor) -> None:
        if is_accelerator(self._device):
            runtime(self._device).set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)

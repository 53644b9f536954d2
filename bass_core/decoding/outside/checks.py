"""What transformers' `generate` can't answer as the other lanes do.

Contract: `refuse_transformers` raises RequestError with one sentence that says what to do. No model is run.
"""

from __future__ import annotations

from ...errors import RequestError
from ...models.pair import ModelPair
from ...models.weights.placement import is_split
from ...models.weights.quantize import is_quantized
from ..request import Request


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
    longest, most = max(map(len, request.prompts)), max(map(request.new_tokens, request.prompts))
    if longest + most > request.context:
        raise RequestError(
            f'method="transformers" gives every row {most} new tokens, and behind the prompt of {longest} tokens '
            f"the model's context has room for {request.context - longest}: ask for at most that many, or leave "
            "it out."
        )

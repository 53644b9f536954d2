"""Prompts that the target makes up itself, by completing an empty user turn (Magpie, arXiv 2406.08464).

Contract: `own_prompts` is a pure function of the pair, the count and the seed. The target ended each prompt
itself, after `SHORTEST` to `LONGEST` tokens, and none is in the evaluation set.
"""

from __future__ import annotations

import math

from bass_core import ModelPair, SamplingParams
from bass_core.decode.base import DecodingParams
from bass_core.decode.batch import BatchDecoder
from bass_core.decode.request import make_request
from bass_core.model.runner import ModelRunner

from .prompts import evaluation_prompts

SHORTEST, LONGEST = 4, 80
# Prompts started per prompt wanted: about one in ten gets too long.
SPARE = 1.25
# Noise seeds of the prompts start here, far from those of the answers; each `seed` has so many of them.
SEEDS, ATTEMPTS = 2**40, 1000
# The prompts' temperature: below 1, fewer are nonsense. The answers have the shard's own.
TEMPERATURE = 0.8


def own_prompts(pair: ModelPair, count: int, seed: int) -> list[str]:
    """`count` different prompts; other seeds give other prompts."""
    if not count:
        return []
    taken = {prompt["text"] for prompt in evaluation_prompts()}
    opening, closing = _template(pair)
    if closing not in pair.default_eos():
        raise SystemExit(
            "This target's template does not end a user's words with an end token: set own_share to 0."
        )
    found: dict[str, None] = {}
    attempt = 0
    while len(found) < count:
        # Each attempt has noise of its own, which the answers do not share.
        for ids in _sample(pair, opening, math.ceil(SPARE * count), SEEDS + seed * ATTEMPTS + attempt):
            text = pair.tokenizer.decode(ids[:-1]).strip()
            again = pair.tokenizer(text, add_special_tokens=False).input_ids
            if ids[-1] == closing and len(again) >= SHORTEST and closing not in again and text not in taken:
                found[text] = None
        attempt += 1
    return list(found)[:count]


def _template(pair: ModelPair) -> tuple[list[int], int]:
    """The ids before a user's message, and the id that ends it."""
    mark = "@@"
    text = pair.tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before, after = (pair.tokenizer(part, add_special_tokens=False).input_ids for part in text.split(mark))
    return before, after[0]


def _sample(pair: ModelPair, opening: list[int], count: int, seed: int) -> list[list[int]]:
    """What the target writes after `opening`, up to and including an end token if it wrote one."""
    sampling = SamplingParams(temperature=TEMPERATURE)
    request = make_request(pair, [opening] * count, max_new_tokens=LONGEST, sampling=sampling, seed=seed)
    rows = request.sequences()
    runner = ModelRunner(pair.target_step, count, request.longest + 1, pair.vocab, request.backend)
    decoder = BatchDecoder(rows, runner, DecodingParams(sampling, seed))
    while not decoder.finished:
        decoder.step()
    return [row.tokens[len(opening) :] for row in rows]

"""Many draws of one token: by regular decoding and by speculation, next to the target's own probabilities.

Call `draws`. The target and the draft run once at that position, so every draw has the same p and q. Only the
random numbers differ: draw i has those of sequence id i. Regular decoding draws from p. Speculation draws one
draft from q and verifies it with the code that verifies a race's rounds (verify/rejection.py): it writes the draft
if that is accepted, else the token that replaces it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import Tensor

from ..decode.admission import admit
from ..decode.batch import BatchDecoder
from ..decode.request import Request, make_request
from ..draft.base import Proposal
from ..errors import RequestError, ask_tokenizer
from ..machine.torch_state import torch_defaults
from ..model.pair import ModelPair
from ..options import Options, Prompt
from ..sample.distribution import dense, probabilities, top
from ..sample.draw import draw
from ..sample.grammar import KINDS
from ..sample.noise import NoiseKeys
from ..verify.rejection import plain, verify
from .build import build_bass
from .methods import DEFAULT_METHOD, METHODS

COUNT = 1000
# Rows of a verification. Each has two columns of the vocabulary's size.
CHUNK = 50
# Tokens that are listed by themselves; a chi-squared cell must be expected at least LEAST times.
LISTED, LEAST = 8, 5.0
MODEL = "model"


class Drawn(TypedDict):
    """How often a token was drawn. The last one, with token None, stands for all that are not listed."""

    token: int | None
    text: str | None
    p: float
    q: float
    plain: int
    speculated: int


class Fit(TypedDict):
    """A chi-squared test of the draws against p. `cells` are the tokens with an expectation of at least LEAST.

    The last cell holds all other tokens. `chance`: the p-value.
    """

    statistic: float
    cells: int
    chance: float


class Draws(TypedDict):
    """The draws at one position.

    Attributes:
        count: draws of each decoder.
        before: the end of the text before the position; None without a tokenizer.
        drafter: the drafter whose q it is.
        accepted: how many of speculation's draws are the draft itself.
        tokens: the most likely tokens, then the rest.
        plain, speculated: the fit to p of regular decoding's and of speculation's draws.
    """

    count: int
    before: str | None
    drafter: str
    accepted: int
    tokens: list[Drawn]
    plain: Fit
    speculated: Fit


@torch_defaults()
@torch.inference_mode()
def draws(
    pair: ModelPair, prompt: Prompt, *, row: int, tokens: Sequence[int], options: Options, count: int = COUNT
) -> Draws:
    """Draw the token after a row's first tokens many times.

    Args:
        tokens: the row's tokens before the position, at least one, as regular decoding wrote them.
        count: draws of each decoder.

    Raises:
        RequestError: if nothing is drafted at this position, or the text is not sampled by verifying drafts.
    """
    whole = make_request(pair, prompt, options=options)
    if whole.sampling.greedy or whole.rule.coupled or whole.synthetic_acceptance is not None or whole.tree:
        raise RequestError("Only sampled chains of drafts can be drawn again, without coupling.")
    if not 0 <= row < len(whole.prompts) or not tokens:
        raise RequestError("Name a row of the race, and at least one token of its text.")
    # The prefill draws the last of `tokens` again, with the row's own random numbers.
    text = [*whole.prompts[row], *tokens[:-1]]
    changed: dict[str, Any] = {
        "n": 1,
        "max_new_tokens": 3,
        "draft_length": 1,
        "sequence_ids": [whole.sequence_ids[row]],
    }
    changed |= {"eos_token_id": None, "stop": None, "time_budget_ms": None, "clock": None, "tree": None}
    changed |= dict.fromkeys(KINDS)
    one = replace(options, **changed)
    for drafter in (options.drafter, MODEL):
        request = make_request(pair, [text], options=replace(one, drafter=drafter))
        decoder = _after_prefill(pair, request, whole, row, tokens[:-1])
        if decoder.finished:
            continue
        proposal, logits = decoder.look_ahead()
        if proposal.num_drafted[0]:
            break
    else:
        raise RequestError("Nothing is drafted at this position: choose another one.")
    return _drawn(pair, request, decoder, proposal, logits, count)


def _after_prefill(
    pair: ModelPair, request: Request, whole: Request, row: int, written: Sequence[int]
) -> BatchDecoder:
    """Return the decoder of a request whose one prompt ends with tokens that a row of the race `whole` wrote."""
    admit(pair, request, [METHODS[DEFAULT_METHOD]])
    (sequence,) = request.sequences()
    if whole.grammars and (grammar := whole.grammars[row]) is not None:
        # With the race's ends of text, which the request doesn't have.
        sequence.grammar = grammar.matcher(whole.eos)
        for token in written:
            sequence.grammar.write(token)
    decoder = build_bass(pair, request, [sequence])
    assert isinstance(decoder, BatchDecoder)
    while not decoder.target_forwards:
        decoder.step()
    return decoder


def _drawn(
    pair: ModelPair, request: Request, decoder: BatchDecoder, proposal: Proposal, logits: Tensor, count: int
) -> Draws:
    params, position = request.sampling, len(decoder.sequences[0].tokens)
    p = probabilities(logits[:, 0], params)[0].double().cpu()
    drafted = int(proposal.tokens[0, 0])
    q = torch.zeros_like(p)
    q_rows = dense(proposal.probs)
    if q_rows is None:
        q[drafted] = 1.0
    else:
        q[: q_rows.shape[-1]] = q_rows[0, 0].double().cpu()
    plain_counts: Counter[int] = Counter()
    speculated: Counter[int] = Counter()
    accepted = 0
    for keys in _keys(request.seed, position, count, logits.device):
        plain_counts.update(outcome.next_token for outcome in plain(_rows(logits[:, 0], keys), keys, params))
        for token, is_draft in _speculate(request, proposal, logits, keys):
            speculated[token] += 1
            accepted += is_draft
    listed = [int(token) for token in top(p[None].float(), min(LISTED, len(p)))[1][0]]
    text = _decoder_of(pair)
    entries: list[Drawn] = [
        {"token": token, "text": text([token]), "p": float(p[token]), "q": float(q[token]),
         "plain": plain_counts[token], "speculated": speculated[token]}
        for token in listed
    ]  # fmt: skip
    sums: dict[str, Any] = {key: sum(entry[key] for entry in entries) for key in ("p", "q")}
    entries.append(
        {"token": None, "text": None, "p": max(0.0, 1 - sums["p"]), "q": max(0.0, 1 - sums["q"]),
         "plain": count - sum(plain_counts[token] for token in listed),
         "speculated": count - sum(speculated[token] for token in listed)}
    )  # fmt: skip
    return {
        "count": count,
        "before": text(decoder.sequences[0].tokens[-24:]),
        "drafter": (proposal.sources or [getattr(decoder.drafter, "source", "")])[0],
        "accepted": accepted,
        "tokens": entries,
        "plain": fit(plain_counts, p),
        "speculated": fit(speculated, p),
    }


def _keys(seed: int, position: int, count: int, device: torch.device) -> Iterator[NoiseKeys]:
    for start in range(0, count, CHUNK):
        ids = torch.arange(start, min(start + CHUNK, count), device=device)
        yield NoiseKeys(seed, ids, torch.full_like(ids, position))


def _rows(values: Tensor, keys: NoiseKeys) -> Tensor:
    """Repeat values [1, ...] for each key."""
    return values.expand(len(keys.sequence_ids), *values.shape[1:]).contiguous()


def _speculate(
    request: Request, proposal: Proposal, logits: Tensor, keys: NoiseKeys
) -> Iterator[tuple[int, bool]]:
    """Yield, for each key, the token that one draft and its verification write, and whether it is the draft."""
    q_rows = dense(proposal.probs)
    if q_rows is None:
        drafts, probs = _rows(proposal.tokens[:, :1].to(logits.device), keys), None
    else:
        probs = _rows(q_rows[:, :1].to(logits.device), keys)
        streams = keys.stream(request.rule.draft_role)
        drafts = draw(probs[:, 0], keys.seed, keys.sequence_ids, keys.positions, streams)[:, None]
    outcome = verify(
        # The logits after the draft decide only about the token after this position.
        _rows(logits[:, :2], keys),
        drafts,
        probs,
        torch.ones_like(keys.sequence_ids),
        keys,
        request.sampling,
        verification=request.rule,
    )
    for row in outcome.host():
        yield (row.tests[0].token, True) if row.accepted else (row.next_token, False)


def fit(counts: Counter[int], p: Tensor) -> Fit:
    """Compare counts of tokens with their probabilities p [V], float64.

    For example, 1,000 draws of two equally likely tokens, 520 and 480 times, have statistic 1.6 and chance 0.21.
    """
    count = counts.total()
    cells = [(counts[token], count * chance) for token, chance in enumerate(p.tolist()) if count * chance >= LEAST]
    rest = count - sum(seen for seen, _ in cells), count - sum(expected for _, expected in cells)
    if rest[1] >= LEAST or not cells:
        cells.append(rest)
    else:  # too rare for a cell of its own
        cells[-1] = cells[-1][0] + rest[0], cells[-1][1] + rest[1]
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = torch.tensor(max(1, len(cells) - 1) / 2, dtype=torch.float64)
    chance = torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64))
    return {"statistic": statistic, "cells": len(cells), "chance": float(chance)}


def _decoder_of(pair: ModelPair) -> Any:
    tokenizer = pair.tokenizer
    return lambda ids: None if tokenizer is None else ask_tokenizer(tokenizer.decode, ids)

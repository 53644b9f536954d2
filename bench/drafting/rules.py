"""`python -m bench rules`: which rule for several candidates at one place is accepted most often.

Contract: p and q are stored of the target and of the pair's draft behind texts that the target samples; no rule
has to decode for it. `chance` is the mean chance that some one of `children` candidates is accepted. It is exact
where the draws can be summed over, and the mean over DRAWS draws where not. The rules are exact ones: drawn from q
anew for each child; drawn without replacement (Sequoia, 2402.12374); the likeliest tokens (as in EAGLE-2,
2406.16858, with an exact test); the likeliest and one drawn from q without them, which trees of sampled texts use;
coupled (the same noise for draft and target). `error` is the standard error over the stored pairs. Nothing is
timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from bass_core import ModelPair, SamplingParams, load_pair
from bass_core.attention.select import choose_backend
from bass_core.budget.policies import EqualRows, FixedLength
from bass_core.decoding.base import DecodingParams
from bass_core.decoding.batch import BatchDecoder
from bass_core.decoding.checks import encode_prompts
from bass_core.drafting.registry import Parts, make_drafter
from bass_core.engine.cuda_graphs import make_runner
from bass_core.engine.prefix import CachedTexts
from bass_core.sampling.distribution import probabilities
from bass_core.sequence import Sequence
from bass_core.verification.acceptance import RowOutcome
from distill.prompts import evaluation_prompts

from ..report.report import claim, finish, parser

TEMPERATURES, CHILDREN, DRAWS = (0.7, 1.0), (1, 2, 3, 4), 16
ANEW, WITHOUT, LIKELIEST = "drawn anew", "drawn without replacement", "likeliest"
OURS, COUPLED = "likeliest and one drawn", "coupled"


def main(argv: list[str]) -> None:
    """Store p and q, judge every rule on them, print, and write."""
    options = parser("rules", __doc__ or "")
    options.add_argument("--pair", default="smollm2")
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--max-new-tokens", type=int, default=96)
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.batch, arguments.max_new_tokens = 2, 8
    pair = load_pair(arguments.pair, device="cpu")
    results = [row for temperature in TEMPERATURES for row in _rows(pair, temperature, arguments)]
    finish("rules", arguments, pair.device, results, _claims(results, arguments.quick))


class _Recorder(BatchDecoder):
    """A decoder that keeps the p and q, [V] each, of every draft that is verified."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def _verify(self, logits: Tensor, drafts: Tensor, proposal: Any, parents: Any, keys: Any) -> list[RowOutcome]:
        if proposal.probs is not None and proposal.probs.shape[1]:
            p = probabilities(logits[:, 0], self.params.sampling)
            self.pairs += [
                (p[r], proposal.probs[r, 0].to(p.dtype)) for r, n in enumerate(proposal.num_drafted) if n
            ]
        return super()._verify(logits, drafts, proposal, parents, keys)


def stored(pair: ModelPair, temperature: float, arguments: Any) -> list[tuple[Tensor, Tensor]]:
    """p and q [V] of the first draft of each round, one draft a round."""
    sampling, tokens = SamplingParams(temperature), arguments.max_new_tokens
    texts = [prompt["text"] for prompt in evaluation_prompts()]
    chosen = texts[:: max(1, len(texts) // arguments.batch)][: arguments.batch]
    prompts = encode_prompts(pair, chosen, 1, raw=False)
    rows = len(prompts)
    longest = max(map(len, prompts)) + tokens + 2
    backend = choose_backend("auto", pair.device, pair.dtype)
    runner = make_runner(pair.target_step, rows, longest, pair.vocab, backend)
    cached = CachedTexts(prompts, [longest] * rows)
    drafter = make_drafter("model", Parts(pair, rows, cached, backend, sampling, "auto", target=runner))
    sequences = [Sequence(i, i, prompt, tokens, frozenset()) for i, prompt in enumerate(prompts)]
    decoder = _Recorder(sequences, runner, DecodingParams(sampling), drafter, EqualRows(FixedLength(1)))
    while not decoder.finished:
        decoder.step()
    return decoder.pairs


def _rows(pair: ModelPair, temperature: float, arguments: Any) -> Iterator[dict[str, Any]]:
    torch.manual_seed(arguments.seed)
    pairs = stored(pair, temperature, arguments)
    for children in CHILDREN:
        chances: dict[str, list[float]] = {rule: [] for rule in (ANEW, WITHOUT, LIKELIEST, OURS, COUPLED)}
        for p, q in pairs:
            noise = torch.empty(DRAWS, len(p)).exponential_()
            chances[ANEW].append(drawn_anew(p, q, children))
            chances[WITHOUT].append(without_replacement(p, q, (q / noise).topk(children).indices))
            chances[LIKELIEST].append(float(p[q.topk(children).indices].sum()))
            chances[OURS].append(likeliest_and_one(p, q, children))
            own = (p / noise).argmax(-1)
            chances[COUPLED].append(
                float(((q / noise).topk(children).indices == own[:, None]).any(-1).float().mean())
            )
        for rule, found in chances.items():
            values = torch.tensor(found)
            yield {
                "temperature": temperature, "children": children, "rule": rule, "pairs": len(found),
                "chance": float(values.mean()), "error": float(values.std()) / sqrt(len(found)),
            }  # fmt: skip


def drawn_anew(p: Tensor, q: Tensor, children: int) -> float:
    """Each drawn from the same q; after a rejection p becomes the residual norm(max(p - q, 0))."""
    rejected = 1.0
    for _ in range(children):
        left = (p - q).clamp(min=0)
        mass = float(left.sum())
        rejected *= mass
        if mass <= 0:
            break
        p = left / mass
    return 1 - rejected


def without_replacement(p: Tensor, q: Tensor, draws: Tensor) -> float:
    """The mean over draws [D, k], each k tokens in the order in which they were drawn without replacement."""
    total = 0.0
    for draw in draws.tolist():
        own, rest, rejected = p.clone(), q.clone(), 1.0
        for token in draw:
            chance = min(1.0, float(own[token] / rest[token])) if rest[token] > 0 else 0.0
            rejected *= 1 - chance
            if rejected <= 0:
                break
            own = (own - rest).clamp(min=0)
            own = own / own.sum().clamp(min=1e-30)
            rest[token] = 0
            rest = rest / rest.sum().clamp(min=1e-30)
        total += 1 - rejected
    return total / len(draws)


def likeliest_and_one(p: Tensor, q: Tensor, children: int) -> float:
    """The drawn one is tested first; the target then draws from what is left, and may land on a sibling."""
    top = q.topk(children - 1).indices
    rest = q.clone()
    rest[top] = 0
    if float(rest.sum()) <= 0:
        return float(p[top].sum())
    return float(torch.minimum(p, rest / rest.sum()).sum() + p[top].sum())


def _claims(rows: list[dict[str, Any]], quick: bool) -> list[dict[str, Any]]:
    found = []
    for temperature in TEMPERATURES:
        for children in CHILDREN[1:]:
            same = [row for row in rows if (row["temperature"], row["children"]) == (temperature, children)]
            ours = next(row["chance"] for row in same if row["rule"] == OURS)
            other = max(row["chance"] for row in same if row["rule"] not in (OURS, COUPLED))
            name = f"{OURS} / the best other, temperature {temperature}, {children} children"
            found.append(claim(name, ours / other, "1.0", None if quick else ours >= other))
    return found

"""`python -m bench exactness`: how often low precision writes other words than regular decoding at batch 1.

Contract: greedy, in the pair's dtype; a row's reference is regular decoding of its prompt alone. For every method,
drafter and batch size: the share of identical rows, and for the others the first place of a difference and how far
the target's two best logits lay apart there (a near-tie that rounding decided). Nothing here is a time.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from bass_core import ModelPair, generate, load_pair, packed
from bass_core.request import make_request

from .prompts import mixed
from .report import claim, finish, parser


def main(argv: list[str]) -> None:
    """Compare, print, and write."""
    options = parser("exactness", __doc__ or "")
    options.add_argument("--pair", default="smollm2")
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    options.add_argument("--prompts", type=int, default=16)
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument(
        "--products",
        choices=["chosen", "float32", "bfloat16"],
        default="chosen",
        help="on a CPU: the layout that is chosen (the same sums whatever the number of rows), or one that is not",
    )
    arguments = options.parse_args(argv)
    _choose_products(arguments.products)
    if arguments.quick:
        arguments.batch, arguments.prompts, arguments.max_new_tokens = [1, 2], 2, 12
    pair = load_pair(arguments.pair, device=arguments.device, dtype=arguments.dtype)
    prompts, tokens = mixed(arguments.prompts), arguments.max_new_tokens
    alone = [_texts(pair, [prompt], tokens, method="regular")[0] for prompt in prompts]
    results: list[dict[str, Any]] = []
    for batch in arguments.batch:
        for name, ways in _arms(pair).items():
            if name == "speculative" and batch > min(arguments.batch):
                continue  # one sequence at a time whatever the batch
            results.append({"batch": batch, "arm": name, **_compare(pair, prompts, alone, batch, tokens, ways)})
    claims = [
        claim(
            f"{row['arm']}, batch {row['batch']}, {arguments.products} products: identical rows",
            row["identical"],
            "1.0",
            row["identical"] == 1,
        )
        for row in results
    ]
    finish("exactness", arguments, pair.device, results, claims)


def _choose_products(name: str) -> None:
    """Go without FBGEMM's float16 layout, which sums each row alike however many there are."""
    if name != "chosen":
        dtype = getattr(torch, name)
        packed.matmul_dtype = lambda weights: dtype
        packed._pack_halves = lambda weight, bias: None


def _arms(pair: ModelPair) -> dict[str, dict[str, Any]]:
    arms = {"regular": {"method": "regular"}, "speculative": {"method": "speculative"}}
    arms["bass"] = {"method": "bass"}
    arms["bass, prompt lookup"] = {"method": "bass", "drafter": "prompt_lookup"}
    return arms


def _texts(pair: ModelPair, prompts: list[str], tokens: int, **ways: Any) -> list[list[int]]:
    out = generate(pair, prompts, max_new_tokens=tokens, **ways)
    return [sequence.token_ids for sequence in out.sequences]


def _compare(
    pair: ModelPair, prompts: list[str], alone: list[list[int]], batch: int, tokens: int, ways: dict[str, Any]
) -> dict[str, Any]:
    places: list[int] = []
    margins: list[float] = []
    for start in range(0, len(prompts), batch):
        part = slice(start, start + batch)
        together = _texts(pair, prompts[part], tokens, **ways)
        for prompt, ours, theirs in zip(prompts[part], together, alone[part], strict=True):
            if ours != theirs:
                places.append(_first_difference(ours, theirs))
                margins.append(_margin(pair, prompt, theirs[: places[-1]]))
    return {
        "rows": len(prompts),
        "identical": 1 - len(places) / len(prompts),
        "first difference at": median(places) if places else None,
        "largest margin": max(margins) if margins else None,
    }


def _first_difference(ours: list[int], theirs: list[int]) -> int:
    pairs = zip(ours, theirs, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def _margin(pair: ModelPair, prompt: str, written: list[int]) -> float:
    """How far the two best logits lie apart after the common text."""
    ids = [*make_request(pair, prompt).prompts[0], *written]
    cache = pair.target_step.new_cache(1, len(ids))
    logits = pair.target_step.forward(
        torch.tensor([ids], device=pair.device), cache, [0], take=[len(ids) - 1]
    ).float()
    best = logits[0].topk(2).values
    return float(best[0] - best[1])

"""`python -m bench budget`: trees and the planner beside chains and regular decoding.

Contract: two measurements on the committed prompts and HumanEval's, all arms of a batch interleaved prompt by
prompt. "nodes": tokens a row-round of trees of a fixed number of drafts, and of chains, with the same drafter,
greedy: they depend on no clock. "lanes": the lanes' own time a token of regular decoding, of the chain under
draft_length="cost-aware" and of draft_length="budget", with the pair's own drafter, greedy and sampled; ratios of
sums over all prompts. `spread` is that of the ratio over the repeats. The rewriting prompt is the page's preset.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bass_core import FixedNodes, Generation, ModelPair, SamplingParams, generate, load_pair
from distill.evaluate import human_eval_prompts
from distill.prompts import evaluation_prompts

from ..prompts import REPEAT
from ..report.report import claim, document, parser, show, table

REGULAR, CHAIN, BUDGET = "regular", "cost-aware", "budget"
CHAINS, TREES = (1, 2, 3, 4, 6, 8), (2, 4, 8, 12, 16, 24)
# Tokens a row-round over the best chain's: trees of 12 drafts in all, and the planner's own choice.
FIXED_BARS, OWN_BAR = {1: 1.25, 4: 1.10}, 1.08
# Speed over regular decoding, greedy; and whatever the batch, the temperature and the prompts.
SPEED_BARS, LEAST = {1: 1.5, 2: 1.3, 4: 1.12}, 0.97
COPY_BARS = {1: 4.0, 4: 2.5}


@dataclass
class _Sum:
    """What an arm's calls came to."""

    ms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    row_rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, out: Generation, repeat: int) -> None:
        """Note a call; the first tokens come with the prefill and count in neither."""
        metrics, rows = out.metrics, len(out.sequences)
        decoded = metrics.new_tokens - rows
        self.ms += [0.0] * (repeat + 1 - len(self.ms))
        self.tokens += [0] * (repeat + 1 - len(self.tokens))
        self.ms[repeat] += (metrics.ms_per_token or 0.0) * decoded / rows
        self.tokens[repeat] += decoded
        self.drafted, self.accepted = self.drafted + metrics.drafted, self.accepted + metrics.accepted
        self.row_rounds += decoded - metrics.accepted

    @property
    def per_round(self) -> float:
        return sum(self.tokens) / max(self.row_rounds, 1)

    def speeds(self) -> list[float]:
        """Tokens a ms of each repeat."""
        return [tokens / ms for tokens, ms in zip(self.tokens, self.ms, strict=True)]


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("budget", __doc__ or "")
    options.add_argument("--pair", default="smollm2")
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    options.add_argument("--prompts", type=int, default=32, help="of each set, spread over it")
    options.add_argument("--max-new-tokens", type=int, default=64)
    options.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    options.add_argument("--repeats", type=int, default=1)
    part = options.add_mutually_exclusive_group()
    part.add_argument("--no-nodes", action="store_true", help="lanes alone")
    part.add_argument("--no-lanes", action="store_true", help="trees of a fixed number of drafts alone")
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.batch, arguments.prompts, arguments.max_new_tokens = [1, 2], 2, 12
    pair = load_pair(arguments.pair, device=arguments.device, dtype=arguments.dtype)
    results: list[dict[str, Any]] = []
    if not arguments.no_nodes:
        results += list(_nodes(pair, arguments))
    if not arguments.no_lanes:
        results += list(_lanes(pair, arguments))
    made = document("budget", arguments, pair.device, results, _claims(results, arguments.quick))
    print(table(results))
    show(made, arguments)


def prompt_sets(count: int) -> dict[str, list[str]]:
    """So many prompts of each set, spread over the committed ones, the first of HumanEval's."""
    committed = [prompt["text"] for prompt in evaluation_prompts()]
    return {
        "committed": committed[:: max(1, len(committed) // count)][:count],
        "HumanEval": human_eval_prompts(count),
    }


def _measured(
    pair: ModelPair, prompts: list[str], batch: int, arms: dict[str, Any], arguments: Any, **same: Any
) -> dict[str, _Sum]:
    """All prompts in batches, each batch by every arm in turn; a last batch that is not full is left out."""
    sums = {name: _Sum() for name in arms}
    groups = [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]
    for repeat in range(arguments.repeats):
        for group in groups or [(prompts * batch)[:batch]]:
            for name, arm in arms.items():
                options = {"max_new_tokens": arguments.max_new_tokens, "seed": arguments.seed, **same, **arm}
                sums[name].add(generate(pair, group, **options), repeat)
    return sums


def _nodes(pair: ModelPair, arguments: Any) -> Iterator[dict[str, Any]]:
    """Tokens a row-round by drafts a round, in all rows together, greedy, with the draft alone."""
    chains, trees = ((2,), (4,)) if arguments.quick else (CHAINS, TREES)
    for batch in (one for one in arguments.batch if one in FIXED_BARS or arguments.quick):
        arms: dict[str, Any] = {f"chain {n}": {"draft_length": n} for n in chains}
        arms |= {f"tree {n}": {"draft_length": FixedNodes(n)} for n in trees}
        prompts = prompt_sets(arguments.prompts)["committed"]
        for name, made in _measured(pair, prompts, batch, arms, arguments, drafter="model").items():
            drafts = made.drafted / max(made.row_rounds, 1)
            yield {
                "part": "nodes", "prompts": "committed", "batch": batch, "temperature": 0.0, "arm": name,
                "tokens/row-round": made.per_round, "drafts/row-round": drafts,
            }  # fmt: skip


def _lanes(pair: ModelPair, arguments: Any) -> Iterator[dict[str, Any]]:
    """Lane time a token."""
    arms: dict[str, Any] = {
        REGULAR: {"method": "regular"},
        CHAIN: {"draft_length": "cost-aware"},
        BUDGET: {"draft_length": "budget"},
    }
    sets = prompt_sets(arguments.prompts) | {"rewriting": [REPEAT]}
    for batch in arguments.batch:
        for arm in arms.values():
            generate(pair, [REPEAT] * batch, max_new_tokens=8, **arm)
        for prompts, texts in sets.items():
            for temperature in arguments.temperatures:
                sampling = SamplingParams(temperature)
                sums = _measured(pair, texts, batch, arms, arguments, sampling=sampling)
                regular = sums[REGULAR].speeds()
                for name, made in sums.items():
                    ratios = [own / plain for own, plain in zip(made.speeds(), regular, strict=True)]
                    yield {
                        "part": "lanes", "prompts": prompts, "batch": batch, "temperature": temperature,
                        "arm": name, "ms/token": batch * sum(made.ms) / max(sum(made.tokens), 1),
                        "over regular": sum(ratios) / len(ratios), "spread": max(ratios) - min(ratios),
                        "tokens/row-round": made.per_round,
                        "drafts/row-round": made.drafted / max(made.row_rounds, 1),
                        "accepted/drafted": made.accepted / made.drafted if made.drafted else None,
                    }  # fmt: skip


def _claims(rows: list[dict[str, Any]], quick: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def add(name: str, value: float, bar: float) -> None:
        found.append(claim(name, value, f"at least {bar:g}", None if quick else value >= bar))

    nodes = [row for row in rows if row["part"] == "nodes"]
    for batch, bar in FIXED_BARS.items():
        own = {row["arm"]: row["tokens/row-round"] for row in nodes if row["batch"] == batch}
        chains = [value for arm, value in own.items() if arm.startswith("chain")]
        if chains and "tree 12" in own:
            add(f"tree of 12 / best chain, tokens a row-round, batch {batch}", own["tree 12"] / max(chains), bar)
    lanes = [row for row in rows if row["part"] == "lanes"]
    for row in (row for row in lanes if row["arm"] == BUDGET):
        where = f"{row['prompts']}, batch {row['batch']}, temperature {row['temperature']:g}"
        chain = next(
            other
            for other in lanes
            if other["arm"] == CHAIN and all(other[key] == row[key] for key in ("prompts", "batch", "temperature"))
        )
        greedy, copies = row["temperature"] == 0, row["prompts"] == "rewriting"
        if greedy and not copies and row["batch"] in SPEED_BARS:
            add(
                f"tokens a row-round over the chain's, {where}",
                row["tokens/row-round"] / chain["tokens/row-round"],
                OWN_BAR,
            )
            add(f"speed over regular, {where}", row["over regular"], SPEED_BARS[row["batch"]])
        elif greedy and copies and row["batch"] in COPY_BARS:
            add(f"speed over regular, {where}", row["over regular"], COPY_BARS[row["batch"]])
        else:
            add(f"speed over regular, {where}", row["over regular"], LEAST)
    return found

"""`python -m bench draft-length`: Algorithm 1, fixed lengths and the cost-aware policy beside regular decoding.

Contract: different prompts, the same number of new tokens for every arm (no early end), arms interleaved, medians
of the lanes' own ms per token. The cost-aware policy's table is measured before, once for a pair and machine.
`spread` is (highest - lowest) / median of an arm's repeats: a difference below it says nothing.
"""

from __future__ import annotations

from typing import Any

from bass_core import Generation, ModelPair, SamplingParams, generate, load_pair

from .prompts import mixed
from .report import claim, finish, median, parser

FIXED = (1, 2, 3, 4, 6, 8, 10)
ALGORITHM_1, COST_AWARE, REGULAR = "Algorithm 1", "cost-aware", "regular"
# Never slower than these allow, or than the spread of the repeats where that is larger.
OVER_FIXED, OVER_REGULAR = 0.03, 0.05


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("draft-length", __doc__ or "")
    options.add_argument("--pair", default="smollm2")
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8])
    options.add_argument("--max-new-tokens", type=int, default=48)
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--repeats", type=int, default=3)
    arguments = options.parse_args(argv)
    fixed: tuple[int, ...] = FIXED
    if arguments.quick:
        arguments.batch, arguments.max_new_tokens, arguments.repeats, fixed = [1, 2], 12, 1, (2,)
    pair = load_pair(arguments.pair, device=arguments.device, dtype=arguments.dtype)
    results: list[dict[str, Any]] = []
    claims: list[dict[str, Any]] = []
    for batch in arguments.batch:
        runs = _runs(pair, batch, fixed, arguments)
        rows = [_row(batch, name, made) for name, made in runs.items()]
        results += rows
        claims += _claims(batch, {row["arm"]: row for row in rows}, fixed, arguments.quick)
        if not arguments.temperature:
            texts = {tuple(tuple(s.token_ids) for s in run.sequences) for made in runs.values() for run in made}
            claims.append(claim(f"different texts, batch {batch}", len(texts), "1", len(texts) == 1))
    finish("draft-length", arguments, pair.device, results, claims)


def _runs(pair: ModelPair, batch: int, fixed: tuple[int, ...], arguments: Any) -> dict[str, list[Generation]]:
    """All runs of each arm, arm after arm in every repeat, after one unmeasured repeat."""
    same: dict[str, Any] = {
        "max_new_tokens": arguments.max_new_tokens,
        "sampling": SamplingParams(temperature=arguments.temperature),
        "seed": arguments.seed,
        "eos_token_id": None,
    }
    lengths: dict[str, Any] = {ALGORITHM_1: "bass", COST_AWARE: "cost-aware", **{f"fixed {n}": n for n in fixed}}
    runs: dict[str, list[Generation]] = {name: [] for name in (REGULAR, *lengths)}
    for repeat in range(arguments.repeats + 1):
        for name, made in runs.items():
            method = {"method": "regular"} if name == REGULAR else {"draft_length": lengths[name]}
            run = generate(pair, mixed(batch), **method, **same)
            if repeat:
                made.append(run)
    return runs


def _row(batch: int, name: str, runs: list[Generation]) -> dict[str, Any]:
    times = [run.metrics.ms_per_token or 0.0 for run in runs]
    last = runs[-1].metrics
    return {
        "batch": batch,
        "arm": name,
        "ms/token": median(times),
        "spread": (max(times) - min(times)) / median(times),
        "rounds": last.rounds,
        "acceptance": last.acceptance_rate,
        "tokens/round": last.mean_acceptance_length,
    }


def _claims(
    batch: int, rows: dict[str, dict[str, Any]], fixed: tuple[int, ...], quick: bool
) -> list[dict[str, Any]]:
    best = min((rows[f"fixed {n}"] for n in fixed), key=lambda row: float(row["ms/token"]))
    found = []
    for other, allowed in ((best, OVER_FIXED), (rows[REGULAR], OVER_REGULAR)):
        spread = max(float(rows[COST_AWARE]["spread"]), float(other["spread"]))
        ratio = rows[COST_AWARE]["ms/token"] / other["ms/token"]
        bar = 1 + max(allowed, spread)
        name = f"{COST_AWARE} / {other['arm']}, batch {batch}"
        found.append(claim(name, ratio, f"at most {bar:.2f}", None if quick else ratio <= bar))
    return found

"""`python -m bench ragged`: the cost of rows of different lengths, and the cost of keeping them equal.

Contract, first part: the attention backends over the same caches, with rows of equal and of very different
lengths: time per call, and live keys and values read in GB/s. A backend that can't run here is named. Second part:
each row keeps its own accepted drafts, against a batch that stops at its first rejection ("common_stop"). Drafts
are accepted with a known probability a instead of tested. Tokens per row and round are counted and compared with
(1 - a^(l+1)) / (1 - a) and, for the common stop, the same with a^batch in place of a (Leviathan et al. 2211.17192,
equation 1). Rounds that a row's end cut short are left out.
"""

from __future__ import annotations

import math
import statistics
from functools import partial
from typing import Any

import plotly.graph_objects as go
import torch

from bass_core import ModelPair, load_pair
from bass_core.decode.request import make_request
from bass_core.lanes.lane import Lane
from kernels.backends import BACKENDS, why_backend_unavailable
from kernels.plan import AttentionPlan

from ..prompts import mixed
from ..report.figures import COLOURS, Report, figure
from ..report.report import claim, document, interleaved, median, parser, show, table, with_report

LENGTH = 7
OWN, COMMON = "each row its own", "common stop"
# Standard errors that a mean may be off its formula; by chance a normal mean is further off once in 16,000 times.
ERRORS = 4.0

Row = dict[str, Any]


def main(argv: list[str]) -> None:
    """Measure, print, draw, and write."""
    options = with_report(parser("ragged", __doc__ or ""))
    options.add_argument("--pair", default="smollm2")
    options.add_argument("--draft", help="a folder or Hub id, in place of the pair's own")
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--drafter", default="model", help="one that always drafts as much as it is asked for")
    options.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8])
    options.add_argument("--acceptance", type=float, default=0.8)
    options.add_argument("--max-new-tokens", type=int, default=80)
    options.add_argument("--repeats", type=int, default=9, help="of each call of attention")
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.batch, arguments.max_new_tokens, arguments.repeats = [2], 32, 1
    pair = load_pair(arguments.pair, draft=arguments.draft, device=arguments.device, dtype=arguments.dtype)
    attention = _attention(pair, arguments.seed, arguments.repeats, arguments.quick)
    stops: list[Row] = []
    claims: list[dict[str, Any]] = []
    for batch in arguments.batch:
        for policy in (OWN, COMMON):
            row = _stopping(pair, policy, batch, arguments)
            stops.append(row)
            off = abs(row["tokens/round"] - row["formula"]) / row["standard error"]
            name = f"standard errors off the formula, {policy}, batch {batch}"
            claims.append(claim(name, off, f"at most {ERRORS:.0f}", off <= ERRORS))
    made = document("ragged", arguments, pair.device, attention + stops, claims)
    print(table(attention), table(stops), sep="\n\n")
    if arguments.report:
        drawn = {"attention": _bars(attention), "stop": _curves(stops, arguments.acceptance)}
        files = Report(made, (__doc__ or "").split("\n\n", 1)[1], drawn).write(arguments.report)
        made["files"] = [path.name for path in files]
    show(made, arguments)


def _attention(pair: ModelPair, seed: int, repeats: int, quick: bool) -> list[Row]:
    """Every backend over rows of equal and of different lengths, for one token per row and for a verification."""
    config = pair.target.config.get_text_config()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    generator = torch.Generator().manual_seed(seed)
    most = 64 if quick else 2048
    cases = {
        "alike": [most // 4] * 8,
        "diverging": (most * 2 ** (-5 * torch.rand(8, generator=generator))).int().tolist(),
    }
    rows = []
    for case, lengths in cases.items():
        for queries in (1, LENGTH + 1):
            shape = (2, 8, kv_heads, max(lengths) + queries, dim)
            key, value = torch.randn(shape, generator=generator).to(pair.device, pair.dtype)
            query = torch.randn(8, heads, queries, dim, generator=generator).to(pair.device, pair.dtype)
            live, token = sum(lengths) + 8 * queries, 2 * kv_heads * dim * pair.dtype.itemsize
            times = _times(pair.device, lengths, (query, key, value), repeats)
            rows += [
                {"attention": name, "lengths": case, "queries": queries, "ms": median(values) if values else None,
                 "GB/s": live * token / median(values) / 1e6 if values else None,
                 "note": "" if values else why_backend_unavailable(name, pair.device)}
                for name, values in times.items()
            ]  # fmt: skip
    return rows


def _times(
    device: torch.device, lengths: list[int], tensors: tuple[Any, ...], repeats: int
) -> dict[str, list[float]]:
    """Milliseconds of each backend's calls; none where it can't run (Triton's interpreter is not worth timing)."""
    step = AttentionPlan(torch.tensor(lengths, device=device), lengths, tensors[0].shape[2])
    scaling = tensors[0].shape[-1] ** -0.5
    names = [
        name
        for name in BACKENDS
        if why_backend_unavailable(name, device) is None and (name != "fused" or device.type == "cuda")
    ]

    def call(name: str) -> None:
        BACKENDS[name](*tensors, step, scaling=scaling)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with torch.inference_mode():
        times = interleaved({name: partial(call, name) for name in names}, repeats)
    return {name: times.get(name, []) for name in BACKENDS}


def _stopping(pair: ModelPair, policy: str, batch: int, arguments: Any) -> Row:
    """One run under a policy: mean tokens per row in its uncut rounds, and ms per token."""
    a = arguments.acceptance
    request = make_request(
        pair, mixed(batch), max_new_tokens=arguments.max_new_tokens, eos_token_id=None, seed=arguments.seed,
        draft_length=LENGTH, verification="auto" if policy == OWN else "common_stop", drafter=arguments.drafter,
        synthetic_acceptance=a,
    )  # fmt: skip
    lane = Lane(pair, request, "bass")
    written: list[float] = []
    while not lane.finished:
        round_ = lane.step()
        if (
            round_.kind != "verify"
            or len(round_.rows) < batch
            or any(len(row.drafted) < LENGTH for row in round_.rows)
        ):
            continue
        counts = [float(row.accepted + 1) for row in round_.rows]
        # Under a common stop all rows of a round have the same count.
        written += counts if policy == OWN else [counts[0]]
    metrics = lane.metrics()
    return {
        "policy": policy,
        "batch": batch,
        "tokens/round": statistics.mean(written),
        "formula": tokens_a_round(a if policy == OWN else a**batch, LENGTH),
        "standard error": _deviation(a if policy == OWN else a**batch, LENGTH) / math.sqrt(len(written)),
        "rounds": metrics.rounds,
        "ms/token": metrics.ms_per_token,
    }


def tokens_a_round(a: float, length: int) -> float:
    """Expected tokens of a round with `length` drafts, each accepted with probability a, bonus token included."""
    return float(length + 1) if a == 1 else (1 - a ** (length + 1)) / (1 - a)


def _deviation(a: float, length: int) -> float:
    """The standard deviation of a round's tokens."""
    chances = [a**n * (1 - a) for n in range(length)] + [a**length]
    mean = tokens_a_round(a, length)
    return math.sqrt(sum(chance * (n + 1 - mean) ** 2 for n, chance in enumerate(chances)))


def _bars(rows: list[Row]) -> go.Figure:
    drawn = figure("Attention over eight rows", "lengths, query tokens a row", "ms a call", barmode="group")
    for name in dict.fromkeys(row["attention"] for row in rows if row["ms"]):
        mine = [row for row in rows if row["attention"] == name]
        drawn.add_bar(
            x=[f"{row['lengths']}, {row['queries']}" for row in mine], y=[row["ms"] for row in mine], name=name
        )
    return drawn


def _curves(rows: list[Row], a: float) -> go.Figure:
    drawn = figure(f"Tokens a row and round, acceptance {a}, length {LENGTH}", "batch", "tokens", xaxis_type="log")
    for policy, colour in ((OWN, COLOURS["bass"]), (COMMON, COLOURS["speculative"])):
        mine = [row for row in rows if row["policy"] == policy]
        x = [row["batch"] for row in mine]
        drawn.add_scatter(
            x=x, y=[row["tokens/round"] for row in mine], name=f"{policy}, counted", mode="markers",
            marker={"color": colour, "size": 10},
            error_y={"array": [2 * row["standard error"] for row in mine]},
        )  # fmt: skip
        drawn.add_scatter(
            x=x, y=[row["formula"] for row in mine], name=f"{policy}, formula", mode="lines", line_color=colour
        )
    batches = sorted({row["batch"] for row in rows})
    drawn.update_xaxes(tickvals=batches, ticktext=[str(batch) for batch in batches])
    return drawn

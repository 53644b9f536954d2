"""`python -m bench passk`: HumanEval within a time budget: regular, single-sequence speculation and BASS.

All arms get the same problems, prompts and random numbers. Each arm is a lane with its own clock, which starts
with the prefill; arms take turns problem by problem. A sequence is finished when it writes the fence that closes
its code block (explained in bench/passk/problems.py) or the model's end of text. The sequence counts for a budget
if it was finished within the budget.

Pass@First: the finished sequence with the highest mean log-probability passes (under the target at temperature 1,
one forward outside the clocks).
Pass@All: any finished sequence passes.
Pass@Finished: the share of finished sequences that pass.

Set budgets with --budget-ms. By default they are fractions of the time that regular decoding takes for one
sequence on this machine (measured first, median over a few problems). Generated programs run only with --execute,
in bench/passk/sandbox.py; without it the pass figures are null.

By default a sample of the problems runs. To run all problems, resumable (takes hours on two cores): python -m
    bench passk --problems 164 --batch 1 4 8 16 --max-new-tokens 256 --samples FILE.jsonl --execute
"""

from __future__ import annotations

import argparse
import os

import plotly.graph_objects as go

from ..report.figures import COLOURS, draw, figure
from ..report.report import Row, claim, document, draft_length, load, number, parser, show, table, whole, writable
from .problems import canonical_claims, chosen, judge
from .run import Samples, collect
from .sandbox import protection
from .score import SPECULATIVE, Record, differing, row

REGULAR, BASS = "regular", "bass"
# Default budgets, as fractions of the time that regular decoding of one sequence takes.
FRACTIONS = (0.5, 0.75, 1.0, 2.0, 3.0)
DASHES = ("dot", "dash", "solid", "dashdot", "longdash", "longdashdot")


def main(argv: list[str]) -> None:
    """Generate, judge, score and print."""
    arguments = _options().parse_args(argv)
    if arguments.quick:
        arguments.problems, arguments.batch, arguments.max_new_tokens = 2, [1, 2], 16
    arguments.batch = sorted(set(arguments.batch))
    if arguments.execute and os.name != "posix":
        raise SystemExit("--execute needs the sandbox, which exists only for Linux and macOS: leave it out here.")
    problems = chosen(arguments.problems)
    protected = protection() if arguments.execute else None
    if protected:
        print("sandbox: " + "; ".join(f"{target}: {layer}" for target, layer in protected.items()))
    pair = load(arguments)
    samples = Samples(arguments.samples)
    records, budgets = collect(pair, problems, samples, FRACTIONS, arguments)
    claims: list[Row] = []
    if arguments.execute:
        judge(pair, problems, records)
        claims += canonical_claims(problems)
    lines = [
        row(records, method, n, budget, arguments.execute)
        for budget in budgets
        for n in arguments.batch
        for method in (REGULAR, SPECULATIVE, BASS)
        if method != BASS or n > 1
    ]
    wrong, compared = differing(records, arguments.batch)
    if compared:
        claims.append(claim(f"regular texts of {compared} that differ with the batch", wrong, "0", wrong == 0))
    claims += _claims(records, lines, budgets, arguments)
    report = document("passk", arguments, pair, lines, claims)
    report |= {"settings": samples.settings, "sandbox": protected}
    print(table(lines))
    if arguments.report:
        report["files"] = draw("passk", arguments.report, {"finished": figure_of(lines)})
    show(report, arguments)


def _options() -> argparse.ArgumentParser:
    options = parser("passk", __doc__ or "", "pair", "device", "dtype", figures=True)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument(
        "--problems", type=whole(1, 164), default=8, help="number of problems, spread evenly over the 164"
    )
    options.add_argument("--batch", type=whole(), nargs="+", default=[1, 4, 8], help="sequences per problem")
    options.add_argument("--max-new-tokens", type=whole(), default=96)
    options.add_argument("--temperature", type=number(), default=0.2)
    options.add_argument("--top-p", type=number(0, 1, above=True), default=0.95)
    options.add_argument("--draft-length", type=draft_length, default="bass", help="a name or a number")
    options.add_argument(
        "--budget-ms", type=number(above=True), nargs="+", help="budgets to use instead of measured ones"
    )
    options.add_argument(
        "--samples", type=writable, metavar="FILE", help="keep the texts in FILE, and continue from it"
    )
    options.add_argument("--execute", action="store_true", help="run the generated programs, in a sandbox")
    return options


def figure_of(lines: list[Row]) -> go.Figure:
    """Draw finished sequences per problem against the budget, a line for each method and n."""
    chart = figure("Finished within the budget", "budget, ms of the lane's clock", "finished sequences a problem")
    sizes = sorted({line["n"] for line in lines})
    for method, n in dict.fromkeys((line["method"], line["n"]) for line in lines):
        mine = [line for line in lines if (line["method"], line["n"]) == (method, n)]
        style = {"color": COLOURS[method], "dash": DASHES[sizes.index(n) % len(DASHES)]}
        chart.add_scatter(
            x=[line["budget ms"] for line in mine], y=[line["finished"] / line["problems"] for line in mine],
            name=f"{method}, {n} a problem", mode="lines+markers", line=style,
        )  # fmt: skip
    return chart


def _claims(
    records: list[Record], lines: list[Row], budgets: list[float], arguments: argparse.Namespace
) -> list[Row]:
    """Return the paper's comparison at the middle budget: BASS at the largest batch and the other methods."""
    budget, n = round(sorted(budgets)[len(budgets) // 2]), arguments.batch[-1]
    at = {(line["method"], line["n"]): line for line in lines if line["budget ms"] == budget}
    if n == 1:
        return []
    verdicts = []
    ours = at[BASS, n]
    for method in (REGULAR, SPECULATIVE):
        more = (ours["finished"] - at[method, n]["finished"]) / len(records)
        name = f"finished within {budget} ms, BASS {n} more than {method} {n}, a problem"
        verdicts.append(claim(name, more, "above 0", None if arguments.quick else more > 0))
    if arguments.execute:
        single = at[SPECULATIVE, arguments.batch[0]]
        more = ours["Pass@All"] - single["Pass@All"]
        apart = ours["95 % all"][0] > single["95 % all"][1]
        name = f"Pass@All within {budget} ms, BASS {n} more than speculative {single['n']}"
        verdicts.append(claim(name, more, "above 0, intervals apart", None if arguments.quick else apart))
    return verdicts

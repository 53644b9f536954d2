"""`python -m bench simulate`: predictions for hardware, models and batch sizes that this machine can't run.

Every row names its kind. "predicted" figures come from step times (a measured table, or a datasheet's roofline
with assumed efficiencies) and from rounds simulated with the real policies. "datasheet" figures are the vendor's,
never measured here. "measured and predicted" compares predictions with measurements on this machine. Checks
against formulas involve no timing.

Not simulated: prefills, early ends of text, requests that arrive over time, quantised weights.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from bass_core import ModelPair
from bass_core.predict.hardware import HARDWARE, Assumptions

from ..gpu.context import Context
from ..prompts import mixed
from ..report.report import CPU, Row, document, load, number, parser, show, table, whole
from . import checks, pairs, stored, sweeps, validation

SECTIONS = {
    "checks": "The simulation against exact values",
    "validation": "Measured on this machine, and predicted without the held-out batch and length",
    "h200": "Measured on an H200 (stored in bench/results), and predicted",
    "hardware": "Datasheet numbers, none measured here",
    "batch": "Predicted: the 7.8B and 310M shapes on one GPU",
    "crossover": "Predicted: the batch at which a policy becomes slower than regular decoding; n/a: none up to 64",
    "window": "Predicted: the 7.8B target as its own draft over a window, and the 310M draft; best fixed lengths",
    "pairs": "Predicted: speed-up of pairs with EAGLE-3 heads on the cards that hold them; best fixed lengths",
}


def main(argv: list[str]) -> None:
    """Check, measure, predict, print and write."""
    arguments = _arguments(argv)
    assumed = Assumptions(**{name: getattr(arguments, name) for name in vars(Assumptions())})
    results, claims = checks.run(arguments.seed, arguments.quick)
    of: ModelPair | torch.device = CPU
    if not arguments.predict_only:
        tiny = Context("simulate", CPU, emit=lambda row: None, seed=arguments.seed)
        of = pair = tiny.small_pair() if arguments.quick else load(arguments)
        most = max(arguments.batch)
        prompts: list[Any] = mixed(most) if pair.tokenizer is not None else tiny.prompts(most, 8, 24, pair.vocab)
        measured, judged = validation.run(pair, prompts, arguments)
        results, claims = results + measured, claims + judged
    batches = sweeps.batches(arguments, assumed)
    results += [*stored.compared(assumed), *_datasheets(), *batches, *sweeps.crossovers(batches)]
    results += [*sweeps.windows(arguments, assumed), *pairs.fitting(arguments, assumed)]
    report = document("simulate", arguments, of, results, claims)
    report["assumptions"] = vars(assumed) | {"acceptance": arguments.acceptance}
    for section, title in SECTIONS.items():
        rows = [row for row in report["results"] if row["section"] == section]
        if rows:
            heads = [head for head in rows[0] if head not in ("kind", "section")]
            print(f"\n{title}\n{table([{head: row[head] for head in heads} for row in rows])}")
    print(f"\nAssumed: {report['assumptions']}\n")
    show(report, arguments)


def _arguments(argv: list[str]) -> argparse.Namespace:
    options = parser("simulate", (__doc__ or "") + "--quick measures a tiny pair.", "pair", "device", "dtype")
    options.add_argument("--batch", type=whole(), nargs="+", default=[1, 2, 4, 8], help="measured batch sizes")
    options.add_argument("--held-out", type=whole(), default=4, help="the batch size left out of the cost table")
    options.add_argument("--max-new-tokens", type=whole(), default=32)
    options.add_argument("--repeats", type=whole(), default=4)
    options.add_argument("--predict-only", action="store_true", help="measure nothing")
    options.add_argument(
        "--acceptance", type=number(0, 1), default=0.8, help="assumed i.i.d. acceptance in the sweeps"
    )
    options.add_argument("--context", type=whole(), default=512, help="assumed mean of cached tokens per row")
    for name, value in vars(Assumptions()).items():
        kind, text = number(above=not name.endswith("_us")), "assumed: see Assumptions"
        options.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value, help=text)
    arguments = options.parse_args(argv)
    if arguments.held_out not in arguments.batch or len(arguments.batch) < 2:
        options.error("--held-out must be one of at least two sizes in --batch: the others predict it")
    if arguments.quick:
        arguments.batch, arguments.held_out, arguments.max_new_tokens, arguments.repeats = [1, 2, 4], 2, 16, 1
    return arguments


def _datasheets() -> list[Row]:
    return [
        {"kind": "datasheet", "section": "hardware", "hardware": gpu.name, "dense bf16 TFLOP/s": gpu.flops / 1e12,
         "memory GB/s": gpu.bandwidth, "memory GB": gpu.memory, "NVLink GB/s": gpu.nvlink, "source": gpu.source}
        for gpu in HARDWARE.values()
    ]  # fmt: skip

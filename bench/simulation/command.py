"""`python -m bench simulate`: predictions for hardware, models and batch sizes that this machine can't run.

Contract: every row names its kind. "predicted" comes from step times (a measured table, or a datasheet's roofline
with assumed efficiencies) and from rounds simulated with the real policies; "datasheet" is a vendor's number,
never measured here; "measured and predicted" compares a prediction with what this machine did. Checks against
formulas involve no timing. Parts: bench/simulation, and bass_core/prediction.
Non-goals: prefills, early ends of text, requests that arrive over time, quantised weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bass_core import ModelPair, load_pair
from bass_core.length.costs import CostTable
from bass_core.predict.hardware import HARDWARE, Assumptions

from ..gpu.context import Context
from ..prompts import mixed
from ..report.report import document, parser, show, table, with_report
from . import checks, drawing, paper, sweeps, validation

SECTIONS = {
    "checks": "The simulation against what is known without it",
    "validation": "Measured on this machine, and predicted without the held-out batch and length",
    "this machine": "Predicted for this machine from its measured table; beyond it the last slope goes on",
    "hardware": "Datasheet numbers, none of them measured here",
    "batch": "Predicted: the 7.8B and 310M shapes on one GPU",
    "crossover": "Predicted: the batch from which on a policy loses against regular decoding; n/a: none up to 64",
    "context": "Predicted: the same, batch 8, by cached tokens a row",
    "window": "Predicted: the 7.8B target as its own draft over a window, and the 310M draft; best fixed lengths",
    "gpus": "Predicted: the 70B and 1B shapes, batch 8, tensor parallel",
    "paper": "Predicted: the acceptance that the paper's figures imply on an A100, batch 8, Algorithm 1",
}


def main(argv: list[str]) -> None:
    """Check, measure, predict, print, and write."""
    arguments = _options().parse_args(argv)
    if arguments.held_out not in arguments.batch or len(arguments.batch) < 2:
        raise SystemExit("--held-out must be one of at least two sizes in --batch: the others predict it.")
    if arguments.quick:
        arguments.batch, arguments.held_out, arguments.max_new_tokens, arguments.repeats = [1, 2, 4], 2, 16, 1
    assumed = Assumptions(**{name: getattr(arguments, name) for name in vars(Assumptions())})
    results, claims = checks.run(arguments.seed, arguments.quick)
    device, weights = torch.device("cpu"), None
    if not arguments.predict_only:
        pair = _pair(arguments)
        device, weights = pair.device, Path(str(pair.target.name_or_path)) / "model.safetensors"
        measured = validation.run(pair, _prompts(pair, max(arguments.batch), arguments.seed), arguments)
        results += [*measured.rows, *_this_machine(measured, arguments)]
        claims += measured.claims
    results += [*_datasheets(), *sweeps.batches(arguments, assumed)]
    results += sweeps.crossovers([row for row in results if row["section"] in ("this machine", "batch")])
    results += [*sweeps.contexts(arguments, assumed), *sweeps.windows(arguments, assumed)]
    results += sweeps.gpus(arguments, assumed)
    rows, words = paper.run(assumed, arguments.context, arguments.seed, arguments.quick)
    made = document("simulate", arguments, device, results + rows, claims, weights)
    made |= {"assumptions": vars(assumed) | {"acceptance": arguments.acceptance}, "paper": words}
    _print(made)
    if arguments.report:
        drawing.report(made).write(arguments.report)
    show(made, arguments)


def _options() -> argparse.ArgumentParser:
    options = with_report(parser("simulate", __doc__ or ""))
    options.add_argument("--pair", default="smollm2", help="measured here; --quick takes a tiny one")
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8], help="sizes that are measured")
    options.add_argument("--held-out", type=int, default=4, help="the size that the table does without")
    options.add_argument("--max-new-tokens", type=int, default=32)
    options.add_argument("--repeats", type=int, default=4)
    options.add_argument("--predict-only", action="store_true", help="measure nothing")
    options.add_argument("--acceptance", type=float, default=0.8, help="assumed, i.i.d., in the sweeps")
    options.add_argument("--context", type=int, default=512, help="assumed mean of cached tokens a row")
    for name, value in vars(Assumptions()).items():
        options.add_argument(
            f"--{name.replace('_', '-')}",
            type=float,
            default=value,
            help="assumed: see Assumptions",
        )
    return options


def _pair(arguments: argparse.Namespace) -> ModelPair:
    """The pair to measure: a tiny one in the quick form."""
    if not arguments.quick:
        return load_pair(arguments.pair, device=arguments.device, dtype=arguments.dtype)
    return _tiny(arguments.seed).small_pair()


def _prompts(pair: ModelPair, count: int, seed: int) -> list[Any]:
    return mixed(count) if pair.tokenizer is not None else _tiny(seed).prompts(count, 8, 24, pair.vocab)


def _tiny(seed: int) -> Context:
    """What makes tiny models and their prompts."""
    return Context("simulate", torch.device("cpu"), emit=lambda row: None, seed=seed)


def _this_machine(measured: validation.Validation, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Predictions for the measured pair, with its measured acceptance, at batch sizes that were not measured."""
    costs: CostTable = measured.table
    rate = float(np.mean(measured.acceptance.rates))
    made = []
    for rows in (1, 8) if arguments.quick else sweeps.BATCHES:
        tokens, trials = arguments.max_new_tokens, 1 if arguments.quick else 8
        found = sweeps.figures(costs, measured.acceptance, rate, rows, tokens, arguments.seed, trials)
        head = {"kind": "predicted", "section": "this machine", "hardware": "this machine", "batch": rows}
        made.append(head | found)
    return made


def _datasheets() -> list[dict[str, Any]]:
    return [
        {
            "kind": "datasheet",
            "section": "hardware",
            "hardware": one.name,
            "dense bf16 TFLOP/s": one.flops / 1e12,
            "memory GB/s": one.bandwidth,
            "memory GB": one.memory,
            "NVLink GB/s": one.nvlink,
            "source": one.source,
        }
        for one in HARDWARE.values()
    ]


def _print(made: dict[str, Any]) -> None:
    """Print a table for each section, and the sentences about the paper."""
    for section, title in SECTIONS.items():
        rows = [row for row in made["results"] if row["section"] == section]
        if rows:
            heads = dict.fromkeys(head for row in rows for head in row if head not in ("kind", "section"))
            print(f"\n{title}\n{table([{head: row.get(head) for head in heads} for row in rows])}")
    print(f"\nAssumed: {made['assumptions']}\n{made['paper']}\n")

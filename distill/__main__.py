"""`python -m distill corpus | train | ablate | evaluate`: make a draft head and measure it.

`corpus`, `train` and `ablate` continue where a killed run stopped. Settings come from config.json (or --config).
Results are written below --work; `--install` copies the head of `train` to drafts/.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bass_core import ModelPair, load_pair
from bass_core.errors import BassError
from bass_core.model.draft_head import load_draft_head

from . import evaluate as measuring
from .ablation import ARMS, ablate, as_markdown
from .corpus import write_corpus
from .duplicates import read_questions
from .settings import CONFIG, Settings, load
from .train import train

DRAFTS = Path(__file__).resolve().parent.parent / "drafts"


def main() -> None:
    """Read the command line and run one command."""
    parser = _parser()
    options = parser.parse_args()
    for name in ("tokens", "steps", "prompts", "max_new_tokens"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be a whole number of at least 1; got {value}.")
    settings = load(options.config)
    if options.command in ("train", "ablate"):
        # If the CPU has bfloat16 products, multiply float32 matrices with them. Sums stay in float32.
        torch.set_float32_matmul_precision("medium")
    work: Path = options.work
    try:
        pair = load_pair(settings.pair, device=options.device, dtype=options.dtype)
        if options.command == "corpus":
            tokens = write_corpus(pair, settings, work / "corpus", options.tokens)
            print(f"{work / 'corpus'} holds {tokens} new tokens.")
        elif options.command == "train":
            _train(pair, _changed(settings, options), options, work)
        elif options.command == "ablate":
            _ablate(pair, _changed(settings, options), options, work)
        else:
            _evaluate(pair, options)
    except BassError as error:
        raise SystemExit(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m distill", description=__doc__)
    parser.add_argument("command", choices=["corpus", "train", "ablate", "evaluate"])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument(
        "--work", type=Path, default=Path("distill-work"), help="folder for the corpus and checkpoints"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="as for load_pair")
    parser.add_argument("--tokens", type=int, default=400_000, help="corpus: total number of answer tokens")
    parser.add_argument("--steps", type=int, default=4000, help="train, ablate: total optimiser steps")
    parser.add_argument("--name", help="folder of this run below --work (train: head, ablate: ablation)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="train, ablate: override a setting of config.json",
    )
    parser.add_argument(
        "--questions",
        type=Path,
        help="train, ablate: leave out conversations that resemble questions of this file (Spec-Bench's form)",
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="ablate: arms to train")
    parser.add_argument("--install", metavar="FOLDER", help="train: copy the head to drafts/FOLDER")
    parser.add_argument("--draft", type=Path, help="evaluate: a trained head, instead of the pair's own")
    parser.add_argument("--drafters", nargs="+", default=["model", "prompt_lookup", "adaptive"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--lengths", nargs="+", default=["4", "bass"], help="evaluate: draft lengths")
    parser.add_argument("--prompts", type=int, help="evaluate: prompts per set (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, help="evaluate, ablate: write the figures to this file")
    return parser


def _changed(settings: Settings, options: argparse.Namespace) -> Settings:
    changed: dict[str, Any] = {}
    for assignment in options.set:
        name, _, value = assignment.partition("=")
        changed[name] = value if name in ("start", "loss") else json.loads(value)
    return replace(settings, train=replace(settings.train, **changed))


def _train(pair: ModelPair, settings: Settings, options: argparse.Namespace, work: Path) -> None:
    out = work / (options.name or "head")
    log = train(pair, settings, work / "corpus", out, options.steps, _questions(options))
    print(f"{out}: overlap {log['overlap'][0][1]} -> {log['overlap'][-1][1]}; held out: {log['held_out'][-1]}")
    if options.install:
        load_draft_head(out, pair.target).save(DRAFTS / options.install)


def _ablate(pair: ModelPair, settings: Settings, options: argparse.Namespace, work: Path) -> None:
    rows, temperatures = [], settings.corpus.temperatures
    out = work / (options.name or "ablation")
    for row in ablate(pair, settings, work / "corpus", out, options.steps, options.arms, _questions(options)):
        rows.append(row)
        print(as_markdown([row], temperatures).splitlines()[-1], flush=True)
        if options.json:
            _write(options.json, {"machine": _machine(pair), "train": vars(settings.train), "arms": rows})
    print(as_markdown(rows, temperatures))


def _questions(options: argparse.Namespace) -> list[str]:
    return [] if options.questions is None else read_questions(options.questions)


def _evaluate(pair: ModelPair, options: argparse.Namespace) -> None:
    draft = load_draft_head(options.draft, pair.target) if options.draft else pair.draft
    if draft is not pair.draft:
        pair = ModelPair(pair.target, draft, pair.tokenizer, name=pair.name)
    report: dict[str, Any] = {"machine": _machine(pair), "tokens": options.max_new_tokens}
    if pair.draft is not None:
        report["cost"] = {batch: measuring.cost_ratio(pair, batch) for batch in (1, 4, 8)}
        print(json.dumps(report["cost"]))
    report["acceptance"] = list(_acceptances(pair, options))
    if options.json:
        _write(options.json, report)


def _write(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _acceptances(pair: ModelPair, options: argparse.Namespace) -> Any:
    for name in ("committed", "humaneval"):
        prompts = measuring.prompt_set(name, options.prompts)
        for temperature in options.temperatures:
            for drafter in options.drafters:
                for length in options.lengths:
                    row = measuring.acceptance(
                        pair,
                        prompts,
                        drafter=drafter,
                        temperature=temperature,
                        draft_length=_length(length),
                        tokens=options.max_new_tokens,
                    )
                    print(json.dumps({"set": name, **row}), flush=True)
                    yield {"set": name, **row}


def _length(text: str) -> int | str:
    """Parse a fixed draft length, or a policy's name."""
    return int(text) if text.isdecimal() else text


def _machine(pair: ModelPair) -> dict[str, Any]:
    return {
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "device": str(pair.device),
        "dtype": str(pair.dtype),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


if __name__ == "__main__":
    main()

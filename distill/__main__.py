"""`python -m distill corpus | train | night | ablate | evaluate`: make a draft head and measure it.

All but `evaluate` continue where a killed run stopped. `night` writes and trains on a GPU, in a given time.
Settings come from config.json, those of `night` from night.json (or --config).
Results are written below --work; `--install` copies the head of `train` to drafts/.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from bass_core import ModelPair, load_pair
from bass_core.errors import BassError
from bass_core.model.draft_head import load_draft_head

from . import evaluate as measuring
from .ablation import ARMS, ablate, as_markdown
from .corpus import write_corpus
from .duplicates import read_questions
from .settings import CONFIG, NIGHT, Settings, TrainSettings, load
from .train import train

DRAFTS = Path(__file__).resolve().parent.parent / "drafts"
# The share of its minutes in which `night` may write.
WRITING = 0.6
T = TypeVar("T")


def main() -> None:
    """Read the command line and run one command."""
    begun = time.monotonic()
    parser = _parser()
    options = parser.parse_args()
    for name in ("tokens", "steps", "prompts", "max_new_tokens"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be a whole number of at least 1; got {value}.")
    if not options.minutes > 0:
        parser.error(f"--minutes must be above 0; got {options.minutes}.")
    is_night = options.command == "night"
    settings = options.config or load(NIGHT if is_night else CONFIG)
    try:
        settings = _changed(settings, options)
    except (TypeError, ValueError) as error:
        names = ", ".join(field.name for field in fields(TrainSettings))
        parser.error(f"--set takes NAME=VALUE, with a value in JSON and a name out of {names} ({error}).")
    options.tokens = options.tokens or (12_000_000 if is_night else 400_000)
    options.steps = options.steps or (8000 if is_night else 4000)
    work: Path = options.work
    try:
        pair = load_pair(settings.pair, device=options.device, dtype=options.dtype)
        if options.command == "corpus":
            tokens = write_corpus(pair, settings, work / "corpus", options.tokens)
            print(f"{work / 'corpus'} holds {tokens} new tokens.")
        elif options.command == "train":
            _train(pair, settings, options, work)
        elif is_night:
            _night(pair, settings, options, work, begun)
        elif options.command == "ablate":
            _ablate(pair, settings, options, work)
        else:
            _evaluate(pair, options)
    except BassError as error:
        raise SystemExit(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m distill", description=__doc__)
    parser.add_argument("command", choices=["corpus", "train", "night", "ablate", "evaluate"])
    parser.add_argument("--config", type=_file_of(load), help="another file of settings")
    parser.add_argument(
        "--work", type=Path, default=Path("distill-work"), help="folder for the corpus and checkpoints"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="as for load_pair")
    parser.add_argument(
        "--tokens", type=int, help="total number of answer tokens (corpus: 400,000, night: 12,000,000)"
    )
    parser.add_argument("--steps", type=int, help="total optimiser steps (train, ablate: 4000, night: 8000)")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="night: end this long after its start, with a trained head"
    )
    parser.add_argument("--name", help="folder of this run below --work (train, night: head, ablate: ablation)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="train, night, ablate: override a setting of training",
    )
    parser.add_argument(
        "--questions",
        type=_file_of(read_questions),
        default=[],
        help="leave out conversations that resemble questions of this file (Spec-Bench's form) in training",
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


def _file_of(read: Callable[[Path], T]) -> Callable[[str], T]:
    """Return the type of an option that names a file: the contents that `read` returns."""

    def contents(name: str) -> T:
        try:
            return read(Path(name))
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"{name!r} can't be read ({type(error).__name__}: {error})") from None

    return contents


def _changed(settings: Settings, options: argparse.Namespace) -> Settings:
    changed: dict[str, Any] = {}
    for assignment in options.set:
        name, _, value = assignment.partition("=")
        changed[name] = value if name in ("start", "loss") else json.loads(value)
    return replace(settings, train=replace(settings.train, **changed))


def _train(pair: ModelPair, settings: Settings, options: argparse.Namespace, work: Path) -> None:
    out = work / (options.name or "head")
    log = train(pair, settings, work / "corpus", out, options.steps, options.questions)
    print(f"{out}: overlap {log['overlap'][0][1]} -> {log['overlap'][-1][1]}; held out: {log['held_out'][-1]}")
    if options.install:
        load_draft_head(out, pair.target).save(DRAFTS / options.install)


def _night(pair: ModelPair, settings: Settings, options: argparse.Namespace, work: Path, begun: float) -> None:
    """Write a corpus, then train on it. Each has its share of the minutes, which began at `begun`."""
    seconds = 60 * options.minutes
    tokens = write_corpus(pair, settings, work / "corpus", options.tokens, begun + WRITING * seconds)
    print(f"{work / 'corpus'} holds {tokens} new tokens.", flush=True)
    out = work / (options.name or "head")
    log = train(pair, settings, work / "corpus", out, options.steps, options.questions, begun + seconds)
    held_out = log["held_out"][-1]
    print(f"{out} was trained for {held_out['step']} steps; held out: {held_out}")
    measure = "python -m distill evaluate --drafters model --temperatures 0 0.7 --lengths 3"
    print(
        "Compare it with the head that ships, on prompts that training has not seen:\n"
        f"    {measure} --draft {out}\n    {measure}\n"
        "If it drafts better, install it: python -m distill train with --install FOLDER and this command's "
        "--config, --work, --name, --set and --questions."
    )


def _ablate(pair: ModelPair, settings: Settings, options: argparse.Namespace, work: Path) -> None:
    rows, temperatures = [], settings.corpus.temperatures
    out = work / (options.name or "ablation")
    for row in ablate(pair, settings, work / "corpus", out, options.steps, options.arms, options.questions):
        rows.append(row)
        print(as_markdown([row], temperatures).splitlines()[-1], flush=True)
        if options.json:
            _write(options.json, {"machine": _machine(pair), "train": vars(settings.train), "arms": rows})
    print(as_markdown(rows, temperatures))


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

"""Run all lanes of one passk run, problem by problem; `collect` is the entry point.

With a samples file each record is appended immediately, and a later call with the same settings continues after
the last record; other settings are refused. Single-sequence speculation runs only at the largest n. It writes one
sequence after another, so for a smaller n we take its first n sequences.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from bass_core import Generation, ModelPair, SamplingParams, generate

from ..report.report import device_name
from .problems import Problem, ends, prompt
from .score import SPECULATIVE, Record

# Number of problems on which the time of one regular sequence is measured.
CALIBRATION = 5


class Samples:
    """The samples of a run, kept in a file if there is a path; `settings` is empty until the run begins."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.settings = path, dict[str, Any]()
        self.records: dict[str, Record] = {}
        if path is not None and path.exists() and (text := path.read_text(encoding="utf-8")):
            # An interrupted write leaves an incomplete line. Drop it; its problem will run again.
            whole = text[: text.rfind("\n") + 1]
            path.write_text(whole, encoding="utf-8")
            self.settings, *rest = [json.loads(line) for line in whole.splitlines()] or [{}]
            self.records = {record["task_id"]: record for record in rest}

    def begin(self, settings: dict[str, Any]) -> None:
        """Raise SystemExit if the file holds a run with other settings."""
        stored = {key: value for key, value in self.settings.items() if key != "budgets_ms"}
        if stored and stored != settings:
            raise SystemExit(f"{self.path} holds a run with other settings ({stored}): name another file.")

    def budgets(self, budgets_ms: list[float], settings: dict[str, Any]) -> None:
        """Store the run's budgets with its settings."""
        self.settings = {**settings, "budgets_ms": budgets_ms}
        self._append(self.settings)

    def add(self, record: Record) -> None:
        """Store the record of one more problem."""
        self.records[record["task_id"]] = record
        self._append(record)

    def _append(self, line: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def collect(
    pair: ModelPair,
    problems: list[Problem],
    samples: Samples,
    fractions: Seq[float],
    arguments: argparse.Namespace,
) -> tuple[list[Record], list[float]]:
    """Run all arms on every problem that is not yet in the samples.

    Args:
        samples: the run's samples, which are filled in.
        fractions: default budgets, as fractions of the time of one regular sequence.

    Returns:
        One record per problem (bench/passk/score.py), and the budgets in milliseconds, shortest first.

    Raises:
        SystemExit: if the samples file has other settings or shorter budgets.
    """
    names = ("pair", "dtype", "batch", "max_new_tokens", "temperature", "top_p", "draft_length", "seed")
    settings = {name: getattr(arguments, name) for name in names} | {"device": device_name(pair.device)}
    samples.begin(settings)
    writer = ProblemWriter(pair, arguments)
    if not samples.settings:
        chosen = arguments.budget_ms
        if not chosen:
            single = writer.single_ms(problems)
            chosen = [part * single for part in fractions]
        samples.budgets(sorted(chosen), settings)
    written: list[float] = samples.settings["budgets_ms"]
    budgets = sorted(arguments.budget_ms or written)
    if budgets[-1] > written[-1]:
        raise SystemExit(
            f"{samples.path} was written with budgets up to {written[-1]:.0f} ms: lower --budget-ms, or name "
            "another file."
        )
    waiting = [problem for problem in problems if problem["task_id"] not in samples.records]
    if waiting:
        writer.warm_up(waiting[0])
    for index, problem in enumerate(waiting):
        samples.add(writer.record(problem, written[-1], index))
        print(f"{problem['task_id']}: {index + 1} of {len(waiting)}", file=sys.stderr, flush=True)
    return [samples.records[problem["task_id"]] for problem in problems], budgets


class ProblemWriter:
    """Generate completions of problems with one pair and one set of options."""

    def __init__(self, pair: ModelPair, arguments: argparse.Namespace) -> None:
        self.pair, self.seed = pair, arguments.seed
        self.common: dict[str, Any] = {
            "sampling": SamplingParams(arguments.temperature, top_p=arguments.top_p),
            "draft_length": arguments.draft_length,
            "eos_token_id": ends(pair),
            "raw": True,
        }
        self.max_new_tokens = arguments.max_new_tokens
        self.arms = [
            (method, n) for n in arguments.batch for method in ("regular", "bass") if (method, n) != ("bass", 1)
        ]
        self.arms.append((SPECULATIVE, arguments.batch[-1]))

    def write(
        self, problem: Problem, method: str, n: int, tokens: int, budget_ms: float | None = None
    ) -> Generation:
        """Run one lane; each problem has its own seed, the same in all arms."""
        number = int(problem["task_id"].rsplit("/", 1)[1])
        return generate(
            self.pair, prompt(self.pair, problem), method=method, n=n, max_new_tokens=tokens,
            seed=1000 * self.seed + number, time_budget_ms=budget_ms, **self.common,
        )  # fmt: skip

    def single_ms(self, problems: list[Problem]) -> float:
        """Return the lane time in ms of one whole regular sequence, the median over some problems."""
        step = max(1, len(problems) // CALIBRATION)
        some = [problems[0], *problems[::step][:CALIBRATION]]
        times = [self.write(each, "regular", 1, self.max_new_tokens).sequences[0].times_ms[-1] for each in some]
        return statistics.median(times[1:])

    def warm_up(self, problem: Problem) -> None:
        """Run each arm for a few tokens, so that one-time costs are not measured."""
        for method, n in self.arms:
            self.write(problem, method, n, 4)

    def record(self, problem: Problem, budget_ms: float, turn: int) -> Record:
        """Run all arms on one problem, starting with a different arm each turn."""
        lanes = {}
        first = turn % len(self.arms)
        for method, n in self.arms[first:] + self.arms[:first]:
            out = self.write(problem, method, n, self.max_new_tokens, budget_ms)
            lanes[f"{method} {n}"] = [
                {"text": sequence.text, "token_ids": sequence.token_ids, "logprob": None, "passed": None,
                 "ended_ms": sequence.times_ms[-1] if sequence.finish_reason == "eos" else None}
                for sequence in out.sequences
            ]  # fmt: skip
        return {"task_id": problem["task_id"], "lanes": lanes}

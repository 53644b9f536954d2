"""`python -m bench readers`: predict the figures of the page's slider "How many readers at once?".

It writes ui/sweep/readers.json. No model runs, and each figure follows from stored measurements:

- the step times of a CPU are those of `bench floor`, the H100's come from its datasheet;
- the drafts of questions are accepted as often as those of Spec-Bench's categories in `bench spec`, the drafts of
  a repeated text as often as in the recording "win".

A step of BASS drafts DRAFTS tokens per row, as the page's first race does. Speculative serves one reader at a
time, so its steps are those of BASS with one reader. The claims compare the predicted speed-ups with those of
`bench spec`, which chose the draft lengths by their measured costs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bass_core import SimulatedClock, mean_steps
from bass_core.length.costs import CostTable, RoundCosts
from ui.recordings.shelf import SHIPPED
from ui.sweep.readers import FILE

from .report import CPU, ROOT, Row, claim, finish, parser
from .tables import load

READERS = range(1, 17)
DRAFTS, NEW_TOKENS, TRIALS = 3, 64, 32
# The tokens that each reader's text has on average, for the step times of the H100.
CONTEXT = 512
# The relative error that a predicted speed-up may have.
WITHIN = 0.15
# The pair of all stored measurements.
PAIR = "smollm2"
QUESTIONS, REPEATED = "questions", "repeat"
# Name -> (label, result file of `bench floor`).
CPUS = {"amx": ("A CPU with AMX", "floor-native-bf16"), "no-amx": ("A CPU without AMX", "floor-without-amx")}
SPEC = "spec-native-bf16"


def main(argv: list[str]) -> None:
    """Predict, compare, and write."""
    cli = parser("readers", __doc__ or "")
    cli.add_argument("--out", type=Path, default=FILE, metavar="FILE")
    options = cli.parse_args(argv)
    readers = (1, 4) if options.quick else READERS
    document = predicted(readers)
    if not options.quick:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"{options.out.relative_to(ROOT) if options.out.is_relative_to(ROOT) else options.out} written")
    finish("readers", options, CPU, rows(document), claims(document))


def predicted(readers: Sequence[int]) -> dict[str, Any]:
    """Return the content of readers.json for these numbers of readers.

    Returns:
        texts: label and the acceptance of each text's rows, which repeat beyond their number.
        machines: label and source of each, regular: ms per step by readers, bass: for each text a list of
            (tokens per step, ms per step) by readers, measured: speed-ups of BASS by readers, if there are any.
    """
    texts = {
        QUESTIONS: {"label": "Questions", "acceptance": question_acceptance(), "source": made(load(SPEC))},
        REPEATED: {
            "label": "A repeated text",
            "acceptance": [repeated_acceptance()],
            "source": recording_source(),
        },
    }
    machines: dict[str, Any] = {}
    for name, (label, file) in CPUS.items():
        stored = load(file)
        machines[name] = {"label": label, "source": made(stored), **steps(cpu_costs(stored), texts, readers)}
    clock = SimulatedClock("h100").fitted(max(READERS), CONTEXT)
    source = clock.record()["source"]
    machines["h100"] = {
        "label": "An H100", "source": f"{source}; 7.8B with 310M", **steps(clock.costs(CONTEXT), texts, readers)
    }  # fmt: skip
    machines["amx"]["measured"] = {QUESTIONS: measured()}
    head = {"readers": list(readers), "drafts": DRAFTS, "new_tokens": NEW_TOKENS, "trials": TRIALS}
    return {"command": "python -m bench readers", "pair": PAIR, **head, "texts": texts, "machines": machines}


def cpu_costs(floor: Row) -> CostTable:
    """Return the step times in a result file of `bench floor`.

    A verification's time depends on its tokens, so steps of equally many tokens are averaged. A draft step with
    cold caches counts as the first of a proposal. Its times are continued linearly to the most readers.
    """
    by_tokens: dict[int, list[float]] = {}
    draft: dict[str, dict[int, float]] = {"draft step": {}, "draft step, again": {}}
    for row in floor["results"]:
        if row["what"] == "step":
            by_tokens.setdefault(row["rows"] * row["tokens a row"], []).append(row["median ms"])
        elif row["what"] in draft:
            draft[row["what"]][row["rows"]] = row["median ms"]
    # A wider verification is never cheaper.
    times = np.maximum.accumulate([fmean(by_tokens[tokens]) for tokens in sorted(by_tokens)])
    verify = [(float(tokens), float(ms)) for tokens, ms in zip(sorted(by_tokens), times, strict=True)]
    for table in draft.values():
        (few, few_ms), (many, many_ms) = sorted(table.items())
        largest = max(READERS)
        table[largest] = many_ms + (largest - many) * (many_ms - few_ms) / (many - few)
    first, again = draft["draft step"], draft["draft step, again"]
    proposal = {rows: max(0.0, first[rows] - again[rows]) for rows in again}
    return CostTable({rows: verify for rows in again}, again, padded=False, proposal=proposal)


def steps(costs: RoundCosts, texts: dict[str, Any], readers: Sequence[int]) -> dict[str, Any]:
    """Return a machine's step times and tokens per step, for each number of readers."""
    bass = {
        text: [[_short(value) for value in step] for step in
               mean_steps(costs, known["acceptance"], readers, DRAFTS, NEW_TOKENS, TRIALS)]
        for text, known in texts.items()
    }  # fmt: skip
    return {"regular": [_short(costs.verify_ms(rows, rows)) for rows in readers], "bass": bass}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def question_acceptance() -> list[float]:
    """Return the acceptance of Spec-Bench's categories, greedy, in their smallest measured batch."""
    found = [row for row in load(SPEC)["results"] if row["temperature"] == 0 and row["category"] != "all"]
    least = min(row["batch"] for row in found)
    return [_short(row["a"]) for row in found if row["batch"] == least]


def repeated_acceptance() -> float:
    """Return the token acceptance of BASS in the recording "win"."""
    last = SHIPPED["win"].recording["snapshots"][-1]["view"]["lanes"]["bass"]
    return _short(last["metrics"]["token_acceptance"])


def recording_source() -> str:
    """Return the machine, date and revision of the recording "win"."""
    facts = SHIPPED["win"].recording["made"]
    return f"recording of {facts['date']}, {facts['device']}, revision {facts['revision']}"


def made(document: Row) -> str:
    """Return the command, machine, date and revision of a result file in one line."""
    command = " ".join(document["command"].split()[:4])
    return f"{command}, {document['device']}, {document['date']}, revision {document['revision']}"


def measured() -> dict[str, float]:
    """Return the measured greedy speed-ups of BASS on Spec-Bench, by readers."""
    rows = load(SPEC)["results"]
    found = [row for row in rows if row["category"] == "all" and row["temperature"] == 0]
    return {str(row["batch"]): _short(row["bass"]) for row in found}


def speedup(machine: Row, text: str, at: int, readers: int) -> float:
    """Return the predicted speed-up of BASS over regular decoding at index `at` of the readers."""
    tokens, ms = machine["bass"][text][at]
    return tokens / ms / (readers / machine["regular"][at])


def rows(document: dict[str, Any]) -> list[Row]:
    """Return a result row for each machine, text and number of readers."""
    return [
        {"machine": name, "text": text, "readers": readers, "regular ms/step": machine["regular"][at],
         "tokens/step": machine["bass"][text][at][0], "ms/step": machine["bass"][text][at][1],
         "speed-up": speedup(machine, text, at, readers)}
        for name, machine in document["machines"].items() for text in document["texts"]
        for at, readers in enumerate(document["readers"])
    ]  # fmt: skip


def claims(document: dict[str, Any]) -> list[Row]:
    """Compare the predicted speed-ups of questions with the measured ones."""
    compared = []
    for name, machine in document["machines"].items():
        for text, known in machine.get("measured", {}).items():
            for at, readers in enumerate(document["readers"]):
                if str(readers) in known:
                    off = speedup(machine, text, at, readers) / known[str(readers)] - 1
                    holds = abs(off) <= WITHIN
                    what = f"predicted / measured speed-up - 1, {name}, {text}, {readers} readers"
                    compared.append(claim(what, off, f"within {WITHIN:g}", holds))
    return compared

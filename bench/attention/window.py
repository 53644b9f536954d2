"""`python -m bench window`: the target as its own draft, which sees the first tokens of a long text and the last.

Contract, four parts. "acceptance": answers to long prompts of different kinds, built from this repository's own
files: greedy, where a small model soon repeats itself and every window is right, and sampled. In each round
every window drafts from the same place, and its drafts are compared with the target's text; this is counted, and
no clock is involved. "steps": measured milliseconds of a regular step, of a windowed draft and of verifications,
over caches whose contents are random numbers, because time does not depend on them. From these and the
acceptance follow the best draft length and its speed-up, by the formula of Leviathan et al. (2211.17192,
equation 1) with a probability of its own for each position: computed, not measured. "turn": where the windowed
draft begins to pay, on straight lines through the measured steps; predicted beyond the longest. "whole": whole
sampled answers with and without windowed drafts, measured in turns, prompts left out of the times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bass_core import ModelPair, SamplingParams, generate, load_pair
from bass_core.decode.checks import encode_prompts
from bass_core.draft.base import Drafter, Proposal
from bass_core.draft.registry import DRAFTERS, DrafterKind, Parts
from bass_core.draft.window import WINDOW, WindowDrafter
from bass_core.model.attention import choose_backend
from bass_core.model.forward import ForwardBatch
from bass_core.model.runner import ModelRunner
from bass_core.sample.noise import NoiseKeys
from bass_core.sequence import Sequence

from ..report.report import claim, document, interleaved, median, parser, show, table

ROOT = Path(__file__).resolve().parents[2]
WINDOWS = (64, 128, 256, 512, 1024)
# Drafts of a round in the first part, and the longest round that the other parts consider.
LENGTH = 4
# Where the search for the turn ends, in cached tokens.
FARTHEST = 200_000
# Prompts: tokens, what they are cut from, and the question behind them (none: the text goes on).
PROMPTS = (
    (1000, "README.md", ""),
    (2000, "docs/extending.md", "\n\nExplain in a few paragraphs how a drafter of one's own is written."),
    (3500, "CHANGELOG.md docs/usage.md", "\n\nSummarise the text above."),
    (5000, "bass_core/decode/*.py", ""),
    (6000, "docs/architecture.md docs/amusd.md docs/usage.md", "\n\nWhat does the text above say about AMUSD?"),
)

# Texts, coupled where they are sampled: a draft is compared with the very token that the target draws.
SAMPLED = "temperature 0.8"
TEXTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    SAMPLED: {"sampling": SamplingParams(0.8), "verification": "coupled"},
}

Row = dict[str, Any]


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("window", __doc__ or "")
    options.add_argument("--pair", default="smollm2")
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    options.add_argument("--cached", type=int, nargs="+", default=[1024, 2048, 4096, 8000])
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument("--repeats", type=int, default=9)
    arguments = options.parse_args(argv)
    prompts: tuple[tuple[int, str, str], ...] = PROMPTS
    windows: tuple[int, ...] = WINDOWS
    if arguments.quick:
        arguments.rows, arguments.cached, arguments.repeats = [1], [600, 1000], 2
        arguments.max_new_tokens, prompts, windows = 8, ((500, "README.md", ""),), (WINDOW,)
    pair = load_pair(arguments.pair, device=arguments.device, dtype=arguments.dtype)
    texts = [(text, prompt) for text in TEXTS for prompt in prompts]
    accepted = [row for text, prompt in texts for row in _acceptance(pair, text, prompt, windows, arguments)]
    print(table(accepted))
    steps = [_steps(pair, rows, cached, arguments) for rows in arguments.rows for cached in arguments.cached]
    chances = _mean_chances(accepted)
    for row in steps:
        row |= _speed(row, chances)
    turns = [_turn([row for row in steps if row["rows"] == rows], chances) for rows in arguments.rows]
    whole = [_whole(pair, list(prompts)[-rows:], arguments) for rows in (1, 4) if rows <= len(prompts)]
    print(table(steps), table(turns), table(whole), sep="\n\n")
    least = min(row["acceptance"] for row in accepted if row["window"] == WINDOW)
    claims = [claim(f"least acceptance of the window of {WINDOW}", least, "above 0", least > 0)]
    show(document("window", arguments, pair.device, accepted + steps + turns + whole, claims), arguments)


class Probe(Drafter):
    """Every window drafts from the same places; `drafts` holds (tokens before it, window, drafts) of each."""

    def __init__(self, drafters: list[WindowDrafter]) -> None:
        self.drafters = drafters
        self.drafts: list[tuple[int, int, list[int]]] = []

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        for drafter in self.drafters:
            made = drafter.propose(rows, max_drafts, keys)
            drafts = made.tokens[0, : made.num_drafted[0]].tolist()
            self.drafts.append((len(rows[0].tokens), drafter.window, drafts))
        return made


def _ids(pair: ModelPair, prompt: tuple[int, str, str]) -> list[int]:
    tokens, files, question = prompt
    paths = [path for pattern in files.split() for path in sorted(ROOT.glob(pattern))]
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in paths)
    cut = pair.tokenizer.decode(pair.tokenizer.encode(text)[:tokens])
    return encode_prompts(pair, cut + question, 1, raw=not question)[0]


def _acceptance(
    pair: ModelPair, text: str, prompt: tuple[int, str, str], windows: tuple[int, ...], arguments: Any
) -> list[Row]:
    """One prompt's rows: how many drafts of each window stand, and each draft's chance if those before it do."""
    ids, (_, files, question) = _ids(pair, prompt), prompt
    probes: list[Probe] = []

    def make(parts: Parts) -> Drafter:
        probes.append(Probe([parts.window(window) for window in windows]))
        return probes[-1]

    DRAFTERS["every window"] = DrafterKind("every window", make, windows=True)
    try:
        out = generate(
            pair, [ids], method="bass", drafter="every window", draft_length=LENGTH, eos_token_id=None,
            max_new_tokens=arguments.max_new_tokens, seed=arguments.seed, **TEXTS[text],
        )  # fmt: skip
    finally:
        del DRAFTERS["every window"]
    name, rows = f"{files}{', a question' if question else ''}", []
    for window in windows:
        tried = [(at - len(ids), drafts) for at, other, drafts in probes[0].drafts if other == window and drafts]
        stood = [_agreeing(drafts, out.sequences[0].token_ids[at:]) for at, drafts in tried]
        drafted = [len(drafts) for _, drafts in tried]
        rows.append(
            {"part": "acceptance", "text": text, "prompt": name, "cached": len(ids), "window": window,
             "rounds": len(stood),
             "acceptance": sum(stood) / max(1, sum(drafted)),
             "tokens a round": 1 + sum(stood) / max(1, len(stood)),
             "chances": [_chance(stood, drafted, i) for i in range(LENGTH)]}
        )  # fmt: skip
    return rows


def _agreeing(drafts: list[int], text: list[int]) -> int:
    """How many leading drafts are the text's tokens."""
    same = [one == other for one, other in zip(drafts, text, strict=False)]
    return (same + [False]).index(False)


def _chance(stood: list[int], drafted: list[int], place: int) -> float | None:
    """How often the draft at a place stood where those before it did; None where none was tried."""
    tried = [count > place for count, most in zip(stood, drafted, strict=True) if most > place and count >= place]
    return sum(tried) / len(tried) if tried else None


def _mean_chances(rows: list[Row]) -> list[float]:
    """The chances of WINDOW in sampled text, over all prompts; 0 where nothing was tried."""
    mine = [row["chances"] for row in rows if row["window"] == WINDOW and row["text"] == SAMPLED]
    columns = zip(*mine, strict=True)
    known = [[one for one in column if one is not None] for column in columns]
    return [sum(column) / len(column) if column else 0.0 for column in known]


def _steps(pair: ModelPair, rows: int, cached: int, arguments: Any) -> Row:
    """Milliseconds of each kind of step, medians of steps that take turns; rows differ in length by a tenth."""
    backend = choose_backend("auto", pair.device, pair.dtype)
    runner = ModelRunner(pair.target_step, rows, cached + LENGTH + 1, pair.vocab, backend)
    runner.cache.buffer.normal_(generator=torch.Generator(runner.cache.buffer.device).manual_seed(arguments.seed))
    lengths = [cached - row * (cached // 10) // max(1, rows - 1) for row in range(rows)]
    tokens = torch.full((rows, LENGTH + 1), 5, dtype=torch.long, device=pair.device)

    def step(width: int, window: int | None = None) -> Callable[[], object]:
        return lambda: runner.forward(ForwardBatch(tokens[:, :width], lengths, window=window)).logits.amax().item()

    arms = {"regular": step(1), "draft": step(1, WINDOW)} | {f"{n}": step(n + 1) for n in range(1, LENGTH + 1)}
    times = {name: median(values) for name, values in interleaved(arms, arguments.repeats).items()}
    verify = [times[f"{n}"] for n in range(1, LENGTH + 1)]
    return {
        "part": "steps", "kind": "measured", "rows": rows, "cached": cached, "regular ms": times["regular"],
        "draft ms": times["draft"], **{f"verify {n + 1} ms": ms for n, ms in enumerate(verify)},
    }  # fmt: skip


def _speed(row: Row, chances: list[float]) -> Row:
    """The best draft length of these steps and its speed-up over regular steps."""
    speeds = {}
    for length in range(1, LENGTH + 1):
        written = 1 + sum(math.prod(chances[: i + 1]) for i in range(length))
        speeds[length] = written * row["regular ms"] / (length * row["draft ms"] + row[f"verify {length} ms"])
    best = max(speeds, key=lambda length: speeds[length])
    return {"best length": best, "speed-up, computed": speeds[best]}


def _turn(rows: list[Row], chances: list[float]) -> Row:
    """The cached tokens from which on drafting pays, by straight lines through the measured steps of some rows."""
    lengths = [float(row["cached"]) for row in rows]
    names = ["regular ms", *(f"verify {n} ms" for n in range(1, LENGTH + 1))]
    lines = {name: statistics.linear_regression(lengths, [row[name] for row in rows]) for name in names}
    drafts = median([row["draft ms"] for row in rows])
    found = None
    for cached in range(0, FARTHEST + 1, 500):
        at = {name: line.intercept + line.slope * cached for name, line in lines.items()} | {"draft ms": drafts}
        if _speed(at, chances)["speed-up, computed"] > 1:
            found = cached
            break
    predicted = found is None or found > max(lengths)
    slope = lines["regular ms"].slope
    return {
        "part": "turn", "kind": "predicted" if predicted else "computed", "rows": rows[0]["rows"],
        "pays from": found, "regular ms": lines["regular ms"].intercept, "ms a thousand cached": 1000 * slope,
        "draft ms": drafts,
    }  # fmt: skip


def _whole(pair: ModelPair, prompts: list[tuple[int, str, str]], arguments: Any) -> Row:
    """ms per token of whole answers, medians of runs that take turns, and the drafts' acceptance."""
    ids = [_ids(pair, prompt) for prompt in prompts]
    same = {"max_new_tokens": arguments.max_new_tokens, "eos_token_id": None, "seed": arguments.seed}
    ways: dict[str, dict[str, Any]] = {
        "regular": {"method": "regular"},
        "windowed": {"method": "bass", "drafter": "window", "draft_length": LENGTH - 1},
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 if arguments.quick else 3):
        for name, way in ways.items():
            out = generate(pair, ids, **same, **way, **TEXTS[SAMPLED])
            times[name].append(out.metrics.ms_per_token or 0.0)
    regular, windowed = (median(times[name]) for name in ways)
    return {
        "part": "whole", "kind": "measured", "rows": len(ids), "cached": max(map(len, ids)),
        "draft length": LENGTH - 1, "acceptance": out.metrics.acceptance_rate, "regular ms/token": regular,
        "windowed ms/token": windowed, "speed-up": regular / windowed,
    }  # fmt: skip

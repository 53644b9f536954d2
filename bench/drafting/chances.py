"""`python -m bench chances`: what drafts in trees are worth: the planner's first guesses, measured.

Contract: trees of a fixed number of drafts grow on the committed prompts and on HumanEval's, greedy, sampled and
coupled. Rows "came" give, by what the source of a draft said (tenths), how often it was accepted where its parent
was: "likely" and "copied" drafts one by one, sampled siblings together ("any"), by their number. Rows "offered"
give how many drafts of which chance (tenths, as the planner first guesses them) a level offered behind one draft
that was open. budget/chances.py and budget/levels.py state what was read off here. Nothing is timed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bass_core import FixedNodes, ModelPair, SamplingParams, generate, load_pair
from bass_core.budget.base import Feedback
from bass_core.budget.chances import Chances
from bass_core.budget.trees import Draft

from ..report.report import finish, parser
from .budget import prompt_sets

WAYS = {"greedy": (0.0, "auto"), "sampled": (0.7, "auto"), "coupled": (0.7, "coupled")}
NODES, LEVELS = 6, 3


class _Counting(FixedNodes):
    """Trees of NODES drafts a row, whose drafts are counted. It is not copied: the counts are in here."""

    def __init__(self, rows: int, sampled: bool) -> None:
        super().__init__(NODES * rows, LEVELS)
        self.guesses = Chances(sampled)
        self.came: dict[tuple[str, int, int], list[bool]] = defaultdict(list)
        self.levels_offered: dict[tuple[int, int], float] = defaultdict(float)
        self.levels_open: dict[int, float] = defaultdict(float)
        self._drafts: list[list[Draft]] = []
        self._asked: tuple[int, list[float]] = (0, [])

    def __deepcopy__(self, memo: Any) -> _Counting:
        return self

    def chance(self, kind: str, depth: int, raw: float) -> float:
        return self.guesses.of(kind, depth, raw)

    def any_chance(self, children: int, raw: float) -> float:
        return self.guesses.of_any(children, raw)

    def deeper(self, worths: Sequence[float], open_: Sequence[float], rows: int, levels: int) -> bool:
        pays = super().deeper(worths, open_, rows, levels)
        if pays:
            self._asked = levels + 1, list(open_)
            self.levels_open[levels + 1] += sum(open_)
        return pays

    def offered(self, worths: Sequence[Sequence[float]]) -> None:
        level, open_ = self._asked
        for before, behind in zip(open_, worths, strict=True):
            for worth in behind if before > 0 else []:
                self.levels_offered[level, min(9, int(10 * worth / before))] += before

    def grown(self, drafts: list[list[Draft]], levels: int) -> None:
        self._drafts = drafts

    def observe_trees(self, feedback: Feedback) -> None:
        for row, path in zip(self._drafts, feedback.paths or [], strict=True):
            stood = {-1, *path}
            families: dict[int, list[int]] = defaultdict(list)
            for i, draft in enumerate(row):
                if draft.parent not in stood:
                    continue
                if draft.kind != "drawn":
                    said = 10 if draft.kind == "copied" else int(10 * draft.raw)
                    self.came[draft.kind, min(draft.depth, LEVELS), said].append(i in stood)
                if draft.kind != "copied":
                    families[draft.parent].append(i)
            for family in families.values():
                drawn = [int(10 * row[i].raw) for i in family if row[i].kind == "drawn"]
                if drawn:
                    self.came["any", len(family), drawn[0]].append(any(i in stood for i in family))


def main(argv: list[str]) -> None:
    """Grow trees, count, print, and write."""
    options = parser("chances", __doc__ or "")
    options.add_argument("--pair", default="smollm2")
    options.add_argument("--device", default="auto")
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--prompts", type=int, default=16, help="of each set, spread over it")
    options.add_argument("--max-new-tokens", type=int, default=64)
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.batch, arguments.prompts, arguments.max_new_tokens = 2, 2, 12
    pair = load_pair(arguments.pair, device=arguments.device)
    results = [row for way in WAYS for row in _rows(pair, way, arguments)]
    finish("chances", arguments, pair.device, results, [])


def _rows(pair: ModelPair, way: str, arguments: Any) -> list[dict[str, Any]]:
    temperature, verification = WAYS[way]
    counting = _Counting(arguments.batch, sampled=way == "sampled")
    for texts in prompt_sets(arguments.prompts).values():
        for i in range(0, len(texts), arguments.batch):
            generate(
                pair, texts[i : i + arguments.batch], max_new_tokens=arguments.max_new_tokens, seed=arguments.seed,
                draft_length=counting, sampling=SamplingParams(temperature), verification=verification,
            )  # fmt: skip
    came = [
        {
            "way": way, "what": "came", "kind": kind, "depth": "" if kind == "any" else place,
            "children": place if kind == "any" else "", "tenth": said, "drafts": len(found),
            "share": sum(found) / len(found),
        }
        for (kind, place, said), found in sorted(counting.came.items())
    ]  # fmt: skip
    shares = {at: found / counting.levels_open[at[0]] for at, found in sorted(counting.levels_offered.items())}
    offered = [
        {"way": way, "what": "offered", "depth": level, "tenth": tenth, "share": share}
        for (level, tenth), share in shares.items()
    ]
    return came + offered

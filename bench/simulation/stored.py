"""Predictions next to the rounds that were measured on a GPU: `compared` reads a stored file of `bench gpu`.

The kernels of a regular step come from its profile, and the rounds from races, by the lane's clock. The rows of
a race end at different times, so we predict a round with their mean number and the mean draft length.
`Assumptions` was fitted to these figures: the errors show how well it fits, not how well it predicts another card.
"""

from __future__ import annotations

from itertools import product

from bass_core.predict.hardware import HARDWARE, Assumptions
from bass_core.predict.roofline import Roofline
from bass_core.predict.shapes import llama, shape, shape_of

from ..report.report import Row
from ..report.tables import load

STORED = "gpu-nvidia-h200-2026-11-27"
# The texts' lengths were not stored. They cost little: 1,000 cached tokens of this pair take 6 microseconds.
CONTEXT = 100
ARMS = ("regular", "speculative", "bass", "bass, cost-aware")
# drafts/smollm2: one layer of the target, and 12,288 rows of its output layer.
HEAD = shape_of("head", llama(12288, 576, 1536, 1, 9, 3))


def compared(assumed: Assumptions) -> list[Row]:
    """Return measured and predicted milliseconds of the shipped pair on an H200, and the prediction's error."""
    shipped = {
        (row["case"], row["what"]): row["value"] for row in load(STORED)["results"] if row["section"] == "shipped"
    }
    costs = Roofline(HARDWARE["H200"], shape("135M"), HEAD, CONTEXT, assumed=assumed)
    results = []
    for batch in (1, 2, 4, 8, 16, 32):
        step = costs.step_ms(costs.target, batch, batch, 1)
        results.append(
            _row(batch, "kernels of a regular step", shipped[f"greedy b{batch} regular", "kernels"], step)
        )
    for batch, arm in product((1, 4, 8), ARMS):
        case = f"b{batch} {arm}"
        if arm == "regular":
            results.append(_row(batch, "round, regular", shipped[case, "ms/token"], costs.verify_ms(batch, batch)))
        elif (case, "ms/round") in shipped:
            drafts, tokens = shipped[case, "draft length"], shipped[case, "tokens/round"]
            rows = tokens / (1 + drafts)
            drafting = costs.proposal_ms(rows) + drafts * costs.draft_ms(rows)
            ms = drafting + costs.verify_ms(rows, tokens)
            results.append(_row(batch, f"round, {arm}", shipped[case, "ms/round"], ms))
    return results


def _row(batch: int, what: str, measured: float, predicted: float) -> Row:
    return {
        "kind": "measured and predicted", "section": "h200", "batch": batch, "what": what,
        "measured ms": measured, "predicted ms": predicted, "error, %": round(100 * (predicted / measured - 1), 1),
    }  # fmt: skip

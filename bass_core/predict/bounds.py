"""The bounds of a predicted machine: its ridge, and the rows that its memory holds.

A table of measured step times has no ridge. The memory holds all rows in the table, because they were measured.
"""

from __future__ import annotations

from contextlib import suppress

from ..errors import RequestError
from ..length.costs import RoundCosts
from .clock import SimulatedClock
from .roofline import Roofline


def ridge(costs: RoundCosts) -> float | None:
    """Return the ridge: the number of tokens per step from which a target's forward is bound by compute.

    With fewer tokens it is bound by reading the weights and one row's context. None for measured step times.
    Source: Williams, Waterman and Patterson, "Roofline", CACM 2009.
    """
    if not isinstance(costs, Roofline):
        return None
    cost, assumed = costs.target.cost, costs.assumed
    read = cost.weight_bytes + costs.context * cost.kv_bytes
    flops = 2 * cost.parameters + costs.context * cost.attention_flops
    bandwidth = assumed.bandwidth * costs.hardware.bandwidth * 1e9
    return (read / bandwidth) / (flops / (assumed.compute * costs.hardware.flops))


def fitted(clock: SimulatedClock, sizes: list[int], context: int) -> SimulatedClock:
    """Return the clock with enough GPUs for the largest batch that fits."""
    for rows in sorted(sizes, reverse=True):
        with suppress(RequestError):
            return clock.fitted(rows, context)
    return clock


def fits(costs: RoundCosts, rows: int) -> bool:
    """Return whether the memory holds that many rows. Always true for measured step times."""
    return not isinstance(costs, Roofline) or costs.fits(rows)

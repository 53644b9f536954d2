"""Where a predicted machine's bounds lie: the ridge, and the rows that its memory holds.

Contract: predicted from datasheets. A table of measured step times tells no ridge, and what it measured did fit.
"""

from __future__ import annotations

from contextlib import suppress

from ..errors import RequestError
from ..length.costs import RoundCosts
from .clock import SimulatedClock
from .roofline import Roofline


def ridge(costs: RoundCosts) -> float | None:
    """Tokens a step from which on a forward of the target multiplies longer than it reads, with one row's context.

    None of measured step times. Source: Williams, Waterman and Patterson, "Roofline", CACM 2009.
    """
    if not isinstance(costs, Roofline):
        return None
    cost, assumed = costs.target.cost, costs.assumed
    read = cost.weight_bytes + costs.context * cost.kv_bytes
    flops = 2 * cost.parameters + costs.context * cost.attention_flops
    bandwidth = assumed.bandwidth * costs.hardware.bandwidth * 1e9
    return (read / bandwidth) / (flops / (assumed.compute * costs.hardware.flops))


def fitted(clock: SimulatedClock, sizes: list[int], context: int) -> SimulatedClock:
    """The clock with as many GPUs as hold the largest of the batches that fit."""
    for rows in sorted(sizes, reverse=True):
        with suppress(RequestError):
            return clock.fitted(rows, context)
    return clock


def fits(costs: RoundCosts, rows: int) -> bool:
    """Whether the memory holds so many rows; measured step times are of what fitted."""
    return not isinstance(costs, Roofline) or costs.fits(rows)

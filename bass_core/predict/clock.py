"""A clock for a machine that is not here: the hardware and models that a lane's times are predicted for.

A SimulatedClock is plain data, frozen and picklable. Unknown names raise a RequestError at once; models that don't
fit the memory raise one as soon as the number of rows is known (`fitted`). Every time derived from the clock is a
prediction; `record` lists the assumptions. lanes/clock.py counts the time, billing.py the forwards of a round.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import RequestError
from ..length.costs import CostTable, RoundCosts
from ..machine.hardware import Peaks
from .checks import check_assumptions, check_numbers, find
from .hardware import HARDWARE, Assumptions, Hardware
from .roofline import Roofline
from .shapes import MODELS, ModelShape, ModelSize, shape

GPUS = (1, 2, 4, 8)


@dataclass(frozen=True)
class SimulatedClock:
    """Time as it would pass on other hardware, with models of other sizes.

    Attributes:
        hardware: a name from HARDWARE, in upper or lower case, or your own numbers (Hardware), or a table of step
            times (CostTable) that was measured on some machine. A table holds only for the pair that it was
            measured with, so target, draft, gpus and assumed are ignored.
        target: a name from MODELS, or your own numbers (ModelSize).
        draft: the same for the draft model.
        gpus: number of GPUs that the target is split over, from GPUS. None: the fewest that hold the models and
            the request's keys and values.
        assumed: the shares of the hardware's figures that a step reaches.

    Raises:
        RequestError: for any other value.
    """

    hardware: str | Hardware | CostTable = "h100"
    target: str | ModelSize = "7.8b"
    draft: str | ModelSize = "310m"
    gpus: int | None = None
    assumed: Assumptions = field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        if self.table is not None:
            return
        hardware = self.machine
        check_numbers("hardware", hardware, ("bandwidth", "flops", "memory"), ("nvlink",))
        for name in ("target", "draft"):
            size = getattr(self, name)
            find(name, size, MODELS, ModelSize)
            if isinstance(size, ModelSize):
                check_numbers(name, size, ("parameters", "bytes_per_weight", "layers", "kv_bytes"), ())
        check_assumptions(self.assumed)
        if self.gpus is not None and self.gpus not in GPUS:
            raise RequestError(f"gpus must be None or one of {', '.join(map(str, GPUS))}; got {self.gpus!r}.")
        if (self.gpus or 1) > 1 and not hardware.nvlink:
            raise RequestError(f"{hardware.name} has no link to others of its kind: leave gpus at None or 1.")
        self.fitted(0, 0)

    @property
    def table(self) -> CostTable | None:
        """The measured step times, if there are any."""
        return self.hardware if isinstance(self.hardware, CostTable) else None

    @property
    def machine(self) -> Hardware:
        """The hardware that it predicts for. A table has none."""
        known = find("hardware", self.hardware, HARDWARE, Hardware)
        return HARDWARE[known] if isinstance(known, str) else known

    @property
    def models(self) -> tuple[ModelShape, ModelShape]:
        """The shapes of target and draft."""
        return _shape("target", self.target), _shape("draft", self.draft)

    @property
    def peaks(self) -> Peaks:
        """The peaks of all its GPUs together."""
        count = self.gpus or 1
        return Peaks(self.machine.bandwidth * 1e9 * count, self.machine.flops * count)

    def fitted(self, rows: int, longest: int) -> SimulatedClock:
        """Return this clock with its number of GPUs, for `rows` rows of up to `longest` tokens.

        Raises:
            RequestError: if the models or rows don't fit the memory.
        """
        if self.table is not None:
            return self
        machine, (target, draft) = self.machine, self.models
        roofline = Roofline(machine, target, draft, longest, assumed=self.assumed)
        candidates = (self.gpus,) if self.gpus else GPUS if machine.nvlink else (1,)
        enough_gpus = next((count for count in candidates if replace(roofline, gpus=count).fits(rows)), None)
        if enough_gpus is not None:
            return self if rows == 0 else replace(self, gpus=enough_gpus)
        batch = f" with {rows} rows of {longest} tokens" if rows else ""
        where = f"{candidates[-1]} x {machine.name} of {machine.memory:g} GB"
        raise RequestError(
            f"{target.name} and {draft.name}{batch} do not fit {where}: choose smaller models, other hardware or "
            "more gpus."
        )

    def costs(self, context: float) -> RoundCosts:
        """Return the step times for `context` cached tokens per row on average. A table ignores `context`."""
        if self.table is not None:
            return self.table
        return Roofline(self.machine, *self.models, context, self.gpus or 1, self.assumed)

    def record(self) -> dict[str, Any]:
        """Return the predicted machine as plain data: ClockRecord in lanes/snapshot.py."""
        if self.table is not None:
            head: dict[str, Any] = {"hardware": "this machine", "gpus": None, "target": None, "draft": None}
            return {"kind": "predicted", **head, "assumptions": {}, "source": "a table of measured step times"}
        target, draft = self.models
        return {
            "kind": "predicted",
            "hardware": self.machine.name,
            "gpus": self.gpus,
            "target": target.name,
            "draft": draft.name,
            "assumptions": vars(self.assumed).copy(),
            "source": self.machine.source,
        }


def check_clock(clock: object, rows: int, longest: int) -> SimulatedClock:
    """Return the clock, fitted to `rows` rows of up to `longest` tokens.

    Raises:
        RequestError: if it is not a SimulatedClock, or the rows don't fit.
    """
    if not isinstance(clock, SimulatedClock):
        raise RequestError(
            f'clock must be None or a SimulatedClock, for example SimulatedClock("h100"); got {clock!r}.'
        )
    return clock.fitted(rows, longest)


def _shape(name: str, value: Any) -> ModelShape:
    known = find(name, value, MODELS, ModelSize)
    return shape(known) if isinstance(known, str) else known.shape()

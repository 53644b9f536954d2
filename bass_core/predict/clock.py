"""A clock for a machine that is not here: what to predict the times of a lane's forwards for.

Contract: plain data, frozen and picklable. What can't be predicted is refused with a RequestError of one sentence,
names at once and what does not fit the memory once the rows are known (`fitted`). Every time that comes from it is
a prediction, and `record` says for what and with which assumptions. Non-goals: counting time (lanes/clock.py), and
what a round's forwards were (billing.py).
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
from .shapes import MODELS, ModelSize, Shape, shape

GPUS = (1, 2, 4, 8)


@dataclass(frozen=True)
class SimulatedClock:
    """Time as it would pass on other hardware, with models of other sizes.

    hardware: a name from HARDWARE, in either case, or numbers of one's own (Hardware); or a table of step times
    (CostTable) measured on some machine, which then hold as they are, for the pair that they were measured with:
    target, draft, gpus and assumed do not count. target, draft: names from MODELS, or own numbers (ModelSize).
    gpus: over how many the target is split, of GPUS; None: the fewest that hold the models, and the keys and
    values of the request at hand. assumed: how much of the hardware's figures a step reaches.
    Raises RequestError for what is none of these.
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
        """The measured step times, if it goes by those."""
        return self.hardware if isinstance(self.hardware, CostTable) else None

    @property
    def machine(self) -> Hardware:
        """The hardware that it predicts for; a table has none."""
        found = find("hardware", self.hardware, HARDWARE, Hardware)
        return HARDWARE[found] if isinstance(found, str) else found

    @property
    def models(self) -> tuple[Shape, Shape]:
        """The shapes of target and draft."""
        return _shape("target", self.target), _shape("draft", self.draft)

    @property
    def peaks(self) -> Peaks:
        """What all its GPUs together do at most."""
        count = self.gpus or 1
        return Peaks(self.machine.bandwidth * 1e9 * count, self.machine.flops * count)

    def fitted(self, rows: int, longest: int) -> SimulatedClock:
        """This clock with its number of GPUs, for `rows` rows of up to `longest` tokens."""
        if self.table is not None:
            return self
        machine, (target, draft) = self.machine, self.models
        made = Roofline(machine, target, draft, longest, assumed=self.assumed)
        tried = (self.gpus,) if self.gpus else GPUS if machine.nvlink else (1,)
        found = next((count for count in tried if replace(made, gpus=count).fits(rows)), None)
        if found is not None:
            return self if rows == 0 else replace(self, gpus=found)
        asked = f" with {rows} rows of {longest} tokens" if rows else ""
        where = f"{tried[-1]} x {machine.name} of {machine.memory:g} GB"
        raise RequestError(
            f"{target.name} and {draft.name}{asked} do not fit {where}: choose smaller models, other hardware or "
            "more gpus."
        )

    def costs(self, context: float) -> RoundCosts:
        """The step times where rows have `context` cached tokens on average; a table's do not depend on it."""
        if self.table is not None:
            return self.table
        return Roofline(self.machine, *self.models, context, self.gpus or 1, self.assumed)

    def record(self) -> dict[str, Any]:
        """What it predicts for, as plain data: ClockRecord in lanes/snapshot.py."""
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
    """The clock fitted to `rows` rows of up to `longest` tokens. Raises RequestError for what is none."""
    if not isinstance(clock, SimulatedClock):
        raise RequestError(f'clock must be None or a SimulatedClock, as SimulatedClock("h100"); got {clock!r}.')
    return clock.fitted(rows, longest)


def _shape(what: str, given: Any) -> Shape:
    found = find(what, given, MODELS, ModelSize)
    return shape(found) if isinstance(found, str) else found.shape()

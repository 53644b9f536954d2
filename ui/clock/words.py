"""What the page says of a predicted clock.

Contract: made from a snapshot's "clock" (bass_core's Snapshot), whose key is absent where times are measured. A
recording's may lack any key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bass_core import RequestError
from ui.clock import machine


def clock_of(snapshot: Mapping[str, Any]) -> dict[str, Any] | None:
    """The predicted clock of a snapshot; None if its times are measured."""
    clock = snapshot.get("clock")
    return clock if isinstance(clock, dict) and clock else None


def machine_of(clock: Mapping[str, Any], mark: str = "") -> str:
    """The machine's name: "H100 with 7.8B and 310M", or "2 H100 with 70B and 8B"; `mark` is put before "H100"."""
    gpus = clock.get("gpus") or 1
    models = " and ".join(str(clock[key]) for key in ("target", "draft") if clock.get(key))
    name = f"{mark}{clock.get('hardware') or 'machine'}"
    return ("" if gpus == 1 else f"{gpus} ") + name + (f" with {models}" if models else "")


def where(clock: Mapping[str, Any]) -> str:
    """Where lane times hold: "on a predicted H100 with 7.8B and 310M"."""
    article = "a " if (clock.get("gpus") or 1) == 1 else ""
    return f"on {article}{machine_of(clock, 'predicted ')}"


def head(snapshot: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the feed's head tells of a predicted clock; nothing for a measured one.

    machine: its name. code: the Python that makes the clock; None for a recording whose settings do not say.
    """
    clock = clock_of(snapshot)
    if clock is None:
        return {}
    try:
        code = machine.code(settings)
    except RequestError:
        code = None
    return {"clock": clock, "machine": machine_of(clock), "code": code}

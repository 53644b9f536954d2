"""`race`: several decoders answer one request on one device, with snapshots while they run.

If a lane needs round costs that are not measured yet, they are measured first. Meanwhile, snapshots have
phase="measuring" and no lanes, and no lane's clock runs.

Scheduling: "fair" always steps the lane whose own clock is furthest behind, so a snapshot shows what identical
machines, one per lane, would show at the same instant. "overlap" gives each lane a thread and, on a GPU, a stream.
"in_turn" runs one lane after another. With greedy or coupled decoding, or a fixed draft length, all three give the
same texts (except for AMUSD). With `clock`, all times of the lanes are predictions for another machine, but the
texts are real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import cast

from typing_extensions import Unpack

from ..decode.admission import admit, make_room
from ..decode.measuring import Measuring
from ..decode.request import Request, make_request
from ..errors import RequestError
from ..machine.capture import empty_cache
from ..machine.monitor import Monitor
from ..machine.torch_state import stepped, torch_defaults
from ..model.pair import ModelPair
from ..options import Keywords, Options, Prompt, lists_options, options_of_call
from ..sequence import record_of
from .comparison import comparison, reference_lane
from .lane import Lane
from .methods import DEFAULT_LANES, Method, check_method, find_methods, policy_rows
from .pace import Pace
from .schedule import SCHEDULINGS
from .snapshot import ClockRecord, DeviceReading, LaneSnapshot, Snapshot
from .view import lane_view
from .warmup import warm_up

SNAPSHOT_SECONDS = 0.1


@lists_options
def race(
    pair: ModelPair,
    prompt: Prompt,
    *,
    lanes: Seq[str] = DEFAULT_LANES,
    scheduling: str = "fair",
    stopped: Callable[[], bool] = lambda: False,
    options: Options | None = None,
    **keywords: Unpack[Keywords],
) -> Iterator[Snapshot]:
    """Yield snapshots while each lane's method answers the prompt: about ten per second, the last with done=True.

    Closing the generator ends the work and frees the memory.

    Args:
        prompt: text, token ids, or a list of either.
        lanes: names from METHODS.
        scheduling: "fair", "overlap" or "in_turn", see the module docstring.
        stopped: called after every step, on any thread. Once it returns True, the race ends without another
            snapshot.
        options: the other arguments as one object, instead of keywords.
        **keywords: the fields of Options, as in `generate`.

    Raises:
        RequestError: at the call, if an argument is unknown or out of range, or the request does not fit the
            memory.
        MemoryShortage: while the race runs, if the device runs out of memory although the request was found to
            fit. Everything is freed.
    """
    all_options = options_of_call(race, options, keywords)
    methods = find_methods(lanes)
    if not isinstance(scheduling, str) or scheduling not in SCHEDULINGS:
        raise RequestError(f"scheduling must be one of {', '.join(SCHEDULINGS)}; got {scheduling!r}.")
    request = make_request(pair, prompt, options=all_options)
    for method in methods:
        check_method(method, pair, request)
    # "in_turn" needs only one lane's memory at a time.
    needed = admit(pair, request, *([methods] if scheduling != "in_turn" else [[method] for method in methods]))
    return _run(pair, request, methods, scheduling, stopped, needed)


def _run(
    pair: ModelPair,
    request: Request,
    methods: list[Method],
    scheduling: str,
    stopped: Callable[[], bool],
    needed: int,
) -> Iterator[Snapshot]:
    monitor = Monitor(pair.device)
    lanes: list[Lane] = []
    try:
        monitor.start()
        warm_up(pair, request)
        measuring = Measuring(pair, request, max(policy_rows(request, method) for method in methods))
        for _ in _measure(measuring, stopped):
            if stopped():
                return
            snapshot = _snapshot(request, [], monitor, scheduling, time.perf_counter(), measuring=True)
            if measuring.progress is not None:
                snapshot["measuring"] = record_of(measuring.progress)
            yield snapshot
        make_room(pair, needed)  # warming up and measuring leave idle caches
        request, start = measuring.request, time.perf_counter()
        with torch_defaults():
            for method in methods:  # one by one, so that an error or Ctrl-C ends those that exist
                lanes.append(Lane(pair, request, method.name))
        for _ in SCHEDULINGS[scheduling](lanes, pair.device, SNAPSHOT_SECONDS, stopped):
            if stopped():
                return
            snapshot = _snapshot(request, lanes, monitor, scheduling, start)
            if not snapshot["done"]:
                yield snapshot
        if stopped():
            return
        last = _snapshot(request, lanes, monitor, scheduling, start)
        differences = comparison(pair, request, lanes)
        if differences is not None:
            last["comparison"] = differences
        yield last
    finally:
        monitor.stop()
        for lane in lanes:
            lane.end("stopped")
        empty_cache(pair.device)


def _measure(measuring: Measuring, stopped: Callable[[], bool]) -> Iterator[None]:
    """Measure the lanes' round costs; yield at once, and whenever a snapshot is due or the race has to stop."""
    due = 0.0
    for _ in stepped(measuring):
        if stopped() or time.perf_counter() >= due:
            yield
            due = time.perf_counter() + SNAPSHOT_SECONDS


def _snapshot(
    request: Request,
    lanes: list[Lane],
    monitor: Monitor,
    scheduling: str,
    start: float,
    measuring: bool = False,
) -> Snapshot:
    views: dict[str, LaneSnapshot] = {}
    paces: dict[str, Pace] = {}
    for lane in lanes:
        with lane.turn, lane.held:
            views[lane.method], paces[lane.method] = lane_view(lane), lane.pace
    reference = reference_lane(lanes)
    for name, view in views.items():
        view["metrics"] |= paces[name].against(None if reference is None else paces[reference.method])
    snapshot: Snapshot = {
        "phase": "measuring" if measuring else "running",
        "done": not measuring and all(view["finished"] for view in views.values()),
        "scheduling": scheduling,
        "elapsed_ms": 1000 * (time.perf_counter() - start),
        "lanes": views,
        "device": cast(DeviceReading, monitor.latest()),
    }
    if request.clock is not None:
        snapshot["clock"] = cast(ClockRecord, request.clock.record())
    return snapshot

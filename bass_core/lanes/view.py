"""A lane as the page and the API see it (`lane_view`).

The caller holds the lane's lock if another thread steps the lane.
"""

from __future__ import annotations

from ..decode.text import TextStream
from ..sequence import Sequence, record_of
from .lane import Lane
from .snapshot import LaneSnapshot, SequenceSnapshot


def lane_view(lane: Lane) -> LaneSnapshot:
    """Return the lane's whole current state as JSON-ready data that shares nothing with the lane."""
    texts = lane.readable_texts()  # first, because it may end the lane
    view: LaneSnapshot = {
        "sequences": [_sequence_view(*both) for both in zip(lane.sequences, texts, strict=True)],
        "metrics": record_of(lane.metrics()),
        "rounds": lane.trace.view(),
        "clock_ms": lane.clock.ms,
        "finished": lane.finished,
        "error": lane.error,
        "reading": None if lane.reading is None else record_of(lane.reading),
        "cache": None if lane.cache is None else record_of(lane.cache),
    }
    if lane.timeline is not None:
        view["timeline"] = lane.timeline.view()
    return view


def _sequence_view(sequence: Sequence, text: TextStream | None) -> SequenceSnapshot:
    return {
        "text": None if text is None else text.text,
        "token_ids": list(sequence.token_ids),
        "pieces": None if text is None else list(text.pieces),
        "origins": list(sequence.origins),
        "times_ms": list(sequence.times_ms),
        "finish_reason": sequence.finish_reason,
    }

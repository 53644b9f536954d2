"""The messages between target and draft in AMUSD (arXiv 2410.17375), and how they are sent.

Contract: one stream of small messages each way, read in the order in which they were sent. A row's text is
agreed on up to some length; every drafted block names its row, its epoch and the position at which it starts.
A `TextUpdate` extends the agreed text and names the row's epoch from now on: a block of any other epoch is stale.
So the two sides keep no counters that must match, and no store has to be seen before another.

Large tensors do not travel in messages but lie in an Arena, by row and position: `q` [rows, ring, V'], the
distribution that the token at position t was drawn from, in slot t % ring; and for a draft head `states`
[rows, length, hidden], which the target's step returns for it. The draft writes a slot of `q` before it sends the
block. It never overwrites a position that the target may still need: it leads by less than `ring`, and learns of
the agreed text after the target has read its `q`. The target writes the states of a row's tokens, once each,
before it sends the verdict that settles them. On an accelerator that both share, "written" means queued on the
writer's stream and "read" queued on the reader's: the arena records an event after each, and the other's stream
waits for it.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from ..errors import BassError
from ..sampling.params import SamplingParams
from ..verification.table import Verification
from .shared_memory import Layout

# Seconds that sending into a full link may take; after that the other side does not read any more.
SEND_PATIENCE_S = 0.7


class DraftLostError(BassError, RuntimeError):
    """The draft process crashed, hangs or could not be started; the message says which."""


@dataclass(frozen=True)
class Open:
    """Begin a request, paused.

    `ends[r]`: the most tokens row r may have; `lead`: how many tokens to draft beyond the agreed text; `drafter`:
    a name of drafting/registry.py.
    """

    session: int
    prompts: list[list[int]]
    sequence_ids: list[int]
    ends: list[int]
    lead: int
    params: SamplingParams
    seed: int
    verification: Verification
    backend: str
    layout: Layout
    drafter: str = "model"
    delay_s: float = 0.0


@dataclass(frozen=True)
class RowUpdate:
    """The row's text from `start` on is `tokens`, and its epoch is now `epoch`; a finished row is forgotten."""

    row: int
    epoch: int
    start: int
    tokens: list[int]
    finished: bool = False


@dataclass(frozen=True)
class TextUpdate:
    """What the target decided in one step."""

    session: int
    rows: list[RowUpdate]


@dataclass(frozen=True)
class Block:
    """Drafted `tokens` from position `start` on.

    `max_probs`, `token_probs`: for each token q's largest value and its value at the token, or empty. `copied`:
    whether the token was copied from the text, so that its q is a point mass.
    """

    row: int
    epoch: int
    start: int
    tokens: list[int]
    max_probs: list[float] = field(default_factory=list)
    token_probs: list[float] = field(default_factory=list)
    copied: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class Drafts:
    """What one step of the draft made, and when it was busy (time.perf_counter, one clock for all processes).

    Totals of the request so far: `made`: tokens drafted; `drawn`: those that the draft model drew, in `forwards`
    forwards; `rolled_back`: roll-backs.
    """

    session: int
    blocks: list[Block]
    begin: float
    end: float
    made: int = 0
    rolled_back: int = 0
    drawn: int = 0
    forwards: int = 0


@dataclass(frozen=True)
class Pause:
    """Stop before the next step and answer with the same object."""

    number: int


@dataclass(frozen=True)
class Resume:
    """Go on after a pause, or begin."""


@dataclass(frozen=True)
class Close:
    """Forget the request and free its memory."""

    session: int


@dataclass(frozen=True)
class Ready:
    """The draft's model is loaded."""


@dataclass(frozen=True)
class Failed:
    """The draft's own error, as one line; the process ends."""

    message: str


def socket_pair() -> tuple[Connection, Connection]:
    """Two ends of one link; sending into a full one gives up after SEND_PATIENCE_S (BlockingIOError)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    seconds, rest = divmod(SEND_PATIENCE_S, 1)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
    return Connection(ours.detach()), Connection(theirs.detach())


def receive_all(link: Connection, timeout: float = 0.0) -> list[Any]:
    """The messages that have arrived; waits up to `timeout` seconds for a first one.

    Raises EOFError when the other end is gone and nothing is left to read.
    """
    found: list[Any] = []
    while link.poll(timeout):
        try:
            found.append(link.recv())
        except (EOFError, OSError):
            if not found:
                raise
            break  # return what came before the end; the next call raises
        timeout = 0.0
    return found

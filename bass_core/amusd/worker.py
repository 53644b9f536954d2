"""The draft's main loop: drafts while it may, and otherwise waits for a message.

Contract: `Worker.run` warms the draft up, reports Ready, and works. It ends when the other end of the link is
closed for whatever reason, so that no draft outlives its target. It blocks (in `recv`) when there is nothing to
draft. `main` runs that loop in a process of its own (amusd/host.py starts it); its arguments are inherited file
descriptors, the number of threads and the device.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import torch
from torch import Tensor

from ..attention.select import choose_backend
from ..models.base import CausalModel
from ..models.draft_head import DraftHead
from ..sampling.params import SamplingParams
from ..verification.table import AUTOMATIC
from .messages import Block, Close, Drafts, Failed, Open, Pause, Ready, Resume, RowUpdate, TextUpdate
from .session import DraftSession
from .shared_memory import Arena, Layout, LocalArena

# What the target watches. STAMP: time of the draft's last sign of life (time.perf_counter), negative while it
# waits for a message; time and state share one number, to be read together. READ: messages it has read.
WATCH: Layout = {"watch": ((2,), torch.float64)}
STAMP, READ = range(2)


@dataclass(frozen=True)
class LoadedDraft:
    """A pair's draft (a causal LM or a head) and what runs it or the head's body: a `DraftSource`."""

    draft: Any
    draft_step: CausalModel
    vocab: int

    @property
    def device(self) -> torch.device:
        return self.draft_step.device

    def session(self, spec: Open, arena: Arena) -> DraftSession:
        """A request as rows of the draft."""
        return DraftSession(spec, arena, self)

    def warm(self) -> None:
        """Draft for a made-up prompt, so that kernels are compiled and libraries loaded before a request."""
        backend = choose_backend("auto", self.device)
        head = self.draft if isinstance(self.draft, DraftHead) else None
        outputs = self.vocab if head is None else len(head.vocabulary)
        layout: Layout = {"q": ((2, 4, outputs), torch.float32)}
        if head is not None:
            layout["states"] = ((2, 6, head.config.hidden), torch.float32)
        for params in (SamplingParams(), SamplingParams(1.0)):
            spec = Open(0, [[0, 0]] * 2, [0, 1], [5, 5], 2, params, 0, AUTOMATIC, backend, layout)
            session = self.session(spec, LocalArena(layout, self.device))
            session.judge([RowUpdate(row, 1, 2, [0]) for row in range(2)])
            while session.busy:
                session.step()
            session.close()


class Worker:
    """One draft on one link, with one request at a time. `local`: in a thread, gives the next request's arena."""

    def __init__(
        self, link: Connection, draft: LoadedDraft, watch: Arena, local: Callable[[], Arena] | None = None
    ) -> None:
        self.link, self.draft, self.watch, self.local = link, draft, watch["watch"], local
        self.session: DraftSession | None = None
        self.paused = False

    def run(self) -> None:
        """Work until the link ends."""
        try:
            self._stamp(working=True)
            self.draft.warm()
            self._stamp(working=True)
            self.link.send(Ready())
            while True:
                self._stamp(working=True)
                while not self._busy() or self.link.poll(0):
                    self._stamp(working=self._busy())
                    self._handle(self.link.recv())
                    self.watch[READ] += 1
                self._stamp(working=True)
                self._step()
        except (EOFError, ConnectionError):
            return
        except Exception as error:
            logging.getLogger(__name__).exception("the draft failed")
            self.link.send(Failed(f"{type(error).__name__}"))
        finally:
            self._let_go()

    def _stamp(self, working: bool) -> None:
        stamp(self.watch, working)

    def _let_go(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.close()

    def _busy(self) -> bool:
        return self.session is not None and not self.paused and self.session.busy

    def _step(self) -> None:
        assert self.session is not None
        spec = self.session.spec
        begin = time.perf_counter()
        if spec.delay_s:
            time.sleep(random.random() * spec.delay_s)
        self._announce(self.session.step(), begin)

    def _announce(self, blocks: list[Block], begin: float) -> None:
        session = self.session
        assert session is not None
        end = time.perf_counter()
        done = (session.made, session.rolled_back, session.drafter.drafted, session.drafter.calls)
        self.link.send(Drafts(session.spec.session, blocks, begin, end, *done))

    def _handle(self, message: Any) -> None:
        if isinstance(message, Open):
            self.session, self.paused = self.draft.session(message, self._arena(message.layout)), True
        elif isinstance(message, TextUpdate):
            begin = time.perf_counter()
            if self.session is not None and (blocks := self.session.judge(message.rows)):
                self._announce(blocks, begin)
        elif isinstance(message, Close):
            self._let_go()
        elif isinstance(message, Pause):
            self.paused = True
            self.link.send(message)
        elif isinstance(message, Resume):
            self.paused = False

    def _arena(self, layout: Layout) -> Arena:
        if self.local is not None:
            return self.local()
        arena = Arena(layout, recv_handle(self.link))
        arena.close_fd()
        return arena


def stamp(watch: Tensor, working: bool) -> None:
    """Record a sign of life: the time, negative unless working."""
    watch[STAMP] = time.perf_counter() if working else -time.perf_counter()


def main(arguments: list[str]) -> None:
    """A draft process. It ends when its link does and ignores Ctrl-C (SIGINT), which is meant for the target."""
    from ..models.select import select_model

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link_fd, model_fd, watch_fd, threads = map(int, arguments[:4])
    torch.set_num_threads(threads)
    device = torch.device(arguments[4])
    watch = Arena(WATCH, watch_fd)
    watch.close_fd()
    stamp(watch["watch"], working=True)  # a sign of life after torch's import
    with os.fdopen(model_fd, "rb") as file:
        # Safe to unpickle: the process that started this one has just written it to anonymous memory.
        draft, vocab = torch.load(file, map_location=device, weights_only=False)
    if isinstance(draft, DraftHead):
        draft.pack()
    stamp(watch["watch"], working=True)
    step = select_model(draft.body if isinstance(draft, DraftHead) else draft)
    Worker(Connection(link_fd), LoadedDraft(draft, step, vocab), watch).run()


if __name__ == "__main__":
    main(sys.argv[1:])

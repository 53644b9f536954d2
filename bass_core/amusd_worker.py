"""The loop in which a draft works: drafts while it may, and otherwise waits for a message.

Contract: `Worker.run` ends when the link's other end is gone, whoever closed it and however, so that no draft
outlives its target. It blocks (in `recv`) when there is nothing to draft. `main` is that loop in a process of
its own (amusd_process.py starts it); its arguments are descriptors that it inherits, threads and device.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import torch

from .amusd_arena import Arena, Layout
from .amusd_draft import DraftSession
from .amusd_link import Block, Close, Drafts, Failed, Open, Pause, Ready, Resume, Verdict
from .draft_head import DraftHead

# For the one who waits: when the draft last showed life, whether it works, and how many messages it has read.
WATCH: Layout = {"watch": ((3,), torch.float64)}
STAMP, WORKING, READ = range(3)

MakeSession = Callable[[Open, Arena], DraftSession]


class Worker:
    """One draft at one link; one request at a time."""

    def __init__(self, link: Connection, make: MakeSession, watch: Arena) -> None:
        self.link, self.make, self.watch = link, make, watch["watch"]
        self.session: DraftSession | None = None
        self.paused = False

    def run(self) -> None:
        """Work until the link ends."""
        try:
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
            self.session = None

    def _stamp(self, working: bool) -> None:
        self.watch[WORKING] = working
        self.watch[STAMP] = time.perf_counter()

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
        self.link.send(Drafts(session.spec.session, blocks, begin, end, session.made, session.rolled_back))

    def _handle(self, message: Any) -> None:
        if isinstance(message, Open):
            fd = recv_handle(self.link)
            arena = Arena(message.layout, fd)
            arena.close_fd()
            self.session, self.paused = self.make(message, arena), True
        elif isinstance(message, Verdict):
            begin = time.perf_counter()
            if self.session is not None and (blocks := self.session.judge(message.rows)):
                self._announce(blocks, begin)
        elif isinstance(message, Close):
            self.session = None
        elif isinstance(message, Pause):
            self.paused = True
            self.link.send(message)
        elif isinstance(message, Resume):
            self.paused = False


def session_maker(draft: Any, step: Any, vocab: int) -> MakeSession:
    """How a request becomes rows of the pair's draft, a causal LM or a head."""
    head = draft if isinstance(draft, DraftHead) else None
    return lambda spec, arena: DraftSession(spec, arena, step, head, vocab)


def main(arguments: list[str]) -> None:
    """A draft process; it ends with its link, not with the terminal's interrupt, which is for the target."""
    from .pair import _step_model

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link_fd, model_fd, watch_fd, threads = map(int, arguments[:4])
    torch.set_num_threads(threads)
    device = torch.device(arguments[4])
    watch = Arena(WATCH, watch_fd)
    watch.close_fd()
    with os.fdopen(model_fd, "rb") as file:
        # Written a moment ago by the process that started this one, into memory without a name.
        draft, vocab = torch.load(file, map_location=device, weights_only=False)
    if isinstance(draft, DraftHead):
        draft.pack()
    step = _step_model(draft.body if isinstance(draft, DraftHead) else draft)
    Worker(Connection(link_fd), session_maker(draft, step, vocab), watch).run()


if __name__ == "__main__":
    main(sys.argv[1:])

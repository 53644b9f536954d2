"""The thread in which a request's draft works.

Contract: the thread makes its session, is paused until `resume`, and then steps the session while there is
something to draft. `pause` returns once no step is under way. If the draft raises, its thread ends:
`timeline.note` says why, nothing is raised here, and what was drafted before still counts. `close` waits for the
thread, and so does the program's end. Both threads spend most of their time in compiled code, which releases
Python's lock.
"""

from __future__ import annotations

import atexit
import logging
import random
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from kernels.support import is_accelerator, own_stream, runtime

from ...machine.cpu import cores
from ...machine.torch_state import ours
from ...sequence import Sequence
from .session import NEWS, Draft, DraftSession, shared_rows
from .timeline import Timeline

_log = logging.getLogger(__name__)


class DraftThread:
    """The draft of these sequences. Methods without an underscore are called by the target's thread.

    rows: what both sides share, by the sequences' index; a thread that touches one holds `lock`. session: the
    draft's side, None if it could not be made. step_ms: of a step of the draft's model, None until one was seen.
    steps: of any kind, seen so far; forwards, drawn: the model's forwards in them, and the tokens that it drew.
    """

    def __init__(self, sequences: list[Sequence]) -> None:
        self.timeline, self.lock = Timeline(), threading.Condition()
        self.rows = {row.index: row for row in shared_rows(sequences)}
        self.session: DraftSession | None = None
        self.step_ms: float | None = None
        self.steps = self.forwards = self.drawn = 0
        # Steps not seen yet: from when to when (time.perf_counter), and whether the model alone drafted.
        self._news: list[tuple[float, float, bool]] = []
        self._running = self._closed = self._working = False
        self._thread: threading.Thread | None = None
        # A failed session's totals.
        self._ended: tuple[int, int, int, int] | None = None

    def start(
        self, make: Callable[[], DraftSession], home: torch.device, device: torch.device, delay_s: float = 0.0
    ) -> None:
        """Let the thread make its session on the draft's device; on return it is there, and paused.

        home: the target's device, to which what was drafted goes. delay_s: for tests, each step is delayed by a
        random time of up to so many seconds.
        """
        self._working = True
        # A number of threads that one thread sets is also that of threads to come.
        threads = torch.get_num_threads()
        arguments = (make, home, device, delay_s)
        self._thread = threading.Thread(target=self._run, args=arguments, name="bass-amusd-draft", daemon=True)
        self._thread.start()
        _started.add(self)
        self.pause()
        torch.set_num_threads(threads)

    @property
    def alive(self) -> bool:
        """Whether the draft is still there."""
        return self.timeline.note is None

    def resume(self) -> None:
        """Let the draft work."""
        with self.lock:
            self._running = True
            self.lock.notify_all()

    def pause(self) -> None:
        """Stop the draft after the step that is under way, and wait for that."""
        with self.lock:
            self._running = False
            if not self._in_own_thread:
                self.lock.wait_for(lambda: not self._working)
        self.look()

    def end(self) -> None:
        """Let the thread end after the step that is under way."""
        with self.lock:
            self._closed = True
            self.lock.notify_all()

    def close(self) -> None:
        """End the thread and wait for it; what it held is free then."""
        self.end()
        if self._thread is not None and not self._in_own_thread:
            self._thread.join()
        self.session = None

    @property
    def _in_own_thread(self) -> bool:
        """Where Python happens to collect a lane that nobody holds, it must not wait for itself."""
        return threading.current_thread() is self._thread

    def look(self, timeout_s: float = 0.0) -> dict[int, list[Draft]]:
        """The drafts after each row's text; waits up to `timeout_s` seconds for a step that was not seen yet."""
        line = self.timeline
        with self.lock:
            self.lock.wait_for(lambda: self._news or not self.alive, timeout_s)
            news, self._news = self._news, []
            drafts = {index: list(row.drafts) for index, row in self.rows.items()}
            if (totals := self._ended if self.session is None else self.session.totals) is not None:
                line.made, self.forwards, self.drawn, rolled_back = totals
                for _ in range(rolled_back - line.rolled_back):
                    line.add_rollback(news[0][0] if news else time.perf_counter())
        for begin, end, modelled in news:
            self.steps += 1
            line.add_draft(begin, end)
            if modelled:
                spent = 1000 * (end - begin)
                if self.step_ms is None or 2 * spent < self.step_ms:  # an earlier step may have compiled kernels
                    self.step_ms = spent
                self.step_ms += NEWS * (spent - self.step_ms)
        line.waiting = sum(map(len, drafts.values()))
        return drafts

    def agree(self, row: Sequence, tokens: list[int], same: bool, states: Tensor | None) -> None:
        """The row has just written `tokens` (`same`: as drafted); `states`: see Row."""
        with self.lock:
            shared = self.rows[row.index]
            shared.agree(tokens, same, states if self.alive else None)
            if row.finish_reason:
                shared.finish_reason = row.finish_reason
                del self.rows[row.index]
            self.lock.notify_all()

    def _run(
        self, make: Callable[[], DraftSession], home: torch.device, device: torch.device, delay_s: float
    ) -> None:
        session: DraftSession | None = None
        try:
            if not is_accelerator(device):
                torch.set_num_threads(split_threads()[1])
            # A copy between two devices waits for the current streams of both: never for the target's.
            with own_stream(home) if home != device else nullcontext(), own_stream(device):
                try:
                    with ours():
                        session = self.session = make()
                    while self._wait(session):
                        begin = time.perf_counter()
                        if delay_s:
                            time.sleep(random.random() * delay_s)
                        with ours():
                            modelled = session.step()
                        with self.lock:
                            self._news.append((begin, time.perf_counter(), modelled))
                            self.lock.notify_all()
                finally:
                    # The next user of this memory may write to it.
                    wait_for_stream(device)
        except Exception as error:
            _log.exception("the draft failed")
            # The traceback's frames hold the session's caches, and live as long as the log record does.
            traceback.clear_frames(error.__traceback__)
            why = f"The draft failed ({type(error).__name__}). This lane goes on as regular decoding."
            self.timeline.note = why
        finally:
            with self.lock:
                if not self.alive:
                    self._ended = None if session is None else session.totals
                    # The log record holds this frame.
                    session = self.session = None
                    for row in self.rows.values():
                        row.states.clear()
                self._working = False
                self.lock.notify_all()

    def _wait(self, session: DraftSession) -> bool:
        """Wait for work; False when the thread is to end."""
        with self.lock:
            self._working = False
            self.lock.notify_all()
            self.lock.wait_for(lambda: self._closed or (self._running and session.busy))
            self._working = not self._closed
            return self._working


def split_threads() -> tuple[int, int]:
    """Threads of target and draft on a CPU: the draft, the smaller model, gets a quarter, at least one."""
    draft = max(1, cores() // 4)
    return max(1, min(torch.get_num_threads(), cores() - draft)), draft


def wait_for_stream(device: torch.device) -> None:
    """Wait for what this thread has queued on an accelerator."""
    if is_accelerator(device):
        runtime(device).current_stream(device).synchronize()


_started: weakref.WeakSet[DraftThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that returns from torch after the interpreter is gone aborts the program."""
    for one in list(_started):
        one.close()

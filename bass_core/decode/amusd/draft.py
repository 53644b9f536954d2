"""The thread in which a request's draft works.

`pause` returns once no step is running. If the draft fails, its thread ends and `timeline.note` explains why; the
target's thread gets no exception. Both threads spend most of their time in compiled code without Python's global
lock.
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

from kernels.support import is_accelerator, new_stream, runtime

from ...machine.cpu import cores
from ...machine.torch_state import torch_defaults
from ...sequence import Sequence
from .session import NEW_SAMPLE_WEIGHT, DraftSession, QueuedDraft, shared_rows
from .timeline import Timeline

_log = logging.getLogger(__name__)


class DraftThread:
    """The draft of these sequences. The target's thread calls the methods without an underscore.

    Attributes:
        lock: a thread that touches a row holds this.
        changed: a condition of `lock`, notified when the draft or its orders have changed.
        rows: the rows that both sides share, by the sequences' index.
        session: the draft's side; None if it could not be made.
        step_ms: milliseconds of a step of the draft model; None until `look` has seen one.
        steps: number of steps of any kind that `look` has seen so far.
        forwards, drawn: the draft model's forwards in these steps, and the tokens that it drew.
    """

    def __init__(self, sequences: list[Sequence]) -> None:
        self.timeline = Timeline()
        # Enter `lock`, not `changed`: its own `with` is compiled, so Ctrl-C can't leave it locked.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.rows = {row.index: row for row in shared_rows(sequences)}
        self.session: DraftSession | None = None
        self.step_ms: float | None = None
        self.steps = self.forwards = self.drawn = 0
        # For each step that `look` has not seen yet: its begin and end (time.perf_counter), and whether it drafted
        # with the model only, without copies.
        self._unseen_steps: list[tuple[float, float, bool]] = []
        self._running = self._closed = self._working = False
        self._thread: threading.Thread | None = None
        # If the draft has failed: `totals` of its session, or None if there was no session.
        self._failed_totals: tuple[int, int, int, int] | None = None

    def start(
        self, make: Callable[[], DraftSession], home: torch.device, device: torch.device, delay_s: float = 0.0
    ) -> None:
        """Let the thread make its session. Returns once the session exists and is paused.

        Args:
            home: the target's device, which the drafts are copied to.
            device: the draft's device.
            delay_s: for tests, the maximum random delay before each step, in seconds.
        """
        self._working = True
        # The draft's thread calls torch.set_num_threads, which also changes the default of threads started later.
        # Remember the number here, and restore it below.
        threads = torch.get_num_threads()
        arguments = (make, home, device, delay_s)
        self._thread = threading.Thread(target=self._run, args=arguments, name="bass-amusd-draft", daemon=True)
        try:
            self._thread.start()
            _started.add(self)
            self.pause()
        except BaseException:  # Ctrl-C
            self.end()
            raise
        finally:
            torch.set_num_threads(threads)

    @property
    def alive(self) -> bool:
        """Whether the draft has not failed."""
        return self.timeline.note is None

    def resume(self) -> None:
        with self.lock:
            self._running = True
            self.changed.notify_all()

    def pause(self) -> None:
        """Stop the draft, and wait until the running step has ended."""
        with self.lock:
            self._running = False
            if not self._in_own_thread:
                self.changed.wait_for(lambda: not self._working)
        self.look()

    def end(self) -> None:
        """Let the thread end after the running step."""
        with self.lock:
            self._closed = True
            self.changed.notify_all()

    def close(self) -> None:
        """End the thread and wait until it has ended; the draft's memory is then free."""
        self.end()
        if self._thread is not None and not self._in_own_thread:
            self._thread.join()
        self.session = None

    @property
    def _in_own_thread(self) -> bool:
        """Whether this is the draft's own thread, e.g. in garbage collection; it must not wait for itself."""
        return threading.current_thread() is self._thread

    def look(self, timeout_s: float = 0.0) -> dict[int, list[QueuedDraft]]:
        """Return the drafts after each row's text. First wait up to `timeout_s` seconds for an unseen step."""
        timeline = self.timeline
        with self.lock:
            self.changed.wait_for(lambda: self._unseen_steps or not self.alive, timeout_s)
            unseen, self._unseen_steps = self._unseen_steps, []
            drafts = {index: list(row.drafts) for index, row in self.rows.items()}
            if (totals := self._failed_totals if self.session is None else self.session.totals) is not None:
                timeline.made, self.forwards, self.drawn, rolled_back = totals
                for _ in range(rolled_back - timeline.rolled_back):
                    timeline.add_rollback(unseen[0][0] if unseen else time.perf_counter())
        for begin, end, only_model in unseen:
            self.steps += 1
            timeline.add_draft(begin, end)
            if only_model:
                spent = 1000 * (end - begin)
                if self.step_ms is None or 2 * spent < self.step_ms:  # an earlier step may have compiled kernels
                    self.step_ms = spent
                self.step_ms += NEW_SAMPLE_WEIGHT * (spent - self.step_ms)
        timeline.waiting = sum(map(len, drafts.values()))
        return drafts

    def agree(self, row: Sequence, tokens: list[int], same: bool, states: Tensor | None) -> None:
        """Report the tokens that a row has written (its next drafts if `same`); `states` as in SharedRow."""
        with self.lock:
            shared = self.rows[row.index]
            shared.agree(tokens, same, states if self.alive else None)
            if row.finish_reason:
                shared.finish_reason = row.finish_reason
                del self.rows[row.index]
            self.changed.notify_all()

    def _run(
        self, make: Callable[[], DraftSession], home: torch.device, device: torch.device, delay_s: float
    ) -> None:
        session: DraftSession | None = None
        try:
            if not is_accelerator(device):
                torch.set_num_threads(split_threads()[1])
            # A copy between two devices waits for the current streams of both devices. Use separate streams here,
            # so that a copy never waits for the target's stream.
            with new_stream(home) if home != device else nullcontext(), new_stream(device):
                try:
                    with torch_defaults():
                        session = self.session = make()
                    while self._wait(session):
                        begin = time.perf_counter()
                        if delay_s:
                            time.sleep(random.random() * delay_s)
                        with torch_defaults():
                            only_model = session.step()
                        with self.lock:
                            self._unseen_steps.append((begin, time.perf_counter(), only_model))
                            self.changed.notify_all()
                finally:
                    # Wait for the draft's last work, because its memory is freed and reused afterwards.
                    wait_for_stream(device)
        except BaseException as error:  # also a panic in a library written in Rust
            _log.exception("the draft failed")
            # Clear the traceback's frames: they hold the session's caches and live as long as the log record.
            traceback.clear_frames(error.__traceback__)
            why = f"The draft failed ({type(error).__name__}). This lane goes on as regular decoding."
            self.timeline.note = why
        finally:
            with self.lock:
                if not self.alive:
                    self._failed_totals = None if session is None else session.totals
                    # The log record keeps this function's local variables alive, so drop the session here.
                    session = self.session = None
                    for row in self.rows.values():
                        row.states.clear()
                self._working = False
                self.changed.notify_all()

    def _wait(self, session: DraftSession) -> bool:
        """Wait for work; return False when the thread is to end."""
        with self.lock:
            self._working = False
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._closed or (self._running and session.busy))
            self._working = not self._closed
            return self._working


def split_threads() -> tuple[int, int]:
    """Return the target's and the draft's number of threads on a CPU: the draft gets a quarter, at least one."""
    draft = max(1, cores() // 4)
    return max(1, min(torch.get_num_threads(), cores() - draft)), draft


def wait_for_stream(device: torch.device) -> None:
    """Wait for everything that this thread has queued on an accelerator."""
    if is_accelerator(device):
        runtime(device).current_stream(device).synchronize()


_started: weakref.WeakSet[DraftThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all threads: a thread that returns from torch after the interpreter's end aborts the program."""
    for thread in list(_started):
        thread.close()

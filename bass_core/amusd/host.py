"""Draft processes: started once per pair, lent to one request at a time, ended with the pair or the program.

Contract: `borrow(pair)` returns a host whose draft is loaded; `give_back` keeps it for the next request. If the
draft has crashed or hangs, the next `send`, `receive` or `check` raises DraftLostError; the host is then `end`ed.
- With the target on a CPU, the draft runs in a process of its own, and the two share the cores.
- With the target on a GPU, it runs in a process on the next GPU; with only one GPU, in a thread with a stream of
  its own (two processes on one GPU take turns instead of overlapping); with `pair.amusd_draft = "cpu"`, on the
  CPU. No GPU arrangement has been run yet.
The process is not started by multiprocessing, which would import the caller's main module again: so a script
without a main guard, or a notebook, works.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

import torch

from kernels.support import is_accelerator, own_stream, runtime

from ..machine.cpu import cores
from ..models.pair import ModelPair
from .messages import DraftLostError, Drafts, Failed, Open, Ready, receive_all, socket_pair
from .pulse import Pulse
from .shared_memory import Arena
from .worker import READ, STAMP, WATCH, LoadedDraft, Worker

# Seconds that a start, or the first step of a request, may take: kernels are compiled, libraries loaded.
START_PATIENCE_S = 300.0
# Seconds without CPU time or progress after which a starting process counts as stopped or stuck.
QUIET_S = 10.0
# Seconds without a sign of life after which a draft hangs; at least SLOW_STEPS times its slowest step.
PATIENCE_S = 0.75
SLOW_STEPS = 4
# The least such patience on an accelerator, where each new shape of a step is compiled and captured.
ACCELERATOR_PATIENCE_S = 30.0
# Imports come from this project's folder first, not from the working directory.
_START = "import sys; sys.path[0] = sys.argv[1]; from bass_core.amusd.worker import main; main(sys.argv[2:])"
_HOME = str(Path(__file__).resolve().parents[2])
# Re-entrant: a finalizer also gives hosts back, and the garbage collector may run it while the lock is held.
_lock = threading.RLock()


def split_threads() -> tuple[int, int]:
    """Threads of target and draft on a CPU: the draft, the smaller model, gets a quarter, at least one."""
    draft = max(1, cores() // 4)
    return max(1, min(torch.get_num_threads(), cores() - draft)), draft


def place(pair: ModelPair) -> torch.device | None:
    """The device of the draft's process; None for a thread in the target's process."""
    wanted = getattr(pair, "amusd_draft", "auto")
    if wanted != "auto":
        return None if wanted == "stream" else torch.device(wanted)
    if not is_accelerator(pair.device):
        return pair.device
    count = runtime(pair.device).device_count()
    return None if count < 2 else torch.device(pair.device.type, ((pair.device.index or 0) + 1) % count)


class DraftHost:
    """A running draft and the target's end of its link."""

    def __init__(self, pair: ModelPair) -> None:
        self.link, theirs = socket_pair()
        self.watch = Arena(WATCH)
        self.owner = os.getpid()
        self.device = place(pair)
        self.process: subprocess.Popen[bytes] | None = None
        self._pulse: Pulse | None = None
        self._arenas: queue.SimpleQueue[Arena] = queue.SimpleQueue()
        self._floor_s = ACCELERATOR_PATIENCE_S if is_accelerator(self.device or pair.device) else 0.0
        # The current request, and whether the model has drafted a token for it.
        self._session, self._drafted = 0, False
        self.sent, self.unread_since, self.slowest_s = 0, 0.0, 0.0
        self.paused = False
        try:
            if self.device is None:
                self._start_thread(pair, theirs)
            else:
                self._start_process(pair, theirs, self.device)
        finally:
            self.watch.close_fd()
        self._end = weakref.finalize(self, _end, self.link, self.process, self.owner)
        self._await_ready()

    def _start_thread(self, pair: ModelPair, theirs: Connection) -> None:
        step, device = pair.draft_step, pair.device
        assert step is not None
        worker = Worker(theirs, LoadedDraft(pair.draft, step, pair.vocab), self.watch, self._arenas.get)

        def run() -> None:
            with own_stream(device):
                worker.run()
            theirs.close()

        thread = threading.Thread(target=run, name="bass-amusd-draft", daemon=True)
        _threads[thread] = self.link
        thread.start()

    def _start_process(self, pair: ModelPair, theirs: Connection, device: torch.device) -> None:
        threads = str(split_threads()[1])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        with tempfile.TemporaryFile() if not hasattr(os, "memfd_create") else _memory() as model:
            try:
                torch.save((pair.draft, pair.vocab), model)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise DraftLostError(f"The draft can't be sent to a process of its own ({error}).") from error
            model.seek(0)
            fds = (theirs.fileno(), model.fileno(), self.watch.fd)
            command = [sys.executable, "-c", _START, _HOME, *map(str, fds), threads, str(device)]
            self.process = subprocess.Popen(command, env=environment, pass_fds=fds, stdin=subprocess.DEVNULL)
            self._pulse = Pulse(self.process.pid)
        theirs.close()

    def _await_ready(self) -> None:
        begin = time.perf_counter()
        while not any(isinstance(message, Ready) for message in self.receive(timeout=0.2)):
            # A draft in a thread has no pulse: a thread can't be stopped alone.
            moved = math.inf if self._pulse is None else self._pulse.moved()
            alive, now = max(float(self.watch["watch"][STAMP]), moved), time.perf_counter()
            if now - begin > START_PATIENCE_S or now - alive > QUIET_S:
                self.end()
                raise DraftLostError("The draft process did not get ready.")

    def send(self, message: Any, arena: Arena | None = None) -> None:
        """Send a message; with an Open, also its arena."""
        if float(self.watch["watch"][READ]) >= self.sent:
            self.unread_since = time.perf_counter()
        if isinstance(message, Open):
            assert arena is not None
            self._session, self._drafted = message.session, False
            self._arenas.put(arena)
        try:
            self._await_room()
            self.link.send(message)
            if isinstance(message, Open) and self.process is not None:
                send_handle(self.link, self._arenas.get().fd, None)
        except (OSError, EOFError) as error:
            raise self._lost(error) from error
        self.sent += 1

    def _await_room(self) -> None:
        """Wait until the link has room: while a draft compiles its first step, hundreds of messages pile up."""
        room = select.poll()
        room.register(self.link, select.POLLOUT)
        while not room.poll(100):
            self.check()

    def receive(self, timeout: float = 0.0) -> list[Any]:
        """What the draft has sent; waits up to `timeout` seconds for a first message."""
        try:
            messages = receive_all(self.link, timeout)
        except (OSError, EOFError) as error:
            raise self._lost(error) from error
        for message in messages:
            if isinstance(message, Failed):
                raise _failed(message)
            if isinstance(message, Drafts):
                self.slowest_s = max(self.slowest_s, message.end - message.begin)
                own = any(not all(block.copied) for block in message.blocks)
                self._drafted |= own and message.session == self._session
        return messages

    @property
    def patience_s(self) -> float:
        """Seconds that the draft may go without a sign of life."""
        return max(PATIENCE_S, SLOW_STEPS * self.slowest_s, self._floor_s)

    def check(self) -> None:
        """Raises DraftLostError if the draft has work or an unread message and shows no sign of life."""
        stamp, read = self.watch["watch"].tolist()
        if stamp < 0 and read >= self.sent:
            return
        now, since = time.perf_counter(), stamp if stamp > 0 else max(-stamp, self.unread_since)
        if not self._drafted and now - since < START_PATIENCE_S:
            # A step that compiles kernels sets no stamp; but a process that is not stopped uses CPU time.
            since = now if self._pulse is None else max(since, self._pulse.moved())
        if now - since > self.patience_s:
            raise DraftLostError("The draft process hangs.")

    @property
    def alive(self) -> bool:
        """Whether it can serve: not ended, and started by this process (a fork must not use its parent's)."""
        running = self.process is None or self.process.poll() is None
        return self._end.alive and running and self.owner == os.getpid()

    def end(self) -> None:
        """Kill the draft's process, or close the link so that its thread ends."""
        self._end()

    def _lost(self, error: BaseException) -> DraftLostError:
        if isinstance(error, BlockingIOError):
            return DraftLostError("The draft process hangs.")
        # A draft that failed says why before it ends.
        with suppress(OSError, EOFError):
            for message in receive_all(self.link):
                if isinstance(message, Failed):
                    return _failed(message)
        code = None
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = self.process.wait(timeout=0.1)
        return DraftLostError("The draft process ended" + ("." if code is None else f" (exit status {code})."))


assert (STAMP, READ) == (0, 1), "the order in which `check` reads"


def _end(link: Connection, process: subprocess.Popen[bytes] | None, owner: int) -> None:
    if owner != os.getpid():
        return
    link.close()
    if process is not None:
        process.kill()
        process.wait()


def _failed(message: Failed) -> DraftLostError:
    return DraftLostError(f"The draft process failed ({message.message}).")


def _memory() -> Any:
    return os.fdopen(os.memfd_create("bass-amusd-model"), "w+b")


# Drafts in threads, and the target's end of each one's link.
_threads: weakref.WeakKeyDictionary[threading.Thread, Connection] = weakref.WeakKeyDictionary()


@atexit.register
def _join_threads() -> None:
    """End the drafts in threads: one that returns from torch after the interpreter is gone aborts the program."""
    for link in list(_threads.values()):
        link.close()
    for thread in list(_threads):
        thread.join(QUIET_S)


# The idle host of each pair, at most one, waiting for the next request.
_idle: weakref.WeakKeyDictionary[ModelPair, DraftHost] = weakref.WeakKeyDictionary()


def borrow(pair: ModelPair) -> DraftHost:
    """The pair's idle host, or a new one (takes seconds). Raises DraftLostError if it can't be started."""
    with _lock:
        host = _idle.pop(pair, None)
    if host is not None and host.alive:
        try:
            host.receive()
            return host
        except DraftLostError:
            host.end()
    return DraftHost(pair)


def give_back(pair: ModelPair, host: DraftHost) -> None:
    """Keep the host for the pair's next request; a second one is not kept."""
    with _lock:
        keep = host.alive and pair not in _idle
        if keep:
            _idle[pair] = host
    if not keep:
        host.end()


def close(pair: ModelPair) -> None:
    """End the pair's idle draft, if there is one; the next request starts another."""
    with _lock:
        host = _idle.pop(pair, None)
    if host is not None:
        host.end()


def prepare(pair: ModelPair) -> None:
    """Start the pair's draft now, so that the first request need not wait for it."""
    if pair.draft is not None:
        give_back(pair, borrow(pair))

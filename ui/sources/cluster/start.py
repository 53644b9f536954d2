"""Ray itself: started here for this program alone or joined, called, and left.

Contract: `LocalRay` starts Ray on this machine, with a token that nobody else knows, and `leave` ends it and
removes its files; `JoinedRay` enters a running cluster as a driver. Ray sends no usage reports. Both raise
BassError with one sentence if Ray is missing, can't start or can't be reached. All calls must have returned before
Ray is shut down: threads call it through `Calls` alone. No call lasts much longer than SLICE_S, and once `close`
has begun, each raises Closed: a thread that asked Ray for something after its end would start it again.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import psutil

from bass_core import BassError, RequestError

MISSING = "--workers and --ray need Ray: pip install -r requirements-ray.txt first."
# Bytes of Ray's store for objects between processes. Deltas are a few kB, and few are in flight.
STORE = 80 * 2**20
# What a node of a cluster must have of this repository; Ray sends it there.
SENT_AWAY = [".git", ".venv*", "tests", "docs", "bench", "distill", "**/__pycache__"]
# Seconds for a cluster's head to answer.
KNOCK_S = 10.0
# Folders of Ray's logs and sockets, with the number of the process that they belong to.
FILES = "bass-ray-"
ROOT = str(Path(__file__).resolve().parents[3])
# What Ray sends to a cluster's nodes: the tree, or the package that this program was installed as (setup.py).
CODE: dict[str, Any] = (
    {"py_modules": [ROOT]} if __name__.startswith("bass_core.") else {"working_dir": ROOT, "excludes": SENT_AWAY}
)


def imported() -> ModuleType:
    """The package ray, which stays quiet. Raises BassError if it is not installed."""
    # Read by ray at import.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # A worker's lines are printed as they are: ray would leave out those that are alike.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    try:
        import ray
    except ImportError as error:
        raise BassError(MISSING) from error
    return ray


def _end_on_sigterm() -> None:
    """Let SIGTERM end this program in order: Ray's own handler would abort it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class LocalRay:
    """Ray on this machine, with `cpus` to give away (a number for its books: no thread is pinned)."""

    def __init__(self, cpus: int) -> None:
        # Ray's servers listen on all addresses: without a token, others on the network could run code here.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        self.ray = imported()
        _sweep()
        self._files = tempfile.mkdtemp(prefix=f"{FILES}{os.getpid()}-")
        try:
            self.ray.init(
                address="local",
                num_cpus=cpus,
                object_store_memory=STORE,
                include_dashboard=False,
                logging_level="ERROR",
                _temp_dir=self._files,
            )
        except Exception as error:
            self.leave()
            raise BassError(f"Ray did not start here ({_first_line(error)}): run without --workers.") from error
        _end_on_sigterm()

    def leave(self) -> None:
        """End Ray's processes and remove its files."""
        self.ray.shutdown()
        shutil.rmtree(self._files, ignore_errors=True)


class JoinedRay:
    """A running cluster, in which this program is a driver: its workers end with it."""

    def __init__(self, address: str) -> None:
        if address.startswith("ray://"):
            raise RequestError(
                "--ray takes no ray:// address, because Ray's client can't stream: start app.py on a machine "
                "of the cluster, with --ray auto."
            )
        if address in ("", "local"):
            raise RequestError(
                "--ray joins a cluster, auto the one on this machine: for workers here without one say --workers."
            )
        self.ray = imported()
        try:
            _knock(address)
            self.ray.init(
                address=address,
                logging_level="ERROR",
                runtime_env=CODE,
            )
        except Exception as error:
            raise BassError(
                f"No Ray cluster answers at {address} ({_first_line(error)}): start one with ray start --head, or "
                "ray up."
            ) from error
        _end_on_sigterm()

    def leave(self) -> None:
        """Leave the cluster; Ray ends this program's workers."""
        self.ray.shutdown()


def actor_options(text: str) -> dict[str, Any]:
    """The options of a Ray actor for "GPU=1,CPU=4,NAME=2". Raises RequestError for anything else."""
    options: dict[str, Any] = {}
    own: dict[str, float] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*([A-Za-z_][\w:.-]*)\s*=\s*(\d+(?:\.\d+)?)\s*", part)
        amount = 0.0 if found is None else float(found[2])
        # As Ray has it: four decimals, and no part of a GPU beside a whole one.
        parts = found is not None and found[1] == "GPU" and amount > 1 and amount != int(amount)
        if found is None or amount <= 0 or amount != round(amount, 4) or parts:
            raise RequestError(
                "--worker-resources must be names with amounts above 0, with at most four decimals and none for "
                f"more than one GPU, such as GPU=1,CPU=4; got {text!r}."
            )
        name = found[1]
        if name in ("CPU", "GPU", "memory"):
            options[name if name == "memory" else f"num_{name.lower()}s"] = amount
        else:
            own[name] = amount
    return options | ({"resources": own} if own else {})


def fits(nodes: list[Mapping[str, Any]], asked: Mapping[str, Any]) -> int:
    """How many workers that ask for this fit on the cluster's living nodes, by what the nodes have in all."""
    wanted = {name: asked[key] for name, key in (("CPU", "num_cpus"), ("GPU", "num_gpus")) if asked.get(key)}
    wanted |= {"memory": asked["memory"]} if "memory" in asked else {}
    wanted |= asked.get("resources", {})
    living = [node["Resources"] for node in nodes if node["Alive"]]
    return sum(min(int(has.get(name, 0) // amount) for name, amount in wanted.items()) for has in living)


def _knock(address: str) -> None:
    """Raise OSError at once where nothing listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=KNOCK_S).close()


def _sweep() -> None:
    """Remove the files of programs that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FILES}*"):
        owner = folder.name.removeprefix(FILES).split("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")[:200] or type(error).__name__


# Seconds of one call, and seconds for which `close` waits for calls.
SLICE_S, CLOSING_S = 0.5, 10.0
T = TypeVar("T")


class Closed(BassError):
    """The program is ending."""


class Calls:
    """`ray`, called by several threads until `close`."""

    def __init__(self, ray: ModuleType) -> None:
        self.ray, self.errors = ray, ray.exceptions
        self.closed = threading.Event()
        self._running, self._changed = 0, threading.Condition()

    def do(self, call: Callable[..., T], *values: Any, **named: Any) -> T:
        """Call something of Ray that returns soon."""
        with self._changed:
            if self.closed.is_set():
                raise Closed("The server is ending: try again once it is back.")
            self._running += 1
        try:
            return call(*values, **named)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def ready(self, what: Any, seconds: float) -> bool:
        """Whether a reference, or a stream's next one, is there within these seconds."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            there, _ = self.do(self.ray.wait, [what], timeout=max(0.0, min(SLICE_S, left)))
            if there or left <= SLICE_S:
                return bool(there)

    def get(self, reference: Any, seconds: float = float("inf")) -> Any:
        """The value of the reference. Raises TimeoutError, or what the call raised."""
        if not self.ready(reference, seconds):
            raise TimeoutError
        return self.do(self.ray.get, reference)

    def close(self) -> None:
        """Refuse further calls, and wait for those that run."""
        with self._changed:
            self.closed.set()
            self._changed.wait_for(lambda: self._running == 0, CLOSING_S)

"""Starts Ray for this program (`LocalRay`) or joins a running cluster (`JoinedRay`), and calls it (`Calls`).

- Both raise BassError if Ray is missing, can't start or can't be reached. Ray sends no usage reports.
- `LocalRay` uses a secret token. Its `leave` ends Ray and removes Ray's files.
- All calls must have returned before Ray is shut down, so threads call it only through `Calls`. No call takes much
  longer than SLICE_S. After `close`, every call raises FrontClosed, because a late call would start Ray again.
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
# Bytes of Ray's object store. It can be small, because it only contains a few deltas of a few kB each.
STORE = 80 * 2**20
# Parts of this repository that the nodes of a cluster don't need.
EXCLUDED = [".git", ".venv*", "tests", "docs", "bench", "distill", "**/__pycache__"]
# Seconds for a cluster's head to answer.
KNOCK_S = 10.0
# Prefix of the folders with Ray's logs and sockets. The rest of the name starts with the owning process's id.
FILES = "bass-ray-"
ROOT = str(Path(__file__).resolve().parents[3])
# Ray sends this to the nodes of a cluster: the tree, or the package that this program was installed as (setup.py).
CODE: dict[str, Any] = (
    {"py_modules": [ROOT]} if __name__.startswith("bass_core.") else {"working_dir": ROOT, "excludes": EXCLUDED}
)


def imported() -> ModuleType:
    """Return the package ray, configured to stay quiet. Raises BassError if it is not installed."""
    # Ray reads this variable when it is imported.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Print every line of a worker. By default, Ray drops repeated ones.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    try:
        import ray
    except ImportError as error:
        raise BassError(MISSING) from error
    return ray


def _end_on_sigterm() -> None:
    """Let SIGTERM end this program cleanly. Ray's own handler would abort it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class LocalRay:
    """Ray on this machine. `cpus` is only the number that Ray hands out to actors. No thread is pinned."""

    def __init__(self, cpus: int) -> None:
        # Ray's servers listen on all addresses. Without a token, others on the network could run code here.
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
    """A running cluster that this program joins as a driver. Its workers end with it."""

    def __init__(self, address: str) -> None:
        if address.startswith("ray://"):
            raise RequestError(
                "--ray takes no ray:// address, because Ray's client can't stream: start app.py on a machine "
                "of the cluster, with --ray auto."
            )
        if address in ("", "local"):
            raise RequestError(
                "--ray needs the address of a cluster, or auto for the one on this machine: for workers here "
                "without a cluster use --workers."
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
        """Leave the cluster. Ray ends this program's workers."""
        self.ray.shutdown()


def actor_options(text: str) -> dict[str, Any]:
    """Parse resources such as "GPU=1,CPU=4,NAME=2" to the options of a Ray actor.

    Raises:
        RequestError: if the text has another form, or an amount that Ray does not allow.
    """
    options: dict[str, Any] = {}
    custom: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_][\w:.-]*)\s*=\s*(\d+(?:\.\d+)?)\s*", part)
        amount = 0.0 if match is None else float(match[2])
        # Ray allows amounts with four decimals, but only whole numbers of GPUs above 1.
        fraction = match is not None and match[1] == "GPU" and amount > 1 and amount != int(amount)
        if match is None or amount <= 0 or amount != round(amount, 4) or fraction:
            raise RequestError(
                "--worker-resources must be names with amounts above 0, with at most four decimals and none for "
                f"more than one GPU, such as GPU=1,CPU=4; got {text!r}."
            )
        name = match[1]
        if name in ("CPU", "GPU", "memory"):
            options[name if name == "memory" else f"num_{name.lower()}s"] = amount
        else:
            custom[name] = amount
    return options | ({"resources": custom} if custom else {})


def fits(nodes: list[Mapping[str, Any]], options: Mapping[str, Any]) -> int:
    """Return how many actors with these options fit on the live nodes, by the total resources of each node."""
    wanted = {name: options[key] for name, key in (("CPU", "num_cpus"), ("GPU", "num_gpus")) if options.get(key)}
    wanted |= {"memory": options["memory"]} if "memory" in options else {}
    wanted |= options.get("resources", {})
    live = [node["Resources"] for node in nodes if node["Alive"]]
    return sum(min(int(has.get(name, 0) // amount) for name, amount in wanted.items()) for has in live)


def _knock(address: str) -> None:
    """Raise OSError at once if nothing listens at the address. Ray itself would try to connect for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=KNOCK_S).close()


def _sweep() -> None:
    """Remove the files that killed programs have left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FILES}*"):
        owner = folder.name.removeprefix(FILES).split("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")[:200] or type(error).__name__


# SLICE_S: the longest time of one call, in seconds. CLOSING_S: how long `close` waits for running calls.
SLICE_S, CLOSING_S = 0.5, 10.0
T = TypeVar("T")


class FrontClosed(BassError):
    """The program is ending."""


class Calls:
    """Calls Ray from several threads, until `close`."""

    def __init__(self, ray: ModuleType) -> None:
        self.ray, self.errors = ray, ray.exceptions
        self.closed = threading.Event()
        self._running, self._changed = 0, threading.Condition()

    def do(self, call: Callable[..., T], *values: Any, **named: Any) -> T:
        """Call a function of Ray that returns soon. Raises FrontClosed after `close`."""
        with self._changed:
            if self.closed.is_set():
                raise FrontClosed("The server is ending: try again once it is back.")
            self._running += 1
        try:
            return call(*values, **named)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def ready(self, reference: Any, seconds: float) -> bool:
        """Return whether a reference, or the next one of a stream, is ready within these seconds."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            done, _ = self.do(self.ray.wait, [reference], timeout=max(0.0, min(SLICE_S, left)))
            if done or left <= SLICE_S:
                return bool(done)

    def get(self, reference: Any, seconds: float = float("inf")) -> Any:
        """Return the value of a reference. Raises TimeoutError, or the exception of the call."""
        if not self.ready(reference, seconds):
            raise TimeoutError
        return self.do(self.ray.get, reference)

    def close(self) -> None:
        """Refuse further calls, and wait for running ones."""
        with self._changed:
            self.closed.set()
            self._changed.wait_for(lambda: self._running == 0, CLOSING_S)

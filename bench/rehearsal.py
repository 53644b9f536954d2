"""`python -m bench space --rehearse PYTHON`: the Space's files, run here as a Space runs them.

Contract: PYTHON gets a new environment with what a Gradio Space's image installs, or has it all (--installed).
The files lie in a folder that is read-only. app.py runs there with an empty home and a Space's variables, and as
user 1000 where this process may change to it. A browser runs the default race, the API asks for the rest. First as
on a CPU; then as on ZeroGPU, with the package `spaces` itself and its forked workers: its scheduler is the one
below, and its CUDA part does what it does where torch is not installed, nothing. Needs PyPI, a browser and some
8 GB; what it made is removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil

from .cpu.page import ENDED, POLL_MS, browser
from .report.report import ROOT, Row, claim

# Besides requirements.txt and Gradio, in the version that the README names: read in public logs of builds.
IMAGE = ("uvicorn>=0.14.0", "websockets>=10.4", "spaces")
USER = 1000
GB = 1e9
# What is handed on to pip and to the program; anything else is this machine's own.
KEPT = re.compile(r"PATH|LD_LIBRARY_PATH|(PIP|SSL)_\w+|(\w+_)?proxy", re.IGNORECASE)
# Seconds that the emulated quota has left: enough for a short race, for the start of a long one, for none.
SHORT, LONG, NONE = 20, 15, 4
# Printed by the Space's Python, which is not the one that this bench runs under.
VERSIONS = """import json, platform, spaces, gradio
from importlib.metadata import version
named = {name: version(name) for name in ("torch", "gradio", "spaces")}
print(json.dumps({"python": platform.python_version(), **named}))
"""
NO_CUDA = """import sys, types
part = sys.modules["spaces.zero.torch"] = types.ModuleType("spaces.zero.torch")
for name in ("enter_mode", "patch", "unpatch", "init", "move"):
    setattr(part, name, lambda *given, **named: None)
part.pack = part.size = lambda *given, **named: 0
part.is_in_bad_fork = lambda: False
"""


class Scheduler:
    """Stands for ZeroGPU's: gives one GPU for seconds that are `left`, and kills a worker that exceeds them."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.asked: list[int] = []
        self.given: list[int] = []
        self.killed = 0
        self._worker: int | None = None
        self._end: threading.Timer | None = None
        outer = self

        class Answer(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                address = urlsplit(self.path)
                given = {name: values[0] for name, values in parse_qs(address.query).items()}
                code, answer = outer.answer(address.path, given)
                body = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str, given: Mapping[str, str]) -> tuple[int, Any]:
        """The status and the content for one request of the package."""
        if path == "/schedule":
            seconds = int(given["durationSeconds"])
            self.asked.append(seconds)
            if self.left is not None and seconds > self.left:
                return 429, {"left": self.left, "wait": 720}
            self.given.append(seconds)
            idle = self._worker is not None and psutil.pid_exists(self._worker)
            if idle:
                self._watch()
            return 200, {"idle": idle, "nvidiaIndex": 0, "nvidiaUUID": "GPU-0", "allowToken": str(len(self.given))}
        if path == "/allow":
            self._worker = int(given["pid"])
            self._watch()
        elif path == "/release" and self._end is not None:
            self._end.cancel()
        return 200, None

    def _watch(self) -> None:
        self._end = threading.Timer(self.given[-1], self._kill)
        self._end.daemon = True
        self._end.start()

    def _kill(self) -> None:
        self.killed += 1
        with suppress(ProcessLookupError):
            os.kill(self._worker or 0, signal.SIGKILL)


def rehearse(python: str, installed: bool, names: list[str], gradio: str) -> tuple[list[Row], list[Row]]:
    """Rows and claims of both kinds of Space. gradio: the version that the Space's configuration names."""
    with tempfile.TemporaryDirectory(prefix="bass-space-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        if not installed:
            python = _install(python, folder / "environment", gradio)
        versions = _versions(python)
        for name in names:
            target = folder / "app" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
        for path in (folder / "app", *(folder / "app").rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        try:
            rows, claims = _on_a_cpu(python, folder)
            on_zero_gpu = _on_zero_gpu(python, folder)
        finally:
            for path in (folder / "app", *(folder / "app").rglob("*")):
                path.chmod(0o755)
    return [row | versions for row in (*rows, *on_zero_gpu[0])], claims + on_zero_gpu[1]


def _versions(python: str) -> dict[str, str]:
    asked: list[str] = [python, "-c", VERSIONS]
    try:
        said = subprocess.run(
            asked, env=_kept(), stdout=subprocess.PIPE, text=True, check=True, **_as_user()
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        sys.exit(f"User {USER} can't run {python}, or it lacks packages: name one outside of a home folder.")
    found: dict[str, str] = json.loads(said.splitlines()[-1])
    return found


def _install(python: str, folder: Path, gradio: str) -> str:
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip: list[str | Path] = [folder / "bin/python", "-m", "pip", "install", "--no-cache-dir", "--quiet"]
    wanted: list[str | Path] = ["-r", ROOT / "requirements.txt", f"gradio[oauth,mcp]=={gradio}", *IMAGE]
    subprocess.run([*pip, *wanted], check=True)
    return str(folder / "bin/python")


def _as_user() -> dict[str, Any]:
    """What makes a process of subprocess one of the Space's user."""
    return {"user": USER, "group": USER, "extra_groups": []} if os.geteuid() == 0 else {}


def _kept() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}


@contextmanager
def _space(python: str, folder: Path, **variables: str) -> Iterator[tuple[str, psutil.Process, float]]:
    """The page: its address, its process, and the seconds until it was up."""
    home, other = folder / "home", folder / "tmp"
    for path in (home, other):
        path.mkdir(exist_ok=True)
        if os.geteuid() == 0:
            os.chown(path, USER, USER)
    known = {"HOME": str(home), "TMPDIR": str(other), "SPACE_ID": "somebody/bass", "SYSTEM": "spaces"}
    began = time.monotonic()
    process = subprocess.Popen(
        [python, "app.py"], cwd=folder / "app", env=_kept() | known | variables, text=True, stdout=subprocess.PIPE,
        **_as_user(),
    )  # fmt: skip
    try:
        for line in process.stdout or ():
            print(line, end="", file=sys.stderr)
            if found := re.search(r"open (http://\S+)", line):
                address = found[1].replace("0.0.0.0", "127.0.0.1").rstrip("/")
                threading.Thread(target=_drain, args=(process.stdout,), daemon=True).start()
                yield address, psutil.Process(process.pid), time.monotonic() - began
                return
        sys.exit("app.py ended before it served.")
    finally:
        workers = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        process.wait()
        for worker in workers:  # of ZeroGPU, which outlive the page
            with suppress(psutil.NoSuchProcess):
                worker.kill()


def _drain(lines: Any) -> None:
    for line in lines:
        print(line, end="", file=sys.stderr)


def _on_a_cpu(python: str, folder: Path) -> tuple[list[Row], list[Row]]:
    with _space(python, folder) as (address, process, seconds):
        ended = _visit(address)
        said = _asked(address, pair="/etc")[1]
        row = _row("CPU", process, seconds)
    others = [path.name for path in (folder / "home").iterdir() if path.name != ".cache"]
    print(f"CPU: a refusal reads {said!r}; in the home, besides the cache: {others or 'nothing'}")
    return [row], [
        claim("lanes that finish the default race on the page", ended, "3", ended == 3),
        claim("sentences for a refusal", float(_sentence(said)), "1", "only its own pair" in said),
        claim("files and folders written besides the cache", len(others), "0", not others),
    ]


def _on_zero_gpu(python: str, folder: Path) -> tuple[list[Row], list[Row]]:
    scheduler = Scheduler()
    (folder / "shim").mkdir()
    (folder / "shim" / "sitecustomize.py").write_text(NO_CUDA, encoding="utf-8")
    variables = {"SPACES_ZERO_GPU": "true", "SPACES_ZERO_DEVICE_API_URL": scheduler.url}
    with _space(python, folder, PYTHONPATH=str(folder / "shim"), **variables) as (address, process, seconds):
        ended = _visit(address)
        first = len(scheduler.asked)
        refused = _asked(address, pair="/etc")[1]
        scheduler.left = SHORT
        done, _ = _asked(address, max_new_tokens=8)
        short = scheduler.given[-1]
        scheduler.left = LONG
        over = _asked(address, batch_size=8, max_new_tokens=512)[1]
        scheduler.left = NONE
        quota = _asked(address)[1]
        scheduler.left, before = None, len(scheduler.asked)
        swept, _ = _asked(address, "/sweep", batches=[1, 2], draft_lengths=["bass"], seconds=5)
        sweeps = len(scheduler.asked) - before
        row = _row("ZeroGPU", process, seconds)
    scheduler.server.shutdown()
    for what, said in (("a refusal", refused), ("the end of a reservation", over), ("the quota", quota)):
        print(f"ZeroGPU: {what} reads {said!r}")
    print(f"ZeroGPU: seconds asked for {scheduler.asked}, given {scheduler.given}")
    known = ("only its own pair" in refused, f"reserved for {LONG} s" in over, f"{NONE}s left" in quota)
    sentences = sum(known)
    return [row], [
        claim("lanes that finish the default race on ZeroGPU", ended, "3", ended == 3),
        claim("reservations of that race", first, "1", first == 1),
        claim("seconds given to a race where the quota has fewer", short, str(SHORT), done and short == SHORT),
        claim("sentences for a refusal, a reservation's end, a quota", sentences, "3", sentences == 3),
        claim("workers that ZeroGPU had to kill", scheduler.killed, "0", scheduler.killed == 0),
        claim("reservations of a sweep", sweeps, "1", swept and sweeps == 1),
    ]


def _row(kind: str, process: psutil.Process, seconds: float) -> Row:
    held = sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
    user = process.uids().effective
    return {"space": kind, "up_after_s": round(seconds), "memory_gb": round(held / GB, 1), "user": user}


def _visit(address: str) -> int:
    """How many lanes finish, when a visitor runs what the page offers."""
    with urllib.request.urlopen(f"{address}/theme.css") as answer:
        assert answer.status == 200
    with browser(address) as page:
        page.click("#run")
        shown = f"() => document.querySelector('.lane .state') && ({ENDED})()"
        page.wait_for_function(shown, timeout=0, polling=POLL_MS)
        return int(page.locator(".lane .state").count())


def _asked(address: str, name: str = "/race", **settings: Any) -> tuple[bool, str]:
    """Whether the API ends what was asked for, and what it says if it does not."""
    from gradio_client import Client

    client = Client(address, verbose=False, headers={"x-ip-token": "visitor"})
    job = client.submit("Write a haiku.", api_name=name, **settings)
    values = list(job)  # ends without a word where the race fails
    return bool(values) and bool(values[-1]["done"]), str(job.exception() or "")


def _sentence(said: str) -> bool:
    return said.endswith(".") and "\n" not in said

"""Run the Space's files here as a Space would: `python -m bench space --rehearse PYTHON`; `rehearse` does it.

PYTHON gets a new environment with the packages of a Gradio Space's image, or already has them (--installed).
app.py runs in a read-only folder with an empty home and a Space's variables, as user 1000 if we may change to it.
A browser runs the default race, and the API makes the other requests. The rehearsal makes all requests twice:
first as on a CPU, then as on ZeroGPU. The second time it uses the real package `spaces` with its forked workers,
but with our `Scheduler` and without the CUDA part. It needs PyPI, a browser and about 8 GB of disk, and cleans up
afterwards.
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

# What a Space installs besides requirements.txt and the README's version of Gradio, from public build logs.
IMAGE = ("uvicorn>=0.14.0", "websockets>=10.4", "spaces")
USER = 1000
GB = 1e9
# Environment variables that pip and the program inherit; all others describe only this machine.
INHERITED = re.compile(r"PATH|LD_LIBRARY_PATH|(PIP|SSL)_\w+|(\w+_)?proxy", re.IGNORECASE)
# Seconds that the visitor has left of the emulated quota. SHORT is enough for a short race, LONG for the beginning
# of a long one, and NONE for no race at all.
SHORT, LONG, NONE = 20, 15, 4
# A program for the Space's Python, which is not the Python that runs this bench.
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
    """A stand-in for ZeroGPU's scheduler: it grants one GPU for a time and kills a worker that exceeds it.

    Attributes:
        left: seconds left of the visitor's quota; None for no limit.
        asked: the seconds of each request.
        given: the seconds of each granted request.
        killed: workers that we had to kill.
        url: the address to give to the package `spaces`.
    """

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
                query = {name: values[0] for name, values in parse_qs(address.query).items()}
                code, answer = outer.answer(address.path, query)
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

    def answer(self, path: str, query: Mapping[str, str]) -> tuple[int, Any]:
        """Return the status and the content for one request of the package."""
        if path == "/schedule":
            seconds = int(query["durationSeconds"])
            self.asked.append(seconds)
            if self.left is not None and seconds > self.left:
                return 429, {"left": self.left, "wait": 720}
            self.given.append(seconds)
            idle = self._worker is not None and psutil.pid_exists(self._worker)
            if idle:
                self._watch()
            return 200, {"idle": idle, "nvidiaIndex": 0, "nvidiaUUID": "GPU-0", "allowToken": str(len(self.given))}
        if path == "/allow":
            self._worker = int(query["pid"])
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
    """Return the rows and claims of both kinds of Space.

    Args:
        python: the Python to run, or from which to make an environment.
        installed: whether it already has all packages.
        names: the Space's files, by their paths in the tree.
        gradio: the version in the Space's configuration.
    """
    with tempfile.TemporaryDirectory(prefix="bass-space-") as temporary:
        folder = Path(temporary)
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
    command: list[str] = [python, "-c", VERSIONS]
    try:
        output = subprocess.run(
            command, env=_inherited(), stdout=subprocess.PIPE, text=True, check=True, **_as_user()
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        sys.exit(f"User {USER} can't run {python}, or it lacks packages: name one outside of a home folder.")
    versions: dict[str, str] = json.loads(output.splitlines()[-1])
    return versions


def _install(python: str, folder: Path, gradio: str) -> str:
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip: list[str | Path] = [folder / "bin/python", "-m", "pip", "install", "--no-cache-dir", "--quiet"]
    wanted: list[str | Path] = ["-r", ROOT / "requirements.txt", f"gradio[oauth,mcp]=={gradio}", *IMAGE]
    subprocess.run([*pip, *wanted], check=True)
    return str(folder / "bin/python")


def _as_user() -> dict[str, Any]:
    """Return arguments of `subprocess` to start a process as the Space's user; none if we may not."""
    return {"user": USER, "group": USER, "extra_groups": []} if os.geteuid() == 0 else {}


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if INHERITED.fullmatch(name)}


@contextmanager
def _space(python: str, folder: Path, **variables: str) -> Iterator[tuple[str, psutil.Process, float]]:
    """Start the page; yield its address, its process, and the seconds until it was up."""
    home, other = folder / "home", folder / "tmp"
    for path in (home, other):
        path.mkdir(exist_ok=True)
        if os.geteuid() == 0:
            os.chown(path, USER, USER)
    space = {"HOME": str(home), "TMPDIR": str(other), "SPACE_ID": "somebody/bass", "SYSTEM": "spaces"}
    began = time.monotonic()
    process = subprocess.Popen(
        [python, "app.py"], cwd=folder / "app", env=_inherited() | space | variables, text=True,
        stdout=subprocess.PIPE, **_as_user(),
    )  # fmt: skip
    try:
        for line in process.stdout or ():
            print(line, end="", file=sys.stderr)
            if match := re.search(r"open (http://\S+)", line):
                address = match[1].replace("0.0.0.0", "127.0.0.1").rstrip("/")
                threading.Thread(target=_drain, args=(process.stdout,), daemon=True).start()
                yield address, psutil.Process(process.pid), time.monotonic() - began
                return
        sys.exit("app.py ended before it served.")
    finally:
        workers = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        process.wait()
        for worker in workers:  # ZeroGPU's workers outlive the page
            with suppress(psutil.NoSuchProcess):
                worker.kill()


def _drain(lines: Any) -> None:
    for line in lines:
        print(line, end="", file=sys.stderr)


def _on_a_cpu(python: str, folder: Path) -> tuple[list[Row], list[Row]]:
    with _space(python, folder) as (address, process, seconds):
        ended = _visit(address)
        refusal = _request(address, pair="/etc")[1]
        row = _row("CPU", process, seconds)
    others = [path.name for path in (folder / "home").iterdir() if path.name != ".cache"]
    print(f"CPU: a refusal reads {refusal!r}; in the home, besides the cache: {others or 'nothing'}")
    return [row], [
        claim("lanes that finish the default race on the page", ended, "3", ended == 3),
        claim("sentences for a refusal", float(_is_sentence(refusal)), "1", "only its own pair" in refusal),
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
        refused = _request(address, pair="/etc")[1]
        scheduler.left = SHORT
        done, _ = _request(address, max_new_tokens=8)
        short = scheduler.given[-1]
        scheduler.left = LONG
        over = _request(address, batch_size=8, max_new_tokens=512)[1]
        scheduler.left = NONE
        quota = _request(address)[1]
        scheduler.left, before = None, len(scheduler.asked)
        swept, _ = _request(address, "/sweep", batches=[1, 2], draft_lengths=["bass"], seconds=5)
        sweeps = len(scheduler.asked) - before
        row = _row("ZeroGPU", process, seconds)
    scheduler.server.shutdown()
    for case, message in (("a refusal", refused), ("the end of a reservation", over), ("the quota", quota)):
        print(f"ZeroGPU: {case} reads {message!r}")
    print(f"ZeroGPU: seconds asked for {scheduler.asked}, given {scheduler.given}")
    as_expected = ("only its own pair" in refused, f"reserved for {LONG} s" in over, f"{NONE}s left" in quota)
    sentences = sum(as_expected)
    return [row], [
        claim("lanes that finish the default race on ZeroGPU", ended, "3", ended == 3),
        claim("reservations of that race", first, "1", first == 1),
        claim("seconds given to a race where the quota has fewer", short, str(SHORT), done and short == SHORT),
        claim("sentences for a refusal, a reservation's end, a quota", sentences, "3", sentences == 3),
        claim("workers that ZeroGPU had to kill", scheduler.killed, "0", scheduler.killed == 0),
        claim("reservations of a sweep", sweeps, "1", swept and sweeps == 1),
    ]


def _row(kind: str, process: psutil.Process, seconds: float) -> Row:
    memory = sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))
    user = process.uids().effective
    return {"space": kind, "up_after_s": round(seconds), "memory_gb": round(memory / GB, 1), "user": user}


def _visit(address: str) -> int:
    """Return the number of lanes that finish when a visitor runs the page's default race."""
    with urllib.request.urlopen(f"{address}/theme.css") as answer:
        assert answer.status == 200
    with browser(address) as page:
        page.click("#run")
        shown = f"() => document.querySelector('.lane .state') && ({ENDED})()"
        page.wait_for_function(shown, timeout=0, polling=POLL_MS)
        return int(page.locator(".lane .state").count())


def _request(address: str, name: str = "/race", **settings: Any) -> tuple[bool, str]:
    """Run a race or a sweep through the API; return whether it finished, and its error or ""."""
    from gradio_client import Client

    client = Client(address, verbose=False, headers={"x-ip-token": "visitor"})
    job = client.submit("Write a haiku.", api_name=name, **settings)
    values = list(job)
    return bool(values) and bool(values[-1]["done"]) and "error" not in values[-1], str(job.exception() or "")


def _is_sentence(text: str) -> bool:
    return text.endswith(".") and "\n" not in text

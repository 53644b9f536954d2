"""`python -m bench load`: many clients at once, which cancel or drop a third of their requests midway.

Real clients use the real app.py over loopback, with a tiny pair. Every request that is not given up must get a
complete and correct answer (the library's texts for that seed) or the message that the queue is full; none may
hang. The server's memory at the end must be within 5 % of that after the first race. Nothing is timed.

With `--workers N` the races run on N workers of Ray. Every minute we kill the busiest worker, unless another one
is still restarting, and its race must get the message about a lost worker. The memory is then that of the front
process and the living workers together. No process may be left over.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import httpx
import psutil
from gradio_client import Client
from gradio_client.exceptions import AppError

from bass_core import ModelPair, SamplingParams, load_pair, race
from ui.sources.cluster import races

from ..report.report import CPU, Row, alike, at_most, claim, finish, number, parser, whole
from .serving import Server

PROMPT, TEMPERATURE, SEEDS = "Hello", 0.8, 8
# Seconds after which a client counts as hung. A race that first waits for a full queue takes far less.
PATIENCE_S = 180.0
# The outcome of a race whose worker was killed.
LOST = "worker killed, and said so"
# CPU_WINDOW_S: seconds over which we measure a worker's CPU use. ENDING_S: seconds that Ray's processes may take
# to end.
CPU_WINDOW_S, ENDING_S = 0.2, 20.0


def main(argv: list[str]) -> None:
    """Serve, load, compare, print and write."""
    options = parser("load", __doc__ or "")
    options.add_argument("--clients", type=whole(), default=32)
    options.add_argument("--minutes", type=number(above=True), default=5.0)
    options.add_argument(
        "--workers", type=whole(0), default=0, help="number of Ray workers (requirements-ray.txt)"
    )
    options.add_argument(
        "--kill-seconds", type=number(above=True), default=60.0, help="seconds between two kills of a worker"
    )
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.clients, arguments.minutes, arguments.kill_seconds = 20, 0.1, 3.0
    ray = ("--workers", str(arguments.workers)) if arguments.workers else ()
    with Server("--max-batch", "8", *ray) as server:
        pair = load_pair(str(server.target), draft=str(server.draft), device="cpu", dtype="float32")
        expected = [_expected(pair, seed) for seed in range(SEEDS)]
        Client(server.url, verbose=False).submit(*_settings(0), api_name="/race").result()
        first = server.memory_mb()
        with killing(server, arguments.kill_seconds if ray else None) as killed:
            outcomes, hung = _load(server, expected, arguments.clients, arguments.minutes * 60)
        # The race of the last client that vanished may still be running; this one queues after it.
        last = Client(server.url, verbose=False).submit(*_settings(1), api_name="/race").result(PATIENCE_S)
        memory = server.memory_mb()
        healthy = server.serving and "Traceback" not in server.log()
        left = server.processes()
    answered = sum(outcomes[name] for name in ("complete", "queue is full", "cancelled", "vanished", LOST))
    wrong = sum(outcomes.values()) - answered
    counted = {**dict(sorted(outcomes.items())), "MB after the first race": first, "MB at the end": memory}
    reported, right = outcomes[LOST], _texts(last) == expected[1]
    claims = [
        claim("requests without a complete, correct answer or a clear refusal", wrong, "0", wrong == 0),
        claim("clients that hung", hung, "0", hung == 0),
        claim("complete answers", outcomes["complete"], "above 0", outcomes["complete"] > 0),
        alike("the race after the load is correct", float(right)),
        alike("the server is up and wrote no traceback", float(healthy)),
        claim("processes left behind", len(living(left)), "0", not living(left)),
        at_most("growth of memory", memory / first - 1, 0.05, not arguments.quick),
    ]
    if ray:
        counted["workers killed"] = len(killed)
        # No client reports a kill that came between two races, or during a race that its client had given up. In a
        # quick run all kills may be of these two kinds.
        holds = None if arguments.quick and not reported else 0 < reported <= len(killed)
        claims.append(claim("races reported as lost, of workers killed", reported, f"1 to {len(killed)}", holds))
    results: list[Row] = [{"outcome": name, "requests": n} for name, n in counted.items()]
    finish("load", arguments, CPU, results, claims)


@contextmanager
def killing(server: Server, seconds: float | None) -> Iterator[list[int]]:
    """Kill the busiest worker every `seconds`, or none if None; yield the ids of those killed so far."""
    killed: list[int] = []
    over, num_workers = threading.Event(), len(server.workers())

    def run() -> None:
        while not over.wait(seconds):
            workers = server.workers()
            if len(workers) == num_workers:
                busiest = max(workers, key=lambda worker: worker.cpu_percent(CPU_WINDOW_S))
                busiest.kill()
                killed.append(busiest.pid)

    thread = threading.Thread(target=run, daemon=True)
    if seconds is not None:
        thread.start()
    try:
        yield killed
    finally:
        over.set()
        if seconds is not None:
            thread.join()


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still run after at most ENDING_S; zombies do not count."""
    end, left = time.monotonic() + ENDING_S, list(processes)
    while left and time.monotonic() < end:
        left = [each for each in left if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.2)
    return left


def _settings(seed: int) -> tuple[Any, ...]:
    return PROMPT, 2, 16, TEMPERATURE, seed


def _expected(pair: ModelPair, seed: int) -> dict[str, list[str]]:
    prompt, n, tokens, temperature, _ = _settings(seed)
    sampling = SamplingParams(temperature=temperature)
    *_, last = race(pair, prompt, n=n, max_new_tokens=tokens, sampling=sampling, seed=seed, draft_length="bass")
    return _texts(last)


def _texts(snapshot: Mapping[str, Any]) -> dict[str, list[str]]:
    return {name: [row["text"] for row in lane["sequences"]] for name, lane in snapshot["lanes"].items()}


def _load(
    server: Server, expected: list[dict[str, list[str]]], clients: int, seconds: float
) -> tuple[Counter[str], int]:
    """Return the count of each outcome, and the number of clients still running PATIENCE_S after the end."""
    outcomes: Counter[str] = Counter()
    url, defaults = server.url, list(server.defaults().values())
    end, lock = time.monotonic() + seconds, threading.Lock()

    def work(number: int) -> None:
        # Each client gives up every third request: it alternates between cancelling it and dropping the
        # connection.
        for turn in count(number):
            if time.monotonic() >= end:
                return
            seed = turn % SEEDS
            try:
                if turn % 6 == 0:
                    outcome = _vanish(url, [*_settings(seed), *defaults[5:]])
                else:
                    # Use a new Client each time: with a shared one, a request can read the end of the last stream.
                    outcome = _ask(Client(url, verbose=False), seed, expected[seed], cancel=turn % 6 == 3)
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"[:80]
            with lock:
                outcomes[outcome] += 1
            if outcome == "queue is full":
                time.sleep(2.0)  # a person would wait before asking again

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end + PATIENCE_S - time.monotonic()))
    return outcomes, sum(thread.is_alive() for thread in threads)


def _ask(client: Client, seed: int, expected: dict[str, list[str]], cancel: bool) -> str:
    job = client.submit(*_settings(seed), api_name="/race")
    try:
        if cancel:
            # Don't use next(job): the client's iterator never ends if the server refuses the request.
            while not job.done() and not job.outputs():
                time.sleep(0.01)
            if job.done() or "error" in job.outputs()[0]:
                job.result()  # raises if the request was refused
            job.cancel()
            return "cancelled"
        last = job.result(PATIENCE_S)
    except Exception as error:
        if "queue is full" in str(error).lower():
            return "queue is full"
        if str(error) == races.LOST:
            return LOST
        if isinstance(error, AppError):
            return f"refused: {error}"[:80]
        raise
    if not last["done"]:
        return "incomplete"
    return "complete" if _texts(last) == expected else "wrong texts"


def _vanish(url: str, values: list[Any]) -> str:
    """Post a request as a script would, read one line of the answer, and drop the connection."""
    with httpx.Client(base_url=f"{url}/gradio_api", timeout=PATIENCE_S) as client:
        joined = client.post("/call/race", json={"data": values})
        if joined.status_code == 503:
            return "queue is full"
        joined.raise_for_status()
        with client.stream("GET", f"/call/race/{joined.json()['event_id']}") as answer:
            next(answer.iter_lines(), None)
    return "vanished"

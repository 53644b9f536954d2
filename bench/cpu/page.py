"""`python -m bench page`: how fast the page opens, and how much a watching browser slows the lanes.

The opening is measured in cold loads of the page, here and on an emulated fast 3G network (opening.py). Then we
run the same race (three lanes, fair) in turns: in a process without a server ("library"), through the running
app.py by gradio_client ("client"), and in headless Chromium on the page of app.py ("browser"). All use the page's
thread count and wait policy. Figures are medians of each lane's ms per token. For the page we also report how
often it rendered new text, and its longest main-thread task after the charts were first drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from app import parse, set_threads

from ..report.report import CPU, ROOT, Row, at_least, at_most, claim, document, median, parser, show, table, whole
from ..robustness.serving import serve
from . import opening

PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."
TEMPERATURE, SEED = 0.7, 0
LANES = ("regular", "speculative", "bass")
Lanes = dict[str, Any]
# Counts the frames in which some text grew, and keeps the longest main-thread task in ms. The script requests no
# frames itself, because every frame slows the lanes.
WATCH = """() => {
  const seen = window.seen = { updates: 0, longest: 0, first: 0, last: 0 };
  window.watch?.disconnect();
  window.watch = new MutationObserver((changes) => {
    if (!changes.some(({ target }) => target.classList.contains("sequence"))) return;
    seen.updates += 1;
    seen.last = performance.now();
    seen.first ||= seen.last;
  });
  window.watch.observe(document.querySelector(".lane-grid"), { childList: true, subtree: true });
  new PerformanceObserver((list) => {
    for (const task of list.getEntries()) seen.longest = Math.max(seen.longest, task.duration);
  }).observe({ type: "longtask" });
}"""
POLL_MS = 500
# The timeout of one action on the page, on cores that the models keep busy.
PATIENCE_MS = 180_000
ENDED = "() => [...document.querySelectorAll('.lane .state')].every((e) => /Finished/.test(e.textContent))"


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    cli = parser("page", __doc__ or "", "pair", "draft")
    cli.add_argument("--batch", type=whole(), default=4)
    cli.add_argument("--max-new-tokens", type=whole(), default=64)
    cli.add_argument("--repeats", type=whole(), default=3)
    cli.add_argument("--loads", type=whole(), default=7, help="cold loads of the page on each network")
    cli.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = cli.parse_args(argv)
    if options.quick:
        options.repeats, options.max_new_tokens, options.loads = 1, 16, 1
    if options.worker:
        work(options)
        return
    # The result file records this process's thread count, so set it to that of the measured processes.
    set_threads(parse(["--host", "127.0.0.1"]), os.environ)
    arms: dict[str, list[Lanes]] = {"library": [], "client": [], "browser": []}
    with ExitStack() as stack:
        library = stack.enter_context(worker(options))
        address = stack.enter_context(app(options))
        with chromium() as started:
            opened = opening.measure(started, address, options.loads)
        page = stack.enter_context(browser(address))
        run: dict[str, Callable[[], Lanes]] = {
            "library": library,
            "client": lambda: client(address, options),
            "browser": lambda: watched(page, options),
        }
        # One unmeasured round first, for everything that is set up once.
        for repeat in range(options.repeats + 1):
            for name, arm in run.items():
                lanes = arm()
                if repeat:
                    arms[name].append(lanes)
    report(options, arms, *opened)


def report(
    options: argparse.Namespace, arms: dict[str, list[Lanes]], opened: list[Row], claims: list[Row]
) -> None:
    """Print and write the tables and the claims; `opened` are the rows of opening.py, and `claims` its claims."""
    results: list[Row] = []
    quick = options.quick
    for lane in LANES:
        times = {name: median([run[lane]["ms_per_token"] for run in runs]) for name, runs in arms.items()}
        cost = times["browser"] / times["library"] - 1
        results.append({"lane": lane, **{f"{name} ms/token": value for name, value in times.items()}})
        claims.append(at_most(f"a browser's cost to {lane}", cost, 0.1, not quick))
    health = [run["page"] for run in arms["browser"]]
    updates, longest = min(h["updates_per_s"] for h in health), max(h["longest_task_ms"] for h in health)
    claims.append(at_least("rendered updates a second", updates, 5, not quick))
    claims.append(at_most("longest task, ms", longest, 200, not quick))
    texts = [[run[lane]["texts"] for lane in LANES] for runs in arms.values() for run in runs]
    same = all(text == texts[0] for text in texts)
    claims.append(claim("runs whose texts agree", len(texts), f"all {len(texts)}", same))
    print(f"{table(opened)}\n\n{table(results)}")
    show(document("page", options, CPU, [*opened, *results], claims), options)


def environment() -> dict[str, str]:
    """Return our environment with the variable that app.py sets before it imports torch."""
    return os.environ | {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}


def work(options: argparse.Namespace) -> None:
    """Run one race without a server for each line of stdin, and print its figures as a line of JSON."""
    from bass_core import SamplingParams, load_pair, race

    set_threads(parse(["--host", "127.0.0.1"]), os.environ)
    pair = load_pair(options.pair, draft=options.draft)
    sampling = SamplingParams(TEMPERATURE)
    print(json.dumps({"threads": torch.get_num_threads()}), flush=True)
    for _ in sys.stdin:
        *_, last = race(
            pair, PROMPT, n=options.batch, max_new_tokens=options.max_new_tokens, sampling=sampling, seed=SEED,
            draft_length="bass",
        )  # fmt: skip
        print(json.dumps(figures(last["lanes"])), flush=True)


def figures(lanes: dict[str, Any]) -> Lanes:
    """Return, for each lane, the figures that we compare."""
    return {
        name: {
            "ms_per_token": lanes[name]["metrics"]["ms_per_token"],
            "texts": [sequence["text"] for sequence in lanes[name]["sequences"]],
        }
        for name in LANES
    }


@contextmanager
def worker(options: argparse.Namespace) -> Iterator[Callable[[], Lanes]]:
    """Start a process that loads the pair once, and yield a function that runs a race in it."""
    command = [sys.executable, "-m", "bench", "page", "--worker", "--pair", options.pair]
    command += ["--batch", str(options.batch), "--max-new-tokens", str(options.max_new_tokens)]
    command += ["--draft", options.draft] if options.draft else []
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin and process.stdout
    requests, answers = process.stdin, process.stdout

    def ask() -> Lanes:
        requests.write("go\n")
        requests.flush()
        answer: Lanes = json.loads(answers.readline())
        return answer

    try:
        threads = json.loads(answers.readline())["threads"]
        policy = environment()["OMP_WAIT_POLICY"]
        print(f"{threads} of {os.cpu_count()} cores for the models, the page's default; OMP_WAIT_POLICY={policy}")
        yield ask
    finally:
        process.terminate()
        process.wait()


@contextmanager
def app(options: argparse.Namespace, draft_length: str = "bass") -> Iterator[str]:
    """Start app.py as a user would and yield its address; with draft_length="bass" app.py measures no costs."""
    draft = ("--draft", options.draft) if options.draft else ()
    with serve("--pair", options.pair, "--draft-length", draft_length, *draft) as (_, address):
        yield address


def client(address: str, options: argparse.Namespace) -> Lanes:
    """Run the race through the API, reading every snapshot."""
    from gradio_client import Client

    arguments = (PROMPT, options.batch, options.max_new_tokens, TEMPERATURE, SEED, 0, 1.0, "bass")
    *_, last = Client(address, verbose=False).submit(*arguments, api_name="/race")
    return figures(last["lanes"])


@contextmanager
def chromium() -> Iterator[Any]:
    """Start headless Chromium and yield Playwright's browser."""
    from playwright.sync_api import sync_playwright

    names = (os.environ.get("BASS_BROWSER"), "chromium", "chromium-browser", "google-chrome")
    executable = next((path for name in names if name and (path := shutil.which(name))), None)
    if executable is None:
        raise SystemExit("No Chromium or Chrome is installed: install one, or name it in BASS_BROWSER.")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@contextmanager
def browser(address: str) -> Iterator[Any]:
    """Open the page in headless Chromium and yield Playwright's page."""
    with chromium() as started:
        page = started.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{address}?play=off#race?draft_length=bass")
        page.locator("[data-chart=latency]").scroll_into_view_if_needed()  # loads Plotly
        page.wait_for_function("() => window.Plotly && document.querySelector('[data-chart] .main-svg')")
        yield page


def watched(page: Any, options: argparse.Namespace) -> Lanes:
    """Run the race on the page, with the charts in view."""
    page.fill("#prompt textarea", PROMPT)
    if not page.locator("#temperature input").is_visible():
        page.click("text=More settings")
    values = {"batch-size": options.batch, "max-new-tokens": options.max_new_tokens, "temperature": TEMPERATURE}
    for name, value in {**values, "seed": SEED}.items():
        page.fill(f"#{name} input", str(value))
    page.locator("[data-chart=latency]").scroll_into_view_if_needed()
    page.evaluate(WATCH)
    page.click("#run")
    page.wait_for_function("() => window.seen.updates > 0", timeout=0, polling=POLL_MS)
    page.wait_for_function(ENDED, timeout=0, polling=POLL_MS)
    page.wait_for_timeout(1500)
    seen, lanes = page.evaluate("() => [window.seen, JSON.parse(Bass.asJson()).lanes]")
    seconds = (seen["last"] - seen["first"]) / 1000
    health = {"updates_per_s": seen["updates"] / max(seconds, 1e-3), "longest_task_ms": seen["longest"]}
    return {**figures(lanes), "page": health}

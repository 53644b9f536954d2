"""How fast the page's opening is in headless Chromium: `measure`. A part of `python -m bench page`.

Each load has an empty browser cache. The time of the first token is from navigation to the first frame in which a
token of the opening is in view.
"""

from __future__ import annotations

import statistics
from typing import Any

from ..report.report import Row, at_most

# Chromium's own "Fast 3G": bytes per second, and ms added to each request.
FAST_3G = {
    "offline": False,
    "latency": 562.5,
    "downloadThroughput": 1.6 * 1024 * 1024 / 8 * 0.9,
    "uploadThroughput": 750 * 1024 / 8 * 0.9,
}
NETWORKS: dict[str, dict[str, Any] | None] = {"here": None, "fast 3G": FAST_3G}
# The goals: ms until the first token on each network; ms of the longest task; layout shift.
FIRST_TOKEN_MS = {"here": 1000, "fast 3G": 2500}
LONGEST_MS, SHIFT = 100, 0.1
# Tasks and layout shift are counted for this time after navigation.
WATCHED_MS = 10_000
WATCH = """() => {
  const seen = window.opening = { token: null, tasks: [], shift: 0 };
  const observe = (type, add) =>
    new PerformanceObserver((list) => list.getEntries().forEach(add)).observe({ type, buffered: true });
  observe("longtask", ({ startTime, duration }) => startTime < WATCHED && seen.tasks.push(duration));
  observe("layout-shift", ({ startTime, hadRecentInput, value }) => {
    if (startTime < WATCHED && !hadRecentInput) seen.shift += value;
  });
  const inView = (element) => {
    const { top, bottom, width } = element.getBoundingClientRect();
    const shown = element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
    return shown && width > 0 && bottom > 0 && top < innerHeight;
  };
  const look = () => {
    if ([...document.querySelectorAll(".sequence .token")].some(inView)) seen.token = performance.now();
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}""".replace("WATCHED", str(WATCHED_MS))
SEEN = f"() => window.opening.token !== null && performance.now() > {WATCHED_MS}"


def load(chromium: Any, address: str, network: dict[str, Any] | None) -> Row:
    """Open the page once, with an empty cache, and return its figures."""
    context = chromium.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    session, received = context.new_cdp_session(page), list[float]()
    session.send("Network.enable")
    session.on("Network.loadingFinished", lambda event: received.append(event["encodedDataLength"]))
    if network:
        session.send("Network.emulateNetworkConditions", network)
    page.add_init_script(f"({WATCH})()")
    page.goto(address, wait_until="commit")
    page.wait_for_function(SEEN, timeout=0, polling=500)
    seen = page.evaluate("() => window.opening")
    context.close()
    return {
        "first token ms": seen["token"],
        "longest task ms": max(seen["tasks"], default=0),
        "tasks over 100 ms": sum(task > LONGEST_MS for task in seen["tasks"]),
        "layout shift": seen["shift"],
        "KB": sum(received) / 1000,
        "requests": len(received),
    }


def measure(chromium: Any, address: str, loads: int) -> tuple[list[Row], list[Row]]:
    """Load the page that many times on each network, after an unmeasured load.

    Returns:
        A row with the medians and with the least and the greatest first token for each network; the claims.
    """
    rows: list[Row] = []
    claims: list[Row] = []
    load(chromium, address, None)
    for name, network in NETWORKS.items():
        found = [load(chromium, address, network) for _ in range(loads)]
        medians = {figure: statistics.median(row[figure] for row in found) for figure in found[0]}
        tokens, tasks = ([row[figure] for row in found] for figure in ("first token ms", "longest task ms"))
        spread = {
            "first token, least": min(tokens),
            "first token, most": max(tokens),
            "longest task, most": max(tasks),
        }
        rows.append({"network": name, "loads": loads, **medians, **spread})
        claims += [
            at_most(f"{name}: first token, ms", medians["first token ms"], FIRST_TOKEN_MS[name], loads > 1),
            at_most(f"{name}: longest task, ms", medians["longest task ms"], LONGEST_MS, loads > 1),
            at_most(f"{name}: layout shift", medians["layout shift"], SHIFT, loads > 1),
        ]
    return rows, claims

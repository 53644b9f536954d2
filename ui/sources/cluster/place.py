"""Ray as the place where races run: on this machine or on a cluster.

Contract: each function returns a Place whose first worker is ready, or raises BassError with one sentence and
leaves nothing behind. Closing the place ends the workers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bass_core import RequestError
from ui.page.limits import Limits
from ui.sources.cluster.calls import Calls
from ui.sources.cluster.pool import Pool
from ui.sources.cluster.races import Races
from ui.sources.cluster.start import JoinedRay, LocalRay, actor_options, fits
from ui.sources.queue import Queue
from ui.sources.source import Ask, Place

# Races that wait in our own queue, which knows their work; more wait in Gradio's.
WAITING = 16


def on_this_machine(ask: Ask, limits: Limits, *, workers: int, threads: int) -> Place:
    """That many workers here: one a GPU, or without a GPU with so many threads each."""
    if ":" in ask.device:
        raise RequestError("With --workers each worker has a GPU of its own: name no number in --device.")
    if ask.device_map:
        raise RequestError(
            "With --workers each worker has one GPU, so --device-map has nothing to spread over: leave one of "
            "them out, or use --ray with --worker-resources GPU=2 or more."
        )
    ray = LocalRay(workers)
    try:
        options: dict[str, Any] = {"num_cpus": 1}
        gpus = int(ray.ray.cluster_resources().get("GPU", 0))
        if gpus and ask.device != "cpu":
            if workers > gpus:
                raise RequestError(f"--workers {workers} needs as many GPUs, and this machine has {gpus}.")
            options["num_gpus"] = 1
        return _place(ray, ask, limits, workers, threads, options)
    except BaseException:
        ray.leave()
        raise


def on_cluster(
    ask: Ask, limits: Limits, *, address: str, resources: str | None, workers: int | None, threads: int | None
) -> Place:
    """Workers on the cluster at `address`, wherever there is what `resources` says ("GPU=1,CPU=4").

    workers: None for as many as fit now; a number waits for nodes that are not there yet. threads: None for one a
    CPU that a worker asks for.
    """
    options = None if resources is None else actor_options(resources)
    ray = JoinedRay(address)
    try:
        if options is None:
            if not ray.ray.cluster_resources().get("GPU") or ask.device == "cpu":
                raise RequestError(
                    "The cluster has no GPU: say what each worker takes, such as --worker-resources CPU=4."
                )
            options = {"num_gpus": 1}
        room = fits(ray.ray.nodes(), options)
        if not room and workers is None:
            raise RequestError(
                f"No node of the cluster has what a worker asks for ({resources or 'GPU=1'}): ask for less with "
                "--worker-resources, or say with --workers how many shall wait for new nodes."
            )
        if not room:
            print("No node of the cluster has room for a worker yet: waiting for one.", file=sys.stderr)
        threads = threads or max(1, int(options.get("num_cpus", 1)))
        return _place(ray, ask, limits, workers or room, threads, options)
    except BaseException:
        ray.leave()
        raise


def _place(
    ray: LocalRay | JoinedRay, ask: Ask, limits: Limits, workers: int, threads: int, options: Mapping[str, Any]
) -> Place:
    calls = Calls(ray.ray)
    pool = Pool(calls, ask, limits, workers=workers, threads=threads, options=options, queue=Queue())
    try:
        facts = pool.start()
    except BaseException:
        calls.close()
        raise
    races = Races(pool)
    many = f"{workers} worker{'s' * (workers > 1)} on Ray"
    return Place(
        races.source,
        replace(facts, about=f"{facts.about}, {many}"),
        races.count if facts.counts else None,
        at_once=workers + WAITING,
        close=_closing(calls.close, ray.leave),
    )


def _closing(*steps: Callable[[], None]) -> Callable[[], None]:
    def close() -> None:
        for step in steps:
            step()

    return close

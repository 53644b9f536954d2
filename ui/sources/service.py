"""What runs the races, by the operator's options: this process, or workers on Ray.

Contract: `open_service` returns a service that is ready for its first race, or raises BassError with one sentence
and leaves nothing running. Closing a service ends its workers. Ray is imported only where an option asks for it.
Non-goals: what the options are (app.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from bass_core import RequestError, on_zero_gpu
from ui.page.limits import Limits
from ui.sources.cluster.pool import Pool
from ui.sources.cluster.races import Races
from ui.sources.cluster.start import Calls, JoinedRay, LocalRay, actor_options, fits
from ui.sources.queue import Queue
from ui.sources.source import Ask, Service

# Races that wait in our own queue, which knows their work; more wait in Gradio's.
WAITING = 16


def open_service(
    asked: Ask, options: argparse.Namespace, limits: Limits, set_threads: Callable[[], int], cores: int
) -> Service:
    """The service that app.py's options ask for, with this pair.

    set_threads: sets the models' threads of this process, and returns them. cores: that the workers may share.
    """
    if options.ray is not None:
        return on_cluster(
            asked,
            limits,
            address=options.ray,
            resources=options.worker_resources,
            workers=options.workers,
            threads=options.threads,
        )
    if options.worker_resources is not None:
        raise RequestError("--worker-resources says what a worker takes on a cluster: name it with --ray.")
    if options.workers:
        threads = options.threads or max(1, cores // options.workers)
        return on_this_machine(asked, limits, workers=options.workers, threads=threads)
    return _in_this_process(asked, limits, set_threads)


def _in_this_process(asked: Ask, limits: Limits, set_threads: Callable[[], int]) -> Service:
    """One race at a time, in this process or on ZeroGPU's workers.

    `spaces` is installed on every Gradio Space, whatever its hardware.
    """
    spaces = import_module("spaces") if on_zero_gpu() else None  # before torch touches CUDA
    from ui.sources.local import Local

    local = Local(asked)
    # Set after loading, because loading lays out the weights on all cores.
    facts = local.facts(set_threads())
    if spaces is None:
        return Service(local.source, facts, local.count(limits), opened=local.idle.start)
    from ui.sources.zero_gpu import ZeroGpu

    zero_gpu = ZeroGpu(spaces, local.alone)
    return Service(zero_gpu.source, facts, local.count(limits), together=zero_gpu.together)


def on_this_machine(ask: Ask, limits: Limits, *, workers: int, threads: int) -> Service:
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
        return _on_ray(ray, ask, limits, workers, threads, options)
    except BaseException:
        ray.leave()
        raise


def on_cluster(
    ask: Ask, limits: Limits, *, address: str, resources: str | None, workers: int | None, threads: int | None
) -> Service:
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
        return _on_ray(ray, ask, limits, workers or room, threads, options)
    except BaseException:
        ray.leave()
        raise


def _on_ray(
    ray: LocalRay | JoinedRay, ask: Ask, limits: Limits, workers: int, threads: int, options: Mapping[str, Any]
) -> Service:
    calls = Calls(ray.ray)
    pool = Pool(calls, ask, limits, workers=workers, threads=threads, options=options, queue=Queue())
    try:
        facts = pool.start()
    except BaseException:
        calls.close()
        raise
    races = Races(pool)

    def close() -> None:
        calls.close()
        ray.leave()

    return Service(
        races.source,
        replace(facts, about=f"{facts.about}, {workers} worker{'s' * (workers > 1)} on Ray"),
        races.count if facts.counts else None,
        at_once=workers + WAITING,
        close=close,
    )

"""Opens the service that runs the races: this process, or workers on Ray. Call `open_service`.

app.py defines the options. Ray is imported only if an option needs it.
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
from ui.sources.cluster.pool import WorkerPool
from ui.sources.cluster.races import Races
from ui.sources.cluster.start import Calls, JoinedRay, LocalRay, actor_options, fits
from ui.sources.queue import Queue
from ui.sources.source import PairOptions, Service

# The maximum number of races in our own queue, which orders races by their work. Further ones wait in Gradio's.
WAITING = 16


def open_service(
    asked: PairOptions, options: argparse.Namespace, limits: Limits, set_threads: Callable[[], int], cores: int
) -> Service:
    """Return the service that app.py's options ask for, ready for its first race. Closing it ends its workers.

    Args:
        set_threads: sets the number of the models' threads in this process and returns it.
        cores: the cores that the workers may share.

    Raises:
        BassError: if the service can't be opened. In that case, no worker or process is left running.
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
        raise RequestError("--worker-resources is for workers on a cluster: name the cluster with --ray.")
    if options.workers:
        threads = options.threads or max(1, cores // options.workers)
        return on_this_machine(asked, limits, workers=options.workers, threads=threads)
    return _in_this_process(asked, limits, set_threads)


def _in_this_process(asked: PairOptions, limits: Limits, set_threads: Callable[[], int]) -> Service:
    """Return a service for one race at a time, in this process or on ZeroGPU's workers."""
    # `spaces` must be imported before torch touches CUDA. It is installed on every Gradio Space.
    spaces = import_module("spaces") if on_zero_gpu() else None
    from ui.sources.local import Local

    local = Local(asked)
    # Set the threads after loading, because loading uses all cores to lay out the weights.
    facts = local.facts(set_threads())
    if spaces is None:
        return Service(local.source, facts, local.count(limits), opened=local.idle.start)
    from ui.sources.zero_gpu import ZeroGpu

    zero_gpu = ZeroGpu(spaces, local.unshared)
    return Service(zero_gpu.source, facts, local.count(limits), together=zero_gpu.together)


def on_this_machine(ask: PairOptions, limits: Limits, *, workers: int, threads: int) -> Service:
    """Return a service with workers on this machine, one per GPU, or each with `threads` CPU threads.

    Raises:
        RequestError: if there are fewer GPUs than workers, or the device options don't fit.
    """
    if ":" in ask.device:
        raise RequestError("With --workers each worker has its own GPU: leave the number out of --device.")
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
    ask: PairOptions,
    limits: Limits,
    *,
    address: str,
    resources: str | None,
    workers: int | None,
    threads: int | None,
) -> Service:
    """Return a service with workers on a Ray cluster.

    Args:
        ask: the pair to load.
        limits: the operator's upper bounds.
        address: the address of the cluster.
        resources: the resources of each worker, e.g. "GPU=1,CPU=4". None means one GPU.
        workers: the number of workers. Those that don't fit now wait for new nodes. None means as many as fit now.
        threads: the models' CPU threads per worker. None means one thread per CPU in `resources`.

    Raises:
        RequestError: if the cluster lacks the resources.
    """
    options = None if resources is None else actor_options(resources)
    ray = JoinedRay(address)
    try:
        if options is None:
            if not ray.ray.cluster_resources().get("GPU") or ask.device == "cpu":
                raise RequestError(
                    "The cluster has no GPU: set what each worker takes, such as --worker-resources CPU=4."
                )
            options = {"num_gpus": 1}
        room = fits(ray.ray.nodes(), options)
        if not room and workers is None:
            raise RequestError(
                f"No node of the cluster has what a worker takes ({resources or 'GPU=1'}): ask for less with "
                "--worker-resources, or set with --workers how many should wait for new nodes."
            )
        if not room:
            print("No node of the cluster has room for a worker yet: waiting for one.", file=sys.stderr)
        threads = threads or max(1, int(options.get("num_cpus", 1)))
        return _on_ray(ray, ask, limits, workers or room, threads, options)
    except BaseException:
        ray.leave()
        raise


def _on_ray(
    ray: LocalRay | JoinedRay,
    ask: PairOptions,
    limits: Limits,
    workers: int,
    threads: int,
    options: Mapping[str, Any],
) -> Service:
    calls = Calls(ray.ray)
    pool = WorkerPool(calls, ask, limits, workers=workers, threads=threads, options=options, queue=Queue())
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

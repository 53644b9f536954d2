"""Where races run, by the operator's options: in this process or on Ray.

Contract: `find_place` returns a place that is ready for its first race, or raises BassError with one sentence.
Ray is imported only where an option asks for it. Non-goals: what the options are (app.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bass_core import RequestError
from ui.page.limits import Limits
from ui.sources.source import Ask, Place


def find_place(asked: Ask, options: Any, limits: Limits, set_threads: Callable[[], int], cores: int) -> Place:
    """The place that app.py's options ask for, with this pair.

    set_threads: sets the models' threads of this process, and returns them. cores: that the workers may share.
    """
    if options.ray:
        from ui.sources.cluster.place import on_cluster

        return on_cluster(
            asked,
            limits,
            address=options.ray,
            resources=options.worker_resources,
            workers=options.workers,
            threads=options.threads,
        )
    if options.worker_resources:
        raise RequestError("--worker-resources says what a worker takes on a cluster: name it with --ray.")
    if options.workers:
        from ui.sources.cluster.place import on_this_machine

        threads = options.threads or max(1, cores // options.workers)
        return on_this_machine(asked, limits, workers=options.workers, threads=threads)
    return _here(asked, limits, set_threads)


def _here(asked: Ask, limits: Limits, set_threads: Callable[[], int]) -> Place:
    """One race at a time, in this process or on a Space's ZeroGPU worker."""
    try:
        import spaces  # ZeroGPU: must be imported before torch
    except ImportError:
        spaces = None
    from ui.sources.local import Local

    # Between races, a ZeroGPU Space has no device to measure on.
    local = Local(asked if spaces is None else replace(asked, measures=False))
    # Set after loading, because loading lays out the weights on all cores.
    facts = local.facts(set_threads())
    source = local.source if spaces is None else spaces.GPU(duration=gpu_seconds)(local.alone)
    return Place(source, facts, local.count(limits), opened=local.idle.start)


def gpu_seconds(request: Any) -> int:
    """Upper bound of a race's GPU time in seconds; ZeroGPU reserves this much."""
    return min(120, 20 + request.max_new_tokens * request.batch_size // 20)

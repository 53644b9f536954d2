"""Where the backend "mixed" uses flash-attn: `measure_flash` times it against our kernel, once per pair.

Rounds replay CUDA graphs, so their steps are timed as replays, without the host's work. Prompts run eagerly and
are timed that way. flash-attn serves a kind of step (`shape_key` in kernels/backends.py) if it is faster in each
step of STEPS, and rounds only if a row's bits depend neither on the number of its new tokens nor on other rows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels.backends import BACKENDS, FLASH_FASTER, shape_key, why_backend_unavailable
from kernels.flash import version_for
from kernels.plan import AttentionPlan
from kernels.support import on, on_zero_gpu

from ..machine.capture import Pool, capture, enabled, refuses_waits, waits_refused
from ..machine.stopwatch import Stopwatch
from ..machine.transfer import to_device

_log = logging.getLogger(__name__)
# For each kind of step: the rows, new tokens per row and cached tokens per row of the steps that are timed.
STEPS = {
    "prompts": ((4, 256, 0),),
    "long prompts": ((1, 4096, 0), (2, 512, 7680)),
    "rounds": ((8, 5, 1024), (8, 1, 4096), (1, 5, 4096)),
}
# Calls in one graph or between two events, so that neither a replay's launch nor an event counts.
CALLS = 8
_WARM_UPS, _REPEATS = 3, 9

Heads = tuple[int, int, int]


def measure_flash(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    """Find the kinds of steps for which flash-attn is used, if it and our kernel can run.

    If timing fails, because memory or a kernel for these heads is missing, our kernel is used. Nothing is timed
    with BASS_MEASURE=0 or on ZeroGPU, where there is no device yet. Read, not run with a real flash-attn.
    """
    off = os.environ.get("BASS_MEASURE") == "0" or on_zero_gpu()
    if off or why_backend_unavailable("mixed", device, dtype) is not None:
        return
    numbers = (heads, kv_heads, dim)
    try:
        with torch.inference_mode(), on(device):
            faster = [kind for kind in STEPS if _is_faster(kind, device, dtype, numbers)]
            if "rounds" in faster and not _rounds_have_the_same_bits(device, dtype, numbers):
                faster.remove("rounds")
                _log.info("flash-attn serves no rounds: a row's bits depend on the number of its new tokens.")
    except Exception as error:  # its kernels may be compiled at the first call, which may raise anything
        _log.warning("flash-attn is not used, since it can't be timed here: %s", " ".join(str(error).split()))
    else:
        FLASH_FASTER.update((device, dtype, *numbers, kind) for kind in faster)


def attention_words(backend: str, device: torch.device, dtype: torch.dtype, heads: Heads) -> str:
    """Describe the kernels that attend, given the backend's name and what `shape_key` needs."""
    version = version_for(device)
    name = "flash-attn" if version is None else version.name
    if backend != "mixed":
        return {"fused": "our kernel", "flash": name, "sdpa": "torch"}.get(backend, backend)
    served = [kind for kind in STEPS if (device, dtype, *heads, kind) in FLASH_FASTER]
    return "our kernel" + (f", {name} for {' and '.join(served)} of plain texts" if served else "")


def _is_faster(kind: str, device: torch.device, dtype: torch.dtype, heads: Heads) -> bool:
    """Return whether flash-attn is faster than our kernel in each step of a kind."""
    for step in STEPS[kind]:
        ours, theirs = (step_ms(name, kind, step, device, dtype, heads) for name in ("fused", "flash"))
        if theirs >= ours:
            return False
    return True


def step_ms(
    backend: str, kind: str, step: tuple[int, int, int], device: torch.device, dtype: torch.dtype, heads: Heads
) -> float:
    """Return the median milliseconds of one layer's attention in a step of STEPS[kind]."""
    rows, queries, length = step
    query, keys = _states(rows, queries, length + queries, device, dtype, heads)
    assert shape_key(query, keys)[-1] == kind
    plan = _plan([length] * rows, queries, device)
    call = partial(BACKENDS[backend], query, keys, keys, plan, scaling=1.0)
    return call_ms(call, device, kind == "rounds")


def _rounds_have_the_same_bits(device: torch.device, dtype: torch.dtype, heads: Heads) -> bool:
    """Return whether flash-attn gives the last token of a step the same bits by itself, and without other rows."""
    lengths, queries = [1000, 77, 300, 2], 5
    query, keys = _states(len(lengths), queries, max(lengths) + queries, device, dtype, heads)
    flash = partial(BACKENDS["flash"], scaling=heads[2] ** -0.5)
    last = flash(query, keys, keys, _plan(lengths, queries, device))[:, -1:]
    alone = flash(query[:, :, -1:], keys, keys, _plan([length + queries - 1 for length in lengths], 1, device))
    first = flash(query[:1], keys[:1], keys[:1], _plan(lengths[:1], queries, device))[:, -1:]
    return torch.equal(last, alone) and torch.equal(last[:1], first)


def _states(
    rows: int, queries: int, columns: int, device: torch.device, dtype: torch.dtype, heads: Heads
) -> tuple[Tensor, Tensor]:
    """Return random queries [rows, Hq, queries, D] and keys [rows, Hkv, columns, D]."""
    count, kv_heads, dim = heads
    draw = partial(torch.randn, device=device, dtype=dtype)
    return draw(rows, count, queries, dim), draw(rows, kv_heads, columns, dim)


def _plan(lengths: list[int], queries: int, device: torch.device) -> AttentionPlan:
    return AttentionPlan(to_device(lengths, device), lengths, queries)


def call_ms(call: Callable[[], object], device: torch.device, captured: bool) -> float:
    """Return the median milliseconds of a call among CALLS in a row.

    Args:
        captured: whether to time replays, if this process captures steps.
    """

    def calls() -> None:
        for _ in range(CALLS):
            call()

    run: Callable[[], object] = calls
    if captured and enabled(device):
        call()  # compiles it
        if refuses_waits(device):
            # A wait would break the capture, and with it all later ones of this process.
            with waits_refused(device):
                call()
        _, run = capture(calls, Pool(device))
    times, watch = [], Stopwatch(device)
    for _ in range(_WARM_UPS + _REPEATS):
        watch.mark()
        run()
        watch.mark()
        times += watch.laps()
    return sorted(times[_WARM_UPS:])[_REPEATS // 2] / CALLS

"""`python -m bench attention`: every attention backend over rows, tokens and lengths, and what "auto" chooses.

Contract: one layer's attention in the shape of a pair's target, all rows equally long. A cell is rows x tokens a
row x cached tokens, over caches of each row's own or over one shared prefix (all but the last 16 tokens of the
rows). The claim is that "auto" takes at most 1.15 of the fastest backend's time in every cell. The kernels of
kernels/cpu, beside which there is no choice, are measured by `python -m bench floor`.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from bass_core import ModelPair, load_pair
from bass_core.machine.memory import available_bytes
from bass_core.model.attention import choose_backend
from bass_core.model.cache import RaggedCache
from bass_core.model.runner import SHARING
from kernels.backends import BACKENDS, why_backend_unavailable
from kernels.plan import SHARE
from kernels.support import is_accelerator, runtime

from ..report.report import claim, finish, parser

ROWS, TOKENS, LENGTHS = (1, 4, 8, 32), (1, 2, 5, 16), (128, 1000, 4000, 8000)
BAR = 1.15
# Each cell is measured for so long at least, in seconds, and so often.
SECONDS, LEAST, MOST = 0.3, 4, 60

Row = dict[str, Any]


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("attention", __doc__ or "")
    options.add_argument("--pair", default="smollm2")
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--rows", type=int, nargs="+", default=ROWS)
    options.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    options.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.rows, arguments.tokens, arguments.lengths = [2], [1, 5], [128]
    pair = load_pair(arguments.pair, draft=None, device=arguments.device, dtype=arguments.dtype)
    found = [
        _cell(pair, rows, tokens, length, shared)
        for length in arguments.lengths
        for rows in arguments.rows
        for tokens in arguments.tokens
        for shared in ([False, True] if rows > 1 and length > 2 * SHARE else [False])
    ]
    results = [row for row in found if row]
    worst = max(results, key=lambda row: float(row["auto / best"]))
    missed = sum(row["auto / best"] > BAR for row in results)
    where = f"{worst['rows']} x {worst['tokens']} x {worst['cached']}, {worst['cache']}"
    claims = [
        claim(f"auto / best, worst of {len(results)} cells ({where})", worst["auto / best"], f"{BAR}", not missed),
        claim("cells in which auto is slower than that", missed, "0", not missed),
    ]
    finish("attention", arguments, pair.device, results, claims)


def _cell(pair: ModelPair, rows: int, tokens: int, length: int, shared: bool) -> Row | None:
    """The least milliseconds of every backend by turns; None where memory is short."""
    device, config = pair.device, pair.target.config.get_text_config()
    heads, model = config.num_attention_heads, pair.target_step
    prefix_len = (length - SHARE) // SHARE * SHARE if shared else 0
    sizes = (1, rows, length - prefix_len + tokens, model.kv_heads, model.head_dim)
    if 3 * rows * length * model.kv_heads * model.head_dim * 2 * pair.dtype.itemsize > available_bytes(device):
        return None
    prefix = RaggedCache(1, 1, prefix_len, *sizes[3:], pair.dtype, device) if shared else None
    cache = RaggedCache(*sizes, pair.dtype, device, prefix)
    for one in (cache, prefix):
        if one is not None:
            one.buffer.normal_()
    for row in range(rows if shared else 0):
        cache.attach(row, 0, prefix_len)
    query = torch.randn(rows, heads, tokens, model.head_dim, dtype=pair.dtype, device=device)
    times = _times(cache, query, [length] * rows, shared)
    best, auto = min(times, key=lambda name: times[name]), choose_backend("auto", device, pair.dtype)
    columns = {f"{name} ms": times.get(name) for name in BACKENDS}
    return {
        "cache": "shared prefix" if shared else "own", "rows": rows, "tokens": tokens, "cached": length,
        **columns, "best": best, "auto": auto, "auto / best": times[auto] / times[best],
    }  # fmt: skip


def _times(cache: RaggedCache, query: torch.Tensor, lengths: list[int], shared: bool) -> dict[str, float]:
    device = query.device
    names = [name for name in BACKENDS if why_backend_unavailable(name, device, query.dtype) is None]
    # Triton's interpreter is not worth timing.
    names = [name for name in names if name != "fused" or is_accelerator(device)]
    names = [name for name in names if name in SHARING or not shared]

    def call(name: str) -> None:
        # A step makes one plan for all its layers, so a plan's masks are not this layer's.
        keys, values = plan.reads(0)
        prefix = None if plan.shared is None else plan.shared.reads(0)
        BACKENDS[name](query, keys, values, plan, scaling=query.shape[-1] ** -0.5, prefix=prefix)
        if is_accelerator(device):
            runtime(device).synchronize(device)

    with torch.inference_mode():
        plan = cache.plan(lengths, query.shape[2])
        arms = {name: partial(call, name) for name in names}
        return _least(arms)


def _least(arms: dict[str, Any]) -> dict[str, float]:
    """The least milliseconds of each arm, by turns, after a call of each that is not measured."""
    for arm in arms.values():
        arm()
    least = dict.fromkeys(arms, float("inf"))
    begin, count = time.perf_counter(), 0
    while count < LEAST or (time.perf_counter() - begin < SECONDS and count < MOST):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm()
            least[name] = min(least[name], 1000 * (time.perf_counter() - start))
        count += 1
    return least

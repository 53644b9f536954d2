"""Ragged attention in one launch: the result of BASS-SPLIT with no more launches than BASS-PAD.

`fused` takes the arguments of `pad` (reference/attention.py), its torch reference, and returns the same. Lengths,
starts and groups are read on the device, so a captured launch serves every later step. It supports fp16, bf16 and
fp32, and head_dim up to 256, but neither backward nor dropout.

Each program takes a block of the query rows of one key-value head, with (g, s) folded into one axis, and a segment
of the columns; the last program of a block to finish merges its segments (flash-decoding). Programs of segments
that a row doesn't reach end at once, so a captured launch costs as much as the row's filled columns. If the rows
alone fill the device, as in a prefill, a program takes all segments. Segments that lie in a shared prefix are
computed for all its rows together, in a launch before (bifurcated attention, arXiv 2403.08845). Trees of tokens
use the same launches: what a query sees of its tree is one number, read once per program. Invariant: a row's sums
depend neither on what is shared, nor on other rows, nor on the number of programs (segments.py).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import triton
from torch import Tensor

from ..plan import MAX_SPLIT_ROWS, MAX_TREE_TOKENS, AttentionPlan, Rotation, TreeMask
from ..reference.attention import pad
from ..support import CompileFailed, capability, needs_float32, processors, shared_bytes, why_unavailable
from .cache_write import rotate_write
from .launch import launch
from .segments import attend, attend_prefix

Pair = tuple[Tensor, Tensor]

# Columns of a segment, a multiple of every tile's columns. With this size, a long row has enough segments to fill
# a device, and the segments' sums take only a few percent of the bytes of their keys and values.
SEGMENT = 512
# If there would be fewer programs per multiprocessor than this with all segments in each program, each takes only
# one segment.
_PROGRAMS_PER_PROCESSOR = 3
# The maximum number of float32 numbers in the sums of all segments; they take 256 MiB.
MAX_PART_NUMBERS = 1 << 26
# Devices of capability 8.6, 8.9 and 12.0 have fewer bytes of shared memory per program.
_AMPLE_SHARED = 128 * 1024
# The most numbers of segments' sums that a program loads at once to merge them.
_MERGED_NUMBERS = 4096


def tiles(
    head_dim: int, rows: int, itemsize: int, shared: int = 99 * 1024, capability: int = 80, narrow: bool = False
) -> list[dict[str, int]]:
    """Return tile sizes of `attend`, the best first; rows: group x queries of one key-value head.

    The later sizes are for launches that could not be compiled with the earlier ones. Tests compile the first size
    for every architecture and check for register spills.

    Args:
        itemsize: bytes of a number of the keys.
        shared: bytes of shared memory that a program may use.
        capability: the device's compute capability, e.g. 90.
        narrow: whether the new tokens form trees, or the step has a gap: such programs need more registers.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    plain = itemsize == 4 or capability < 80
    if plain:
        # Products without tensor cores run from registers: exact float32 ones, and all products on old devices.
        block_m, choices = 16, [(32, 2)] if block_d < 128 else [(16, 2)]
    else:
        # Two sums of 64 rows of 256 numbers (of a segment, and of those before it) would not fit the registers.
        block_m = 16 if rows <= 16 else 64 if block_d <= 128 else 32
        choices = [(64, 3), (64, 2), (32, 2), (16, 2)] if block_d <= 128 else [(32, 2), (16, 2)]
        if block_d <= 128 and (narrow or (block_m == 64 and shared < _AMPLE_SHARED)):
            # With 64 columns, capability 12.0 spills registers, and so does 10.0 in steps with a gap. The other
            # capabilities also take fewer columns here; this has not been timed. For trees of 64 rows, Triton
            # 3.7.0 and 3.7.1 abort the process when they compile 64 columns for 8.0 and 9.0. Fewer rows take the
            # same number of columns, so that a row's bits don't depend on the widest tree in the batch.
            choices = choices[2:]
    needed = {
        (n, stages): (block_m * block_d + stages * 2 * n * block_d) * itemsize + 2048 for n, stages in choices
    }
    fitting = [pair for pair in choices if needed[pair] <= shared] or choices[-1:]
    # With fewer warps, some of these spill registers.
    wide = block_m == 64 and (block_d == 128 or capability // 10 == 10)
    warps = 8 if block_d == 256 or wide or (block_d == 128 and plain) else 4
    warps = 16 if plain and capability >= 80 and block_d == 256 else warps
    sizes = {"BLOCK_M": block_m, "BLOCK_D": block_d, "num_warps": warps}
    return [sizes | {"BLOCK_N": block_n, "num_stages": stages} for block_n, stages in fitting]


def in_parts(
    device: torch.device, programs: int, rows: int, segments: int, shares: bool, numbers: int = 0
) -> bool:
    """Return whether each program takes only one segment.

    Args:
        programs: number of programs if each took all segments.
        rows: group x queries of one head.
        shares: whether segments lie in a prefix; they are then read once for all its rows.
        numbers: how many numbers the sums of all segments have.
    """
    if segments == 1 or rows > MAX_SPLIT_ROWS or numbers > MAX_PART_NUMBERS:
        return False
    return shares or programs < _PROGRAMS_PER_PROCESSOR * processors(device)


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    prefix: Pair | None = None,
    rotation: Rotation | None = None,
    parts: bool | None = None,
) -> Tensor:
    """Compute attention in one launch, or two with prefixes. Same arguments and result as `pad`.

    If no tile size could be compiled, `pad` computes the result. With `pad`, or with another tile size than the
    first, a row's sums may be rounded differently from those of other launches.

    Args:
        rotation: normalise and rotate the queries and the new keys first, and write keys and values to the cache;
            `query`, `key` and `value` are then views of its tensors. For at most MAX_SPLIT_ROWS query rows.
        parts: whether each program takes one segment (for tests); None lets `in_parts` choose.

    Raises:
        ValueError: if shapes or dtypes are not supported, or kernels can't run here.
    """
    _check(query, key, value, plan, prefix, rotation)
    device, rows = query.device, query.shape[1] // key.shape[1] * query.shape[2]
    narrow = plan.tree is not None or plan.gap is not None
    options: Any = {"scaling": scaling, "window": window, "softcap": softcap, "prefix": prefix}
    for tile in tiles(query.shape[3], rows, key.element_size(), shared_bytes(device), capability(device), narrow):
        with suppress(CompileFailed):
            return _attend(query, key, value, plan, **options, rotation=rotation, parts=parts, tile=tile)
    if rotation is not None:
        rotation.apply(rotate_write, plan)
        return fused(query, key, value, plan, **options, parts=parts)
    return pad(query, key[:, :, : plan.extent], value[:, :, : plan.extent], plan, **options)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
    prefix: Pair | None,
    rotation: Rotation | None,
    parts: bool | None,
    tile: dict[str, int],
) -> Tensor:
    """Compute `fused` with tiles of one size. Raise CompileFailed if one of its launches could not be compiled."""
    batch, heads, queries, dim = query.shape
    kv_heads, columns = key.shape[1:3]
    group, shared, device = heads // kv_heads, plan.shared, query.device
    blocks = triton.cdiv(group * queries, tile["BLOCK_M"])
    longest = max(plan.host) + queries if plan.host else columns + (0 if prefix is None else prefix[0].shape[2])
    segments, in_prefix = triton.cdiv(longest, SEGMENT), 0 if shared is None else shared.extent // SEGMENT
    out = torch.empty(batch, queries, heads, dim, dtype=query.dtype, device=device)
    rows = batch * queries * heads
    if parts is None:
        programs, numbers = blocks * kv_heads * batch, segments * rows * (dim + 2)
        parts = in_parts(device, programs, group * queries, segments, in_prefix > 0, numbers)
    lengths = plan.lengths
    # Absent tensors are replaced by others, and not read.
    sums, peaks, totals, counters = out, out, out, lengths
    if parts:
        sums = torch.empty(segments, rows, dim, dtype=torch.float32, device=device)
        peaks, totals = (torch.empty(segments, rows, dtype=torch.float32, device=device) for _ in range(2))
        counters = plan.zeros(batch * kv_heads * blocks)
    skips = lengths if plan.gap is None else plan.window_starts(plan.gap)
    starts, groups, order = (lengths,) * 3 if shared is None else (shared.starts, shared.groups, shared.order)
    bases, positions, marks = (lengths,) * 3 if plan.tree is None else _tree(plan, plan.tree, window)
    angles: Any = (query,) * 4
    last_position, eps = 0, 0.0
    if rotation is not None:
        angles = (rotation.cos, rotation.sin, *(rotation.norms or angles[:2]))
        last_position, eps = len(rotation.cos) - 1, rotation.eps
    stored = (key, value) if prefix is None else prefix
    strides = [stride for tensor in stored for stride in tensor.stride()[:3]]
    common: dict[str, Any] = {
        "GROUP": group, "EXACT": dim == tile["BLOCK_D"], "SEGMENT": SEGMENT,
        "WINDOW": window is not None, "GAP": plan.gap is not None, "TREE": plan.tree is not None,
        "ROTATE": rotation is not None, "NORM": rotation is not None and rotation.norms is not None,
        "SOFTCAP": softcap is not None, "WIDEN": needs_float32(key.dtype),
        "PRECISION": "ieee" if key.dtype == torch.float32 else "tf32", "enable_fp_fusion": False, **tile,
    }  # fmt: skip
    scale, cap, width = scaling, softcap or 1.0, window or 0
    if parts and in_prefix:
        many = triton.cdiv(batch * group * queries, tile["BLOCK_M"])
        # A block has at most as many prefixes as rows.
        meeting = min(stored[0].shape[0], batch, 1 + triton.cdiv(tile["BLOCK_M"], group * queries))
        launch(attend_prefix, (many * in_prefix, kv_heads, meeting),
            query, *stored, lengths, starts, groups, order, skips, positions, sums, peaks, totals,
            *angles[:3], last_position, eps, *query.stride()[:3], *strides,
            scale, cap, batch, queries, width, many, dim, **common,
        )  # fmt: skip
    launch(attend, (blocks * (segments if parts else 1), kv_heads, batch),
        query, key, value, *stored, lengths, starts, groups, order, skips, bases, positions, marks,
        sums, peaks, totals, counters, out, *angles, last_position, eps,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *strides,
        scale, cap, queries, width, segments if parts else 1, dim,
        HEADS=heads, SHARED=shared is not None, WHOLE=not parts,
        UNROLLED=min(8, max(1, _MERGED_NUMBERS // (tile["BLOCK_M"] * tile["BLOCK_D"]))), **common,
    )  # fmt: skip
    return out


def _tree(plan: AttentionPlan, tree: TreeMask, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return bases int64 [B], positions and marks int64 [B, S] of segments.py, computed once per step."""

    def marks() -> Tensor:
        sees = tree.sees
        if window is not None:
            # A token is n positions after an ancestor if n of the token's bits are higher than the ancestor's bit.
            places = torch.arange(MAX_TREE_TOKENS, device=sees.device)
            bits = (sees[:, :, None] >> places) & 1
            above = bits.flip(-1).cumsum(-1).flip(-1)
            sees = ((bits * (above <= window)) << places).sum(-1)
        return sees.contiguous()

    bases = plan.once("bases", lambda: plan.lengths - tree.before)
    positions = plan.once("dense positions", plan.positions.contiguous)
    return bases, positions, plan.once(("marks", window), marks)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    prefix: Pair | None,
    rotation: Rotation | None,
) -> None:
    reason = why_unavailable(query.device)
    if reason:
        raise ValueError(f"fused attention can't run: {reason}.")
    batch, heads, queries, dim = query.shape
    if key.shape != value.shape or key.shape[0] != batch or key.shape[3] != dim or heads % key.shape[1]:
        raise ValueError(f"shapes don't fit: query {tuple(query.shape)}, key {tuple(key.shape)}.")
    if not 1 <= dim <= 256 or queries != plan.queries or plan.lengths.shape != (batch,):
        raise ValueError(f"head_dim {dim} (at most 256) or the step's size ({plan.queries} queries) doesn't fit.")
    if key.dtype not in (torch.float16, torch.bfloat16, torch.float32) or key.dtype != value.dtype:
        raise ValueError(f"keys and values must be float16, bfloat16 or float32, both alike; got {key.dtype}.")
    if plan.tree is not None and (plan.gap is not None or plan.tree.sees.shape != (batch, queries)):
        raise ValueError(f"trees of {tuple(plan.tree.sees.shape)} tokens don't fit the step, or it has a gap too.")
    if (prefix is None) != (plan.shared is None):
        raise ValueError("a prefix and the plan's shared part belong together: give both or neither.")
    for stored in prefix or ():
        if stored.dtype != key.dtype or stored.shape[1::2] != key.shape[1::2] or stored.stride(3) != 1:
            raise ValueError(f"a prefix of shape {tuple(stored.shape)} does not fit keys {tuple(key.shape)}.")
    few = heads // key.shape[1] * queries <= MAX_SPLIT_ROWS
    if rotation is not None and not (few and rotation.fits(query, key)):
        raise ValueError(f"a rotation does not fit queries {tuple(query.shape)} and keys {tuple(key.shape)}.")
    if query.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1:
        raise ValueError("the last dimension of query, key and value must be contiguous.")

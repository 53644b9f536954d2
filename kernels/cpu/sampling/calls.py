"""The kernels of this folder, called with tensors.

Rows are float32 on the CPU. Results never depend on the number of rows or threads. A call with only a few rows
runs on the calling thread, because waking another thread takes as long as the work. Call `compile_all` before a
clock starts, so that no kernel is compiled while it runs.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..calls.pool import run
from ..calls.threads import state_of, watch
from . import distribution, draws, noise
from . import verification as judging

# A call over fewer numbers than this runs on the calling thread. Four rows of 49,152 numbers take 0.2 ms.
_LEAST_SHARED = 4 * 49_152
_NONE = np.empty(0, np.int64)
_NO_Q = np.empty(0, np.float32)
_NO_POINTS = np.empty((0, 0), np.int64)


class _Scratch(threading.local):
    """A thread's scratch memory for `verify`: new memory would have to be mapped page by page in each round."""

    p, tokens = _NO_Q, _NONE


_scratch = _Scratch()


class Columns(NamedTuple):
    """Distributions in the form of ColumnProbs (bass_core/sample/distribution.py), which documents the fields."""

    values: Tensor
    ids: Tensor
    columns: Tensor
    points: Tensor | None


class Filters(NamedTuple):
    """How logits become a distribution (SamplingParams).

    Attributes:
        temperature: at most 2**126. The reciprocal of a larger temperature could become 0 in float32, and -inf
            times 0 is NaN.
        top_k: 0 for no filter.
        top_p: 1 for no filter.
        min_p: 0 for no filter.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def numbers(self) -> tuple[Any, ...]:
        """Return the numbers as `distribution_row` reads them."""
        # Raise a top_p that is too small for float32 to its smallest normal number, so that the likeliest token
        # stays.
        top_p = np.float32(max(self.top_p, 2.0**-126))
        return np.float32(1 / self.temperature), min(self.top_k, 2**62), top_p, np.float32(self.min_p)


class Verified(NamedTuple):
    """The result of `verify`."""

    accepted: Tensor
    next_token: Tensor
    judged: Tensor
    p: Tensor
    q: Tensor
    u: Tensor
    chance: Tensor
    next_p: Tensor


def _call(kernel: Any, phases: int, numbers: int, *arguments: Any) -> None:
    if numbers < _LEAST_SHARED:
        kernel(state_of(phases), 1, *arguments)
    else:
        run(kernel, phases, *arguments)


def _flat(rows: Tensor) -> Any:
    """Return the numbers of the rows, copied if they are not contiguous: by numpy, which starts no threads."""
    return np.ascontiguousarray(rows.detach().numpy()).reshape(-1)


def _in_place(q: Tensor) -> tuple[Any, int, int]:
    """Return the memory of q [B, w, V], and the strides of its rows and places.

    It is a copy if a row is not contiguous.
    """
    q = q.detach().float()
    if q.numel() and q.stride(2) != 1:
        q = torch.from_numpy(np.ascontiguousarray(q.numpy()))
    steps = q.stride(0), q.stride(1)
    reach = sum((count - 1) * step for count, step in zip(q.shape[:2], steps, strict=True)) + q.shape[2]
    return q.as_strided((reach if q.numel() else 0,), (1,)).numpy(), *steps


def _drawn_from(q: Tensor | Columns | None) -> tuple[Any, ...]:
    """Return q in the form of the kernel `verify`."""
    if q is None:
        return (_NO_Q, 0, 0, _NONE, _NONE, _NO_POINTS)
    if isinstance(q, Tensor):
        return (*_in_place(q), _NONE, _NONE, _NO_POINTS)
    points = _NO_POINTS if q.points is None else np.ascontiguousarray(q.points.numpy())
    return (*_in_place(q.values), q.ids.contiguous().numpy(), q.columns.contiguous().numpy(), points)


def probabilities(logits: Tensor, filters: Filters, out: Tensor | None = None) -> Tensor:
    """Return the distribution of each row of logits [..., V], V > 0; NaN for unsound rows.

    out: contiguous float32 to write to.
    """
    out = torch.empty(logits.shape, dtype=torch.float32) if out is None else out
    source, size = _flat(logits), logits.shape[-1]
    _call(distribution.distributions, 1, len(source), source, size, filters.numbers(), _flat(out))
    return out


def largest(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index of the largest number of each row of values [..., V], int64 [...], and the number.

    NaN counts as the largest. V > 0.
    """
    shape, size, source = values.shape[:-1], values.shape[-1], _flat(values)
    places, numbers = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.float32)
    _call(distribution.largest, 1, len(source), source, size, places.view(-1).numpy(), numbers.view(-1).numpy())
    return places, numbers


def scatter_columns(q: Tensor, ids: Tensor, size: int, out: Tensor | None = None) -> Tensor:
    """Return q [..., V'] over a vocabulary of `size`: column i becomes column ids[i], and the others are 0.

    ids: int64 [V']. out: contiguous float32 [..., size] to write to.
    """
    out = torch.empty(*q.shape[:-1], size, dtype=torch.float32) if out is None else out
    _call(
        distribution.scatter_columns,
        1,
        out.numel(),
        _flat(q),
        q.shape[-1],
        ids.contiguous().numpy(),
        _flat(out),
        size,
    )
    return out


def scatter_rows(x: Tensor, places: Tensor, rows: int) -> Tensor:
    """Return x float32 [N, ...] as [rows, ...], with row i at places[i] (int64 [N]) and zeros elsewhere."""
    out = torch.empty(rows, *x.shape[1:], dtype=torch.float32)
    at, size = np.full(rows, -1, np.int64), x.shape[1:].numel()
    at[places.numpy()] = np.arange(len(places))
    _call(distribution.scatter_rows, 1, out.numel(), _flat(x), size, at, _flat(out))
    return out


def keep_allowed(logits: Tensor, places: list[int], bits: Any) -> None:
    """Set logits [..., V] of tokens without a bit to -inf, in place.

    Args:
        logits: contiguous in V.
        places: the rows to change, counted over all dimensions but the last.
        bits: int32 [rows, words], a bit per token from the lowest; tokens after the last have none.
    """
    memory, row, step = _in_place(logits if logits.dim() == 3 else logits[None])
    count, at = logits.shape[-2], np.array(places, np.int64)
    starts = at // count * row + at % count * step
    size, words = logits.shape[-1], bits.shape[1]
    _call(distribution.keep_allowed, 1, len(places) * size, memory, size, starts, bits.reshape(-1), words)


def draw(weights: Tensor, first: Tensor, second: Tensor, tokens: Tensor | None) -> Tensor:
    """Return the column of the largest weight / exponential in each row of weights [..., V], V > 0: int64 [...].

    Args:
        first, second: int64 [...], two words of the hash of each row's key.
        tokens: int64 [V], the token ids of the columns; None if they are 0 to V - 1.
    """
    shape, size, source = weights.shape[:-1], weights.shape[-1], _flat(weights)
    places = torch.empty(shape, dtype=torch.int64)
    token_ids = _NONE if tokens is None else tokens.contiguous().numpy()
    keys = (word.reshape(-1).contiguous().numpy() for word in (first, second))
    _call(draws.draw, 1, len(source), source, size, token_ids, tokens is not None, *keys, places.view(-1).numpy())
    return places


def words(seed: int, sequences: Tensor, positions: Tensor, streams: Tensor) -> tuple[Tensor, ...]:
    """Return the four hash words of each key, int64, in the common shape of the int64 arguments."""
    keys = [bits.reshape(-1).contiguous().numpy() for bits in (sequences, positions, streams)]
    out = torch.empty(4, sequences.numel(), dtype=torch.int64)
    noise.words(signed(seed), keys[0], keys[1], keys[2], out.numpy())
    return tuple(word.view(sequences.shape) for word in out)


def verify(
    logits: Tensor,
    drafts: Tensor,
    q: Tensor | Columns | None,
    num_drafted: Tensor,
    seed: int,
    ids: Tensor,
    positions: Tensor,
    streams: tuple[Tensor, Tensor, Tensor],
    filters: Filters,
    rule: int,
    places: Tensor | None = None,
) -> Verified:
    """Verify drafts int64 [B, w] by logits [B, w + 1, V] and one of the rules in verification.py; w may be 0.

    Args:
        q: [B, w, V], the distribution of each draft; None for point masses.
        num_drafted: int64 [B], drafts per row.
        seed, ids, positions: the parts of the round's noise keys, int64 [B].
        streams: three noise streams, int64 [B] each: for acceptance, for a recovered token, and for the target's
            own token.
        places: int64 [B, w + 1]. If given, the logits are [N, V], and places[b, i] is the row of logits[b, i];
            entries after a row's last draft are not read.

    Returns:
        int64 [B]: accepted drafts, the next token (UNSOUND if there is none), the drafts that could be judged;
        float32 [B, w]: each draft's p, q, u and chance; float32 [B]: the next token's p.
    """
    size, source, at, tests, ends, chances = _judged_arrays(logits, drafts, places)
    counts, *keys = (numbers.contiguous().numpy() for numbers in (num_drafted, ids, positions))
    if _scratch.p.size < len(source):
        _scratch.p, _scratch.tokens = np.empty(len(source), np.float32), np.empty(len(source), np.int64)
    _call(
        judging.verify, 3, len(source), source, size, at, filters.numbers(), rule, drafts.contiguous().numpy(),
        _drawn_from(q), counts, signed(seed), *keys, np.stack([stream.numpy() for stream in streams]),
        _scratch.p[: len(source)], _scratch.tokens[: len(source)], np.empty(at.shape, np.int64),
        np.zeros(at.shape, np.bool_), np.zeros(drafts.shape, np.bool_), np.zeros(drafts.shape), tests, ends,
        chances,
    )  # fmt: skip
    return Verified(*map(torch.from_numpy, (*ends, *tests, chances)))


def verify_greedy(logits: Tensor, drafts: Tensor, num_drafted: Tensor, places: Tensor | None = None) -> Verified:
    """Accept drafts int64 [B, w] while they equal the likeliest tokens; the arguments are those of `verify`.

    All entries of `places` are read.
    """
    size, source, at, tests, ends, chances = _judged_arrays(logits, drafts, places)
    number = len(source) // size
    _call(
        judging.verify_greedy, 2, len(source), source, size, at, drafts.contiguous().numpy(),
        num_drafted.contiguous().numpy(), np.empty(number, np.int64), np.empty(number, np.float32), tests, ends,
        chances,
    )  # fmt: skip
    return Verified(*map(torch.from_numpy, (*ends, *tests, chances)))


def _judged_arrays(logits: Tensor, drafts: Tensor, places: Tensor | None) -> tuple[Any, ...]:
    """Return V, the flat logits, the row of each place, and arrays for the results (`verify`)."""
    rows, width = drafts.shape
    at = np.arange(rows * (width + 1)).reshape(rows, width + 1) if places is None else places.numpy()
    tests, ends = np.zeros((4, rows, width), np.float32), np.empty((3, rows), np.int64)
    return logits.shape[-1], _flat(logits), at, tests, ends, np.empty(rows, np.float32)


def signed(seed: int) -> int:
    """Return a seed as the int64 with the same bits."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def compile_all() -> None:
    """Compile these kernels and `watch`, or load their code from disk; each has one signature."""
    key, none = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 0, dtype=torch.int64)
    rows = torch.ones(1, 3, 1, dtype=torch.float32)
    first, second, _, _ = words(0, key, key, key)
    draw(rows[:, 0], first, second, None)
    keep_allowed(rows, [0], np.full((1, 1), -1, np.int32))
    largest(scatter_rows(scatter_columns(probabilities(rows, Filters(1.0)), key, 1)[0], torch.arange(3), 3))
    verify(rows[:, :1], none, None, key, 0, key, key, (key, key, key), Filters(1.0), judging.REJECTION)
    verify_greedy(rows[:, :1], none, key)
    distribution.address_of_row()
    watch(np.zeros(1, np.int64), -1)

"""Verification of chains of drafts in one call: the distributions, the accepted drafts, and the next token.

Decisions are those of bass_core/verify/rejection.py, the reference, which also explains the rules. Results do not
depend on other rows or the number of threads. Only what a decision reads is computed: no distribution after a
row's last draft, of a distribution with top-p only the tokens that it keeps, and one draw per row.
"""

from __future__ import annotations

import numpy as np

from ..calls.jit import helper, kernel
from ..calls.threads import claim, done, wait
from .distribution import ALL, CHUNK, LANES, kept_row, largest_of_row, probability_of, scratch_for
from .draws import BLOCK, draw_row
from .noise import key_words, uniform

# Rules (bass_core/verify/rules.py).
REJECTION, BLOCK_RULE, COUPLED = 0, 1, 2
# Replaces a token id that can't be drawn (bass_core/verify/acceptance.py).
UNSOUND = -1
_NO_IDS = np.empty(0, np.int64)


@helper
def _excess(p, at, q, q_at, size, reach, lanes):
    """Return the sum of max(reach p - q, 0) over `size` numbers from p[at] and q[q_at] on."""
    num_lanes, whole = np.uintp(LANES), np.uintp(size) // np.uintp(LANES)
    for j in range(num_lanes):
        lanes[j] = np.float32(0.0)
    for i in range(whole):
        left, right = np.uintp(at) + i * num_lanes, np.uintp(q_at) + i * num_lanes
        for j in range(num_lanes):
            more = reach * p[left + j] - q[right + j]
            lanes[j] += more if more > np.float32(0.0) else np.float32(0.0)
    left, right = np.uintp(at) + whole * num_lanes, np.uintp(q_at) + whole * num_lanes
    for j in range(np.uintp(size) - whole * num_lanes):
        more = reach * p[left + j] - q[right + j]
        lanes[j] += more if more > np.float32(0.0) else np.float32(0.0)
    total = 0.0
    for j in range(num_lanes):
        total += lanes[j]
    return total


@helper
def _residual(p, at, q, q_at, size, reach, out):
    """Write max(reach p - q, 0) to `out`; return whether any of these numbers is above 0."""
    left, right, any_left = np.uintp(at), np.uintp(q_at), False
    for i in range(np.uintp(size)):
        more = reach * p[left + i] - q[right + i]
        out[i] = more if more > np.float32(0.0) else np.float32(0.0)
        any_left |= more > np.float32(0.0)
    return any_left


@helper
def _kept_excess(p, tokens, at, count, q, row, i, reach, lanes):
    """Return the sum of max(reach p - q, 0) over the kept tokens (`kept_row`), with the bits of `_excess`.

    The numbers are added to the same lanes in the same order. Other tokens have p = 0, which adds nothing.
    """
    total, place, end = 0.0, at, at + count
    while place < end:
        chunk, chunk_total = tokens[place] // CHUNK, 0.0
        for j in range(np.uintp(LANES)):
            lanes[j] = np.float32(0.0)
        while place < end and tokens[place] // CHUNK == chunk:
            more = reach * p[place] - _probability_of(q, row, i, tokens[place])
            lanes[tokens[place] % LANES] += more if more > np.float32(0.0) else np.float32(0.0)
            place += 1
        for j in range(np.uintp(LANES)):
            chunk_total += lanes[j]
        total += chunk_total
    return total


@helper
def _kept_residual(p, tokens, at, count, q, row, i, reach, out):
    """Write max(reach p - q, 0) of the kept tokens to `out`; return whether any of these numbers is above 0."""
    any_left = False
    for place in range(count):
        more = reach * p[at + place] - _probability_of(q, row, i, tokens[at + place])
        out[place] = more if more > np.float32(0.0) else np.float32(0.0)
        any_left |= more > np.float32(0.0)
    return any_left


@helper
def _finite(x, start, size):
    """Return whether none of x[start : start + size] is NaN or infinite."""
    at, bad = np.uintp(start), False
    for i in range(np.uintp(size)):
        bad |= x[at + i] - x[at + i] != np.float32(0.0)
    return not bad


@helper
def _reach_after(reach, p, q):
    """Return the factor of p in block verification after one more draft (bass_core/verify/block.py)."""
    share = reach * p
    if share < q:
        return share / q
    return np.float32(1.0) if share > np.float32(0.0) else np.float32(0.0)


@helper
def _distribution_of(q, row, i, size, dense):
    """Return (numbers, place): q of draft i of a row begins at numbers[place]. `dense` is scratch [size].

    q: see `verify`.
    """
    values, row_stride, place_stride, ids, _, points = q
    at, spread = row * row_stride + i * place_stride, len(ids) > 0
    is_point = points.size > 0 and points[row, i] >= 0
    if not (is_point or spread):
        return values, at
    for j in range(np.uintp(size)):
        dense[j] = np.float32(0.0)
    if is_point:
        dense[points[row, i]] = np.float32(1.0)
    else:
        for j in range(np.uintp(len(ids))):
            dense[np.uintp(ids[j])] = values[np.uintp(at) + j]
    return dense, 0


@helper
def _probability_of(q, row, i, token):
    """Return the probability of a token under q of draft i of a row."""
    values, row_stride, place_stride, ids, columns, points = q
    if points.size > 0 and points[row, i] >= 0:
        return np.float32(1.0) if token == points[row, i] else np.float32(0.0)
    at = row * row_stride + i * place_stride
    if len(ids) == 0:
        return values[at + token]
    return values[at + columns[token]] if columns[token] >= 0 else np.float32(0.0)


@helper
def _is_finite(q, row, i, size):
    """Return whether all numbers of q of draft i of a row are finite."""
    values, row_stride, place_stride, ids, _, points = q
    if points.size > 0 and points[row, i] >= 0:
        return True
    return _finite(values, row * row_stride + i * place_stride, len(ids) if len(ids) > 0 else size)


@helper
def _judged_drafts(row, size, drafts, places, p, tokens, kept, q, counts, sound, q_finite, tests):
    """Return how many of a row's drafts can be judged; write p and q of each draft to tests[0] and tests[1]."""
    judged, count = 0, counts[row]
    while judged < count and sound[row, judged] and q_finite[row, judged]:
        judged += 1
    for i in range(drafts.shape[1]):
        token, is_draft = drafts[row, i], i < count
        tests[0, row, i] = np.float32(0.0)
        if is_draft:
            tests[0, row, i] = probability_of(p, tokens, places[row, i] * size, kept[row, i], token)
        tests[1, row, i] = np.float32(1.0)
        if len(q[0]) > 0:
            tests[1, row, i] = _probability_of(q, row, i, token) if is_draft else np.float32(0.0)
    return judged


@helper
def _draw_kept(weights, tokens, start, count, size, at, first, second, uniforms):
    """Draw from weights[start:], whose token ids are tokens[at : at + count], or all ids if `count` is ALL."""
    if count == ALL:
        return draw_row(weights, start, size, _NO_IDS, False, first, second, uniforms)
    return tokens[at + draw_row(weights, start, count, tokens[at : at + count], True, first, second, uniforms)]


@kernel
def verify(
    state, threads, x, size, places, filters, rule, drafts, q, counts, seed, ids, positions, streams, p, tokens,
    kept, sound, q_finite, excess, tests, ends, chances
):  # fmt: skip
    """Verify drafts int64 [B, w] by the logits x float32 [N * size]; w may be 0.

    Args:
        places: int64 [B, w + 1], the rows of x with the logits after the newest token and each draft. Entries
            after a row's last draft are not read.
        filters: see `distribution_row`.
        q: (float32 [...], r, s, ids, columns, points); the distribution of draft i of row b begins at b r + i s.
            An empty array means point masses. ids int64 [V'], columns int64 [size] and points int64 [B, w] are as
            in ColumnProbs (bass_core/sample/distribution.py). If `ids` is empty, distributions have `size`
            numbers; `points` may be empty.
        counts: int64 [B], drafts per row; the rest is padding.
        seed, ids, positions: the parts of the round's noise keys (NoiseKeys).
        streams: int64 [3, B], the noise streams for acceptance, for a recovered token, and for the target's own
            token.
        p, tokens, kept: scratch, float32 [N * size], int64 [N * size] and [B, w + 1]: the distributions as
            `kept_row` writes them.
        sound, q_finite, excess: scratch, bool [B, w + 1] and [B, w], float64 [B, w].
        tests: float32 [4, B, w], for the drafts' p, q, u and chance.
        ends: int64 [3, B], for the number of accepted drafts, the next token, and the number of judged drafts.
        chances: float32 [B], for the next token's p.
    """
    rows, width = drafts.shape
    has_q = len(q[0]) > 0
    scratch, uniforms, spread = scratch_for(size), np.empty(BLOCK, np.float32), np.empty(size, np.float32)
    (lanes, _, weights), own_tests = scratch, np.empty((2, rows, width), np.float32)
    part = np.empty(CHUNK, np.float32)
    task = claim(state, 0)
    while task < rows * (width + 1):
        row, i = task // (width + 1), task % (width + 1)
        if i <= counts[row]:
            at = places[row, i] * size
            sound[row, i], kept[row, i] = kept_row(x, at, size, filters, p, tokens, at, part, scratch)
        if i < counts[row]:
            q_finite[row, i] = rule == COUPLED or not has_q or _is_finite(q, row, i, size)
        done(state, 0)
        task = claim(state, 0)
    wait(state, 0, rows * (width + 1))
    drawn = rows * width if rule == BLOCK_RULE and has_q else 0
    task = claim(state, 1)
    while task < drawn:
        row, i = task // width, task % width
        if (
            0
            < i
            < _judged_drafts(row, size, drafts, places, p, tokens, kept, q, counts, sound, q_finite, own_tests)
        ):
            reach = np.float32(1.0)
            for j in range(i):
                reach = _reach_after(reach, own_tests[0, row, j], own_tests[1, row, j])
            total, at = 0.0, places[row, i] * size
            if kept[row, i] == ALL:
                q_numbers, q_at = _distribution_of(q, row, i, size, spread)
                for start in range(0, size, CHUNK):
                    few = min(CHUNK, size - start)
                    total += _excess(p, at + start, q_numbers, q_at + start, few, reach, lanes)
            else:
                total = _kept_excess(p, tokens, at, kept[row, i], q, row, i, reach, lanes)
            excess[row, i] = total
        done(state, 1)
        task = claim(state, 1)
    wait(state, 1, drawn)
    row = claim(state, 2)
    while row < rows:
        judged = _judged_drafts(row, size, drafts, places, p, tokens, kept, q, counts, sound, q_finite, tests)
        accepted, token, reach = 0, np.int64(UNSOUND), np.float32(1.0)
        if rule == COUPLED:
            for i in range(width):
                tests[2, row, i] = np.float32(np.nan)
            while True:
                first, second, _, _ = key_words(seed, ids[row], positions[row] + accepted, streams[2, row])
                at = places[row, accepted] * size
                token = _draw_kept(p, tokens, at, kept[row, accepted], size, at, first, second, uniforms)
                if accepted >= judged or token != drafts[row, accepted]:
                    break
                accepted += 1
        else:
            accepted_reach, before = reach, np.float32(1.0)
            for i in range(width):
                word, _, _, _ = key_words(seed, ids[row], positions[row] + i, streams[0, row])
                u, p_draft, q_draft = uniform(word), tests[0, row, i], tests[1, row, i]
                tests[2, row, i] = u
                if rule == REJECTION:
                    accepted += 1 if accepted == i and i < judged and u * q_draft < p_draft else 0
                    continue
                before = _reach_after(before, p_draft, q_draft)
                chance = before
                if i + 2 <= judged:
                    if has_q:
                        over = np.float32(excess[row, i + 1])
                    else:
                        over = max(before * (np.float32(1.0) - tests[0, row, i + 1]), np.float32(0.0))
                    rest = over + (np.float32(1.0) - before)
                    chance = np.float32(1.0) if rest == np.float32(0.0) else over / rest
                tests[3, row, i] = chance
                if i < judged and u < chance:
                    accepted, accepted_reach = i + 1, before
            reach = accepted_reach
            rejected, at, count = accepted < judged, places[row, accepted] * size, kept[row, accepted]
            left = False
            if rejected and has_q and count == ALL:
                q_numbers, q_at = _distribution_of(q, row, accepted, size, spread)
                left = _residual(p, at, q_numbers, q_at, size, reach, weights)
            elif rejected and has_q:
                left = _kept_residual(p, tokens, at, count, q, row, accepted, reach, weights)
            elif rejected:
                base, draft = np.uintp(at), drafts[row, accepted]
                for i in range(np.uintp(size if count == ALL else count)):
                    here = i == np.uintp(draft) if count == ALL else tokens[base + i] == draft
                    weights[i] = np.float32(0.0) if here else p[base + i]
                    left |= weights[i] > np.float32(0.0)
            stream = streams[1, row] if rejected else streams[2, row]
            first, second, _, _ = key_words(seed, ids[row], positions[row] + accepted, stream)
            # If p and q are almost equal, rounding can make max(p - q, 0) zero everywhere. Then draw from p.
            source, start = (weights, 0) if left else (p, at)
            token = _draw_kept(source, tokens, start, count, size, at, first, second, uniforms)
        chance = probability_of(p, tokens, places[row, accepted] * size, kept[row, accepted], token)
        ends[0, row], ends[2, row], chances[row] = accepted, judged, chance
        ends[1, row] = token if sound[row, accepted] and chance > np.float32(0.0) else UNSOUND
        done(state, 2)
        row = claim(state, 2)
    wait(state, 2, rows)


@kernel
def verify_greedy(state, threads, x, size, places, drafts, counts, choices, values, tests, ends, chances):
    """Accept drafts int64 [B, w] while they are the likeliest tokens of the logits x float32 [N * size].

    Args:
        places: as in `verify`, but all entries are read.
        counts: int64 [B], drafts per row; the rest is padding.
        choices, values: scratch, int64 [N] and float32 [N].
        tests, ends, chances: as in `verify`, but without a chance.
    """
    (rows, width), lanes, num_places = drafts.shape, np.empty(LANES, np.float32), len(choices)
    place = claim(state, 0)
    while place < num_places:
        choices[place], values[place] = largest_of_row(x, place * size, size, lanes)
        done(state, 0)
        place = claim(state, 0)
    wait(state, 0, num_places)
    row = claim(state, 1)
    while row < rows:
        accepted, judged = 0, 0
        while judged < counts[row] and np.isfinite(values[places[row, judged]]):
            judged += 1
        for i in range(width):
            agrees = choices[places[row, i]] == drafts[row, i]
            accepted += 1 if accepted == i and i < judged and agrees else 0
            tests[0, row, i] = np.float32(1.0 if agrees else 0.0)
            tests[1, row, i], tests[2, row, i] = np.float32(1.0), np.float32(0.5)
        last = places[row, accepted]
        ends[0, row], ends[2, row], chances[row] = accepted, judged, np.float32(1.0)
        ends[1, row] = choices[last] if np.isfinite(values[last]) else UNSOUND
        done(state, 1)
        row = claim(state, 1)
    wait(state, 1, rows)

"""The sampled rule for trees of drafts in float64, independent of the library.

`outcomes` enumerates everything that a round can draw, for trees two tokens deep over a few tokens. A `Shape`
decides which children a draft gets, and `exact` which token follows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

Path = tuple[int, ...]
Table = dict[Path, np.ndarray]
# Given q, a path and `first`, returns the drafts after the path that are chosen without a draw, and whether one
# more draft is drawn. `first` is the draft that was drawn directly after the row's newest token (-1: none, or not
# drawn yet).
Shape = Callable[[Table, Path, int], tuple[tuple[int, ...], bool]]
DEPTH = 2


def tables(size: int, seed: int, zeros: bool = False) -> tuple[Table, Table]:
    """Return random p and q after every path of a tree; with `zeros` each gives one token no probability."""
    rng = np.random.default_rng(seed)
    both: tuple[Table, Table] = ({}, {})
    for depth in range(DEPTH + 1):
        for path in product(range(size), repeat=depth):
            for table in both:
                row = rng.dirichlet(np.full(size, 0.7))
                row[rng.integers(size)] *= not zeros
                # Models return float32, so the library and the reference start from the same rounded numbers.
                table[path] = np.exp(np.log(np.maximum(row, 1e-30)).astype(np.float32).astype(np.float64))
                table[path] /= table[path].sum()
    return both


def most_likely(q: np.ndarray, count: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.argsort(-q, kind="stable")[:count])


def pairs(q: Table, path: Path, first: int) -> tuple[tuple[int, ...], bool]:
    """Every path has two children: the most likely token and a drawn one."""
    return most_likely(q[path], 1), True


def triples(q: Table, path: Path, first: int) -> tuple[tuple[int, ...], bool]:
    return most_likely(q[path], 2), True


def drawn_decides(q: Table, path: Path, first: int) -> tuple[tuple[int, ...], bool]:
    """The more likely a draft, the more children it has: none after an unlikely one, up to three after others."""
    if not path:
        return most_likely(q[()], 1), True
    count = int(4 * q[()][path[0]])
    return (most_likely(q[path], count - 1), True) if count else ((), False)


def sibling_decides(q: Table, path: Path, first: int) -> tuple[tuple[int, ...], bool]:
    """The newest token has a likely child and a drawn one.

    The drawn child decides which children both of them get.
    """
    if not path:
        return most_likely(q[()], 1), True
    return most_likely(q[path], first % 2), first % 3 != 1


SHAPES: dict[str, Shape] = {shape.__name__: shape for shape in (pairs, triples, drawn_decides, sibling_decides)}


def without(q: np.ndarray, tokens: tuple[int, ...]) -> np.ndarray | None:
    """Return q without these tokens, normalised, or None if nothing is left."""
    rest = q.copy()
    rest[list(tokens)] = 0
    return rest / rest.sum() if rest.sum() > 1e-6 else None


# The possible results after one path, each as (the drawn token or -1, the token written, the probability of both).
Steps = Iterator[tuple[int, int, float]]


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    left = np.maximum(p - q, 0)
    return left / left.sum() if left.sum() > 0 else p


def exact(p: np.ndarray, q: np.ndarray, others: tuple[int, ...], drawn: bool) -> Steps:
    """Yield the possible results after one path, by the rule for trees.

    The drawn child, if any, is tested with q', which is q without the other children (`others`). If no child was
    drawn, or the drawn child is rejected, the target draws a token, perhaps one of the other children.
    """
    rest = without(q, others) if drawn else None
    if rest is None:
        yield from ((-1, token, float(chance)) for token, chance in enumerate(p))
        return
    for y in np.flatnonzero(rest):
        accepted = min(1.0, p[y] / rest[y])
        yield int(y), int(y), rest[y] * accepted
        if accepted < 1:
            for token, chance in enumerate(residual(p, rest)):
                yield int(y), token, rest[y] * (1 - accepted) * chance


def outcomes(p: Table, q: Table, shape: Shape, path: Path = (), first: int = -1) -> dict[Path, float]:
    """Return the probability of each text that a round can write: the accepted drafts and the token after them."""
    others, drawn = shape(q, path, first) if len(path) < DEPTH else ((), False)
    texts: dict[Path, float] = defaultdict(float)
    if not others and not drawn:
        return {(*path, token): float(chance) for token, chance in enumerate(p[path])}
    for y, token, chance in exact(p[path], q[path], others, drawn):
        longer = (*path, token)
        if token != y and token not in others:
            texts[longer] += chance
            continue
        rest = outcomes(p, q, shape, longer, first if path else y)
        for text, share in rest.items():
            texts[text] += chance * share
    return texts

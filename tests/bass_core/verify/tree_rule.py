"""The sampled rule of trees of drafts in float64, written apart from the library, and faults that others shipped.

Contract: `outcomes` goes through everything that a round can draw, for trees two tokens deep over vocabularies of
a few tokens; `distance` says how far the text is from the target's. A `Shape` says which children a draft gets, a
`Rule` what comes of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

Path = tuple[int, ...]
Table = dict[Path, np.ndarray]
# Behind a path: the tokens drafted without a draw, and whether one more is drawn. The second argument is the token
# that was drawn behind the newest one (-1: none was, or it is not drawn yet).
Shape = Callable[[Table, Path, int], tuple[tuple[int, ...], bool]]
DEPTH = 2


def tables(size: int, seed: int, zeros: bool = False) -> tuple[Table, Table]:
    """p and q behind every path of a tree: random, and with `zeros` each gives one token no probability."""
    rng = np.random.default_rng(seed)
    made: tuple[Table, Table] = ({}, {})
    for depth in range(DEPTH + 1):
        for path in product(range(size), repeat=depth):
            for table in made:
                row = rng.dirichlet(np.full(size, 0.7))
                row[rng.integers(size)] *= not zeros
                # What a model gives is float32: the walk and the reference begin with the same numbers.
                table[path] = np.exp(np.log(np.maximum(row, 1e-30)).astype(np.float32).astype(np.float64))
                table[path] /= table[path].sum()
    return made


def likeliest(q: np.ndarray, count: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.argsort(-q, kind="stable")[:count])


def chain(q: Table, path: Path, first: int) -> tuple[tuple[int, ...], bool]:
    return (), True


def pairs(q: Table, path: Path, first: int) -> tuple[tuple[int, ...], bool]:
    """The likeliest child and a drawn one, everywhere."""
    return likeliest(q[path], 1), True


def triples(q: Table, path: Path, first: int) -> tuple[tuple[int, ...], bool]:
    return likeliest(q[path], 2), True


def top_two(q: Table, path: Path, first: int) -> tuple[tuple[int, ...], bool]:
    return likeliest(q[path], 2), False


def copied(q: Table, path: Path, first: int) -> tuple[tuple[int, ...], bool]:
    """A copy of tokens 0, 1 beside what is drawn; behind the drawn one the likeliest."""
    return ((len(path),), True) if path in ((), (0,)) else (likeliest(q[path], 1), False)


def drawn_decides(q: Table, path: Path, first: int) -> tuple[tuple[int, ...], bool]:
    """How many children a draft gets depends on it: none behind an unlikely one, up to three behind others."""
    if not path:
        return likeliest(q[()], 1), True
    count = int(4 * q[()][path[0]])
    return (likeliest(q[path], count - 1), True) if count else ((), False)


def sibling_decides(q: Table, path: Path, first: int) -> tuple[tuple[int, ...], bool]:
    """What was drawn beside a likely draft decides what is drafted behind that."""
    if not path:
        return likeliest(q[()], 1), True
    return likeliest(q[path], first % 2), first % 3 != 1


SHAPES: dict[str, Shape] = {
    shape.__name__: shape for shape in (chain, pairs, triples, top_two, copied, drawn_decides, sibling_decides)
}


def without(q: np.ndarray, tokens: tuple[int, ...]) -> np.ndarray | None:
    """q without these tokens, normalised; None where nothing is left."""
    rest = q.copy()
    rest[list(tokens)] = 0
    return rest / rest.sum() if rest.sum() > 1e-6 else None


# What may come of the drafts behind one path: (the token drawn or -1, the token written, the chance of both).
Steps = Iterator[tuple[int, int, float]]
Rule = Callable[[np.ndarray, np.ndarray, tuple[int, ...], bool], Steps]


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    left = np.maximum(p - q, 0)
    return left / left.sum() if left.sum() > 0 else p


def exact(p: np.ndarray, q: np.ndarray, others: tuple[int, ...], drawn: bool) -> Steps:
    """The rule: the drawn child is tested with q', then the target draws, perhaps one of the other children."""
    rest = without(q, others) if drawn else None
    if rest is None:
        yield from ((-1, token, float(chance)) for token, chance in enumerate(p))
        return
    for y in np.flatnonzero(rest):
        stands = min(1.0, p[y] / rest[y])
        yield int(y), int(y), rest[y] * stands
        if stands < 1:
            for token, chance in enumerate(residual(p, rest)):
                yield int(y), token, rest[y] * (1 - stands) * chance


def unchanged_residual(p: np.ndarray, q: np.ndarray, others: tuple[int, ...], drawn: bool) -> Steps:
    rest = without(q, others)
    assert rest is not None
    for y in np.flatnonzero(rest):
        stands = min(1.0, p[y] / rest[y])
        yield int(y), int(y), rest[y] * stands
        yield from ((int(y), token, rest[y] * (1 - stands) * chance) for token, chance in enumerate(p))


def dropped_by_its_q(p: np.ndarray, q: np.ndarray, others: tuple[int, ...], drawn: bool) -> Steps:
    """A drawn child counts only if it is likely itself; without one, the target draws."""
    rest = without(q, others)
    assert rest is not None
    for y, token, chance in exact(p, q, others, drawn):
        if rest[y] >= 0.4:
            yield y, token, chance
    for y in np.flatnonzero(rest < 0.4):
        yield from ((int(y), token, rest[y] * chance) for token, chance in enumerate(p))


def ranked_by_its_q(p: np.ndarray, q: np.ndarray, others: tuple[int, ...], drawn: bool) -> Steps:
    """Two are drawn, and the one that q likes better takes the only place."""
    rest = without(q, others)
    assert rest is not None
    for y, z in product(np.flatnonzero(rest), repeat=2):
        best = y if rest[y] >= rest[z] else z
        stands = min(1.0, p[best] / rest[best])
        yield int(best), int(best), rest[y] * rest[z] * stands
        for token, chance in enumerate(residual(p, rest)):
            yield int(best), token, rest[y] * rest[z] * (1 - stands) * chance


def siblings_in_q(p: np.ndarray, q: np.ndarray, others: tuple[int, ...], drawn: bool) -> Steps:
    """Drawn from all of q, tested as if it were drawn from q without its siblings."""
    rest = without(q, others)
    assert rest is not None
    for y in np.flatnonzero(q):
        stands = min(1.0, p[y] / rest[y]) if rest[y] else 1.0
        yield int(y), int(y), q[y] * stands
        for token, chance in enumerate(residual(p, rest)):
            yield int(y), token, q[y] * (1 - stands) * chance


def likely_tested_with_q(p: np.ndarray, q: np.ndarray, others: tuple[int, ...], drawn: bool) -> Steps:
    """The likeliest children, which nobody drew, are tested one after another with q(x)."""
    left, alive = p.copy(), 1.0
    for x in likeliest(q, 2):
        stands = min(1.0, left[x] / q[x])
        yield -1, x, alive * stands
        alive *= 1 - stands
        left[x] = 0
        left = left / left.sum() if left.sum() > 0 else p
    yield from ((-1, token, alive * chance) for token, chance in enumerate(left))


def outcomes(
    p: Table, q: Table, shape: Shape, rule: Rule = exact, path: Path = (), first: int = -1
) -> dict[Path, float]:
    """The chance of each text that a round can write: accepted drafts, and the token behind them."""
    others, drawn = shape(q, path, first) if len(path) < DEPTH else ((), False)
    found: dict[Path, float] = defaultdict(float)
    if not others and not drawn:
        return {(*path, token): float(chance) for token, chance in enumerate(p[path])}
    for y, token, chance in rule(p[path], q[path], others, drawn):
        longer = (*path, token)
        if token != y and token not in others:
            found[longer] += chance
            continue
        behind = outcomes(p, q, shape, rule, longer, first if path else y)
        for text, share in behind.items():
            found[text] += chance * share
    return found


def distance(p: Table, written: dict[Path, float]) -> float:
    """The total variation between texts of DEPTH + 1 tokens that begin so and go on by p, and those of p alone."""
    size = len(p[()])
    whole: dict[Path, float] = defaultdict(float)
    for text, chance in written.items():
        for more in product(range(size), repeat=DEPTH + 1 - len(text)):
            longer = text + more
            whole[longer] += chance * np.prod([p[longer[:i]][longer[i]] for i in range(len(text), len(longer))])
    direct = {
        text: float(np.prod([p[text[:i]][text[i]] for i in range(DEPTH + 1)]))
        for text in product(range(size), repeat=DEPTH + 1)
    }
    return sum(abs(whole[text] - chance) for text, chance in direct.items()) / 2

"""More of a round than its verdicts, for a reader: the numbers at the place where each row's round ended.

Contract: reads what the round left and changes nothing of it; it must be called before the target's next forward,
which may overwrite the logits. p, q and the residual are those that the rule used (rejection.py, block.py,
tree.py), computed again in float32. Rows without drafts get no detail. Chains and trees alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..machine.transfer import to_device, to_host
from ..sample.distribution import probabilities, top
from ..sample.params import SamplingParams
from ..sample.rows import pick, residual, stack, sums
from ..sequence import Candidate, Ending, RowDetail, RowRound, depths_of
from .acceptance import DraftTest, RowOutcome
from .rules import Rule, Verification

TOP = 8  # so many of the likeliest tokens are listed
GREEDY, COIN, TREE = "greedy", "coin", "tree"
RESIDUALS = (Rule.REJECTION.value, Rule.BLOCK.value, TREE)


def rule_name(verification: Verification, params: SamplingParams, synthetic: float | None, tree: bool) -> str:
    """What decides a round: see RowDetail."""
    if synthetic is not None:
        return COIN
    if params.greedy:
        return GREEDY
    rule = verification.chains
    return TREE if tree and rule is not Rule.COUPLED else rule.value


def reach_of(tests: list[DraftTest]) -> float:
    """What p is multiplied with after these accepted drafts under block verification (block.py)."""
    reach = 1.0
    for test in tests:
        share = reach * test.p
        reach = share / test.q if share < test.q else float(share > 0)
    return reach


@dataclass
class _Place:
    """Where a row's round ended. node: the last accepted draft, or -1; draft: which one was rejected there."""

    row: int
    node: int
    after: int
    draft: int | None
    written: int
    reach: float = 1.0
    q: Tensor | None = field(default=None, repr=False)


@torch.inference_mode()
def explain(
    records: list[RowRound],
    outcomes: list[RowOutcome],
    logits: Tensor,
    drafts: Drafts,
    params: SamplingParams,
    rule: str,
) -> None:
    """Give each record of a row that drafted its detail. logits [B, 1 + N, V]: the target's of this round."""
    rows = [r for r, tokens in enumerate(drafts.tokens) if tokens]
    if not rows:
        return
    places = [_place(r, records[r], outcomes[r], drafts, rule, logits.shape[-1]) for r in rows]
    ended = [place for place in places if place is not None]
    endings = {place.row: one for place, one in zip(ended, _endings(ended, logits, drafts, params), strict=True)}
    own_p = _own(logits, rows, drafts) if rule == GREEDY else None
    own_q = drafts.own() if rule == GREEDY and drafts.own is not None else None
    for r in rows:
        parents = None if drafts.parents is None else drafts.parents[r]
        count = len(drafts.tokens[r])
        kept = kept_drafts(outcomes[r].accepted_drafts, count, parents, len(records[r].tokens))
        ending = endings.get(r)
        records[r].detail = RowDetail(
            rule,
            [drafts.sources[r][i] for i in kept],
            None if own_p is None else [_known(own_p[r][i]) for i in kept],
            None if own_p is None else [None if own_q is None else _known(own_q[r][i]) for i in kept],
            ending,
        )


def _place(row: int, record: RowRound, outcome: RowOutcome, drafts: Drafts, rule: str, size: int) -> _Place | None:
    """Where the target added a token of its own; None if the round ended with an accepted draft."""
    path = outcome.accepted_drafts
    if outcome.next_drafted or len(record.tokens) <= len(path):
        return None
    node = path[-1] if path else -1
    draft = drafts.behind(row, node)
    place = _Place(row, node, len(path), draft, record.tokens[-1])
    if rule == Rule.BLOCK.value:
        place.reach = reach_of(outcome.tests[: len(path)])
    # A draft that could not be judged leaves no residual.
    if draft is not None and rule in RESIDUALS and not math.isnan(outcome.tests[draft].q):
        place.q = drafts.drawn_from(row, draft, size)
    return place


def _endings(places: list[_Place], logits: Tensor, drafts: Drafts, params: SamplingParams) -> list[Ending]:
    if not places:
        return []
    device = logits.device
    at = pick(logits, [place.row for place in places], [place.node + 1 for place in places])
    p = probabilities(at, SamplingParams(1.0) if params.greedy else params)
    nothing = torch.zeros((), device=device).expand(p.shape[-1])
    q = stack([nothing if place.q is None else place.q.to(device) for place in places])
    left = residual(p, q, to_device([place.reach for place in places], device).float())
    mass = sums(left)[:, 0]
    asked = [
        [place.written if place.draft is None else drafts.tokens[place.row][place.draft], place.written]
        for place in places
    ]
    tokens = torch.cat((top(p, min(TOP, p.shape[-1]))[1], to_device(asked, device)), dim=1)
    numbers = torch.stack(
        (tokens.double(), *(values.gather(1, tokens).double() for values in (p, q, left))), dim=-1
    )
    listed = zip(places, to_host(numbers).tolist(), to_host(mass).tolist(), strict=True)
    return [_ending(place, rows, total) for place, rows, total in listed]


def _ending(place: _Place, rows: list[list[float]], total: float) -> Ending:
    """rows: [token, p, q, what q leaves of p], the likeliest tokens first, then the draft and the written one."""
    top: dict[int, Candidate] = {}
    tested = place.q is not None
    for i, (token, p, q, left) in enumerate(rows):
        # Where p and q agree, rounding can leave nothing of p - q; the token is then drawn from p.
        residual = left / total if tested and total > 0 else None
        if p > 0 or i >= len(rows) - 2:
            top.setdefault(int(token), Candidate(int(token), p, q if tested else None, residual))
    return Ending(place.after, place.draft, total if tested else None, place.reach, list(top.values()))


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _own(logits: Tensor, rows: list[int], drafts: Drafts) -> dict[int, list[float]]:
    """By row, each draft's probability at temperature 1 given the text before it."""
    parents = drafts.parents or [list(range(-1, len(tokens) - 1)) for tokens in drafts.tokens]
    places = [
        (r, parent + 1, token) for r in rows for parent, token in zip(parents[r], drafts.tokens[r], strict=True)
    ]
    row, column, token = (list(one) for one in zip(*places, strict=True))
    at = logits[row, column].float()
    own = at.gather(1, to_device(token, at.device)[:, None])[:, 0] - at.logsumexp(-1)
    found = iter(to_host(own.exp()).tolist())
    return {r: [next(found) for _ in drafts.tokens[r]] for r in rows}


@dataclass
class Drafts:
    """The drafts of a round: lists by row, each as long as the row has drafts.

    parents, drawn: see Proposal; None: chains. probs: for chains float32 [B, N, V] (None: point masses), for trees
    float32 [D, V]. sources: who proposed each. own: gives each draft's probability at temperature 1, where known.
    """

    tokens: list[list[int]]
    sources: list[list[str]]
    parents: list[list[int]] | None = None
    drawn: list[list[int]] | None = None
    probs: Tensor | None = None
    own: Callable[[], list[list[float | None]]] | None = None

    def behind(self, row: int, node: int) -> int | None:
        """The draft after `node` (-1: the newest token) that a draw of the target's own stands for; None: none.

        In a tree that is the drawn one, or else the first.
        """
        if self.parents is None:
            return node + 1 if node + 1 < len(self.tokens[row]) else None
        children = [i for i, parent in enumerate(self.parents[row]) if parent == node]
        drawn = [i for i in children if self.drawn is not None and self.drawn[row][i] >= 0]
        return next(iter([*drawn, *children]), None)

    def drawn_from(self, row: int, draft: int, size: int) -> Tensor | None:
        """q [size] of a draft that a test rejected; None for a tree's draft that was not drawn."""
        assert self.probs is None or self.probs.shape[-1] == size
        if self.parents is None and self.probs is not None:
            return self.probs[row, draft]
        if self.parents is None:
            return torch.zeros(size).index_fill_(0, torch.tensor(self.tokens[row][draft]), 1.0)
        place = -1 if self.drawn is None else self.drawn[row][draft]
        return None if place < 0 or self.probs is None else self.probs[place]


def kept_drafts(path: list[int], count: int, parents: list[int] | None, taken: int) -> list[int]:
    """Of a row's `count` drafts those that are recorded, where `taken` tokens were appended.

    Drafts after the end of a text that ended among the accepted ones count as never tested.
    """
    if taken > len(path):
        return list(range(count))
    if parents is None:
        return list(range(taken))
    return [draft for draft, deep in enumerate(depths_of(parents)) if deep <= taken]

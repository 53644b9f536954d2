"""Details of a round for the step-by-step view: the numbers at the position where each row's round ended.

Call `explain` before the target's next forward, which may overwrite the logits. It changes no text and no state.
p, q and the residual are those of the rule (rejection.py, block.py, tree.py), recomputed in float32, for chains
and trees. Rows without drafts get no detail.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
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

TOP = 8  # number of most likely tokens to list
GREEDY, COIN, TREE = "greedy", "coin", "tree"
RESIDUALS = (Rule.REJECTION.value, Rule.BLOCK.value, TREE)


def rule_name(verification: Verification, params: SamplingParams, synthetic: float | None, tree: bool) -> str:
    """Return the name of the rule that decides a round, as in RowDetail."""
    if synthetic is not None:
        return COIN
    if params.greedy:
        return GREEDY
    rule = verification.chains
    return TREE if tree and rule is not Rule.COUPLED else rule.value


def reach_of(tests: list[DraftTest]) -> float:
    """Return `reach` of block verification (block.py), the factor of p, after these accepted drafts."""
    reach = 1.0
    for test in tests:
        share = reach * test.p
        reach = share / test.q if share < test.q else float(share > 0)
    return reach


@dataclass
class _RoundEnd:
    """The position where a row's round ended.

    Attributes:
        node: the last accepted draft, or -1.
        after: number of accepted drafts.
        draft: the draft that was rejected there, or None.
        written: the token that the target wrote at this position.
        reach: factor of p in the residual; 1 except under block verification (block.py).
        q: the distribution that `draft` was drawn from, if its test used it.
    """

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
    outcomes: Seq[RowOutcome],
    logits: Tensor,
    drafts: Drafts,
    params: SamplingParams,
    rule: str,
) -> None:
    """Set `detail` in the record of each row that drafted.

    `records` and `outcomes` have one entry per row; `logits` [B, 1 + N, V] are the target's; `rule` is from
    `rule_name`.
    """
    rows = [r for r, tokens in enumerate(drafts.tokens) if tokens]
    if not rows:
        return
    places = [_find_ending_place(r, records[r], outcomes[r], drafts, rule, logits.shape[-1]) for r in rows]
    ended = [place for place in places if place is not None]
    endings = {place.row: one for place, one in zip(ended, _endings(ended, logits, drafts, params), strict=True)}
    own_p = _probs_at_temperature_1(logits, rows, drafts) if rule == GREEDY else None
    own_q = drafts.greedy_probs() if rule == GREEDY and drafts.greedy_probs is not None else None
    for r in rows:
        parents = None if drafts.parents is None else drafts.parents[r]
        count = len(drafts.tokens[r])
        recorded = recorded_drafts(outcomes[r].accepted_drafts, count, parents, len(records[r].tokens))
        ending = endings.get(r)
        records[r].detail = RowDetail(
            rule,
            [drafts.sources[r][i] for i in recorded],
            None if own_p is None else [_known(own_p[r][i]) for i in recorded],
            None if own_p is None else [None if own_q is None else _known(own_q[r][i]) for i in recorded],
            ending,
        )


def _find_ending_place(
    row: int, record: RowRound, outcome: RowOutcome, drafts: Drafts, rule: str, size: int
) -> _RoundEnd | None:
    """Return the position where the target wrote a token, or None if the round ended with an accepted draft."""
    path = outcome.accepted_drafts
    if outcome.next_drafted or len(record.tokens) <= len(path):
        return None
    node = path[-1] if path else -1
    draft = drafts.replaced_after(row, node)
    place = _RoundEnd(row, node, len(path), draft, record.tokens[-1])
    if rule == Rule.BLOCK.value:
        place.reach = reach_of(outcome.tests[: len(path)])
    # A draft that could not be judged leaves no residual.
    if draft is not None and rule in RESIDUALS and not math.isnan(outcome.tests[draft].q):
        place.q = drafts.drawn_from(row, draft, size)
    return place


def _endings(places: list[_RoundEnd], logits: Tensor, drafts: Drafts, params: SamplingParams) -> list[Ending]:
    if not places:
        return []
    device = logits.device
    at = pick(logits, [place.row for place in places], [place.node + 1 for place in places])
    p = probabilities(at, SamplingParams(1.0) if params.greedy else params)
    nothing = torch.zeros((), device=device).expand(p.shape[-1])
    q = stack([nothing if place.q is None else place.q.to(device) for place in places])
    leftover = residual(p, q, to_device([place.reach for place in places], device).float())
    mass = sums(leftover)[:, 0]
    draft_and_written = [
        [place.written if place.draft is None else drafts.tokens[place.row][place.draft], place.written]
        for place in places
    ]
    tokens = torch.cat((top(p, min(TOP, p.shape[-1]))[1], to_device(draft_and_written, device)), dim=1)
    numbers = torch.stack(
        (tokens.double(), *(values.gather(1, tokens).double() for values in (p, q, leftover))), dim=-1
    )
    listed = zip(places, to_host(numbers).tolist(), to_host(mass).tolist(), strict=True)
    return [_ending(place, rows, total) for place, rows, total in listed]


def _ending(place: _RoundEnd, rows: list[list[float]], total: float) -> Ending:
    """Return the ending at `place`; `total` is the sum of the residual over all tokens."""
    # `rows` are [token, p, q, residual] of the most likely tokens, then of the rejected and the written one.
    top: dict[int, Candidate] = {}
    tested = place.q is not None
    for i, (token, p, q, leftover) in enumerate(rows):
        # If p and q are almost equal, p - q can round to 0 everywhere; the token is then drawn from p.
        residual = leftover / total if tested and total > 0 else None
        if p > 0 or i >= len(rows) - 2:
            top.setdefault(int(token), Candidate(int(token), p, q if tested else None, residual))
    return Ending(place.after, place.draft, total if tested else None, place.reach, list(top.values()))


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _probs_at_temperature_1(logits: Tensor, rows: list[int], drafts: Drafts) -> dict[int, list[float]]:
    """Return, by row, each draft's probability at temperature 1 given the text before it."""
    parents = drafts.parents or [list(range(-1, len(tokens) - 1)) for tokens in drafts.tokens]
    places = [
        (r, parent + 1, token) for r in rows for parent, token in zip(parents[r], drafts.tokens[r], strict=True)
    ]
    row, column, token = (list(one) for one in zip(*places, strict=True))
    at = logits[row, column].float()
    log_probs = at.gather(1, to_device(token, at.device)[:, None])[:, 0] - at.logsumexp(-1)
    values = iter(to_host(log_probs.exp()).tolist())
    return {r: [next(values) for _ in drafts.tokens[r]] for r in rows}


@dataclass
class Drafts:
    """The drafts of a round, as one list per row.

    Attributes:
        sources: who proposed each draft.
        parents: as in TreeProposal; None for chains.
        drawn: as in TreeProposal; None for chains.
        probs: the distributions that drafts were drawn from: float32 [B, N, V] for chains (None for point masses),
            float32 [D, V] for trees.
        greedy_probs: returns each draft's probability at temperature 1, if known.
    """

    tokens: list[list[int]]
    sources: list[list[str]]
    parents: list[list[int]] | None = None
    drawn: list[list[int]] | None = None
    probs: Tensor | None = None
    greedy_probs: Callable[[], list[list[float | None]]] | None = None

    def replaced_after(self, row: int, node: int) -> int | None:
        """Return the draft after `node` (-1: the newest token) that the target's token replaced, or None.

        In a tree, this is the drawn child of `node`, or its first child if none was drawn.
        """
        if self.parents is None:
            return node + 1 if node + 1 < len(self.tokens[row]) else None
        children = [i for i, parent in enumerate(self.parents[row]) if parent == node]
        drawn = [i for i in children if self.drawn is not None and self.drawn[row][i] >= 0]
        return next(iter([*drawn, *children]), None)

    def drawn_from(self, row: int, draft: int, size: int) -> Tensor | None:
        """Return q [size] of a rejected draft, or None for a tree's draft that was not drawn."""
        assert self.probs is None or self.probs.shape[-1] == size
        if self.parents is None and self.probs is not None:
            return self.probs[row, draft]
        if self.parents is None:
            return torch.zeros(size).index_fill_(0, torch.tensor(self.tokens[row][draft]), 1.0)
        place = -1 if self.drawn is None else self.drawn[row][draft]
        return None if place < 0 or self.probs is None else self.probs[place]


def recorded_drafts(path: Seq[int], count: int, parents: list[int] | None, taken: int) -> Seq[int]:
    """Return which of a row's `count` drafts are recorded, if `taken` tokens were appended.

    If the text ended within the accepted drafts, the drafts after its end count as never tested.
    """
    if taken > len(path):
        return range(count)
    if parents is None:
        return range(taken)
    return [draft for draft, deep in enumerate(depths_of(parents)) if deep <= taken]

"""Verification of draft trees: which path is accepted, and which token the target adds. See `verify_tree`.

The walk starts at the newest token. Greedy and coupled decoding go to the child that is the target's own choice.
In sampled decoding (p = target, q = draft), at most one child of a node is drawn, from q without the other
children. The text before the node determines the other children (e.g. the most likely tokens, or copies). The
drawn child y is accepted if u < p(y) / q(y); otherwise p becomes norm(max(p - q, 0)). Then the target draws from
p; if that token is one of the other children, the walk continues there.

The text has the target's distribution: the first step is Leviathan's rejection rule (2211.17192), the second draws
from the remaining distribution. The set of children is fixed before any is drawn (draft/tree.py).

A drawn child whose q contains a NaN or an infinity can't be judged and is treated as not drafted. If q is 0 at the
child's own token, the child is accepted if p is above 0, as in a chain. Rows do not depend on each other.
"""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch import Tensor

from kernels.support import CompileFailed, available, is_accelerator

from ..machine.transfer import to_device, to_host
from ..sample.distribution import argmax, probabilities
from ..sample.draw import draw
from ..sample.noise import NoiseKeys, Role, uniform
from ..sample.params import SamplingParams
from ..sample.rows import pick, residual, stack, sums
from .acceptance import UNSOUND, DraftTest, RowOutcome, single_draft_chance, sound_columns
from .rules import Verification
from .tree_shape import JudgedTree


def verify_tree(
    logits: Tensor, tree: JudgedTree, keys: NoiseKeys, params: SamplingParams, verification: Verification
) -> list[RowOutcome]:
    """Verify the tree of each row.

    Args:
        logits: [B, 1 + N, V], the target's, after the newest token and after each draft.
        tree: the drafts.
        keys: keys of the round's random numbers.
        params: how tokens are sampled.
        verification: the rule.

    Returns:
        One outcome per row, with its `path`. The next token is UNSOUND if the row's logits are not finite or if
        the token had no probability.
    """
    if params.greedy or verification.coupled:
        return _follow_choices(logits, tree, keys, params)
    if is_accelerator(logits.device) and available(logits.device):
        from .tree_triton import outcomes_of, walk_on_device  # imports triton

        with suppress(CompileFailed):
            return outcomes_of(walk_on_device(logits, tree, keys, params), tree)
    return _Walk(logits, tree, keys, params).outcomes()


def _follow_choices(logits: Tensor, tree: JudgedTree, keys: NoiseKeys, params: SamplingParams) -> list[RowOutcome]:
    """Walk each tree by the target's own choices, as in greedy and coupled decoding."""
    width, device = logits.shape[1], logits.device
    fed, depths, parents, q = _drafts_from_column_1(tree, width, device), None, None, None
    if not params.greedy:
        depths = to_device([([0, *row] + [0] * width)[:width] for row in tree.depths], device)
        nodes = [([0, *(parent + 1 for parent in row)] + [0] * width)[:width] for row in tree.parents]
        parents, q = to_device(nodes, device), _drawn_with(tree, width, device)
    return followed(choices_of(logits, fed, depths, parents, q, keys, params), tree, params)


def choices_of(
    logits: Tensor,
    fed: Tensor,
    depths: Tensor | None,
    parents: Tensor | None,
    q: Tensor | None,
    keys: NoiseKeys,
    params: SamplingParams,
) -> Tensor:
    """Return the target's own choices at the nodes of trees, as one tensor for `followed`.

    A row's newest token is node 0, and draft i is node i + 1. Greedy decoding needs only the first two arguments.

    Args:
        logits: [B, 1 + N, V], the target's.
        fed: int64 [B, 1 + N], the tokens of the nodes; any number for the newest token and for padding.
        depths: int64 [B, 1 + N], the depth of each node.
        parents: int64 [B, 1 + N], the node before each; 0 for the newest token and for padding.
        q: float32 [B, 1 + N], the probability that each draft was drawn with; None for 1.
        keys: the round's noise keys.
        params: how tokens are sampled.
    """
    # Ids are below 2**24, so float32 holds them exactly.
    sound, tokens = sound_columns(logits).float(), fed.float()
    if params.greedy:
        choices = argmax(logits)
        return torch.stack((choices.float(), torch.ones_like(tokens), sound, tokens), dim=-1)
    assert depths is not None and parents is not None
    p = probabilities(logits, params)
    streams, positions = keys.stream(Role.TARGET)[:, None], keys.positions[:, None] + depths
    choices = draw(p, keys.seed, keys.sequence_ids[:, None], positions, streams)
    chances = p.gather(-1, choices[..., None])[..., 0]
    at_drafts = p[torch.arange(len(p), device=p.device)[:, None], parents, fed]
    q = torch.ones_like(tokens) if q is None else q
    return torch.stack((choices.float(), chances, sound, tokens, at_drafts, q), dim=-1)


def followed(packed: Tensor, tree: JudgedTree, params: SamplingParams) -> list[RowOutcome]:
    """Follow the target's choices through the trees: `packed` as from `choices_of`. Waits for the device."""
    outcomes, columns = [], to_host(packed).tolist()
    if tree.device_tokens is not None:
        tree.set_tokens([[int(column[3]) for column in row[1:]] for row in columns])
    for r, row in enumerate(columns):
        node, finite = -1, True
        while True:
            choice, finite = int(row[node + 1][0]), finite and row[node + 1][2] > 0
            child = tree.children[r].get((node, choice))
            if child is None:
                break
            node = child
        tests = []
        for i, (token, parent) in enumerate(zip(tree.tokens[r], tree.parents[r], strict=True)):
            agrees = float(token == int(row[parent + 1][0]))
            p_draft, q_draft = (agrees, 1.0) if params.greedy else row[i + 1][4:]
            tests.append(DraftTest(p_draft, q_draft, 0.5 if params.greedy else math.nan, token))
        next_p = row[node + 1][1]
        path = tree.path(r, node)
        token = choice if finite and next_p > 0 else UNSOUND
        outcomes.append(RowOutcome(len(path), token, next_p, tests, path=path))
    return outcomes


def _drafts_from_column_1(tree: JudgedTree, width: int, device: torch.device) -> Tensor:
    """Return the draft tokens, with draft i in column i + 1: int64 [B, width]."""
    return torch.nn.functional.pad(tree.on(device, width - 1), (1, 0))


def _drawn_with(tree: JudgedTree, width: int, device: torch.device) -> Tensor:
    """Return each draft's q, or 1 if it was not drawn: float32 [B, width], with draft i in column i + 1."""
    if tree.drawn is None or tree.probs is None or not len(tree.probs):
        return torch.ones(len(tree.parents), width, device=device)
    drawn = to_device([([-1, *row] + [-1] * width)[:width] for row in tree.drawn], device)
    return tree.probs[drawn.clamp(min=0), _drafts_from_column_1(tree, width, device)].where(drawn >= 0, 1.0)


class _Walk:
    """The sampled walk of all rows, one depth at a time, until every row has its next token."""

    def __init__(self, logits: Tensor, tree: JudgedTree, keys: NoiseKeys, params: SamplingParams) -> None:
        self.logits, self.tree, self.keys, self.params = logits, tree, keys, params
        if tree.device_tokens is not None:
            tree.set_tokens(to_host(tree.device_tokens).tolist())
        rows = range(len(tree.tokens))
        self.nodes = [-1 for _ in rows]
        unknown = math.nan
        self.tests = [[DraftTest(unknown, unknown, unknown, token) for token in row] for row in tree.tokens]
        self.ends: list[tuple[int, float]] = [(UNSOUND, unknown) for _ in rows]
        self.fit = [] if tree.probs is None else sums(tree.probs)[:, 0].isfinite().tolist()

    def outcomes(self) -> list[RowOutcome]:
        """Walk to the end and return the outcome of each row."""
        active, depth = list(range(len(self.nodes))), 0
        while active:
            active, depth = self._step(active, depth), depth + 1
        ended = zip(self.nodes, self.ends, self.tests, strict=True)
        paths = [(self.tree.path(r, node), end, tests) for r, (node, end, tests) in enumerate(ended)]
        return [RowOutcome(len(path), *end, tests, path=path) for path, end, tests in paths]

    def _step(self, active: list[int], depth: int) -> list[int]:
        """Take one step in each active row; return the rows that continue."""
        device = self.logits.device
        rows = to_device(active, device)
        p = probabilities(pick(self.logits, active, [self.nodes[r] + 1 for r in active]), self.params)
        ids, positions = self.keys.sequence_ids[rows], self.keys.positions[rows] + depth
        coins = uniform(self.keys.seed, ids, positions, self.keys.stream(Role.ACCEPT)[rows]).tolist()
        continuing, to_draw = [], []
        for i, r in enumerate(active):
            drawn = self._judged(r)
            if drawn is None:
                to_draw.append((i, p[i], Role.TARGET))
                continue
            token, q = self.tree.tokens[r][drawn], self._drawn_from(r, drawn)
            chance, proposed = float(p[i, token]), float(q[token])
            accept_below = single_draft_chance(chance, proposed, coins[i])
            self.tests[r][drawn] = DraftTest(chance, proposed, coins[i], token, accept_below)
            if coins[i] * proposed < chance:
                self.nodes[r] = drawn
                continuing.append(r)
                continue
            rest = residual(p[i], q, torch.ones((), device=device))
            # If p and q are almost equal, p - q can round to 0 everywhere. Then draw from p instead.
            to_draw.append((i, rest if float(sums(rest)) > 0 else p[i], Role.RESIDUAL))
        if to_draw:
            continuing += self._draw([active[i] for i, _, _ in to_draw], to_draw, p, ids, positions)
        return sorted(continuing)

    def _draw(
        self, rows: list[int], to_draw: list[tuple[int, Tensor, Role]], p: Tensor, ids: Tensor, positions: Tensor
    ) -> list[int]:
        """Draw tokens for rows with (index in `p`, weights, role of the noise); return the rows that continue."""
        places = [i for i, _, _ in to_draw]
        at = to_device(places, p.device)
        streams_of = {role: self.keys.stream(role).tolist() for role in (Role.TARGET, Role.RESIDUAL)}
        streams = to_device([streams_of[role][r] for r, (_, _, role) in zip(rows, to_draw, strict=True)], p.device)
        weights = stack([weight for _, weight, _ in to_draw])
        tokens = draw(weights, self.keys.seed, ids[at], positions[at], streams)
        chances = p[at, tokens].tolist()
        continuing = []
        for r, i, token, chance in zip(rows, places, to_host(tokens).tolist(), chances, strict=True):
            for (parent, other), draft in self.tree.others[r].items():
                if parent == self.nodes[r]:
                    self.tests[r][draft] = DraftTest(float(p[i, other]), 1.0, math.nan, other)
            child = self.tree.others[r].get((self.nodes[r], token))
            if child is not None and chance > 0:
                self.nodes[r] = child
                continuing.append(r)
            else:
                self.ends[r] = (token if chance > 0 else UNSOUND, chance)
        return continuing

    def _judged(self, row: int) -> int | None:
        """Return the drawn child of the row's node if it can be judged, else None."""
        draft = self.tree.drawn_at[row].get(self.nodes[row])
        if draft is None or self.tree.drawn is None or not self.fit[self.tree.drawn[row][draft]]:
            return None
        return draft

    def _drawn_from(self, row: int, draft: int) -> Tensor:
        assert self.tree.drawn is not None and self.tree.probs is not None
        return self.tree.probs[self.tree.drawn[row][draft]]

"""What whole rounds write has the target's law: every draw and every verdict is enumerated, in float64.

Contract: loop, drafters, policies and verification are the library's own; the models are tables (enumerated.py).
Whatever decides how much is drafted has a line in POLICIES, whatever drafts one in DRAFTERS, and each rule one in
RULES: the rows' joint law must be the product of the targets' to 1e-9, which rounding in float64 never reaches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import cycle, pairwise, product
from typing import Any

import pytest
import torch

from bass_core import SamplingParams
from bass_core.draft.base import Proposal, TreeProposal, own_drafter, point_masses
from bass_core.draft.head import HeadDrafter
from bass_core.draft.lookup import Cascade, PromptLookupDrafter
from bass_core.draft.model import ModelDrafter
from bass_core.draft.window import WindowChain, WindowDrafter
from bass_core.length.cost_aware import CostAware
from bass_core.length.costs import CostTable
from bass_core.length.policies import Algorithm1, FixedLength, RecordedLengths
from bass_core.model.pointer import Pointer
from bass_core.sample import draw as draws
from bass_core.sample.noise import Role, place_node
from tests.support.models import slow_but, small_window

from .enumerated import BigramHead, Scene, Table, Text, Written, distance, written

EXACT = 1e-9
# Float32 rounds p and q to 6e-8 of themselves, and what is computed of them a few times more.
SINGLE = 1e-6
# Two tokens, and two that only end prompts: behind them the first token is certain.
P: Table = ((0.3, 0.7), (0.6, 0.4), (1.0, 0.0), (0.0, 1.0))
Q: Table = ((0.66, 0.34), (0.2, 0.8), (0.5, 0.5), (0.5, 0.5))
# Three tokens, some of which are never written or never drafted, and one that ends prompts.
P3: Table = ((0.2, 0.3, 0.5), (0.0, 0.45, 0.55), (0.6, 0.4, 0.0), (1.0, 0.0, 0.0))
Q3: Table = ((0.5, 0.25, 0.25), (0.3, 0.7, 0.0), (0.1, 0.2, 0.7), (0.2, 0.3, 0.5))
# What drafts for a windowed target, whose law is Q3.
R3: Table = ((0.1, 0.5, 0.4), (0.6, 0.1, 0.3), (0.5, 0.3, 0.2), (0.3, 0.3, 0.4))
RULES = ("rejection", "block", "coupled")
# Milliseconds with which what was accepted so far decides how many drafts pay, if any; and with which many do.
COSTS = CostTable({rows: [(rows, 6), (9 * rows, 10)] for rows in (1, 2)}, {1: 0.3, 2: 0.3}, padded=False)
CHEAP = CostTable({1: [(1, 10), (2, 10.2), (8, 11.4)]}, {1: 0.1}, padded=False)


class Own:
    """A user's policy: as many as the best row accepted, and one more after every other round."""

    limit = 3

    def __init__(self) -> None:
        self.length, self.rounds = 1, 0

    def lengths(self, offers: Any) -> list[int]:
        return [self.length] * len(offers)

    def observe(self, feedback: Any) -> None:
        self.rounds += 1
        self.length = min(max(feedback.accepted) + self.rounds % 2, self.limit)


class Leaking:
    """A user's policy: three drafts at first; then one after a round that drafted fewer than three, else none."""

    limit = 3

    def __init__(self) -> None:
        self.length = 3

    def lengths(self, offers: Any) -> list[int]:
        return [self.length] * len(offers)

    def observe(self, feedback: Any) -> None:
        self.length = int(max(feedback.drafted) < 3)


POLICIES: dict[str, Callable[[], Any]] = {
    "fixed 0": lambda: FixedLength(0),
    "fixed 1": lambda: FixedLength(1),
    "fixed 2": lambda: FixedLength(2),
    "fixed 3": lambda: FixedLength(3),
    "algorithm 1": lambda: Algorithm1(length=1, increment=1, limit=3),
    "by cost": lambda: CostAware(COSTS),
    "by cost, untimed": lambda: CostAware(COSTS, timed=False),
    "recorded": lambda: RecordedLengths([1, 3]),
    "own": Own,
}
VARIED = [name for name in POLICIES if not name.startswith("fixed")]


class Unsure:
    """A user's drafter, which draws from a table while that is sure of the next token before it is drawn."""

    def __init__(self, table: Table, rule: str) -> None:
        self.table, self.role = table, Role.TARGET if rule == "coupled" else Role.DRAFT

    def propose(self, rows: list[Any], max_drafts: list[int], keys: Any) -> Proposal:
        size = len(self.table[0])
        tokens = torch.zeros(len(rows), max(max_drafts), dtype=torch.long)
        probs = torch.full((*tokens.shape, size), 1 / size)
        counts = []
        for r, (row, most) in enumerate(zip(rows, max_drafts, strict=True)):
            text, count = list(row.tokens), 0
            while count < most and max(self.table[text[-1]]) > 0.6:
                probs[r, count] = torch.tensor(self.table[text[-1]])
                at = keys.positions[r] + count
                drawn = draws.draw(probs[r, count], 0, keys.sequence_ids[r], at, keys.stream(self.role)[r])
                tokens[r, count] = drawn
                text.append(int(drawn))
                count += 1
            counts.append(count)
        width = max(counts)
        return Proposal(tokens[:, :width], counts, probs[:, :width])


class Neighbours:
    """A user's drafter, which copies what followed the row's newest token in its own text or another row's."""

    def propose(self, rows: list[Any], max_drafts: list[int], keys: Any) -> Proposal:
        known = {a: [b] for row in rows for a, b in pairwise(row.tokens)}
        return point_masses(
            [known.get(row.tokens[-1], [])[:most] for row, most in zip(rows, max_drafts, strict=True)]
        )


class Trees:
    """A user's drafter of trees: children(drafts) is how many follow a path of drafts.

    All but the last of them are a copy of what followed the newest token before, or q's likeliest; it is drawn
    from q without those.
    """

    branches = True

    def __init__(self, table: Table, rule: str, children: Callable[[Text], int]) -> None:
        self.table, self.children, self.draws = table, children, rule != "coupled"

    def propose(self, rows: list[Any], max_drafts: list[int], keys: Any) -> Proposal:
        tokens: list[list[int]] = [[] for _ in rows]
        parents: list[list[int]] = [[] for _ in rows]
        drawn: list[list[int]] = [[] for _ in rows]
        probs: list[torch.Tensor] = []
        for r, row in enumerate(rows):
            open_: list[tuple[int, Text]] = [(-1, ())]
            for parent, path in open_:
                children = self.children(path) if len(path) < max_drafts[r] else 0
                if not children:
                    continue
                q = torch.tensor(self.table[[*row.tokens, *path][-1]])
                others = self._others([*row.tokens, *path], q)[: children - 1]
                following = [(token, -1) for token in others]
                q[others] = 0.0
                if self.draws and q.sum() > 0:
                    at = place_node(keys.positions[r] + len(path), torch.tensor(parent + 1))
                    child = draws.draw(q, 0, keys.sequence_ids[r], at, keys.stream(Role.DRAFT)[r])
                    following.append((int(child), len(probs)))
                    probs.append(q / q.sum())
                for token, place in following:
                    open_.append((len(tokens[r]), (*path, token)))
                    tokens[r].append(token)
                    parents[r].append(parent)
                    drawn[r].append(place)
        counts = [len(row) for row in tokens]
        padded = torch.tensor([row + [0] * (max(counts) - len(row)) for row in tokens], dtype=torch.long)
        proposal = TreeProposal(padded.view(len(rows), max(counts)), counts, parents=parents)
        if probs:
            proposal.drawn, proposal.probs = drawn, torch.stack(probs)
        return proposal

    def _others(self, text: list[int], q: torch.Tensor) -> list[int]:
        """The copy, and then all tokens from the likeliest on."""
        before = [b for a, b in pairwise(text) if a == text[-1] and b < len(q)]
        return list(dict.fromkeys([*before[-1:], *q.argsort(descending=True).tolist()]))


def _lookup(scene: Scene) -> PromptLookupDrafter:
    return PromptLookupDrafter(longest=2, shortest=2)


def _model(table: Table) -> Callable[[Scene], Any]:
    return lambda scene: ModelDrafter(scene.runner(table), scene.sampling, scene.verification)


def _head(
    scene: Scene,
    tree: tuple[int, ...] | None = None,
    table: Table = ((0.9, 0.1), (0.5, 0.5), (0.7, 0.3), (0.5, 0.5)),
    ids: tuple[int, int] = (2, 0),
    lift: float = 0.1,
) -> HeadDrafter:
    """Has two tokens, is sure of its drafts while they are likely, and stops where it is not.

    lift: by how much its pointer raises what followed where a text's last two tokens stood before.
    """
    pointer = Pointer(1).requires_grad_(False)
    pointer.by_size.fill_(lift)
    head: Any = BigramHead(torch.tensor(ids), pointer)
    return HeadDrafter(
        head, scene.runner(table), len(scene.p[0]), scene.sampling, scene.verification, 0.6, tree=tree
    )


def _window(scene: Scene) -> WindowDrafter:
    """The windowed target is another model here, as it is where a window hides what matters."""
    return WindowDrafter(scene.runner(Q3), scene.sampling, scene.verification, 1)


def _trees(children: Callable[[Text], int]) -> Callable[[Scene], Any]:
    return lambda scene: own_drafter(Trees(Q3 if len(scene.p[0]) == 3 else Q, scene.rule, children))


# For three tokens.
DRAFTERS: dict[str, Callable[[Scene], Any]] = {
    "model": _model(Q3),
    "copies": _lookup,
    "copies, else a model": lambda scene: Cascade(_lookup(scene), _model(Q3)(scene)),
    "a head that stops": _head,
    "a head that points": lambda scene: _head(scene, ids=(1, 2), lift=2.0),
    "a user's that stops": lambda scene: own_drafter(Unsure(Q3, scene.rule)),
    "a window": _window,
    "a window behind a model": lambda scene: WindowChain(_model(R3)(scene), _window(scene)),
    "a window behind copies": lambda scene: WindowChain(_lookup(scene), _window(scene)),
}
TREES: dict[str, Callable[[Scene], Any]] = {
    "(2, 1)": lambda scene: ModelDrafter(scene.runner(Q3), scene.sampling, scene.verification, (2, 1)),
    "(1, 2)": lambda scene: ModelDrafter(scene.runner(Q3), scene.sampling, scene.verification, (1, 2)),
    "(3, 2) of a head": lambda scene: _head(scene, (3, 2)),
    "a user's with copies": _trees(lambda path: 2),
    "a user's, wider behind 0": _trees(lambda path: 1 + (path == (0,))),
    "a user's, a chain unless 0": _trees(lambda path: 1 + (path[-1:] == (0,)) * (len(path) == 2)),
}


@pytest.fixture(autouse=True)
def tiny_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windowed drafts see the first token and the last two alone."""
    small_window(monkeypatch, sinks=1, unit=1, window=1)


@pytest.fixture(autouse=True)
def unsure_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head stops behind an unlikely draft as well as before an unlikely one."""
    monkeypatch.setattr("bass_core.draft.head.HEADROOM", 1.0)


def holds(scene: Scene, patch: pytest.MonkeyPatch, least: float = EXACT) -> Written:
    """Enumerates the scene, and asserts that its law is the target's."""
    found = written(scene, patch)
    assert abs(math.fsum(found.law.values()) - 1) < EXACT, "a path was lost, or taken twice"
    assert distance(scene.completed(found.law), scene.expected()) < least
    return found


def each(axis: Iterable[str], rules: Iterable[str] = RULES) -> list[tuple[str, str]]:
    """Each choice with one of the rules."""
    return list(zip(axis, cycle(rules), strict=False))


@pytest.mark.parametrize(
    ("policy", "rule"), slow_but(each(POLICIES, ["block", "rejection", "coupled"]), product(POLICIES, RULES))
)
def test_policies(policy: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of one row: the first, and one whose length the first may have decided."""
    scene = Scene(P, _model(Q), POLICIES[policy](), rule, ((2,),), 6 if policy in VARIED else 5, rounds=2)
    found = holds(scene, monkeypatch)
    assert (policy == "fixed 0") == (found.drafted == {0})
    if policy in VARIED:
        assert len(found.drafted) > 1, "its rounds differ"


@pytest.mark.parametrize("rule", slow_but(["rejection", "block"], RULES))
def test_lengths_that_a_head_decides_by_where_it_stops(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it threw away of a position must say nothing of what it drafts there next."""

    def head(scene: Scene) -> HeadDrafter:
        return _head(scene, table=((0.2, 0.8), (0.9, 0.1), (0.5, 0.5), (0.5, 0.5)), ids=(1, 0))

    scene = Scene(P, head, Leaking(), rule, ((3,),), 5, rounds=2)
    assert holds(scene, monkeypatch).drafted == {0, 1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "rule"), product(VARIED, RULES))
def test_policies_that_have_learnt(policy: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(P, _model(Q), POLICIES[policy](), rule, ((0,),), 5)
    holds(scene.after(60), monkeypatch)


BY_DRAFTER = [("model", "block"), ("copies", "coupled"), *each(DRAFTERS, ["rejection", "block"])]
BY_DRAFTER += [("a head that stops", "block"), ("a window behind a model", "rejection")]


@pytest.mark.parametrize(("drafter", "rule"), slow_but(BY_DRAFTER, product(DRAFTERS, RULES)))
def test_drafters(drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(P3, DRAFTERS[drafter], FixedLength(2), rule, ((2, 1, 2, 1, 2),), 5)
    found = holds(scene, monkeypatch)
    assert found.origins >= {"sampled", "accepted", "recovered"}
    some = {"copies": {0, 2}, "a head that points": {1, 2}}.get(drafter, {0, 1, 2})
    assert found.drafted == ({2} if "model" in drafter or "window" in drafter else some)


def test_no_drafter_is_quick_under_coupled_alone() -> None:
    """Coupled verification reads no q, so it can't see one that was not drawn from."""
    for table, cases in ((DRAFTERS, BY_DRAFTER), (dict(BY_TREE), BY_TREE)):
        for drafter in table:
            assert {rule for name, rule in cases if name == drafter} - {"coupled"}, drafter


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", ["model", "copies, else a model", "a head that stops"])
def test_whole_texts(drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one row, until it ends by a token or by its length, in the midst of a round or behind one."""
    scene = Scene(P3, DRAFTERS[drafter], Algorithm1(length=1, increment=1, limit=2), rule, ((2, 1, 2),), 4, 9)
    holds(replace(scene, eos=frozenset({1})), monkeypatch)


BY_TREE = [("(2, 1)", "rejection"), ("a user's, a chain unless 0", "auto")]


@pytest.mark.parametrize(("drafter", "rule"), slow_but(BY_TREE, product(TREES, ["rejection", "auto", "coupled"])))
def test_trees(drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All by the tree rule, whatever they look like."""
    scene = Scene(P3, TREES[drafter], FixedLength(3), rule, ((1, 0, 1, 3),), 5)
    found = holds(scene, monkeypatch)
    assert rule == "coupled" or found.origins == {"sampled", "accepted", "recovered", "bonus"}


# Of one shape, by a draft that knows fewer tokens than the shape has children behind some texts.
SHAPED = ["(2, 1)", "(1, 2)", "(3, 2) of a head"]


@pytest.mark.parametrize(
    ("drafter", "rule"), slow_but([(SHAPED[2], "rejection")], product(SHAPED, ["rejection", "auto", "coupled"]))
)
def test_trees_that_keep_their_shape(drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, where nobody looks which children q has."""
    monkeypatch.setattr("bass_core.draft.tree.is_accelerator", lambda device: True)
    scene = Scene(P3, TREES[drafter], FixedLength(3), rule, ((1, 0, 1, 3),), 5)
    assert len(holds(scene, monkeypatch).drafted) == 1, "every tree is whole"


@pytest.mark.slow
@pytest.mark.parametrize("drafter", TREES)
def test_whole_texts_of_trees(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(P3, TREES[drafter], RecordedLengths([1, 2, 0, 2]), "rejection", ((1, 0, 1, 3),), 4, 9)
    holds(replace(scene, eos=frozenset({1})), monkeypatch)


BY_ROW = {"recorded by row": lambda: RecordedLengths([[1, 2]])} | {name: POLICIES[name] for name in VARIED}


@pytest.mark.parametrize(
    ("policy", "rule"), slow_but([("recorded by row", "rejection")], each(BY_ROW, [*RULES, "common_stop"]))
)
def test_two_rows(policy: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one row writes says nothing of the other, though it may decide how much that drafts next."""
    scene = Scene(P, _model(Q), BY_ROW[policy](), rule, ((2,), (3,)), 4, rounds=1 if "row" in policy else 2)
    assert len(holds(scene, monkeypatch).drafted) > 1


@pytest.mark.parametrize("rule", slow_but(["rejection"], RULES))
@pytest.mark.parametrize(
    "prompts",
    [((2, 0, 1, 0, 2), (3,)), pytest.param(((0, 1, 0), (0, 1, 1)), marks=pytest.mark.slow)],
    ids=["the first", "either"],
)
def test_two_rows_of_which_one_copies(
    prompts: tuple[Text, ...], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cascade(scene: Scene) -> Cascade:
        return Cascade(_lookup(scene), _model(Q)(scene))

    found = holds(Scene(P, cascade, FixedLength(2), rule, prompts, 4), monkeypatch)
    assert found.origins >= {"accepted", "recovered", "bonus"}


@pytest.mark.parametrize("rule", slow_but(["rejection"], RULES))
def test_two_rows_that_copy_from_each_other(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def neighbours(scene: Scene) -> Any:
        return own_drafter(Neighbours())

    holds(Scene(P, neighbours, FixedLength(1), rule, ((0,), (1,)), 3, 9), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "auto"])
def test_two_rows_of_trees(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holds(Scene(P, _trees(lambda path: 2), FixedLength(1), rule, ((2,), (3,)), 4, rounds=2), monkeypatch)


@pytest.mark.parametrize("rule", slow_but(["block"], [*RULES, "common_stop"]))
def test_two_rows_that_end(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One ends first, mostly, and the other takes its place."""
    policy = Algorithm1(length=1, increment=1, limit=2)
    scene = Scene(P, _model(Q), policy, rule, ((2,), (3,)), 3, rounds=9, eos=frozenset({1}))
    holds(scene, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "rule"), each(VARIED, ["block", "common_stop", *RULES]))
def test_two_rows_to_their_ends(policy: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(P, _model(Q), POLICIES[policy](), rule, ((2,), (3,)), 4, rounds=9)
    holds(scene, monkeypatch)


# "a window behind a model" would take 20 minutes here: test_as_users_run_it drafts three tokens with it.
FOUR_DRAFTS = [drafter for drafter in DRAFTERS if drafter != "a window behind a model"]


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "rule"), each(FOUR_DRAFTS, ["block", "rejection"]))
def test_more_drafts(drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holds(Scene(P3, DRAFTERS[drafter], FixedLength(4), rule, ((2, 1, 2, 1, 2),), 6), monkeypatch)


@pytest.mark.parametrize(("rule", "start"), slow_but([("block", 0)], product(RULES, [0, 1])))
def test_costs_in_which_many_drafts_pay(rule: str, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models and costs with which a rule that was chosen behind a draw once put these texts off by 0.1."""
    p = ((0.37665463953140643, 0.6233453604685936), (0.0026029339051791603, 0.9973970660948208))
    q = ((0.6875928994252203, 0.31240710057477966), (0.48650397189957106, 0.5134960281004289))
    scene = Scene(p, _model(q), CostAware(CHEAP, timed=False), rule, ((start,),), 200).after(200)
    assert holds(replace(scene, new_tokens=5), monkeypatch).drafted == {3}


@pytest.mark.parametrize(("rule", "exact"), slow_but([("block", True)], product(RULES, [True, False])))
def test_a_draft_that_breaks_behind_some_tokens(rule: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafts behind token 1 can't be judged, and say nothing of those before."""
    broken: Table = ((0.8, 0.2), (math.nan, math.nan))
    scene = Scene(((0.4, 0.6), (0.5, 0.5)), _model(broken), FixedLength(3), rule, ((0,),), 5, exact=exact)
    holds(scene, monkeypatch, EXACT if exact else SINGLE)


@pytest.mark.parametrize(
    ("drafter", "rule"), slow_but([("model", "block")], each(DRAFTERS, ["block", "coupled", "rejection"]))
)
def test_as_users_run_it(drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, by the compiled kernels where there are any."""
    scene = Scene(P3, DRAFTERS[drafter], FixedLength(3), rule, ((2, 1, 2, 1, 2),), 5, exact=False)
    holds(scene, monkeypatch, SINGLE)


# Each changes what the text before a token says of it, a draft's included.
SHAPED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": -0.6, "temperature": 0.8},
    "bias": {"logit_bias": {0: 0.7, 1: -0.4}},
    "bad words": {"bad_words": [(0, 1), (1, 1, 2)]},
    "min-p": {"min_p": 0.55},
    "all": {
        **{"repetition_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {2: 0.5}},
        **{"bad_words": [(0, 1)], "min_p": 0.2, "temperature": 1.3},
    },
}
BY_SHAPE = [*each(SHAPED, ["block", "rejection", "coupled"]), ("all", "rejection")]


def how(name: str) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0} | SHAPED[name])


@pytest.mark.parametrize(("name", "rule"), slow_but(BY_SHAPE, product(SHAPED, RULES)))
def test_penalties_by_the_drafts_before(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """p and q at a draft know the drafts before it, which may be rejected."""
    scene = Scene(P3, _model(Q3), FixedLength(3), rule, ((2, 1, 2),), 5, sampling=how(name))
    holds(scene, monkeypatch)
    assert distance(scene.expected(), replace(scene, sampling=SamplingParams(1.0)).expected()) > 0.01


SHAPED_DRAFTERS = DRAFTERS | TREES


@pytest.mark.parametrize(
    ("drafter", "rule"),
    slow_but(
        [("(2, 1)", "rejection"), ("copies, else a model", "block")],
        [*each(SHAPED_DRAFTERS, ["rejection", "coupled"]), *each(SHAPED_DRAFTERS, ["coupled", "rejection"])],
    ),
)
def test_penalties_under_each_drafter(drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(P3, SHAPED_DRAFTERS[drafter], FixedLength(2), rule, ((2, 1, 2, 1, 2),), 5, sampling=how("all"))
    holds(scene, monkeypatch)


@pytest.mark.parametrize("rule", slow_but(["block"], RULES))
def test_penalties_of_two_rows_to_their_ends(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its own text, and when one ends the other takes its place."""
    policy, some = Algorithm1(length=1, increment=1, limit=2), how("presence")
    scene = Scene(P, _model(Q), policy, rule, ((2,), (3,)), 3, rounds=9, eos=frozenset({1}), sampling=some)
    holds(scene, monkeypatch)

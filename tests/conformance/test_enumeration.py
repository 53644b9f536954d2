"""Whole rounds write texts with the target's distribution: every random outcome is enumerated, in float64.

Loop, drafters, policies and verification are the library's own; the models are tables (enumerated.py). The joint
distribution of all rows must equal the product of the target's distributions to 1e-9, which is far more than
rounding errors in float64. A new policy needs a line in POLICIES, a new drafter one in DRAFTERS, a new
verification one in RULES.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import cycle, pairwise, product
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bass_core import SamplingParams
from bass_core.draft.base import Proposal, TreeProposal, point_masses, wrap_user_drafter
from bass_core.draft.head.chain import HeadDrafter
from bass_core.draft.lookup import Cascade, PromptLookupDrafter
from bass_core.draft.model import ModelDrafter
from bass_core.draft.registry import head_drafter
from bass_core.draft.window import WindowChain, WindowDrafter
from bass_core.length.cost_aware import CostAware
from bass_core.length.costs import CostTable
from bass_core.length.policies import Algorithm1, FixedLength, RecordedLengths
from bass_core.model.base import CausalModel
from bass_core.model.pointer import Pointer
from bass_core.model.runner import ModelRunner
from bass_core.sample import draw as draws
from bass_core.sample.noise import Role, place_node
from tests.support.models import slow_but, small_window, tiny

from .enumerated import BigramHead, Enumeration, Law, Scene, Table, Text, distance, enumerate_scene

EXACT = 1e-9
# The tolerance for float32, which rounds p and q, and each result computed from them, by up to 6e-8.
SINGLE = 1e-6
# A text has tokens 0 and 1. Tokens 2 and 3 occur only at the end of a prompt, where they fix the first token.
P: Table = ((0.3, 0.7), (0.6, 0.4), (1.0, 0.0), (0.0, 1.0))
Q: Table = ((0.66, 0.34), (0.2, 0.8), (0.5, 0.5), (0.5, 0.5))
# A text has tokens 0 to 2. After some of these tokens, one token is never written or never drafted. Token 3 ends
# prompts.
P3: Table = ((0.2, 0.3, 0.5), (0.0, 0.45, 0.55), (0.6, 0.4, 0.0), (1.0, 0.0, 0.0))
Q3: Table = ((0.5, 0.25, 0.25), (0.3, 0.7, 0.0), (0.1, 0.2, 0.7), (0.2, 0.3, 0.5))
# The draft of a windowed target, whose distribution is Q3.
R3: Table = ((0.1, 0.5, 0.4), (0.6, 0.1, 0.3), (0.5, 0.3, 0.2), (0.3, 0.3, 0.4))
RULES = ("rejection", "block", "coupled")
# The same for texts of two tokens, whose windowed target has the distribution Q.
R: Table = ((0.2, 0.8), (0.7, 0.3), (0.4, 0.6), (0.4, 0.6))
# In ms. With COSTS, earlier acceptance decides how many drafts pay, perhaps none. With CHEAP, many drafts pay.
COSTS = CostTable({rows: [(rows, 6), (9 * rows, 10)] for rows in (1, 2)}, {1: 0.3, 2: 0.3}, padded=False)
CHEAP = CostTable({1: [(1, 10), (2, 10.2), (8, 11.4)]}, {1: 0.1}, padded=False)


class UserPolicy:
    """A user's policy: as many drafts as the best row accepted; after every other round, one more."""

    limit = 3

    def __init__(self) -> None:
        self.length, self.rounds = 1, 0

    def lengths(self, offers: Any) -> list[int]:
        return [self.length] * len(offers)

    def observe(self, feedback: Any) -> None:
        self.rounds += 1
        self.length = min(max(feedback.accepted) + self.rounds % 2, self.limit)


class LeakingPolicy:
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
    "cost-aware": lambda: CostAware(COSTS),
    "cost-aware, untimed": lambda: CostAware(COSTS, timed=False),
    "recorded": lambda: RecordedLengths([1, 3]),
    "a user's": UserPolicy,
}
VARIED = [name for name in POLICIES if not name.startswith("fixed")]


class UnsureDrafter:
    """A user's drafter that draws from a table, as long as the table is sure of the next token."""

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
                position = keys.positions[r] + count
                drawn = draws.draw(probs[r, count], 0, keys.sequence_ids[r], position, keys.stream(self.role)[r])
                tokens[r, count] = drawn
                text.append(int(drawn))
                count += 1
            counts.append(count)
        width = max(counts)
        return Proposal(tokens[:, :width], counts, probs[:, :width])


class CopyingDrafter:
    """A user's drafter that copies the token after an earlier occurrence of the newest one, in any row's text."""

    def propose(self, rows: list[Any], max_drafts: list[int], keys: Any) -> Proposal:
        known = {a: [b] for row in rows for a, b in pairwise(row.tokens)}
        return point_masses(
            [known.get(row.tokens[-1], [])[:most] for row, most in zip(rows, max_drafts, strict=True)]
        )


class TreeDrafter:
    """A user's drafter of trees: a path of drafts has `children(path)` children.

    All children but the last are copied from earlier text, or q's likeliest tokens. The last is drawn from q
    without the other children.
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
            nodes: list[tuple[int, Text]] = [(-1, ())]
            for parent, path in nodes:
                children = self.children(path) if len(path) < max_drafts[r] else 0
                if not children:
                    continue
                q = torch.tensor(self.table[[*row.tokens, *path][-1]])
                others = self._others([*row.tokens, *path], q)[: children - 1]
                following = [(token, -1) for token in others]
                q[others] = 0.0
                if self.draws and q.sum() > 0:
                    position = place_node(keys.positions[r] + len(path), torch.tensor(parent + 1))
                    child = draws.draw(q, 0, keys.sequence_ids[r], position, keys.stream(Role.DRAFT)[r])
                    following.append((int(child), len(probs)))
                    probs.append(q / q.sum())
                for token, place in following:
                    nodes.append((len(tokens[r]), (*path, token)))
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
        """Return the copied token, if any, followed by all other tokens, the likeliest first."""
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
    """Return a head of two tokens, `ids`, that stops when unsure; `lift` is added to its pointer's logit."""
    pointer = Pointer(1).requires_grad_(False)
    pointer.by_size.fill_(lift)
    head: Any = BigramHead(torch.tensor(ids), pointer)
    return head_drafter(
        head, scene.runner(table), len(scene.p[0]), scene.sampling, scene.verification, 0.6, tree=tree
    )


def _window(scene: Scene, table: Table = Q3) -> WindowDrafter:
    """Return a windowed drafter whose model differs from the target, as if the window hid important text."""
    return WindowDrafter(scene.runner(table), scene.sampling, scene.verification, 1)


def _trees(children: Callable[[Text], int]) -> Callable[[Scene], Any]:
    return lambda scene: wrap_user_drafter(TreeDrafter(Q3 if len(scene.p[0]) == 3 else Q, scene.rule, children))


# For scenes of three tokens.
DRAFTERS: dict[str, Callable[[Scene], Any]] = {
    "model": _model(Q3),
    "copies": _lookup,
    "copies, else a model": lambda scene: Cascade(_lookup(scene), _model(Q3)(scene)),
    "a head that stops": _head,
    "a head with a pointer": lambda scene: _head(scene, ids=(1, 2), lift=2.0),
    "a user's drafter that stops": lambda scene: wrap_user_drafter(UnsureDrafter(Q3, scene.rule)),
    "a window": _window,
    "a window after a model": lambda scene: WindowChain(_model(R3)(scene), _window(scene)),
    "a window after copies": lambda scene: WindowChain(_lookup(scene), _window(scene)),
}
# For scenes of two tokens.
DRAFTERS_OF_TWO: dict[str, Callable[[Scene], Any]] = {
    "a window": lambda scene: _window(scene, Q),
    "a window after a model": lambda scene: WindowChain(_model(R)(scene), _window(scene, Q)),
}
TREES: dict[str, Callable[[Scene], Any]] = {
    "(2, 1)": lambda scene: ModelDrafter(scene.runner(Q3), scene.sampling, scene.verification, (2, 1)),
    "(1, 2)": lambda scene: ModelDrafter(scene.runner(Q3), scene.sampling, scene.verification, (1, 2)),
    "(3, 2) of a head": lambda scene: _head(scene, (3, 2)),
    "a user's trees with copies": _trees(lambda path: 2),
    "a user's trees, wider after 0": _trees(lambda path: 1 + (path == (0,))),
    "a user's trees, chains except after 0": _trees(lambda path: 1 + (path[-1:] == (0,)) * (len(path) == 2)),
}


@pytest.fixture(autouse=True)
def tiny_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let windowed drafts see only the first token and the last two."""
    small_window(monkeypatch, sinks=1, unit=1, window=1)


@pytest.fixture(autouse=True)
def unsure_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the head also stop after a draft that turned out unlikely, not only before one."""
    monkeypatch.setattr("bass_core.draft.chain.HEADROOM", 1.0)


def check_distribution(scene: Scene, patch: pytest.MonkeyPatch, tolerance: float = EXACT) -> Enumeration:
    result = enumerate_scene(scene, patch)
    assert abs(math.fsum(result.law.values()) - 1) < EXACT, "a path was lost, or taken twice"
    assert distance(scene.completed(result.law), scene.expected()) < tolerance
    return result


def with_rules(choices: Iterable[str], rules: Iterable[str] = RULES) -> list[tuple[str, str]]:
    """Return a pair (choice, rule) for each choice, going through the rules in turn."""
    return list(zip(choices, cycle(rules), strict=False))


@pytest.mark.parametrize(
    ("policy", "rule"), slow_but(with_rules(POLICIES, ["block", "rejection", "coupled"]), product(POLICIES, RULES))
)
def test_policies_keep_the_distribution(policy: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are two rounds, so that the first may decide the draft length of the second."""
    scene = Scene(P, _model(Q), POLICIES[policy](), rule, ((2,),), 6 if policy in VARIED else 5, rounds=2)
    result = check_distribution(scene, monkeypatch)
    assert (policy == "fixed 0") == (result.drafted == {0})
    if policy in VARIED:
        assert len(result.drafted) > 1, "all rounds had one length"


@pytest.mark.parametrize("rule", slow_but(["rejection", "block"], RULES))
def test_lengths_that_depend_on_a_heads_stop_keep_the_distribution(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that the head discards at a position must not influence the draft of the next round there."""

    def head(scene: Scene) -> HeadDrafter:
        return _head(scene, table=((0.2, 0.8), (0.9, 0.1), (0.5, 0.5), (0.5, 0.5)), ids=(1, 0))

    scene = Scene(P, head, LeakingPolicy(), rule, ((3,),), 5, rounds=2)
    assert check_distribution(scene, monkeypatch).drafted == {0, 1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "rule"), product(VARIED, RULES))
def test_policies_with_history_keep_the_distribution(
    policy: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(P, _model(Q), POLICIES[policy](), rule, ((0,),), 5)
    check_distribution(scene.after(60), monkeypatch)


QUICK_DRAFTERS = [("model", "block"), ("copies", "coupled"), *with_rules(DRAFTERS, ["rejection", "block"])]
QUICK_DRAFTERS += [("a head that stops", "block"), ("a window after a model", "rejection")]


@pytest.mark.parametrize(("drafter", "rule"), slow_but(QUICK_DRAFTERS, product(DRAFTERS, RULES)))
def test_drafters_keep_the_distribution(drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(P3, DRAFTERS[drafter], FixedLength(2), rule, ((2, 1, 2, 1, 2),), 5)
    result = check_distribution(scene, monkeypatch)
    assert result.origins >= {"sampled", "accepted", "recovered"}
    lengths = {"copies": {0, 2}, "a head with a pointer": {1, 2}}.get(drafter, {0, 1, 2})
    assert result.drafted == ({2} if "model" in drafter or "window" in drafter else lengths)


@dataclass(frozen=True)
class ModelScene(Scene):
    """A scene with real models in place of tables: each table names one of `models`."""

    models: dict[Table, PreTrainedModel] = field(default_factory=dict, compare=False)

    def runner(self, table: Table) -> ModelRunner:
        model = self._models.setdefault(table, CausalModel(self.models[table]))
        longest = max(map(len, self.prompts)) + self.new_tokens + 4
        return ModelRunner(model, len(self.prompts), longest, len(table[0]), "sdpa")

    def following(self, row: int, text: Text) -> list[float]:
        logits = self.models[self.p](input_ids=torch.tensor([(*self.prompts[row], *text)])).logits[0, -1]
        chances: list[float] = logits.double().softmax(-1).tolist()
        return chances


@pytest.mark.parametrize(("rule", "length"), slow_but([("rejection", 1)], product(RULES, (1, 2))))
def test_models_with_states_keep_the_distribution(rule: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second round starts from the states of what the first one accepted, in the target and in the draft."""
    sizes = {"vocab_size": 2, "scale": 4.0}
    models = {P: tiny("qwen3_5", **sizes), Q: tiny("qwen3_5", seed=5, **sizes)}
    new_tokens = 2 * length + 1
    scene = ModelScene(
        P, _model(Q), FixedLength(length), rule, ((0, 1),), new_tokens, rounds=2, exact=False, models=models
    )
    result = check_distribution(scene, monkeypatch, 1e-5)
    assert result.origins >= {"sampled", "accepted", "recovered"}


@pytest.mark.parametrize("rule", slow_but(["block"], RULES))
def test_a_window_after_a_model_shares_no_noise_between_rounds(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first round the window draws its second draft at the position of the second round's first draft."""
    drafter = DRAFTERS_OF_TWO["a window after a model"]
    scene = Scene(P, drafter, RecordedLengths([2, 1]), rule, ((0, 1, 0, 1, 2),), 4, rounds=2)
    check_distribution(replace(scene, sampling=SamplingParams(0.7)), monkeypatch)


@pytest.mark.parametrize("drafter", ["a window", "a window after a model"])
def test_rows_with_equal_ids_may_have_windows(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such rows draw the same random numbers, so the drafts of one must not depend on the other's text."""
    scene = Scene(
        P, DRAFTERS_OF_TWO[drafter], FixedLength(2), "rejection", ((0, 1, 0, 1, 2), (1, 0, 0, 3)), 3, rounds=2,
        ids=(7, 7),
    )  # fmt: skip
    law = scene.completed(enumerate_scene(scene, monkeypatch).law)
    expected = scene.expected()
    for row in range(2):
        assert distance(alone(law, row), alone(expected, row)) < EXACT


def alone(law: Law, row: int) -> Law:
    """Return the distribution of one row's texts."""
    texts: dict[tuple[Text, ...], float] = defaultdict(float)
    for rows, chance in law.items():
        texts[(rows[row],)] += chance
    return texts


def test_every_drafter_has_a_quick_case_that_is_not_coupled() -> None:
    """Coupled verification reads no q, so it does not notice a q that the drafts were not drawn from."""
    for table, cases in ((DRAFTERS, QUICK_DRAFTERS), (dict(QUICK_TREES), QUICK_TREES)):
        for drafter in table:
            assert {rule for name, rule in cases if name == drafter} - {"coupled"}, drafter


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", ["model", "copies, else a model", "a head that stops"])
def test_whole_texts_have_the_distribution(drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row may end with an end token or at its maximum length, within a round or at its end."""
    scene = Scene(P3, DRAFTERS[drafter], Algorithm1(length=1, increment=1, limit=2), rule, ((2, 1, 2),), 4, 9)
    check_distribution(replace(scene, eos=frozenset({1})), monkeypatch)


QUICK_TREES = [("(2, 1)", "rejection"), ("a user's trees, chains except after 0", "auto")]


@pytest.mark.parametrize(
    ("drafter", "rule"), slow_but(QUICK_TREES, product(TREES, ["rejection", "auto", "coupled"]))
)
def test_trees_keep_the_distribution(drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All trees are verified by the tree rule, even if they are chains."""
    scene = Scene(P3, TREES[drafter], FixedLength(3), rule, ((1, 0, 1, 3),), 5)
    result = check_distribution(scene, monkeypatch)
    assert rule == "coupled" or result.origins == {"sampled", "accepted", "recovered", "bonus"}


# Trees that always have one shape, although after some texts fewer tokens have q > 0 than the shape has children.
FIXED_SHAPES = ["(2, 1)", "(1, 2)", "(3, 2) of a head"]


@pytest.mark.parametrize(
    ("drafter", "rule"),
    slow_but([(FIXED_SHAPES[2], "rejection")], product(FIXED_SHAPES, ["rejection", "auto", "coupled"])),
)
def test_trees_of_a_fixed_shape_keep_the_distribution(
    drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator, where the host does not check which children have q > 0, no tree is cut."""
    monkeypatch.setattr("bass_core.draft.tree.is_accelerator", lambda device: True)
    scene = Scene(P3, TREES[drafter], FixedLength(3), rule, ((1, 0, 1, 3),), 5)
    assert len(check_distribution(scene, monkeypatch).drafted) == 1, "every tree is whole"


@pytest.mark.slow
@pytest.mark.parametrize("drafter", TREES)
def test_whole_texts_of_trees_have_the_distribution(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(P3, TREES[drafter], RecordedLengths([1, 2, 0, 2]), "rejection", ((1, 0, 1, 3),), 4, 9)
    check_distribution(replace(scene, eos=frozenset({1})), monkeypatch)


PER_ROW = {"recorded per row": lambda: RecordedLengths([[1, 2]])} | {name: POLICIES[name] for name in VARIED}


@pytest.mark.parametrize(
    ("policy", "rule"), slow_but([("recorded per row", "rejection")], with_rules(PER_ROW, [*RULES, "common_stop"]))
)
def test_two_rows_are_independent(policy: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row's text may decide the other's next draft length, but not its tokens."""
    scene = Scene(P, _model(Q), PER_ROW[policy](), rule, ((2,), (3,)), 4, rounds=1 if "row" in policy else 2)
    assert len(check_distribution(scene, monkeypatch).drafted) > 1


@pytest.mark.parametrize("rule", slow_but(["rejection"], RULES))
@pytest.mark.parametrize(
    "prompts",
    [((2, 0, 1, 0, 2), (3,)), pytest.param(((0, 1, 0), (0, 1, 1)), marks=pytest.mark.slow)],
    ids=["first row", "either row"],
)
def test_two_rows_are_independent_if_one_copies(
    prompts: tuple[Text, ...], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cascade(scene: Scene) -> Cascade:
        return Cascade(_lookup(scene), _model(Q)(scene))

    result = check_distribution(Scene(P, cascade, FixedLength(2), rule, prompts, 4), monkeypatch)
    assert result.origins >= {"accepted", "recovered", "bonus"}


@pytest.mark.parametrize("rule", slow_but(["rejection"], RULES))
def test_two_rows_that_copy_from_each_other_are_independent(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def copying(scene: Scene) -> Any:
        return wrap_user_drafter(CopyingDrafter())

    check_distribution(Scene(P, copying, FixedLength(1), rule, ((0,), (1,)), 3, 9), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "auto"])
def test_two_rows_of_trees_are_independent(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_distribution(
        Scene(P, _trees(lambda path: 2), FixedLength(1), rule, ((2,), (3,)), 4, rounds=2), monkeypatch
    )


@pytest.mark.parametrize("rule", slow_but(["block"], [*RULES, "common_stop"]))
def test_two_rows_are_independent_when_one_ends(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Algorithm1(length=1, increment=1, limit=2)
    scene = Scene(P, _model(Q), policy, rule, ((2,), (3,)), 3, rounds=9, eos=frozenset({1}))
    check_distribution(scene, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "rule"), with_rules(VARIED, ["block", "common_stop", *RULES]))
def test_two_rows_are_independent_to_their_ends(policy: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(P, _model(Q), POLICIES[policy](), rule, ((2,), (3,)), 4, rounds=9)
    check_distribution(scene, monkeypatch)


# Leave out "a window after a model": it would take 20 minutes, and another test lets it draft three tokens.
FOUR_DRAFTS = [drafter for drafter in DRAFTERS if drafter != "a window after a model"]


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "rule"), with_rules(FOUR_DRAFTS, ["block", "rejection"]))
def test_four_drafts_keep_the_distribution(drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_distribution(Scene(P3, DRAFTERS[drafter], FixedLength(4), rule, ((2, 1, 2, 1, 2),), 6), monkeypatch)


@pytest.mark.parametrize(("rule", "start"), slow_but([("block", 0)], product(RULES, [0, 1])))
def test_many_cheap_drafts_keep_the_distribution(rule: str, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p = ((0.37665463953140643, 0.6233453604685936), (0.0026029339051791603, 0.9973970660948208))
    q = ((0.6875928994252203, 0.31240710057477966), (0.48650397189957106, 0.5134960281004289))
    scene = Scene(p, _model(q), CostAware(CHEAP, timed=False), rule, ((start,),), 200).after(200)
    assert check_distribution(replace(scene, new_tokens=5), monkeypatch).drafted == {3}


@pytest.mark.parametrize(("rule", "exact"), slow_but([("block", True)], product(RULES, [True, False])))
def test_a_draft_model_with_nan_keeps_the_distribution(
    rule: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts after token 1 have no valid q; the drafts before them stay valid."""
    broken: Table = ((0.8, 0.2), (math.nan, math.nan))
    scene = Scene(((0.4, 0.6), (0.5, 0.5)), _model(broken), FixedLength(3), rule, ((0,),), 5, exact=exact)
    check_distribution(scene, monkeypatch, EXACT if exact else SINGLE)


@pytest.mark.parametrize(
    ("drafter", "rule"), slow_but([("model", "block")], with_rules(DRAFTERS, ["block", "coupled", "rejection"]))
)
def test_float32_keeps_the_distribution(drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(P3, DRAFTERS[drafter], FixedLength(3), rule, ((2, 1, 2, 1, 2),), 5, exact=False)
    check_distribution(scene, monkeypatch, SINGLE)


# Options that make a token's probability depend on the text before it, drafts included.
PENALTIES: dict[str, dict[str, Any]] = {
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
QUICK_PENALTIES = [*with_rules(PENALTIES, ["block", "rejection", "coupled"]), ("all", "rejection")]


def sampling(name: str) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0} | PENALTIES[name])


@pytest.mark.parametrize(("name", "rule"), slow_but(QUICK_PENALTIES, product(PENALTIES, RULES)))
def test_penalties_count_the_drafts_before(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """p and q of a draft depend on the drafts before it, even on those that are rejected."""
    scene = Scene(P3, _model(Q3), FixedLength(3), rule, ((2, 1, 2),), 5, sampling=sampling(name))
    check_distribution(scene, monkeypatch)
    assert distance(scene.expected(), replace(scene, sampling=SamplingParams(1.0)).expected()) > 0.01


ALL_DRAFTERS = DRAFTERS | TREES


@pytest.mark.parametrize(
    ("drafter", "rule"),
    slow_but(
        [("(2, 1)", "rejection"), ("copies, else a model", "block")],
        [*with_rules(ALL_DRAFTERS, ["rejection", "coupled"]), *with_rules(ALL_DRAFTERS, ["coupled", "rejection"])],
    ),
)
def test_penalties_keep_the_distribution_with_every_drafter(
    drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(P3, ALL_DRAFTERS[drafter], FixedLength(2), rule, ((2, 1, 2, 1, 2),), 5, sampling=sampling("all"))
    check_distribution(scene, monkeypatch)


@pytest.mark.parametrize("rule", slow_but(["block"], RULES))
def test_penalties_keep_two_rows_independent(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is penalised for its own text, even after one row ended and the other moved to its place."""
    policy, presence = Algorithm1(length=1, increment=1, limit=2), sampling("presence")
    scene = Scene(P, _model(Q), policy, rule, ((2,), (3,)), 3, rounds=9, eos=frozenset({1}), sampling=presence)
    check_distribution(scene, monkeypatch)

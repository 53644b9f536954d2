"""Captured rounds write texts with the target's distribution: every random outcome is enumerated, in float32.

Drafting and judging run as the library's own graphs; only a replay is a call (enumerated.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bass_core import SamplingParams
from bass_core.decode.verifier import LaunchedRound, Verifier
from bass_core.draft.chain_graph import ChainGraphs
from bass_core.draft.lookup import Cascade, PromptLookupDrafter
from bass_core.draft.model import ModelDrafter
from bass_core.draft.model_graph import CapturedModelDrafter
from bass_core.draft.registry import head_drafter
from bass_core.length.policies import Algorithm1, FixedLength, RecordedLengths
from bass_core.model.pointer import Pointer

from .enumerated import BigramHead, Scene, Table, distance, enumerate_scene
from .test_enumeration import P3, Q3, SINGLE, P, Q

# The distributions of heads that draft two tokens.
H3: Table = ((0.6, 0.4), (0.2, 0.8), (0.5, 0.5), (0.5, 0.5))
PENALTIES = SamplingParams(
    1.3, repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.2, logit_bias={2: 0.5},
    bad_words=[(0, 1), (1, 1, 2)], min_p=0.1,
)  # fmt: skip
PRESENCE = SamplingParams(1.0, repetition_penalty=1.6, presence_penalty=0.8)
PREFIX = (0, 1) * 8


class CapturableHead(BigramHead):
    """A head whose chains and trees can be captured."""

    body = torch.zeros(0)

    @property
    def columns(self) -> torch.Tensor:
        columns = torch.full((16,), -1)
        columns[self.vocabulary] = torch.arange(len(self.vocabulary))
        return columns

    def parameters(self) -> list[torch.Tensor]:
        return [] if self.pointer is None else list(self.pointer.parameters())

    def buffers(self) -> list[torch.Tensor]:
        return [self.vocabulary]


class EagleBigramHead(CapturableHead):
    """A head without a pointer, that reads a token's id and the state before it side by side."""

    def inputs(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return torch.stack((ids.to(states.dtype), *states.unbind(-1)), -1)


def _model(table: Table, tree: tuple[int, ...] | None = None) -> Callable[[Scene], Any]:
    def make(scene: Scene) -> ModelDrafter:
        drafter = CapturedModelDrafter if scene.captured else ModelDrafter
        return drafter(scene.runner(table), scene.sampling, scene.verification, tree)

    return make


def _head(ids: tuple[int, int], lift: float | None, tree: tuple[int, ...] | None = None) -> Callable[[Scene], Any]:
    """Make a head of two tokens; its pointer adds `lift`, or if `lift` is None it is an EAGLE head."""

    def make(scene: Scene) -> Any:
        pointer: Any = None
        if lift is not None:
            pointer = Pointer(1).requires_grad_(False)
            pointer.by_size.fill_(lift)
        head: Any = (EagleBigramHead if lift is None else CapturableHead)(torch.tensor(ids), pointer)
        runner, size = scene.runner(H3), len(scene.p[0])
        return head_drafter(head, runner, size, scene.sampling, scene.verification, tree=tree)

    return make


def _cascade(model: Callable[[Scene], Any]) -> Callable[[Scene], Any]:
    return lambda scene: Cascade(PromptLookupDrafter(longest=2, shortest=2), model(scene))


def scene(
    p: Table, drafter: Callable[[Scene], Any], policy: Any, rule: str, prompts: Any, new_tokens: int,
    rounds: int = 1, **more: Any,
) -> Scene:  # fmt: skip
    length = FixedLength(policy) if isinstance(policy, int) else policy
    return Scene(p, drafter, length, rule, prompts, new_tokens, rounds, exact=False, captured=True, **more)


CHAINS = {
    "chain": scene(P3, _model(Q3), 2, "rejection", ((2, 1),), 4),
    "chain of 3, block": scene(P, _model(Q), 3, "block", ((2,),), 5, 2),
    "lengths by rows": scene(P, _model(Q), RecordedLengths([[1, 2]]), "block", ((2,), (3,)), 4),
    "common stop": scene(P, _model(Q), 2, "common_stop", ((2,), (3,)), 3),
    "penalties": scene(P3, _model(Q3), 2, "rejection", ((2, 1, 2),), 5, 2, sampling=PENALTIES),
    "penalties, a row leaves": scene(
        P, _model(Q), Algorithm1(length=1, increment=1, limit=2), "rejection", ((1, 0, 2), (0, 2)), 4, 9,
        eos=frozenset({1}), sampling=PRESENCE,
    ),
    "pointer": scene(P3, _head((1, 2), 2.0), 2, "block", ((2, 1, 2, 1, 2),), 4),
    "pointer, rejection": scene(P3, _head((2, 0), 2.0), 3, "rejection", ((2, 2, 2, 2, 2),), 5),
    "eagle head": scene(P3, _head((1, 2), None), 2, "block", ((2, 1),), 4),
    "copies in a row": scene(P, _cascade(_model(Q)), 2, "rejection", ((2, 0, 1, 0, 2), (3,)), 4),
    "copies in the other row, head, block": scene(
        P3, _cascade(_head((1, 2), 1.0)), 2, "block", ((3,), (2, 1, 0, 2, 1)), 3, 2
    ),
    "copies, penalties": scene(
        P3, _cascade(_model(Q3)), 2, "rejection", ((2, 1, 2, 1), (0,)), 3, 2, sampling=PENALTIES
    ),
    "eager rounds between": scene(
        P, _model(Q), RecordedLengths([1, 2, 1]), "rejection", ((0, 3),), 5, 3, sampling=PRESENCE
    ),
    "grammars": scene(
        P3, _head((1, 2), 2.0), 2, "block", ((2, 1, 2, 1, 2), (3,)), 3,
        languages=(("aab", "bca", "bcb", "cab"), None),
    ),
    "prefix": scene(
        P, _model(Q), 1, "rejection", ((*PREFIX, 2), (3,)), 3, 2, shared=(PREFIX,), sampling=PRESENCE
    ),
    "prefix, head": scene(P3, _head((1, 2), 2.0), 2, "block", ((*PREFIX, 2, 1, 2),), 4, shared=(PREFIX,)),
}  # fmt: skip
# Scenes in which the second round is launched before the first one is read.
AHEAD = {
    "ahead": scene(P3, _model(Q3), 1, "rejection", ((2, 1),), 5, 2),
    "ahead, 2 drafts, block": scene(P, _model(Q), 2, "block", ((2,),), 7, 2),
    "ahead, head": scene(P3, _head((1, 2), 2.0), 1, "block", ((2, 1, 2, 1, 2),), 5, 2),
    "ahead, eagle head": scene(P3, _head((1, 2), None), 1, "rejection", ((2, 1),), 5, 2),
    "ahead, a row ends": scene(P, _model(Q), 1, "rejection", ((2,), (0,)), 5, 2, eos=frozenset({1})),
    "ahead, prefix": scene(P, _model(Q), 1, "rejection", ((*PREFIX, 2),), 5, 2, shared=(PREFIX,)),
}
TREES = {
    "two rows": scene(P, _model(Q, (2, 1)), 2, "rejection", ((2,), (3,)), 3),
    "deep": scene(P3, _model(Q3, (1, 2)), 2, "rejection", ((1, 0, 1, 3),), 4, 2),
    "coupled": scene(P3, _model(Q3, (2, 2)), 2, "coupled", ((1, 0),), 4, 2),
    "of a head": scene(P3, _head((2, 0), 1.5, (2, 2)), 2, "rejection", ((1, 0, 1, 3),), 4),
    "of an eagle head": scene(P3, _head((2, 0), None, (2, 2)), 2, "rejection", ((1, 0, 1, 3),), 4),
}


@pytest.fixture(autouse=True)
def torch_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch compute the additions of pointers, because Triton's interpreter is slow."""
    monkeypatch.setattr("bass_core.draft.head.texts.available", lambda device: False)


@pytest.fixture(autouse=True)
def two_drafts_run_eagerly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In scenes with eager rounds, no graph drafts or judges two tokens."""
    if "eager rounds between" in request.node.name:
        fits = ChainGraphs.fits
        monkeypatch.setattr(ChainGraphs, "fits", lambda self, *args: args[-1] != 2 and fits(self, *args))
        monkeypatch.setattr("bass_core.model.graphs.MAX_CAPTURED_WIDTH", 2)


@pytest.fixture
def full_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every tree have its full shape, as on an accelerator."""
    monkeypatch.setattr("bass_core.draft.tree.is_accelerator", lambda device: True)


def check(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    found = enumerate_scene(scene, patch)
    assert found.replays >= 2 * found.paths, "drafts and verification are not captured"
    assert abs(math.fsum(found.law.values()) - 1) < SINGLE
    assert distance(scene.completed(found.law), scene.expected()) < SINGLE


@pytest.mark.parametrize("name", CHAINS)
def test_captured_chains_keep_the_distribution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(CHAINS[name], monkeypatch)


@pytest.mark.parametrize("name", AHEAD)
def test_rounds_launched_ahead_keep_the_distribution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that ended take part in one more round, whose random numbers are also enumerated."""
    launch, launched = Verifier.launch_again, list[LaunchedRound]()

    def noted(self: Verifier, *arguments: Any) -> LaunchedRound:
        launched.append(launch(self, *arguments))
        return launched[-1]

    monkeypatch.setattr(Verifier, "launch_again", noted)
    check(AHEAD[name], monkeypatch)
    assert launched


@pytest.mark.parametrize("name", TREES)
def test_captured_trees_keep_the_distribution(
    name: str, full_trees: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(TREES[name], monkeypatch)


@pytest.mark.parametrize("name", ["pointer", "eager rounds between", "eagle head", "two rows", "of a head"])
def test_captured_rounds_write_as_much_as_eager_ones(
    name: str, full_trees: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts from another distribution would keep that of the texts, but fewer of them would be accepted."""
    scene = (CHAINS | TREES)[name]
    captured, eager = (enumerate_scene(replace(scene, captured=on), monkeypatch).law for on in (True, False))
    assert distance(captured, eager) < SINGLE

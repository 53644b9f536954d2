"""The decoder hands the model one batch object per forward, and a row's length changes in one place only."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bass_core import ModelPair, generate
from bass_core.model import graphs as graphs
from bass_core.model.base import CausalModel
from bass_core.model.forward import ForwardBatch, ForwardOutput
from bass_core.model.graphs import GraphRunner, record_calls
from bass_core.model.llama_cuda import LlamaCuda
from bass_core.model.prefill import PrefillSteps
from bass_core.model.runner import ModelRunner
from tests.models import prompts, tiny

ROOT = Path(__file__).parents[3]
# The packages that call a runner; the frames below them lead to the model.
CALLERS = ("decode", "draft", "lanes")


def way_up() -> list[str]:
    """The bass_core functions between the runner's caller and the caller of this one, innermost first."""
    found, frame = [], sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if any(f"/bass_core/{room}/" in file for room in CALLERS):
            return found
        if "/bass_core/" in file and "/tests/" not in file:
            found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found


@pytest.mark.parametrize("kind", [ModelRunner, GraphRunner])
@pytest.mark.parametrize("model", [CausalModel, LlamaCuda])
def test_a_forward_takes_at_most_three_calls_and_one_batch(
    model: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft and target, prefill and rounds; a runner that cannot replay also calls the plain runner's forward."""
    ways: list[list[str]] = []
    fed: list[ForwardBatch] = []
    forward, compute = model.forward, model._compute

    def noted(self: Any, batch: Any, *rest: Any) -> ForwardOutput:
        fed.append(batch)
        return forward(self, batch, *rest)

    def spied(self: Any, batch: Any, *rest: Any) -> ForwardOutput:
        if batch is (fed or [None])[-1]:
            ways.append(way_up())
        return compute(self, batch, *rest)

    monkeypatch.setattr(model, "forward", noted)
    monkeypatch.setattr(model, "_compute", spied)
    target = tiny("llama")
    pair = ModelPair(target, target)
    pair.target_step, pair.draft_step = model(target), model(target)

    def make(*arguments: Any, **rest: Any) -> ModelRunner:
        return kind(*arguments, **rest, **({"record": record_calls} if kind is GraphRunner else {}))

    monkeypatch.setattr("bass_core.model.graphs.make_runner", make)
    generate(pair, prompts(3), method="bass", max_new_tokens=12, draft_length=3)
    graphs._idle.clear()
    assert ways and len(ways) == len(fed)
    # `step` is the prefill's own method, which a decoder calls for each chunk.
    calls = [[name for name in way if name != "step"] for way in ways]
    # runner.forward, then model.forward (`noted` is not in bass_core), then the computation.
    assert all(set(way) == {"forward"} for way in calls)
    assert max(map(len, calls)) <= (2 if kind is ModelRunner else 3)


def assigned(tree: ast.AST) -> list[tuple[str, ast.expr]]:
    """The attributes that are assigned to, whole or by item: name and owner."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        else:
            continue
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute):
                    found.append((part.attr, part.value))
    return found


def test_a_rows_length_changes_in_one_place() -> None:
    """Only `commit` in model/runner.py assigns to a runner's lengths; nothing else in bass_core does."""
    places = []
    for path in sorted((ROOT / "bass_core").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for function in ast.walk(tree):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names = [name for name, _ in assigned(function)]
                if {"_lengths", "lengths"} & set(names):
                    places.append(f"{path.relative_to(ROOT / 'bass_core')}:{function.name}")
    assert places == ["model/runner.py:__init__", "model/runner.py:commit"]


def test_lengths_follow_what_is_committed() -> None:
    model = CausalModel(tiny("llama"))
    runner = ModelRunner(model, 3, 32, model.vocab, "pad")
    steps = PrefillSteps(runner, [[5, 6, 7], [8, 9], [5, 6, 7]])
    while not steps.done:
        steps.step()
    assert list(runner.lengths) == [3, 2, 3]
    runner.forward(ForwardBatch(torch.ones(3, 2, dtype=torch.long), runner.lengths))
    assert list(runner.lengths) == [3, 2, 3]
    runner.commit(1, 4)
    runner.move_row(1, 0)
    assert list(runner.lengths) == [4, 4, 3]


@pytest.mark.parametrize("kind", [ModelRunner, GraphRunner])
def test_states_come_with_the_batch_that_asks_for_them(kind: Any) -> None:
    model = CausalModel(tiny("llama"))
    runner = kind(model, 1, 32, model.vocab, "pad", **({"record": record_calls} if kind is GraphRunner else {}))
    tokens = torch.tensor([[5, 6]])
    without = runner.forward(ForwardBatch(tokens, [0]))
    assert without.states is None
    with pytest.raises(ValueError, match="return_states"):
        without.require_states()
    assert runner.forward(ForwardBatch(tokens, [0], return_states=True)).require_states().shape == (1, 2, 64)
    graphs._idle.clear()

"""`commit` keeps a tree's accepted path in the cache as if it had been fed as text, and sets the row's length.

The tests use RaggedCache and TiledCache, with and without a shared prefix. With the compiled kernels, results are
equal bit for bit.
"""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from bass_core import ModelPair
from bass_core.machine import cpu_kernels
from bass_core.model import graphs as graphs
from bass_core.model.base import CausalModel
from bass_core.model.forward import ForwardBatch, verified_tree
from bass_core.model.graphs import GraphRunner, record_calls
from bass_core.model.prefill import PrefillSteps
from bass_core.model.prefix import CachedTexts
from bass_core.model.runner import ModelRunner
from bass_core.model.tiled import TiledCache
from kernels.plan import PREFIX_UNIT
from tests.support import ROOT
from tests.support.models import VOCAB, tiny

LONG = list(range(1, 1 + 2 * PREFIX_UNIT))
PROMPTS = [[*LONG, 5, 6], [9, 8, 7], [*LONG, 70]]
PARENTS = [[-1, -1, 0, 1, 3, 0], [-1, 0, 1, 1, 2, 3], [-1, -1, -1, 2, 3, 4]]
DRAFTS = [[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26], [31, 32, 33, 34, 35, 36]]
# Each path lists columns relative to the row's old length: column 0 is the newest token, column i + 1 is draft i.
PATHS = [[0, 2, 4, 5], [0, 1, 2, 4, 6], [0, 3, 4, 5, 6]]
NEWEST = [40, 41, 42]


@pytest.fixture(params=["pad", "split", "sdpa", "compiled"])
def model_and_backend(request: Any) -> tuple[Any, str]:
    """Return a model and its attention backend."""
    if request.param != "compiled":
        return CausalModel(tiny("llama")), request.param
    if not cpu_kernels.available():
        pytest.skip("numba is not there")
    return ModelPair(tiny("llama").to(torch.bfloat16)).target_step, "sdpa"


def runner_over(model: Any, backend: str, share: bool) -> ModelRunner:
    texts = CachedTexts(PROMPTS, [len(prompt) + 20 for prompt in PROMPTS])
    shared = texts.shared(PREFIX_UNIT if share else None)
    runner = ModelRunner(model, 3, texts.columns(shared), VOCAB, backend, shared=shared)
    prefill = PrefillSteps(runner, PROMPTS)
    while not prefill.done:
        prefill.step()
    assert bool(any(runner.cache.starts)) == share
    return runner


@pytest.mark.parametrize("share", [False, True], ids=["unshared", "shared"])
def test_a_committed_path_equals_the_same_tokens_fed_as_text(
    model_and_backend: tuple[Any, str], share: bool
) -> None:
    model, backend = model_and_backend
    tree_runner, text_runner = (runner_over(model, backend, share) for _ in range(2))
    exact = isinstance(tree_runner.cache, TiledCache)
    before = list(tree_runner.lengths)
    step = torch.tensor([[new, *drafts] for new, drafts in zip(NEWEST, DRAFTS, strict=True)])
    tree = tree_runner.forward(ForwardBatch(step, before, tree=verified_tree(PARENTS))).logits.clone()
    for r, path in enumerate(PATHS):
        text = step[r, path]
        for i, token in enumerate(text.tolist()):
            x = torch.zeros(3, 1, dtype=torch.long)
            x[r] = token
            lengths = [length + (i if row == r else 0) for row, length in enumerate(text_runner.lengths)]
            logits = text_runner.forward(ForwardBatch(x, lengths, [int(row == r) or 1 for row in range(3)])).logits
            assert_equal_or_close(tree[r, path[i]], logits[r, 0], exact)
        text_runner.commit(r, before[r] + len(path))
    tree_runner.commit_paths(PATHS)
    assert (
        list(tree_runner.lengths)
        == list(text_runner.lengths)
        == [length + len(path) for length, path in zip(before, PATHS, strict=True)]
    )
    if not exact:
        for r, length in enumerate(tree_runner.lengths):
            num_cached = length - tree_runner.cache.starts[r]
            ours, theirs = (runner.cache.buffer[:, :, r, :, :num_cached] for runner in (tree_runner, text_runner))
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    after = torch.tensor([[50, 51], [52, 53], [54, 55]])
    ours, theirs = (
        runner.forward(ForwardBatch(after, runner.lengths)).logits for runner in (tree_runner, text_runner)
    )
    assert_equal_or_close(ours, theirs, exact)


def assert_equal_or_close(ours: torch.Tensor, theirs: torch.Tensor, exact: bool) -> None:
    if exact:
        assert torch.equal(ours, theirs)
    else:
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_path_already_in_place_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_over(CausalModel(tiny("llama")), "pad", False)
    moved: list[Any] = []
    monkeypatch.setattr(runner.cache, "keep_all", moved.extend)
    first, second, third = runner.lengths
    runner.commit_paths([[0, 1, 2], [0]])
    assert not moved and list(runner.lengths[:2]) == [first + 3, second + 1]
    runner.commit_paths([[0, 2], [0], [1, 3]])
    assert moved == [(0, first + 3, [first + 3, first + 5]), (2, third, [third + 1, third + 3])]


def assigned(function: ast.AST) -> set[str]:
    """Return the names of the attributes that a function assigns to, directly or by item."""
    kinds = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)
    nodes: list[Any] = [node for node in ast.walk(function) if isinstance(node, kinds)]
    targets = [
        target for node in nodes for target in (node.targets if hasattr(node, "targets") else [node.target])
    ]
    return {part.attr for target in targets for part in ast.walk(target) if isinstance(part, ast.Attribute)}


def test_only_commit_changes_a_rows_length() -> None:
    places = []
    for path in sorted((ROOT / "bass_core").rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            written = (
                assigned(function) if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) else set()
            )
            if {"_lengths", "lengths"} & written:
                places.append(f"{path.relative_to(ROOT / 'bass_core')}:{function.name}")
    assert places == ["model/runner.py:__init__", "model/runner.py:commit"]


def test_lengths_change_only_with_commits() -> None:
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
def test_states_are_returned_only_on_request(kind: Any) -> None:
    model = CausalModel(tiny("llama"))
    runner = kind(model, 1, 32, model.vocab, "pad", **({"record": record_calls} if kind is GraphRunner else {}))
    tokens = torch.tensor([[5, 6]])
    output = runner.forward(ForwardBatch(tokens, [0]))
    assert output.states is None
    with pytest.raises(ValueError, match="return_states"):
        output.require_states()
    assert runner.forward(ForwardBatch(tokens, [0], return_states=True)).require_states().shape == (1, 2, 64)
    graphs._idle.clear()

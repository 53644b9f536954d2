"""What a runner commits: a row's length, and the accepted path of a tree, as if it had been fed as text.

Contract: RaggedCache and TiledCache, with and without a prefix that rows share, first in columns, then in what
the model says next; the compiled kernels give the same bits. A row's length changes in one place.
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
# Columns behind the old length: the newest token is 0, draft i is i + 1.
PATHS = [[0, 2, 4, 5], [0, 1, 2, 4, 6], [0, 3, 4, 5, 6]]
NEWEST = [40, 41, 42]


@pytest.fixture(params=["pad", "split", "sdpa", "compiled"])
def made(request: Any) -> tuple[Any, str]:
    """A model, and its way to attend."""
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


@pytest.mark.parametrize("share", [False, True], ids=["alone", "shared"])
def test_a_kept_path_is_what_was_fed_as_text(made: tuple[Any, str], share: bool) -> None:
    model, backend = made
    kept, fed = (runner_over(model, backend, share) for _ in range(2))
    exact = isinstance(kept.cache, TiledCache)
    before = list(kept.lengths)
    step = torch.tensor([[new, *drafts] for new, drafts in zip(NEWEST, DRAFTS, strict=True)])
    tree = kept.forward(ForwardBatch(step, before, tree=verified_tree(PARENTS))).logits.clone()
    for r, path in enumerate(PATHS):
        text = step[r, path]
        for at, token in enumerate(text.tolist()):
            x = torch.zeros(3, 1, dtype=torch.long)
            x[r] = token
            lengths = [length + (at if row == r else 0) for row, length in enumerate(fed.lengths)]
            logits = fed.forward(ForwardBatch(x, lengths, [int(row == r) or 1 for row in range(3)])).logits
            alike(tree[r, path[at]], logits[r, 0], exact)
        fed.commit(r, before[r] + len(path))
        kept.commit(r, before[r] + len(path), path)
    assert (
        list(kept.lengths)
        == list(fed.lengths)
        == [length + len(path) for length, path in zip(before, PATHS, strict=True)]
    )
    if not exact:
        for r, length in enumerate(kept.lengths):
            own = length - kept.cache.starts[r]
            ours, theirs = (one.cache.buffer[:, :, r, :, :own] for one in (kept, fed))
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    after = torch.tensor([[50, 51], [52, 53], [54, 55]])
    ours, theirs = (one.forward(ForwardBatch(after, one.lengths)).logits for one in (kept, fed))
    alike(ours, theirs, exact)


def alike(ours: torch.Tensor, theirs: torch.Tensor, exact: bool) -> None:
    if exact:
        assert torch.equal(ours, theirs)
    else:
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_path_that_lies_right_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_over(CausalModel(tiny("llama")), "pad", False)
    moved: list[Any] = []
    monkeypatch.setattr(runner.cache, "keep", lambda *of: moved.append(of))
    length = runner.lengths[0]
    runner.commit(0, length + 3, [0, 1, 2])
    runner.commit(1, 4)
    assert not moved and list(runner.lengths[:2]) == [length + 3, 4]
    runner.commit(0, length + 5, [0, 2])
    assert moved == [(0, length + 3, [length + 3, length + 5])]


def assigned(function: ast.AST) -> set[str]:
    """The names of the attributes that a function assigns to, whole or by item."""
    kinds = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)
    nodes: list[Any] = [node for node in ast.walk(function) if isinstance(node, kinds)]
    targets = [one for node in nodes for one in (node.targets if hasattr(node, "targets") else [node.target])]
    return {part.attr for target in targets for part in ast.walk(target) if isinstance(part, ast.Attribute)}


def test_a_rows_length_changes_in_one_place() -> None:
    """Only `commit` in model/runner.py assigns to a runner's lengths; nothing else in bass_core does."""
    places = []
    for path in sorted((ROOT / "bass_core").rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            written = (
                assigned(function) if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) else set()
            )
            if {"_lengths", "lengths"} & written:
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

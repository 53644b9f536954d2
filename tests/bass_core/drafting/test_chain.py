"""A round's greedy drafts as one captured step; on a CPU a replay calls the forward again.

Contract: the same drafts as step by step, whatever the rows' lengths; a chain is one replay, and off by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bass_core import ModelPair, generate
from bass_core.drafting.chain import ChainedModel, follow
from bass_core.engine import cuda_graphs as graphs
from bass_core.engine.cuda_graphs import GraphRunner, record_calls
from bass_core.engine.prefill import PrefillSteps
from bass_core.engine.prefix import SharedPrompts
from bass_core.engine.runner import ModelRunner
from bass_core.models.base import CausalModel
from bass_core.models.forward import ForwardBatch
from bass_core.models.llama_cuda import LlamaCuda, Plan
from tests.models import perturbed, prompts, reference, tiny


@pytest.fixture(autouse=True)
def no_idle_caches() -> Iterator[None]:
    """Captured steps that call the forward again keep their model alive; clearing the cache frees it."""
    yield
    graphs._idle.clear()


def plain(model: torch.nn.Module) -> LlamaCuda:
    """The GPU's forward, with torch's matrix products and attention instead of the Triton kernels."""
    made = LlamaCuda(model)
    made.has_kernels = False
    return made


@pytest.mark.parametrize("kind", [GraphRunner, ModelRunner])
def test_a_chain_is_its_steps(kind: type[ModelRunner]) -> None:
    """Ragged rows, replayed from other lengths and for fewer rows; the shape of four rows serves three."""
    model = plain(tiny("llama"))
    options = {"record": record_calls} if kind is GraphRunner else {}
    runner = kind(model, 4, 64, model.vocab, "pad", **options)
    eager = ModelRunner(model, 4, 64, model.vocab, "pad")
    ids = torch.randint(1, 90, (4, 9), generator=torch.Generator().manual_seed(1))
    for one in (runner, eager):
        one.forward(ForwardBatch(ids, [0, 0, 0, 0]))
    for ends in ([9, 4, 7, 2], [6, 8, 3]):
        token = ids[: len(ends), 0]
        tokens = follow(runner, token, ends, 5)
        expected = []
        for step in range(5):
            fed = ForwardBatch(token[:, None], [end + step for end in ends])
            token = eager.forward(fed).logits[:, 0].argmax(-1)
            expected.append(token)
        assert torch.equal(tokens, torch.stack(expected, dim=1))
    assert runner.model is model and runner.vocab == model.vocab
    if kind is GraphRunner:
        assert [key[5] for key in runner.slot.steps if isinstance(key[5], tuple)] == [(Plan(), 5, model.vocab)]


def test_a_chain_reads_what_its_rows_share() -> None:
    head = list(range(1, 33))
    texts = [head + [5], head + [6, 7]]
    model = plain(tiny("llama"))
    found = []
    for kind, options in ((GraphRunner, {"record": record_calls}), (ModelRunner, {})):
        runner = kind(model, 2, 16, model.vocab, "pad", shared=SharedPrompts((tuple(head),)), **options)
        prefill = PrefillSteps(runner, texts)
        while not prefill.done:
            prefill.step()
        found.append(follow(runner, torch.tensor([8, 9]), list(runner.lengths), 5))
    assert torch.equal(*found)


def test_a_chain_that_has_no_room_is_none() -> None:
    model = plain(tiny("llama"))
    runner = GraphRunner(model, 2, 250, model.vocab, "pad", record=record_calls)
    token = torch.ones(2, dtype=torch.long)
    assert follow(runner, token, [3, 252], 5) is None and follow(runner, token, [3, 9], 0) is None
    assert follow(runner, token, [3, 251], 5).shape == (2, 5)


def test_a_chain_that_cannot_be_captured_runs_step_by_step() -> None:
    model = plain(tiny("llama"))

    def refuse(forward: object) -> object:
        raise RuntimeError("operation not permitted when stream is capturing")

    token = torch.tensor([7])
    runner = GraphRunner(model, 1, 64, model.vocab, "pad", record=refuse)
    tokens = follow(runner, token, [0], 4)
    assert not model.capturable and not ChainedModel(model, 3, 90).capturable
    assert torch.equal(tokens, follow(ModelRunner(model, 1, 64, model.vocab, "pad"), token, [0], 4))


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_texts_and_acceptance_are_the_same(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole lanes. With noise 0 the draft is the target and always accepted; stale lengths would end that."""
    model = tiny("llama")
    pair = ModelPair(model, perturbed(model, noise) if noise else model)
    rows = prompts(3)
    made: list[GraphRunner] = []

    def make(model_: CausalModel, *arguments: object, **rest: Any) -> object:
        made.append(GraphRunner(model_, *arguments, record=record_calls, **rest))
        return made[-1]

    monkeypatch.setattr("bass_core.engine.cuda_graphs.make_runner", make)
    found = []
    for chain in (False, True):
        pair.draft_step = plain(pair.draft)
        pair.draft_step.plan = Plan(chain=chain)
        made.clear()
        out = generate(pair, rows, max_new_tokens=14, draft_length=4, eos_token_id=None, drafter="model")
        found.append(([row.token_ids for row in out.sequences], out.metrics.acceptance_rate))
        chained = [key for runner in made for key in runner.slot.steps if isinstance(key[5], tuple)]
        assert bool(chained) == chain
    assert found[0] == found[1]
    assert found[0][0] == [reference(model, row, 14) for row in rows]
    assert noise or found[0][1] == 1.0

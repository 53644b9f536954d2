"""A target split over two devices writes the CPU's texts; methods that can't follow it are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import nn
from transformers import PreTrainedModel

from bass_core import ModelPair, PairError, RequestError, SamplingParams, generate, race
from bass_core.model.weights.placement import home_device, is_split, places
from tests.support.models import BUILDERS, STATEFUL, perturbed, prompts, texts_of, tiny, tiny_head

pytestmark = pytest.mark.slow

ROWS = prompts(3)
TEXT: dict[str, Any] = {"max_new_tokens": 8, "draft_length": 3, "eos_token_id": None}
FIRST, SECOND = "emul:0", "emul:1"


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy whose last layer, last norm and head are on the second device."""
    model = copy.deepcopy(model)
    lists = [f"{name}." for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    layers = [
        name + str(index) for name in lists for index in range(model.config.get_text_config().num_hidden_layers)
    ]
    # Keep each layer on one device, because a layer passes some inputs to several of its parts.
    rest = [
        name
        for name, part in model.named_modules()
        if not any(True for _ in part.children()) and not name.startswith(tuple(lists))
    ]
    head = next(name for name, part in model.named_modules() if part is model.get_output_embeddings())
    second = [layers[-1], head, *(name for name in rest if name.endswith(("norm", "ln_f")))]
    return dispatch_model(model, {name: SECOND if name in second else FIRST for name in layers + rest}, FIRST)


def written(pair: ModelPair, **options: Any) -> list[list[int]]:
    return texts_of(generate(pair, ROWS, **TEXT, **options))


def test_models_with_states_are_refused() -> None:
    with pytest.raises(PairError, match="another forward than their class"):
        ModelPair(spread(tiny("qwen3_5")))


@pytest.mark.parametrize("name", [name for name in BUILDERS if name not in STATEFUL])
def test_texts_equal_the_cpus(name: str) -> None:
    target, draft = tiny(name), perturbed(tiny(name), 0.03)
    split = spread(target)
    pair = ModelPair(split, copy.deepcopy(draft).to(FIRST))
    assert is_split(split) and places(split) == [FIRST, SECOND] and str(pair.device) == FIRST
    assert {str(weight.device) for weight in split.parameters()} == {FIRST, SECOND}
    for method, temperature in (("regular", 0.9), ("speculative", 0.0), ("bass", 0.0), ("bass", 0.9)):
        options = {"method": method, "sampling": SamplingParams(temperature)}
        assert written(pair, **options) == written(ModelPair(target, draft), **options)


def test_a_race_runs_without_graphs_or_utilisation() -> None:
    pair = ModelPair(spread(tiny("llama")), perturbed(tiny("llama"), 0.03).to(FIRST))
    assert not pair.target_step.capturable
    *_, last = race(pair, ROWS, **TEXT)
    for lane in last["lanes"].values():
        assert lane["error"] is None and lane["metrics"]["bandwidth_utilization"] is None
        assert lane["metrics"]["flops_utilization"] is None


def test_prompts_share_a_prefix() -> None:
    shared = [[1 + i % 90 for i in range(60)] + [row] for row in (5, 6, 7)]
    target = tiny("llama")
    split = ModelPair(spread(target))
    split.target_step.min_shared_tokens = 1
    split_texts, cpu_texts = (
        texts_of(generate(pair, shared, max_new_tokens=6, eos_token_id=None))
        for pair in (split, ModelPair(target))
    )
    assert split_texts == cpu_texts


@pytest.mark.parametrize("method", ["amusd", "transformers"])
def test_methods_that_cannot_follow_are_refused(method: str) -> None:
    pair = ModelPair(spread(tiny("llama")), perturbed(tiny("llama"), 0.03).to(FIRST))
    with pytest.raises(RequestError, match=r"can't follow a target that is split over several devices: .*\.$"):
        generate(pair, ROWS, method=method)


def test_a_draft_head_is_refused() -> None:
    head = tiny_head(tiny("llama"))
    with pytest.raises(PairError, match="A draft head can't follow"):
        ModelPair(spread(tiny("llama")), head)


def test_a_model_on_one_device_is_not_split() -> None:
    model = dispatch_model(copy.deepcopy(tiny("llama")), {"": FIRST})
    assert not is_split(model) and home_device(model) == torch.device(FIRST)

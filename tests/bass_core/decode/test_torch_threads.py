"""No round on a CPU runs a torch operation large enough to be split among torch's threads.

torch splits operations on at least 32,768 numbers (at::internal::GRAIN_SIZE). Between our compiled calls, waiting
for torch's threads takes longer than the operation, and much longer if the cores have other work.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM

from bass_core import ModelPair, SamplingParams
from bass_core.decode.request import make_request
from bass_core.lanes.lane import Lane
from bass_core.machine import cpu_kernels
from tests.support.models import tiny, tiny_head

if not cpu_kernels.available():
    pytest.skip("numba is not there", allow_module_level=True)

SPLIT_SIZE, VOCAB, HEAD_VOCAB = 32_768, 40_000, 33_000
# FREE operations only allocate; FEW read only as many numbers as they return.
FREE, FEW = ("empty", "lift_fresh"), ("gather", "index", "embedding")
NUCLEUS = SamplingParams(0.7, top_p=0.95)


class SplitCounter(TorchDispatchMode):
    """Counts the operations that torch would split."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output, name = func(*args, **(kwargs or {})), str(func).split(".")[1]
        read, written = (
            [tensor for tensor in tree_leaves(values) if isinstance(tensor, torch.Tensor)]
            for values in ((args, kwargs), output)
        )
        storages = {tensor.untyped_storage().data_ptr() for tensor in read}
        view = not func._schema.is_mutable and any(
            tensor.untyped_storage().data_ptr() in storages for tensor in written
        )
        numbers = max((tensor.numel() for tensor in (written if name in FEW else read + written)), default=0)
        if not view and not name.startswith(FREE) and numbers >= SPLIT_SIZE:
            self.seen[str(func)] += 1
        return output


def model(seed: int) -> LlamaForCausalLM:
    return tiny("llama", seed, scale=4, vocab_size=VOCAB).to(torch.bfloat16)


@cache
def pair(draft: str) -> ModelPair:
    target = model(0)
    if draft == "model":
        return ModelPair(target, model(1))
    return ModelPair(target, tiny_head(target, reads_layers=(0,), size=HEAD_VOCAB).to(torch.bfloat16))


CASES: list[tuple[str, str, SamplingParams, dict[str, Any]]] = [
    ("head", "regular", SamplingParams(), {}),
    ("head", "regular", NUCLEUS, {}),
    ("head", "bass", SamplingParams(), {}),
    ("head", "bass", NUCLEUS, {}),
    ("head", "bass", SamplingParams(0.8, top_k=30, min_p=0.01), {"verification": "rejection"}),
    ("head", "bass", NUCLEUS, {"verification": "coupled"}),
    ("head", "bass", SamplingParams(0.7, repetition_penalty=1.2, presence_penalty=0.3), {}),
    ("head", "bass", NUCLEUS, {"draft_length": None, "tree": (2, 2)}),
    ("head", "bass", NUCLEUS, {"drafter": "adaptive"}),
    ("head", "bass", NUCLEUS, {"inspect": True}),
    ("model", "bass", SamplingParams(), {}),
    ("model", "bass", NUCLEUS, {}),
    ("model", "bass", SamplingParams(0.7, frequency_penalty=0.3), {}),
    ("model", "speculative", NUCLEUS, {}),
    ("model", "amusd", NUCLEUS, {}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_round_splits_nothing_among_torchs_threads(case: Any) -> None:
    draft, method, sampling, options = case
    options = {"draft_length": 3} | options if method != "regular" else options
    options = {name: value for name, value in options.items() if value is not None}
    prompts = [[row + 1, *[5, 6, 7, 8] * 3] for row in range(4)]
    request = make_request(
        pair(draft), prompts, sampling=sampling, max_new_tokens=30, eos_token_id=None, **options
    )
    lane = Lane(pair(draft), request, method)
    while lane.step().kind == "prefill":
        pass
    with SplitCounter() as counter:
        for _ in range(4):
            lane.step()
    assert not counter.seen


def test_an_operation_over_a_vocabulary_is_counted() -> None:
    with SplitCounter() as counter:
        torch.zeros(VOCAB).exp()
        torch.ones(4).exp()
    assert counter.seen == {"aten.zeros.default": 1, "aten.exp.default": 1}

"""No round on a CPU waits for torch's threads: torch computes nothing that it would share among them.

torch shares an operation over 32,768 numbers or more (at::internal::GRAIN_SIZE). Its threads wait for each other,
which between our own compiled calls costs more than the operation, and much more beside other work.
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

SHARED, VOCAB, KNOWN = 32_768, 40_000, 33_000
# They only allocate, or read as many numbers as they return.
FREE, FEW = ("empty", "lift_fresh"), ("gather", "index", "embedding")
NUCLEUS = SamplingParams(0.7, top_p=0.95)


class Shared(TorchDispatchMode):
    """Counts the operations that torch would share."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, name = func(*args, **(kwargs or {})), str(func).split(".")[1]
        read, written = (
            [one for one in tree_leaves(some) if isinstance(one, torch.Tensor)] for some in ((args, kwargs), made)
        )
        places = {one.untyped_storage().data_ptr() for one in read}
        view = not func._schema.is_mutable and any(one.untyped_storage().data_ptr() in places for one in written)
        numbers = max((one.numel() for one in (written if name in FEW else read + written)), default=0)
        if not view and not name.startswith(FREE) and numbers >= SHARED:
            self.seen[str(func)] += 1
        return made


def model(seed: int) -> LlamaForCausalLM:
    return tiny("llama", seed, scale=4, vocab_size=VOCAB).to(torch.bfloat16)


@cache
def pair(draft: str) -> ModelPair:
    target = model(0)
    if draft == "model":
        return ModelPair(target, model(1))
    return ModelPair(target, tiny_head(target, reads_layers=(0,), size=KNOWN).to(torch.bfloat16))


WAYS: list[tuple[str, str, SamplingParams, dict[str, Any]]] = [
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


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_round_shares_nothing_among_torch_s_threads(way: Any) -> None:
    draft, method, sampling, options = way
    options = {"draft_length": 3} | options if method != "regular" else options
    options = {name: value for name, value in options.items() if value is not None}
    prompts = [[row + 1, *[5, 6, 7, 8] * 3] for row in range(4)]
    request = make_request(
        pair(draft), prompts, sampling=sampling, max_new_tokens=30, eos_token_id=None, **options
    )
    lane = Lane(pair(draft), request, method)
    while lane.step().kind == "prefill":
        pass
    with Shared() as shared:
        for _ in range(4):
            lane.step()
    assert not shared.seen


def test_an_operation_over_a_vocabulary_is_seen() -> None:
    with Shared() as shared:
        torch.zeros(VOCAB).exp()
        torch.ones(4).exp()
    assert shared.seen == {"aten.zeros.default": 1, "aten.exp.default": 1}

"""The caller's global torch settings change no lane's text, and are restored afterwards.

Each setting is tried in this process, with a draft model and with a draft head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from bass_core import ModelPair, SamplingParams, generate, race
from bass_core.machine.torch_state import torch_defaults
from tests.support.models import perturbed, prompts, texts_of, tiny, tiny_head

ROWS = prompts(2)
METHODS = ("regular", "speculative", "bass", "amusd", "transformers")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def precision(name: str) -> Iterator[None]:
    torch.set_float32_matmul_precision(name)
    try:
        yield
        assert torch.get_float32_matmul_precision() == name
    finally:
        torch.set_float32_matmul_precision("highest")


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "another device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic": deterministic,
    "low precision": lambda: precision("medium"),
    "three threads": lambda: threads(3),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
}


@cache
def models(dtype: torch.dtype) -> tuple[Any, Any]:
    target = tiny("llama").to(dtype)
    return target, perturbed(target, 0.03)


def texts(dtype: torch.dtype, draft: str, setting: Callable[[], AbstractContextManager[Any]]) -> list[Any]:
    """Return the texts of all methods, greedy and coupled, with every call made under `setting`."""
    target, model = models(dtype)
    head = tiny_head(target).to(dtype)
    written = []
    for sampling in (SamplingParams(), SamplingParams(0.8, repetition_penalty=1.2, logit_bias={3: 0.5})):
        with setting():
            pair = ModelPair(target, head if draft == "head" else model)
            for method in METHODS[: None if sampling.greedy else -1]:
                coupled = {} if sampling.greedy else {"verification": "coupled"}
                options: Any = {"max_new_tokens": 8, "eos_token_id": None, "draft_length": 3, **coupled}
                out = generate(pair, ROWS, method=method, sampling=sampling, **options)
                written.append(texts_of(out))
    with setting():
        *_, last = race(pair, ROWS, lanes=("regular", "bass"), max_new_tokens=6, scheduling="overlap")
        written += [[row["token_ids"] for row in lane["sequences"]] for lane in last["lanes"].values()]
    return written


QUICK = ("head", torch.bfloat16)
EACH = [
    pytest.param(*kind, state, marks=() if kind == QUICK else pytest.mark.slow)
    for kind in product(["model", "head"], [torch.float32, torch.bfloat16])
    for state in STATES
]


@pytest.mark.parametrize(("draft", "dtype", "state"), EACH)
def test_a_callers_setting_changes_no_text(state: str, dtype: torch.dtype, draft: str) -> None:
    without = expected(dtype, draft)
    assert texts(dtype, draft, STATES[state]) == without


@cache
def expected(dtype: torch.dtype, draft: str) -> list[Any]:
    return texts(dtype, draft, nullcontext)


def test_the_callers_default_dtype_is_restored_after_the_last_block() -> None:
    with default_dtype(torch.float64):
        first, second = torch_defaults(), torch_defaults()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert torch.get_default_dtype() == torch.float32
        second.__exit__(None, None, None)
        assert torch.get_default_dtype() == torch.float64


def test_ctrl_c_at_the_start_of_a_block_leaves_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    set_dtype, calls = torch.set_default_dtype, []

    def interrupted(dtype: torch.dtype) -> None:
        calls.append(dtype)
        if len(calls) == 1:
            raise KeyboardInterrupt
        set_dtype(dtype)

    with default_dtype(torch.float64), monkeypatch.context() as patch:
        patch.setattr(torch, "set_default_dtype", interrupted)
        with pytest.raises(KeyboardInterrupt), torch_defaults():
            pass
        with torch_defaults():
            assert torch.get_default_dtype() == torch.float32
        assert torch.get_default_dtype() == torch.float64


def test_torchs_older_settings_can_be_read_in_a_block() -> None:
    """torch refuses to read them if they contradict the settings per device."""
    with precision("high"):
        with torch_defaults():
            assert not torch.backends.cuda.matmul.allow_tf32
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cuda.matmul.allow_tf32

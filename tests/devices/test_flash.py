"""flash-attn is timed against our kernel on the emulated device, whose time is the number of operations.

Both kernels are fakes that run as many operations as they are to cost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bass_core.machine import capture
from bass_core.model import flash
from bass_core.model.flash import attention_words, measure_flash
from kernels.backends import BACKENDS, LONG_COLUMNS, shape_key

HEADS = (4, 2, 16)
# The number of operations of a call, given its query, its keys, and the number of calls so far.
Cost = Callable[[Tensor, Tensor], int]
Kinds = set[str]


class Kernel:
    """A kernel that returns its queries after a number of operations.

    Attributes:
        calls: how often Python called it for each kind of step; a replay doesn't.
    """

    def __init__(self, cost: Cost) -> None:
        self.cost, self.calls = cost, dict.fromkeys(flash.STEPS, 0)

    def __call__(self, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Tensor:
        self.calls[shape_key(query, key)[-1]] += 1
        out = query
        for _ in range(self.cost(query, key)):
            out = out * 1.0
        return out.transpose(1, 2)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, accelerator: torch.device) -> Callable[..., Kinds]:
    """Return a function that times flash-attn, which has the given cost, against a kernel of three operations.

    It returns the kinds of steps that flash-attn serves.
    """
    monkeypatch.delenv("BASS_MEASURE")
    monkeypatch.setattr(flash, "FLASH_FASTER", set())
    for name, count in (("CALLS", 2), ("_WARM_UPS", 1), ("_REPEATS", 1)):
        monkeypatch.setattr(flash, name, count)
    monkeypatch.setattr(flash, "why_backend_unavailable", lambda *_: None)
    monkeypatch.setattr(capture, "_failed", False)

    def measure(kernel: Any) -> Kinds:
        monkeypatch.setitem(BACKENDS, "fused", Kernel(lambda query, key: 3))
        monkeypatch.setitem(BACKENDS, "flash", kernel)
        measure_flash(accelerator, torch.float32, *HEADS)
        assert all(key[:-1] == (accelerator, torch.float32, *HEADS) for key in flash.FLASH_FASTER)
        return {key[-1] for key in flash.FLASH_FASTER}

    return measure


def test_rounds_are_timed_as_replays_and_prompts_as_calls(measured: Callable[..., Kinds]) -> None:
    kernel = Kernel(lambda query, key: 2 if query.shape[2] <= 64 else 4)
    assert measured(kernel) == {"rounds"}
    # Per step: a call that compiles, one in which waits are refused, and a graph, which is run and then recorded.
    # Three more calls compare bits.
    assert kernel.calls["rounds"] == 3 * (2 + 2 * flash.CALLS) + 3
    assert kernel.calls["prompts"] == flash.CALLS * (flash._WARM_UPS + flash._REPEATS)


@pytest.mark.parametrize(
    ("cost", "kinds"),
    [
        (lambda query, key: 2, {"prompts", "long prompts", "rounds"}),
        (lambda query, key: 3, set()),
        (lambda query, key: 2 if key.shape[2] > LONG_COLUMNS and query.shape[2] > 64 else 4, {"long prompts"}),
        # A batch of one row, with long texts, is slow.
        (lambda query, key: 2 + (query.shape[0] == 1) * (query.shape[2] < 64) * 2, {"prompts", "long prompts"}),
    ],
)
def test_it_serves_the_kinds_of_steps_in_which_it_is_always_faster(
    cost: Cost, kinds: Kinds, measured: Callable[..., Kinds], accelerator: torch.device
) -> None:
    assert measured(Kernel(cost)) == kinds
    words = attention_words("mixed", accelerator, torch.float32, HEADS)
    assert words.startswith("our kernel")
    assert all((kind in words) is (kind in kinds) for kind in ("rounds", "long prompts"))


@pytest.mark.parametrize("dependence", [lambda query: query.shape[2], lambda query: query.shape[0]])
def test_it_serves_no_rounds_if_bits_depend_on_the_step_or_on_other_rows(
    dependence: Callable[[Tensor], int], measured: Callable[..., Kinds]
) -> None:
    kernel = Kernel(lambda query, key: 1)

    def uneven(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Tensor:
        return kernel(query, key) + 1e-6 * dependence(query)

    assert measured(uneven) == {"prompts", "long prompts"}


@pytest.mark.parametrize(("name", "value"), [("BASS_MEASURE", "0"), ("SPACES_ZERO_GPU", "true")])
def test_nothing_is_timed_if_measuring_is_off(
    name: str, value: str, measured: Callable[..., Kinds], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    kernel = Kernel(lambda query, key: 1)
    assert not measured(kernel) and not any(kernel.calls.values())


def test_without_graphs_rounds_are_timed_as_calls(
    measured: Callable[..., Kinds], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BASS_GRAPHS", "0")
    kernel = Kernel(lambda query, key: 2)
    assert "rounds" in measured(kernel)
    assert kernel.calls["rounds"] == 3 * flash.CALLS * (flash._WARM_UPS + flash._REPEATS) + 3


def test_a_kernel_that_raises_is_logged_and_not_used(
    measured: Callable[..., Kinds], caplog: pytest.LogCaptureFixture
) -> None:
    def failing(query: Tensor, *rest: Any, **options: Any) -> Tensor:
        if query.shape[2] <= 64:
            raise AssertionError("no heads\nof 16")
        return query.transpose(1, 2)

    with caplog.at_level(logging.WARNING):
        assert not measured(failing)
    assert caplog.messages == ["flash-attn is not used, since it can't be timed here: no heads of 16"]


def test_a_kernel_that_waits_is_not_used_and_breaks_no_capture(
    measured: Callable[..., Kinds], caplog: pytest.LogCaptureFixture
) -> None:
    def waiting(query: Tensor, *rest: Any, **options: Any) -> Tensor:
        return query.transpose(1, 2) * query.sum().item()

    assert not measured(waiting)
    assert len(caplog.messages) == 1 and not capture.failed()

"""flash-attn is timed against our kernel, here with fakes that only sleep."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch

from bass_core.model import attention
from bass_core.model.attention import BACKENDS, measure_flash

CPU, HEADS = torch.device("cpu"), (4, 2, 16)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fake both kernels and list their calls: ours is 2 ms slower for prompts, flash-attn for short queries."""
    calls_so_far: list[str] = []

    def fused(query: torch.Tensor, *rest: Any, **options: Any) -> None:
        calls_so_far.append("fused")
        time.sleep(0.002 * (query.shape[2] > 64))

    def flash(query: torch.Tensor, *rest: Any, **options: Any) -> None:
        calls_so_far.append("flash")
        time.sleep(0.002 * (query.shape[2] <= 64))

    monkeypatch.delenv("BASS_MEASURE")
    monkeypatch.setattr(attention, "FLASH_FASTER", set())
    monkeypatch.setattr(attention, "why_backend_unavailable", lambda *_: None)
    monkeypatch.setitem(BACKENDS, "fused", fused)
    monkeypatch.setitem(BACKENDS, "flash", flash)
    return calls_so_far


def test_flash_attn_is_used_only_where_it_was_faster(calls: list[str]) -> None:
    measure_flash(CPU, torch.float32, *HEADS)
    assert {"fused", "flash"} == set(calls)
    assert {(CPU, torch.float32, *HEADS, True)} == attention.FLASH_FASTER


@pytest.mark.parametrize(("name", "value"), [("BASS_MEASURE", "0"), ("SPACES_ZERO_GPU", "true")])
def test_nothing_is_timed_if_measuring_is_off(
    name: str, value: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    measure_flash(CPU, torch.float32, *HEADS)
    assert not calls and not attention.FLASH_FASTER


def test_a_kernel_that_fails_is_logged_and_not_used(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing_kernel(query: torch.Tensor, *rest: Any, **options: Any) -> None:
        if query.shape[2] <= 64:
            raise RuntimeError("out\nof memory")

    monkeypatch.setitem(BACKENDS, "flash", failing_kernel)
    with caplog.at_level(logging.WARNING):
        measure_flash(CPU, torch.float32, *HEADS)
    assert not attention.FLASH_FASTER
    assert caplog.messages == ["flash-attn is not used, since it can't be timed here: out of memory"]

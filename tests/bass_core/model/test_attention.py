"""When flash-attn is timed against our kernel, by kernels that only take their time."""

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
    """Both kernels seem to be there; says which ran. Our own takes 2 ms longer, for prompts alone."""
    seen: list[str] = []

    def ours(query: torch.Tensor, *rest: Any, **options: Any) -> None:
        seen.append("fused")
        time.sleep(0.002 * (query.shape[2] > 64))

    def other(query: torch.Tensor, *rest: Any, **options: Any) -> None:
        seen.append("flash")
        time.sleep(0.002 * (query.shape[2] <= 64))

    monkeypatch.delenv("BASS_MEASURE")
    monkeypatch.setattr(attention, "FLASH_FASTER", set())
    monkeypatch.setattr(attention, "why_backend_unavailable", lambda *_: None)
    monkeypatch.setitem(BACKENDS, "fused", ours)
    monkeypatch.setitem(BACKENDS, "flash", other)
    return seen


def test_it_serves_what_it_was_faster_for(calls: list[str]) -> None:
    measure_flash(CPU, torch.float32, *HEADS)
    assert {"fused", "flash"} == set(calls)
    assert {(CPU, torch.float32, *HEADS, True)} == attention.FLASH_FASTER


@pytest.mark.parametrize(("name", "value"), [("BASS_MEASURE", "0"), ("SPACES_ZERO_GPU", "true")])
def test_nothing_is_timed_where_that_is_off(
    name: str, value: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    measure_flash(CPU, torch.float32, *HEADS)
    assert not calls and not attention.FLASH_FASTER


def test_a_kernel_that_fails_is_one_line_and_not_used(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(query: torch.Tensor, *rest: Any, **options: Any) -> None:
        if query.shape[2] <= 64:
            raise RuntimeError("out\nof memory")

    monkeypatch.setitem(BACKENDS, "flash", fails)
    with caplog.at_level(logging.WARNING):
        measure_flash(CPU, torch.float32, *HEADS)
    assert not attention.FLASH_FASTER
    assert caplog.messages == ["flash-attn is not used, since it can't be timed here: out of memory"]

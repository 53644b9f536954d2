"""flash-attn: the version that is chosen, and its arguments.

Stub modules take the place of the packages. Their functions take the real arguments and compute the reference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import backends, flash
from kernels.backends import BACKENDS
from kernels.flash import VERSIONS, version_for
from kernels.plan import AttentionPlan
from kernels.support import capability

CPU = torch.device("cpu")
KV_CACHE = "flash_attn_with_kvcache"
Calls = list[tuple[str, dict[str, Any]]]


def _reference(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scaling: float, window: int | None, softcap: float
) -> Tensor:
    """Attend with [B, S, H, D] tensors, whose rows have int32 `lengths` columns with the new tokens."""
    assert lengths.dtype == torch.int32
    count = query.shape[1]
    plan = AttentionPlan(lengths.long() - count, (lengths - count).tolist(), count)
    states = (x.transpose(1, 2) for x in (query, key[:, : plan.extent], value[:, : plan.extent]))
    return BACKENDS["pad"](*states, plan, scaling=scaling, window=window, softcap=softcap or None)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Calls]]:
    """Return a function that installs modules by name, and returns the calls of their functions."""
    calls: Calls = []

    def with_kvcache(name: str) -> Callable[..., Tensor]:
        def function(
            q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any = None, v: Any = None, *, cache_seqlens: Tensor,
            softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float, num_splits: int = 0,
        ) -> Tensor:  # fmt: skip
            calls.append((name, {"queries": q.shape[1], "lengths": cache_seqlens, "num_splits": num_splits}))
            assert causal and window_size[1] == (-1 if window_size[0] < 0 else 0)
            window = None if window_size[0] < 0 else window_size[0] + 1
            return _reference(q, k_cache, v_cache, cache_seqlens, softmax_scale, window, softcap)

        return function

    def varlen(
        q: Tensor, k: Tensor, v: Tensor, qv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, *,
        seqused_k: Tensor, softmax_scale: float, causal: bool, window_size: tuple[int | None, int | None],
        softcap: float, num_splits: int = 1,
    ) -> tuple[Tensor, None]:  # fmt: skip
        calls.append(("flash_attn.cute", {"queries": q.shape[1], "lengths": seqused_k, "num_splits": num_splits}))
        assert causal and window_size[1] == (None if window_size[0] is None else 0)
        window = None if window_size[0] is None else window_size[0] + 1
        return _reference(q, k, v, seqused_k, softmax_scale, window, softcap), None

    def install(*names: str) -> Calls:
        flash._function.cache_clear()
        for name in {name for version in VERSIONS for name in version.modules}:
            module = ModuleType(name) if name in names else None
            if module is not None and name == "flash_attn.cute":
                module.flash_attn_varlen_func = varlen  # type: ignore[attr-defined]
            elif module is not None:
                setattr(module, KV_CACHE, with_kvcache(name))
            # None makes the import fail.
            monkeypatch.setitem(sys.modules, name, module)
        if "flash_attn.cute" in names and "flash_attn" not in names:
            # Only flash-attn 4: a namespace without the function of flash-attn 2.
            monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
        calls.clear()
        return calls

    yield install
    flash._function.cache_clear()


def test_the_newest_version_for_the_gpu_is_chosen(
    installed: Callable[..., Calls], monkeypatch: pytest.MonkeyPatch
) -> None:
    third, fourth, second = "flash_attn_3.flash_attn_interface", "flash_attn.cute", "flash_attn"
    for names, capability_, chosen in (
        ((third, fourth, second), 90, "flash-attn 3"),
        (("flash_attn_interface", second), 90, "flash-attn 3"),
        ((third, fourth, second), 80, "flash-attn 4"),
        ((third, fourth), 100, "flash-attn 4"),
        ((fourth,), 120, "flash-attn 4"),
        ((fourth,), 75, None),
        ((second,), 90, "flash-attn 2"),
        ((), 90, None),
    ):
        installed(*names)
        monkeypatch.setattr(flash, "capability", lambda device, capability_=capability_: capability_)
        version = version_for(CPU)
        assert (version and version.name) == chosen, (names, capability_)


def test_a_broken_installation_is_not_used(
    monkeypatch: pytest.MonkeyPatch, installed: Callable[..., Calls]
) -> None:
    calls = installed("flash_attn")

    def import_module(name: str) -> ModuleType:
        if name == "flash_attn.cute":
            raise TypeError("made for another cutlass")
        return sys.modules[name]

    monkeypatch.setattr(flash, "import_module", import_module)
    version = version_for(CPU)
    assert not calls and version is not None and version.name == "flash-attn 2"


@pytest.mark.parametrize(
    ("module", "capability_"), [("flash_attn", 80), ("flash_attn_interface", 90), ("flash_attn.cute", 90)]
)
def test_its_result_is_the_references(
    module: str, capability_: int, installed: Callable[..., Calls], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are never split, so that a row's bits don't depend on the number of its new tokens."""
    calls = installed(module)
    monkeypatch.setattr(flash, "capability", lambda device: capability_)
    torch.manual_seed(0)
    keys, values = torch.randn(2, 3, 2, 43, 16)
    for queries, window, softcap in ((3, None, None), (3, 7, None), (1, None, 20.0), (1, 7, None)):
        # A row without cached tokens: flash-attn 3's second query sees nothing.
        plan = AttentionPlan(torch.tensor([7, 40, 0]), [7, 40, 0], queries)
        query = torch.randn(3, 4, queries, 16)
        options: dict[str, Any] = {"scaling": 0.3, "window": window, "softcap": softcap}
        expected = BACKENDS["pad"](query, keys[:, :, : plan.extent], values[:, :, : plan.extent], plan, **options)
        for _ in range(2):
            ours = BACKENDS["flash"](query, keys, values, plan, **options)
            torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
        # Lengths are computed once per step.
        (name, first), (_, second) = calls
        assert name == module and first["lengths"] is second["lengths"] and first["num_splits"] == 1
        # flash-attn 3 is never called with a single query.
        assert first["queries"] == (max(2, queries) if module == "flash_attn_interface" else queries)
        calls.clear()


def test_mixed_uses_flash_only_where_it_is_faster_and_supported(
    installed: Callable[..., Calls], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = installed("flash_attn")
    monkeypatch.setattr(backends, "FLASH_FASTER", set())
    torch.manual_seed(0)
    query, (keys, values) = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 2, 43, 16)
    for window in (None, 7):
        options: dict[str, Any] = {"scaling": 0.3, "window": window}
        plan = AttentionPlan(torch.tensor([7, 40]), [7, 40], 3)
        backends.FLASH_FASTER.clear()
        expected = backends.mixed(query, keys, values, plan, **options)
        assert not seen
        backends.FLASH_FASTER.add(backends.shape_key(query, keys))
        torch.testing.assert_close(
            backends.mixed(query, keys, values, plan, **options), expected, atol=1e-5, rtol=1e-5
        )
        assert seen.pop()[1]["lengths"].tolist() == [10, 43]
    # Our kernel runs steps with a gap, because flash does not support them, and prompts, because flash was not
    # faster for them.
    backends.mixed(query, keys, values, AttentionPlan(torch.tensor([7, 40]), [7, 40], 3, gap=64), scaling=0.3)
    prompt = AttentionPlan(torch.tensor([0]), [0], 65)
    backends.mixed(torch.randn(1, 4, 65, 16), *torch.randn(2, 1, 2, 65, 16), prompt, scaling=0.3)
    assert not seen


def test_a_kind_of_step_follows_from_its_tokens_and_columns() -> None:
    shapes = {"rounds": (64, 5000), "prompts": (65, 2048), "long prompts": (65, 2049)}
    for kind, (queries, columns) in shapes.items():
        key = backends.shape_key(torch.empty(1, 4, queries, 16), torch.empty(1, 2, columns, 16))
        assert key == (CPU, torch.float32, 4, 2, 16, kind)


def test_a_device_without_capability_counts_as_ampere() -> None:
    assert capability(CPU) == 80

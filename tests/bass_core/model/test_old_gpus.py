"""The dtype, attention and matrix products that are chosen for a GPU's compute capability.

Nothing is launched; the tests set the compute capability.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from bass_core import RequestError
from bass_core.machine import cpu_kernels
from bass_core.model import llama_cuda as gpu_model
from bass_core.model.attention import choose_backend
from bass_core.model.llama_cuda import LlamaCuda, ProductPlan
from bass_core.model.loading import catalogue
from bass_core.model.loading.catalogue import default_dtype, pick_dtype
from kernels import backends as ragged_attention
from kernels.support import why_unavailable
from tests.support.models import tiny

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
T4, AMPERE, HOPPER = (7, 5), (8, 0), (9, 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the compute capability, and whether Triton and flash-attn are installed."""
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("CC", "cc")

    def set_gpu(capability: tuple[int, int], triton: bool = True, flash: Any = None) -> None:
        why_unavailable.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr("kernels.support.find_spec", lambda name: triton or None)
        monkeypatch.setattr("kernels.support._why_no_driver", lambda: None)
        monkeypatch.setattr(ragged_attention, "version_for", lambda device: flash)

    yield set_gpu
    why_unavailable.cache_clear()


def test_a_t4_runs_float16_and_a_cpu_without_bfloat16_float32(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, dtype in ((T4, torch.float16), (AMPERE, torch.bfloat16), (HOPPER, torch.bfloat16)):
        gpu(capability)
        assert default_dtype(CUDA) == pick_dtype("auto", CUDA) == dtype
        # A dtype that the user or a catalogue entry names is kept.
        assert pick_dtype("bfloat16", CUDA) == torch.bfloat16
    for kernels, native in product((True, False), repeat=2):
        monkeypatch.setattr(cpu_kernels, "available", lambda kernels=kernels: kernels)
        monkeypatch.setattr(catalogue, "native_bfloat16", lambda native=native: native)
        assert default_dtype(CPU) == (torch.bfloat16 if kernels or native else torch.float32)


def test_without_a_c_compiler_attention_is_torchs(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton itself would notice the missing compiler only at its first launch.
    monkeypatch.delenv("CC")
    for compiler, chosen in ((None, "sdpa"), ("/usr/bin/clang", "fused")):
        monkeypatch.setattr("shutil.which", lambda name, compiler=compiler: compiler if name == "clang" else None)
        gpu(HOPPER)
        assert choose_backend("auto", CUDA, torch.float16) == chosen
        assert ("install gcc or clang" in str(why_unavailable(CUDA))) is (compiler is None)


def test_auto_attention_is_the_fastest_backend_of_the_device(gpu: Any) -> None:
    half, flash = torch.float16, object()
    for capability, triton, symbol, chosen in (
        (HOPPER, True, flash, "mixed"),
        (AMPERE, True, None, "fused"),
        (HOPPER, False, flash, "flash"),
        (HOPPER, False, None, "sdpa"),
        (T4, True, flash, "sdpa"),
        (T4, False, flash, "sdpa"),
    ):
        gpu(capability, triton, symbol)
        assert choose_backend("auto", CUDA, half) == chosen
        assert choose_backend("auto", CPU, half) == "sdpa"
    gpu(HOPPER, triton=False, flash=flash)
    assert choose_backend("auto", CUDA, torch.float32) == choose_backend("auto", CUDA) == "sdpa"
    # A kernel that works on the device may still be chosen by name.
    gpu(T4)
    assert choose_backend("fused", CUDA, half) == "fused"


def test_flash_attention_is_refused_on_devices_that_cannot_run_it(gpu: Any) -> None:
    for capability, dtype, reason in (
        (HOPPER, torch.float32, "numbers are float32"),
        (T4, torch.float16, "capability 8.0"),
    ):
        gpu(capability, flash=object())
        sentence = f'"flash" can\'t run here: .*{reason}.* Choose attention="auto"'
        with pytest.raises(RequestError, match=sentence) as refusal:
            choose_backend("flash", CUDA, dtype)
        assert "\n" not in str(refusal.value)
    gpu(HOPPER, flash=object())
    assert choose_backend("flash", CUDA, torch.bfloat16) == "flash"


def test_without_tensor_cores_products_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for the cache and the rotation are still used, because they multiply no matrices."""
    model = tiny("llama")
    assert LlamaCuda(model).plan == ProductPlan()
    monkeypatch.setattr(gpu_model, "has_tensor_cores", lambda device: False)
    ours = LlamaCuda(model)
    assert ours.has_kernels and not any(ours.plan.takes(rows, 2, 1) for rows in (1, 8, 64))

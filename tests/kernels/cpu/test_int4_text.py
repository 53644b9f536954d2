"""The GGUF file's own blocks, unpacked in registers, are the numbers that the converted bfloat16 model holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bass_core import load_pair
from bass_core.machine import cpu_kernels
from bass_core.model.forward import ForwardBatch


@pytest.mark.slow
def test_int4_gives_the_logits_of_bfloat16_bit_for_bit(smollm2_folder: Path) -> None:
    if not cpu_kernels.available():
        pytest.skip("numba is not there")
    from kernels.cpu.kinds import HAS_DOT

    if not HAS_DOT:
        pytest.skip("without bfloat16 products, int4 weights are not rounded to bfloat16")
    ids = torch.randint(0, 49_152, (2, 5), generator=torch.Generator().manual_seed(0))
    made = []
    for dtype in ("bfloat16", "int4"):
        model = load_pair("smollm2", device="cpu", dtype=dtype).target_step
        for width in (1, 5):  # unpacked in registers, and once for several blocks
            made.append(model.forward(ForwardBatch(ids[:, :width], [0, 0]), model.new_cache(2, 8)).logits.clone())
    assert torch.equal(made[0], made[2]) and torch.equal(made[1], made[3])

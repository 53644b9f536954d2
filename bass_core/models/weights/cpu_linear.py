"""Linear layers whose weights are laid out once for the CPU's matrix library.

Contract: `PackedLinear` computes what `torch.nn.Linear` computes, from a copy of the weights. 16-bit weights are
packed for our own kernels (kernels/cpu), where these can be used: a row's result does not depend on the number of
rows. Else they take the first layout of torch's that fits:
- float16 for FBGEMM, if float16 holds every weight of a 16-bit model exactly: half the bytes of float32 are read,
  products and sums are float32, and a row's result does not depend on the number of rows;
- bfloat16 for oneDNN, if the CPU multiplies it natively;
- float32 for oneDNN, unless the matrix is small. If none is available, torch's own products are used.
Of these only the first keeps a text independent of the number of tokens in the batch. So it comes first, although
oneDNN's bfloat16 is faster for steps of many tokens. How the operators are called, and why: cpu_tricks.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...machine import cpu_kernels
from .cpu_tricks import bare

_multiply_halves = bare(torch.ops.quantized.linear_dynamic_fp16.default)
# From this many rows of x on, oneDNN's float32 layout is faster than the plain one (measured on AVX-512).
PACKED_ROWS = 4
# For matrices of fewer weights, launching oneDNN (40 microseconds) costs more than its layout saves.
PACKED_WEIGHTS = 1 << 18
# The most rows of a weight that FBGEMM packs at once. It reads a weight column by column, a cache line of each row
# at a time: with more rows, these lines outgrow a level-2 cache of 1 MB, and packing a head of 49152 rows takes
# over twice as long. Multiplying by its three pieces makes a step only 1 % longer than by the whole.
HALVES_ROWS = 1 << 14


def matmul_dtype(weights: torch.dtype) -> torch.dtype:
    """The dtype in which this CPU multiplies weights of the given dtype fastest without losing precision."""
    return torch.bfloat16 if native_bfloat16() and weights == torch.bfloat16 else torch.float32


def native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 natively (AVX-512 BF16 or AMX)."""
    known = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in known)


class PackedLinear(nn.Module):
    """y = x W^T + b, with several layers that read the same input joined into one W ([sum of outs, in])."""

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        joined = torch.cat([layer.weight.detach() for layer in layers])
        biases = [layer.bias for layer in layers]
        bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        self.compiled: Any = None
        if joined.dtype != torch.float32 and cpu_kernels.available():
            self._compile(joined, bias)
            return
        self.halves = None if joined.dtype == torch.float32 else _pack_halves(joined.float(), _float(bias))
        self.compute = torch.float32 if self.halves is not None else matmul_dtype(joined.dtype)
        joined = joined.to(self.compute)
        self.bias = None if bias is None else bias.to(self.compute)
        self.packed = None if self.halves is not None else _pack(joined)
        self.plain: Tensor | None = None
        self.small: Tensor | None = None
        if self.halves is None and self.packed is None:
            # Stored as [in, out], with which torch multiplies a few vectors by a small matrix fastest.
            self.small = joined.t().contiguous()
            self.plain = self.small.t()
        elif self.halves is None and self.compute == torch.float32:
            self.plain = joined

    def _compile(self, weight: Tensor, bias: Tensor | None) -> None:
        from kernels.cpu.packing import pack  # imports numba
        from kernels.cpu.products import linear

        self.compiled, self.compute = partial(linear, weight=pack(weight, bias)), torch.float32
        self.compiled(
            torch.zeros(1, weight.shape[1])
        )  # compiles it, or loads its code from disk, before a clock runs

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`forward` itself, without nn.Module's search for hooks."""
        return self.forward(x, residual)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., in] of any float dtype; returns [..., out] in that dtype, plus `residual` where one is given."""
        if self.compiled is not None:
            product: Tensor = self.compiled(x.float()).to(x.dtype)
            return product if residual is None else product.add_(residual)
        if self.small is not None and self.bias is None and x.dim() == 2 and x.dtype == self.compute:
            # Not F.linear, whose overhead is larger than a small product.
            return torch.mm(x, self.small) if residual is None else torch.addmm(residual, x, self.small)
        inputs = x if x.dtype == self.compute else x.to(self.compute)
        if self.halves is not None:
            pieces = [_multiply_halves(inputs, piece) for piece in self.halves]
            out: Tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
            out = out if x.dtype == out.dtype else out.to(x.dtype)
        elif self.plain is not None and (self.packed is None or x.numel() < PACKED_ROWS * x.shape[-1]):
            out = F.linear(inputs, self.plain, self.bias).to(x.dtype)
        elif residual is not None and self.compute == residual.dtype:
            call = torch.ops.mkldnn._linear_pointwise.binary
            fused: Tensor = call(inputs, residual, self.packed, self.bias, "add")
            return fused
        else:
            call = torch.ops.mkldnn._linear_pointwise.default
            out = call(inputs, self.packed, self.bias, "none", [], "").to(x.dtype)
        return out if residual is None else out.add_(residual)


def pack_all(groups: list[tuple[nn.Linear, ...]]) -> list[PackedLinear]:
    """One PackedLinear for each group of layers to be joined, packed on all cores (FBGEMM itself uses one)."""
    largest_first = sorted(range(len(groups)), key=lambda i: -sum(layer.weight.numel() for layer in groups[i]))
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        tasks = {index: pool.submit(PackedLinear, *groups[index]) for index in largest_first}
    return [tasks[index].result() for index in range(len(groups))]


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


def _pack_halves(weight: Tensor, bias: Tensor | None) -> list[torch.ScriptObject] | None:
    """FBGEMM's float16 layout of a float32 weight, in pieces of HALVES_ROWS; None if float16 is not exact."""
    if weight.dtype != torch.float32 or "fbgemm" not in torch.backends.quantized.supported_engines:
        return None
    # Checked in slices: a converted copy of a whole head takes another 200 MB.
    if not all(torch.equal(part.half().float(), part) for part in weight.split(4096)):
        return None
    rows = weight.split(HALVES_ROWS)
    biases = [None] * len(rows) if bias is None else bias.split(HALVES_ROWS)
    try:
        return [torch.ops.quantized.linear_prepack_fp16(*piece) for piece in zip(rows, biases, strict=True)]
    except (AttributeError, RuntimeError):
        return None


def _pack(weight: Tensor) -> Tensor | None:
    small = weight.dtype == torch.float32 and weight.numel() < PACKED_WEIGHTS
    if small or not torch.backends.mkldnn.is_available():
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return packed

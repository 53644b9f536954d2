"""Tricks that make a small model's forward fast on a CPU, each beside the plain code that it replaces.

Contract: every trick computes what its `plain_` neighbour computes, within float32 rounding; a test compares the
two (tests/bass_core/models/test_cpu_tricks.py).

Why: a step of a small model over a few tokens is short, and each torch operator has a fixed overhead. Written
plainly, a layer launches several times as many small operators as matrix products, and on a CPU their launches are
much of the cost of a step. So the aim is fewer operators and less overhead in each:

- `Norm`: RMSNorm in four operators; F.rms_norm launches seven.
- `rotate`: rotary embeddings of queries and keys, and the scaling of queries, as one complex product. The plain
  way splits, negates, joins, multiplies twice and adds. It needs weights whose rows are in another order, which
  `interleaved` makes once.
- `bare`: the operator without the look-up and the wrapper around it. `torch.ops.x.y(...)` looks up its overload
  in each call (20 microseconds), the overload's Python wrapper costs another 4, and a forward makes over a hundred
  such calls.
- PackedLinear (cpu_linear.py) joins layers that read the same input, is called without nn.Module's search for
  hooks (3 microseconds), and calls torch.mm where F.linear's overhead is larger than the product.
- LlamaCpu (models/llama_cpu.py) leaves the padding of shorter rows out of its products.
- `argmax` (sampling/distribution.py) is numpy's on a CPU: a tenth of torch's time over a whole vocabulary.

None of this is for accelerators, where CUDA graphs make launches free (models/llama_cuda.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Norm:
    """RMSNorm of vectors [..., n] with n weights w: x / hypot(|x|, sqrt(n eps)) * (sqrt(n) w).

    The same as `plain_norm`: the mean of the squares is |x|^2 / n, and hypot adds n eps to |x|^2 under the root.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        root = len(weight) ** 0.5
        self.weight = weight.detach().float() * root
        self.least = torch.tensor(root * eps**0.5)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self.least)
        return (x / length).mul_(self.weight)


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm as published (Zhang and Sennrich, arXiv 1910.07467): x / sqrt(mean(x^2) + eps) * w."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def pairs(head_dim: int) -> Tensor:
    """int64 [D]: the order of a head's dimensions that puts i and i + D / 2 side by side."""
    return torch.arange(head_dim).view(2, -1).T.flatten()


def interleaved(layer: nn.Linear, head_dim: int) -> nn.Linear:
    """The layer with the outputs of each head in the order of `pairs`, as real and imaginary parts side by side.

    Queries and keys are reordered alike, so their products do not change.
    """
    weight, bias = layer.weight.detach(), layer.bias
    result = nn.Linear(layer.in_features, layer.out_features, bias=bias is not None, device="meta")
    rows = torch.arange(layer.out_features).view(-1, head_dim)[:, pairs(head_dim)].flatten()
    result.weight = nn.Parameter(weight[rows], requires_grad=False)
    if bias is not None:
        result.bias = nn.Parameter(bias.detach()[rows], requires_grad=False)
    return result


def turns(cos: Tensor, sin: Tensor) -> Tensor:
    """The complex factors [..., D / 2] of `rotate`, from rotary embeddings cos and sin [..., D] of both halves."""
    half = cos.shape[-1] // 2
    return torch.complex(cos[..., :half].float(), sin[..., :half].float())


def rotate(x: Tensor, factors: Tensor) -> None:
    """Rotate float32 x [N, heads x D] in place, heads in the order of `pairs`, by factors [N, heads x D / 2]."""
    x.view(torch.complex64).mul_(factors)


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embeddings (Su et al., arXiv 2104.09864) of x [..., D]; dimensions i and i + D / 2 form a pair."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def bare(overload: Any) -> Any:
    """The operator under an overload such as torch.ops.aten.mm.default.

    `_op` is private to torch: where it is missing, the overload itself, which is a little slower.
    """
    return getattr(overload, "_op", overload)

"""Operations on whole rows of a vocabulary: pick, stack, pad, subtract and sum.

On a CPU, numpy runs these operations on the calling thread. torch would split each operation among its threads,
which then wait for each other, and the sum of a row could depend on the other rows of its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kernels.support import is_accelerator

from ..machine import cpu_kernels
from ..machine.transfer import to_device


@dataclass(frozen=True)
class RaggedRows:
    """Rows [B, S, V] that are stored without the padding after each of the B texts.

    Attributes:
        rows: [N, V], the rows of all texts.
        firsts: the first row of each text, then N.
        width: S.
        real: int64 [N], the places of the rows in [B x S].
    """

    rows: Tensor
    firsts: list[int]
    width: int
    real: Tensor

    @property
    def places(self) -> Tensor:
        """int64 [B, S], where each row is among `rows`. Padding stands for some other row."""
        places = np.array(self.firsts[:-1])[:, None] + np.arange(self.width)
        return torch.from_numpy(np.minimum(places, self.firsts[-1] - 1))

    def __len__(self) -> int:
        """Return B."""
        return len(self.firsts) - 1

    def padded(self) -> Tensor:
        """Return rows [B, S, V], with zeros as padding."""
        return scattered(self.rows, self.real, len(self) * self.width).view(len(self), self.width, -1)


def padded(rows: Tensor | RaggedRows) -> Tensor:
    """Return rows [B, S, V], with zeros as padding if they were ragged."""
    return rows.padded() if isinstance(rows, RaggedRows) else rows


def scattered(x: Tensor, places: Tensor, rows: int) -> Tensor:
    """Return x [N, ...] as [rows, ...], with row i at places[i] and zeros elsewhere."""
    if not is_accelerator(x.device) and x.dtype == torch.float32 and cpu_kernels.available():
        from kernels.cpu.sampling import calls  # imports numba

        return calls.scatter_rows(x, places, rows)
    return x.new_zeros(rows, *x.shape[1:]).index_copy_(0, places, x)


def copied(values: Tensor) -> Tensor:
    """Return a float32 copy of the values."""
    if values.is_cpu and values.dtype == torch.float32:
        return torch.from_numpy(values.detach().numpy().copy())
    return values.float().clone()


def pick(values: Tensor, *places: list[int] | Tensor) -> Tensor:
    """Return rows of values [..., V]: values[places[0][i], places[1][i], ...] for each i."""
    if values.is_cpu and values.dtype == torch.float32:
        return torch.from_numpy(values.detach().numpy()[tuple(np.asarray(index, np.int64) for index in places)])
    return values[tuple(to_device(index, values.device).long() for index in places)]


def stack(rows: list[Tensor], dim: int = 0) -> Tensor:
    """Stack rows, as torch.stack does."""
    if rows[0].is_cpu and rows[0].dtype == torch.float32:
        return torch.from_numpy(np.stack([row.detach().numpy() for row in rows], axis=dim))
    return torch.stack(rows, dim=dim)


def cat(parts: list[Tensor]) -> Tensor:
    """Join parts, as torch.cat does."""
    if parts and all(part.is_cpu and part.dtype == torch.float32 for part in parts):
        return torch.from_numpy(np.concatenate([part.detach().numpy() for part in parts]))
    return torch.cat(parts)


def pad(parts: list[Tensor]) -> Tensor:
    """Return parts [n, V] as one [B, longest n, V], with zeros after each."""
    if not all(part.is_cpu and part.dtype == torch.float32 for part in parts):
        return pad_sequence(parts, batch_first=True)
    padded = np.zeros((len(parts), max(map(len, parts)), parts[0].shape[1]), np.float32)
    for row, part in zip(padded, parts, strict=True):
        row[: len(part)] = part.detach().numpy()
    return torch.from_numpy(padded)


def residual(p: Tensor, q: Tensor, reach: Tensor) -> Tensor:
    """Return max(reach p - q, 0), which a recovered token is drawn from: p and q [..., V], reach [...]."""
    if p.is_cpu and p.dtype == q.dtype == torch.float32:
        reach_numbers, p_numbers, q_numbers = (tensor.detach().numpy() for tensor in (reach.float(), p, q))
        return torch.from_numpy(np.maximum(reach_numbers[..., None] * p_numbers - q_numbers, np.float32(0)))
    return (reach[..., None] * p - q).clamp_(min=0)


def sums(rows: Tensor) -> Tensor:
    """Return the sum of each row: [..., 1]."""
    if rows.is_cpu:
        return torch.from_numpy(rows.detach().numpy().sum(-1, keepdims=True))
    return rows.sum(-1, keepdim=True)

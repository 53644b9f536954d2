"""Whole rows of a vocabulary: picked, stacked, subtracted and summed.

Contract: on a CPU numpy does it on the calling thread. torch would share each of these among its threads, which
then wait for each other, and a row's sum would have other bits alone than among others.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..machine.transfer import to_device


def copied(values: Tensor) -> Tensor:
    """A copy in float32."""
    if values.is_cpu and values.dtype == torch.float32:
        return torch.from_numpy(values.detach().numpy().copy())
    return values.float().clone()


def pick(values: Tensor, *places: list[int] | Tensor) -> Tensor:
    """The rows of values [..., V] at these places: values[places[0][i], places[1][i], ...] for each i."""
    if values.is_cpu and values.dtype == torch.float32:
        return torch.from_numpy(values.detach().numpy()[tuple(np.asarray(one, np.int64) for one in places)])
    return values[tuple(to_device(one, values.device).long() for one in places)]


def stack(rows: list[Tensor], dim: int = 0) -> Tensor:
    """torch.stack."""
    if rows[0].is_cpu and rows[0].dtype == torch.float32:
        return torch.from_numpy(np.stack([row.detach().numpy() for row in rows], axis=dim))
    return torch.stack(rows, dim=dim)


def cat(parts: list[Tensor]) -> Tensor:
    """torch.cat."""
    if parts and all(part.is_cpu and part.dtype == torch.float32 for part in parts):
        return torch.from_numpy(np.concatenate([part.detach().numpy() for part in parts]))
    return torch.cat(parts)


def pad(parts: list[Tensor]) -> Tensor:
    """Parts [n, V] as [B, longest n, V], zeros after each."""
    if not all(part.is_cpu and part.dtype == torch.float32 for part in parts):
        return pad_sequence(parts, batch_first=True)
    made = np.zeros((len(parts), max(map(len, parts)), parts[0].shape[1]), np.float32)
    for row, part in zip(made, parts, strict=True):
        row[: len(part)] = part.detach().numpy()
    return torch.from_numpy(made)


def residual(p: Tensor, q: Tensor, reach: Tensor) -> Tensor:
    """max(reach p - q, 0), for p and q [..., V] and reach [...]: what a recovered token is drawn from."""
    if p.is_cpu and p.dtype == q.dtype == torch.float32:
        factor, one, other = (numbers.detach().numpy() for numbers in (reach.float(), p, q))
        return torch.from_numpy(np.maximum(factor[..., None] * one - other, np.float32(0)))
    return (reach[..., None] * p - q).clamp_(min=0)


def sums(rows: Tensor) -> Tensor:
    """The sum of each row [..., 1]."""
    if rows.is_cpu:
        return torch.from_numpy(rows.detach().numpy().sum(-1, keepdims=True))
    return rows.sum(-1, keepdim=True)

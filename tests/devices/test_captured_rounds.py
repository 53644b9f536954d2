"""A round of captured graphs: few operators outside of them, and the drafts of the eager round.

Operators are counted by a dispatch mode that ignores what a graph records or replays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bass_core import SamplingParams
from bass_core.decode.request import make_request
from bass_core.draft.base import Proposal
from bass_core.draft.head import HeadDrafter
from bass_core.lanes.lane import Lane

from ..conformance import table
from .emulation import emulated, ledger, order
from .emulation.models import TYPE, pair

pytestmark = pytest.mark.slow

SAMPLING = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(0.8),
    "top-p": SamplingParams(0.8, top_p=0.9),
}


class Operators(TorchDispatchMode):
    """Counts operators on the device outside of graphs."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        self.count += not order.captures and any(tensor.device.type == TYPE for tensor in tensors)
        return out


@contextmanager
def allocations(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collect the sizes of tensors that are made on the device outside of graphs."""
    sizes: list[int] = []
    wrap = emulated.wrap

    def wrapped(raw: torch.Tensor, device: int) -> torch.Tensor:
        if not order.captures:
            sizes.append(raw.numel())
        return wrap(raw, device)

    with patch.context() as inside:
        inside.setattr(emulated, "wrap", wrapped)
        yield sizes


def lane_of(method: str, batch: int, sampling: str, **options: Any) -> Lane:
    models = pair("llama", table.DRAFTS["head"].kind)
    rows = (table.PROMPTS["different"] * batch)[:batch]
    request = make_request(
        models, rows, max_new_tokens=60, draft_length=3, drafter="model", sampling=SAMPLING[sampling], seed=3,
        eos_token_id=None, **options,
    )  # fmt: skip
    lane = Lane(models, request, method)
    lane.prepare()
    return lane


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(("method", "batch"), [("regular", 1), ("bass", 1), ("bass", 5), ("bass", 32)])
def test_a_round_is_two_graphs(method: str, batch: int, sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = lane_of(method, batch, sampling)
    # Some rounds see every width of unread tokens.
    for _ in range(16):
        lane.step()
    ledger.clear()
    with allocations(monkeypatch) as sizes, Operators() as operators:
        for _ in range(3):
            assert lane.step().kind == ("plain" if method == "regular" else "verify")
    assert operators.count <= 3 * (10 if method == "regular" else 30)
    assert ledger.uploads == {"queued": 3 * (1 if method == "regular" else 2)}
    assert ledger.reads.total() == 3 and not sizes and not ledger.races
    lane.end("stopped")


def drafted(monkeypatch: pytest.MonkeyPatch, sampling: str, graphs: bool) -> tuple[list[Any], list[Any]]:
    """Return each round's drafts, with the distributions that they were drawn from, and the texts."""
    proposals: list[Any] = []
    propose = HeadDrafter.propose

    def kept(*arguments: Any) -> Proposal:
        proposal = propose(*arguments)
        probs = (
            []
            if proposal.probs is None
            else [row[:n] for row, n in zip(proposal.probs.cpu(), proposal.num_drafted, strict=True)]
        )
        tokens = [row[:n] for row, n in zip(proposal.tokens.tolist(), proposal.num_drafted, strict=True)]
        proposals.append((tokens, probs, None if proposal.own is None else proposal.own()))
        return proposal

    with monkeypatch.context() as patch:
        patch.setenv("BASS_GRAPHS", "1" if graphs else "0")
        patch.setattr(HeadDrafter, "propose", kept)
        # Inspecting asks for the probabilities of greedy drafts. Three rows leave graphs of four partly filled.
        lane = lane_of("bass", 3, sampling, inspect=True)
        while not lane.finished:
            lane.step()
    return proposals, [sequence.token_ids for sequence in lane.sequences]


@pytest.mark.parametrize("sampling", SAMPLING)
def test_captured_chains_draft_what_eager_ones_draft(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, texts = drafted(monkeypatch, sampling, graphs=True)
    eager, expected = drafted(monkeypatch, sampling, graphs=False)
    assert texts == expected and len(captured) == len(eager) > 10
    for (tokens, probs, own), (other_tokens, other_probs, other_own) in zip(captured, eager, strict=True):
        assert tokens == other_tokens
        torch.testing.assert_close(probs, other_probs, atol=1e-5, rtol=1e-4)
        for row, other_row in zip(own or [], other_own or [], strict=True):
            assert row == pytest.approx(other_row[: len(row)], abs=1e-5)

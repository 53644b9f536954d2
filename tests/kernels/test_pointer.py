"""The pointer's kernel gives the logits of its torch reference: the same token raised by the same amount."""

from __future__ import annotations

import pytest
import torch

from bass_core.draft.head.texts import last_tokens
from bass_core.model.pointer import LONGEST, SHORTEST, Pointer, followers, windows
from kernels.triton import pointer as kernel

VOCAB, IDS, HIDDEN = 37, 60, 48


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids", [2, 5, IDS])
@pytest.mark.parametrize("longest", [30, 1100])
def test_the_kernel_raises_the_references_logit(dtype: torch.dtype, ids: int, longest: int) -> None:
    """Texts of few different tokens have many matches, also of equal length, and texts of many have none."""
    generator = torch.Generator().manual_seed(ids)
    ends = torch.tensor([0, 1, 2, 3, 17, longest])
    rows, pointer = len(ends), Pointer(HIDDEN)
    text = torch.randint(0, ids, (rows, longest + 10), generator=generator)
    columns = torch.randint(-1, VOCAB, (IDS,), generator=generator)
    pointer.weight.data = torch.randn(HIDDEN, generator=generator)
    pointer.requires_grad_(False).to(dtype)
    logits = torch.randn(2 * rows, VOCAB, generator=generator).to(dtype)
    states = torch.randn(2 * rows, HIDDEN, generator=generator).to(dtype)
    last = last_tokens(text, ends)
    # There are two positions after each text: its end, and one whose words begin with a drafted token.
    words = torch.stack((last, torch.cat((text[:, :1], last[:, :-1]), dim=1)), dim=1)
    assert words.shape[2] == LONGEST
    found = followers(windows(text), ends[:, None].expand(rows, 2), words)
    tokens, sizes = (each.flatten() for each in found)
    expected, lifts = logits.clone(), pointer(states, sizes).to(dtype)
    for row, token in enumerate(tokens.tolist()):
        if token >= 0 and (column := int(columns[token])) >= 0:
            expected[row, column] += lifts[row]
    for positions in (2, 1):
        ours = logits.clone()
        searched, searched_ends = (each.repeat_interleave(2 // positions, 0) for each in (text, ends))
        arguments = searched, searched_ends, columns, pointer.weight, pointer.by_size, SHORTEST
        kernel.add(ours, states, words.flatten(0, 1), *arguments)
        assert torch.equal(ours == logits, expected == logits)
        torch.testing.assert_close(ours, expected)


def test_gaps_are_refused() -> None:
    numbers = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="gaps"):
        kernel.add(*[numbers.t()] * 9)  # type: ignore[arg-type,call-arg]

"""What a head's pointer points at, against a search by hand."""

import random

import torch

from bass_core.model.pointer import INITIAL_INCREASE, LONGEST, SHORTEST, Pointer, followers, windows


def by_hand(settled: list[int], drafts: list[int]) -> tuple[int, int]:
    """The token behind the longest match of the end of settled + drafts in settled, the newest; and its size."""
    whole, best = settled + drafts, (-1, 0)
    for size in range(LONGEST, SHORTEST - 1, -1):
        if size > len(whole):
            continue
        for end in range(len(settled) - 1, size - 1, -1):
            if settled[end - size : end] == whole[-size:]:
                return settled[end], size
    return best


def last_of(tokens: list[int]) -> list[int]:
    return (tokens[::-1] + [-1] * LONGEST)[:LONGEST]


def test_it_is_what_followed_the_newest_of_the_longest_matches():
    chosen, seen = random.Random(0), set()
    for _ in range(300):
        rows = [[chosen.randrange(3) for _ in range(chosen.randrange(1, 40))] for _ in range(3)]
        drafts = [[chosen.randrange(3) for _ in range(chosen.randrange(4))] for _ in range(3)]
        width = max(map(len, rows))
        # What stands behind a row's end is not searched.
        text = torch.tensor([row + [chosen.randrange(3) for _ in range(width - len(row))] for row in rows])
        last = torch.tensor([[last_of(row + more)] for row, more in zip(rows, drafts, strict=True)])
        found, sizes = followers(windows(text), torch.tensor([[len(row)] for row in rows]), last)
        expected = [by_hand(row, more) for row, more in zip(rows, drafts, strict=True)]
        assert list(zip(found[:, 0].tolist(), sizes[:, 0].tolist(), strict=True)) == expected
        seen.update(size for _, size in expected)
    assert seen == {0, *range(SHORTEST, LONGEST + 1)}


def test_windows_are_the_last_tokens_of_each_place():
    text = torch.randint(5, (2, 12))
    made = windows(text)
    for row, tokens in zip(made, text.tolist(), strict=True):
        assert row.tolist() == [last_of(tokens[: end + 1]) for end in range(12)]


def test_a_longer_match_raises_more_at_first_and_the_state_is_asked_as_well():
    pointer, states = Pointer(4), torch.randn(3, 4)
    sizes = torch.tensor([SHORTEST, 5, LONGEST])
    lifts = pointer(states, sizes)
    assert lifts[0] == INITIAL_INCREASE[0] and lifts[0] < lifts[1] < lifts[2] == INITIAL_INCREASE[1]
    with torch.no_grad():
        pointer.weight.copy_(torch.tensor([0.0, 2.0, 0.0, 0.0]))
    torch.testing.assert_close(pointer(states, sizes), lifts + 2 * states[:, 1])

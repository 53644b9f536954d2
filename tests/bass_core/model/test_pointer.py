"""A head's pointer finds the same matches as a simple search in Python."""

import random

import torch

from bass_core.model.pointer import INITIAL_INCREASE, LONGEST, SHORTEST, Pointer, followers, windows


def by_hand(committed: list[int], drafts: list[int]) -> tuple[int, int]:
    """Return the token after the longest match of the text's end (the most recent on ties), and its length."""
    text, best = committed + drafts, (-1, 0)
    for size in range(LONGEST, SHORTEST - 1, -1):
        if size > len(text):
            continue
        for end in range(len(committed) - 1, size - 1, -1):
            if committed[end - size : end] == text[-size:]:
                return committed[end], size
    return best


def last_of(tokens: list[int]) -> list[int]:
    return (tokens[::-1] + [-1] * LONGEST)[:LONGEST]


def test_the_pointer_finds_the_token_after_the_longest_and_most_recent_match():
    rng, seen = random.Random(0), set()
    for _ in range(300):
        rows = [[rng.randrange(3) for _ in range(rng.randrange(1, 40))] for _ in range(3)]
        drafts = [[rng.randrange(3) for _ in range(rng.randrange(4))] for _ in range(3)]
        width = max(map(len, rows))
        # Tokens after a row's end are padding and must not be searched.
        text = torch.tensor([row + [rng.randrange(3) for _ in range(width - len(row))] for row in rows])
        last = torch.tensor([[last_of(row + row_drafts)] for row, row_drafts in zip(rows, drafts, strict=True)])
        tokens, sizes = followers(windows(text), torch.tensor([[len(row)] for row in rows]), last)
        expected = [by_hand(row, row_drafts) for row, row_drafts in zip(rows, drafts, strict=True)]
        assert list(zip(tokens[:, 0].tolist(), sizes[:, 0].tolist(), strict=True)) == expected
        seen.update(size for _, size in expected)
    assert seen == {0, *range(SHORTEST, LONGEST + 1)}


def test_windows_are_the_last_tokens_up_to_each_position():
    text = torch.randint(5, (2, 12))
    all_windows = windows(text)
    for row, tokens in zip(all_windows, text.tolist(), strict=True):
        assert row.tolist() == [last_of(tokens[: end + 1]) for end in range(12)]


def test_the_lift_grows_with_the_match_and_depends_on_the_state():
    pointer, states = Pointer(4), torch.randn(3, 4)
    sizes = torch.tensor([SHORTEST, 5, LONGEST])
    lifts = pointer(states, sizes)
    assert lifts[0] == INITIAL_INCREASE[0] and lifts[0] < lifts[1] < lifts[2] == INITIAL_INCREASE[1]
    with torch.no_grad():
        pointer.weight.copy_(torch.tensor([0.0, 2.0, 0.0, 0.0]))
    torch.testing.assert_close(pointer(states, sizes), lifts + 2 * states[:, 1])

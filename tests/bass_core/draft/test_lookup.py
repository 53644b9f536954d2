"""Drafters that copy from the text: prompt lookup, and the cascade, which asks a model if a row cannot copy."""

import torch

from bass_core.draft.base import Drafter, Proposal
from bass_core.draft.lookup import Cascade, PromptLookupDrafter
from bass_core.sample.noise import NoiseKeys
from bass_core.sequence import Sequence

KEYS = NoiseKeys(0, torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long))


def row(tokens, index=0):
    return Sequence(index, index, tokens, 50, frozenset())


def proposed(drafter, rows, max_drafts):
    proposal = drafter.propose(rows, max_drafts, KEYS)
    assert proposal.probs is None
    return [tokens[:count] for tokens, count in zip(proposal.tokens.tolist(), proposal.num_drafted, strict=True)]


def test_the_longest_and_latest_match_is_copied():
    rows = [row([1, 2, 3, 9, 2, 3, 8, 1, 2, 3]), row([5, 6, 7])]
    drafter = PromptLookupDrafter()
    drafter.start(rows)
    assert proposed(drafter, rows, [4, 4]) == [[9, 2, 3, 8], []]
    longer = PromptLookupDrafter(shortest=4)
    longer.start(rows)
    assert proposed(longer, rows, [4, 4]) == [[], []]


def test_a_match_that_overlaps_the_end_repeats_itself():
    rows = [row([4, 7, 7, 7])]
    drafter = PromptLookupDrafter()
    drafter.start(rows)
    assert proposed(drafter, rows, [5]) == [[7] * 5]


def test_moved_rows_keep_their_text():
    rows = [row([1, 2, 8, 1, 2]), row([3, 4, 9, 3, 4], 1)]
    drafter = PromptLookupDrafter()
    drafter.start(rows)
    drafter.propose(rows, [1, 1], KEYS)
    drafter.move_row(1, 0)
    assert proposed(drafter, [rows[1]], [1]) == [[9]]


def test_a_cascade_asks_the_model_only_for_rows_that_cannot_copy():
    class Counting(Drafter):
        def propose(self, rows, max_drafts, keys):
            self.calls += 1
            self.drafted += sum(max_drafts)
            self.max_drafts = max_drafts
            width = max(max_drafts)
            probs = torch.full((len(rows), width, 10), 0.1)
            return Proposal(torch.full((len(rows), width), 5), max_drafts, probs)

    rows = [row([1, 2, 3, 8, 1, 2, 3]), row([4, 5, 6], 1)]
    model = Counting()
    cascade = Cascade(PromptLookupDrafter(shortest=3), model)
    cascade.start(rows)
    proposal = cascade.propose(rows, [3, 2], KEYS)
    assert model.max_drafts == [0, 2] and proposal.num_drafted == [3, 2]
    assert proposal.tokens.tolist() == [[8, 1, 2], [5, 5, 0]]
    assert proposal.probs[0].argmax(-1).tolist() == [8, 1, 2] and proposal.probs[0].sum() == 3
    assert torch.allclose(proposal.probs[1, :2], torch.full((2, 10), 0.1))
    cascade.propose([rows[0], row([1, 2, 3, 9, 1, 2, 3], 1)], [1, 1], KEYS)
    assert model.calls == cascade.calls == 1
    assert cascade.drafted == 2, "copies must not count as the model's drafts"

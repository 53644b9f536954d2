"""Drafters that copy: what they propose, how they chain, and that the text does not change."""

import numpy as np
import pytest
import torch

from bass_core import ModelPair, generate
from bass_core.drafting.base import Drafter, Proposal
from bass_core.drafting.combine import Cascade, LookupChain
from bass_core.drafting.lookup import PromptLookupDrafter, SiblingLookupDrafter
from bass_core.drafting.ngram import NgramDrafter
from bass_core.errors import RequestError, WeightsError
from bass_core.models.ngram import NgramTable, context_key, load_ngrams
from bass_core.sampling.noise import NoiseKeys
from bass_core.sequence import Sequence

from ...models import perturbed, prompts, tiny

CPU = torch.device("cpu")
KEYS = NoiseKeys(0, torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long))


def row(tokens, index=0):
    return Sequence(index, index, tokens, 50, frozenset())


def table(pairs, longest=4):
    entries = sorted((context_key(list(context)), token) for context, token in pairs)
    keys, tokens = zip(*entries, strict=True)
    return NgramTable(np.array(keys, dtype=np.uint64), np.array(tokens, dtype=np.uint32), longest)


def proposed(drafter, rows, max_drafts):
    proposal = drafter.propose(rows, max_drafts, KEYS)
    assert proposal.probs is None
    return [tokens[:count] for tokens, count in zip(proposal.tokens.tolist(), proposal.num_drafted, strict=True)]


def test_the_longest_and_latest_match_is_copied():
    rows = [row([1, 2, 3, 9, 2, 3, 8, 1, 2, 3]), row([5, 6, 7])]
    drafter = PromptLookupDrafter(CPU)
    drafter.start(rows)
    assert proposed(drafter, rows, [4, 4]) == [[9, 2, 3, 8], []]
    longer = PromptLookupDrafter(CPU, shortest=4)
    longer.start(rows)
    assert proposed(longer, rows, [4, 4]) == [[], []]


def test_a_match_that_overlaps_the_end_repeats_itself():
    rows = [row([4, 7, 7, 7])]
    drafter = PromptLookupDrafter(CPU)
    drafter.start(rows)
    assert proposed(drafter, rows, [5]) == [[7] * 5]


def test_siblings_copy_from_each_other_and_lone_rows_do_not():
    rows = [row([1, 2, 3, 4, 5]), row([9, 2, 3], 1)]
    for kind, expected in ((SiblingLookupDrafter, [4, 5]), (PromptLookupDrafter, [])):
        drafter = kind(CPU)
        drafter.start(rows)
        assert proposed(drafter, rows, [2, 2])[1] == expected


def test_rows_that_move_keep_their_own_text():
    rows = [row([1, 2, 8, 1, 2]), row([3, 4, 9, 3, 4], 1)]
    drafter = PromptLookupDrafter(CPU)
    drafter.start(rows)
    drafter.propose(rows, [1, 1], KEYS)
    drafter.move_row(1, 0)
    assert proposed(drafter, [rows[1]], [1]) == [[9]]


def test_ngrams_back_off_and_chain():
    known = table([((1,), 2), ((1, 2), 3), ((2, 3), 4), ((7, 1, 2), 5)])
    drafter = NgramDrafter(known, CPU)
    assert proposed(drafter, [row([1]), row([7, 1])], [4, 4]) == [[2, 3, 4], [2, 5]]
    assert proposed(NgramDrafter(known, CPU, shortest=2), [row([9, 1]), row([0, 1, 2])], [3, 1]) == [[], [3]]
    assert known.next_token([6]) is None


def test_each_row_takes_the_first_copy_there_is():
    rows = [row([1, 2, 8, 1, 2]), row([3, 1], 1)]
    chain = LookupChain(PromptLookupDrafter(CPU), NgramDrafter(table([((1,), 6), ((2,), 9)]), CPU))
    chain.start(rows)
    assert proposed(chain, rows, [1, 1]) == [[8], [6]]


def test_a_table_is_read_back_and_a_missing_one_explained(tmp_path):
    table([((1, 2), 3), ((2,), 70000)]).save(tmp_path)
    loaded = load_ngrams(tmp_path)
    assert isinstance(loaded.keys, np.memmap)
    assert (loaded.next_token([1, 2]), loaded.next_token([5, 2]), loaded.next_token([1])) == (3, 70000, None)
    with pytest.raises(WeightsError, match="distill ngram"):
        load_ngrams(tmp_path / "nowhere")


@pytest.fixture(scope="module")
def pair():
    target = tiny("llama")
    known = {}
    for sequence in generate(ModelPair(target), prompts(4), method="regular", max_new_tokens=40).sequences:
        for a, b in zip(sequence.token_ids, sequence.token_ids[1:], strict=False):
            known[(a,)] = b
    return ModelPair(target, perturbed(target, 0.05), ngrams=table(list(known.items())))


def test_a_cascade_spares_the_model_where_every_row_copies():
    class Counting(Drafter):
        def propose(self, rows, max_drafts, keys):
            self.calls += 1
            self.drafted += sum(max_drafts)
            self.max_drafts = max_drafts
            return PromptLookupDrafter(CPU).propose([], [], keys) if not rows else self.fixed(rows, max_drafts)

        def fixed(self, rows, max_drafts):
            width = max(max_drafts)
            probs = torch.full((len(rows), width, 10), 0.1)
            return Proposal(torch.full((len(rows), width), 5), max_drafts, probs)

    rows = [row([1, 2, 3, 8, 1, 2, 3]), row([4, 5, 6], 1)]
    model = Counting()
    cascade = Cascade(PromptLookupDrafter(CPU, shortest=3), model, 10)
    cascade.start(rows)
    proposal = cascade.propose(rows, [3, 2], KEYS)
    assert model.max_drafts == [0, 2] and proposal.num_drafted == [3, 2]
    assert proposal.tokens.tolist() == [[8, 1, 2], [5, 5, 0]]
    assert proposal.probs[0].argmax(-1).tolist() == [8, 1, 2] and proposal.probs[0].sum() == 3
    assert torch.allclose(proposal.probs[1, :2], torch.full((2, 10), 0.1))
    cascade.propose([rows[0], row([1, 2, 3, 9, 1, 2, 3], 1)], [1, 1], KEYS)
    assert model.calls == cascade.calls == 1
    assert cascade.drafted == 2, "copies are no work of the model"


def test_what_a_pair_lacks_is_refused_by_name(pair):
    with pytest.raises(RequestError, match="needs a draft head"):
        generate(pair, [1, 2, 3], drafter="adaptive")
    pair = ModelPair(tiny("llama"))
    for drafter, reason in (
        ("cascade", "no draft model"),
        ("ngram", "no n-gram table"),
        ("magic", "must be auto"),
    ):
        with pytest.raises(RequestError, match=reason):
            generate(pair, [1, 2, 3], drafter=drafter)

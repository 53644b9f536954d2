"""Rolled-back text: after a rewind every drafter proposes what it would for the remaining text."""

import random

import torch

from bass_core.draft.base import Drafter, own_drafter, point_masses
from bass_core.draft.head import HeadDrafter
from bass_core.draft.head_states import StandInStates
from bass_core.draft.lookup import Cascade, PromptLookupDrafter
from bass_core.draft.model import ModelDrafter
from bass_core.draft.texts import Texts
from bass_core.model.pair import ModelPair
from bass_core.model.pointer import LONGEST
from bass_core.model.runner import ModelRunner
from bass_core.sample.noise import NoiseKeys
from bass_core.sample.params import SamplingParams
from bass_core.sequence import Sequence
from tests.support.models import reference, tiny, tiny_head

CPU = torch.device("cpu")
KEYS = NoiseKeys(0, torch.arange(2), torch.zeros(2, dtype=torch.long))


def texts(*tokens):
    return [Sequence(i, i, list(own), 200, frozenset()) for i, own in enumerate(tokens)]


def said(drafter, rows, most=4):
    proposal = drafter.propose(rows, [most] * len(rows), KEYS)
    return [own[:count] for own, count in zip(proposal.tokens.tolist(), proposal.num_drafted, strict=True)]


def test_a_lookup_knows_no_run_that_was_taken_back():
    """With an alphabet of three, nearly every run repeats and replaces an earlier one."""
    chance = random.Random(1)
    rows = texts(*([chance.randrange(3) for _ in range(6)] for _ in range(2)))
    drafter = PromptLookupDrafter()
    drafter.start(rows)
    found = 0
    for _ in range(150):
        for r, row in enumerate(rows):
            row.tokens += [chance.randrange(3) for _ in range(chance.randrange(4))]
            said(drafter, rows)
            at = max(len(row.prompt), len(row.tokens) - chance.randrange(6))
            del row.tokens[at:]
            drafter.rewind(r, at)
            row.tokens += [chance.randrange(3) for _ in range(chance.randrange(3))]
        fresh = PromptLookupDrafter()
        fresh.start(rows)
        assert said(drafter, rows) == said(fresh, rows)
        found += any(said(fresh, rows))
    assert found > 100


def test_a_pointer_searches_no_text_that_was_taken_back():
    chance, head = random.Random(1), tiny_head(tiny("llama"))
    rows = texts([7], [8, 9])
    kept = Texts(head, 2)
    for step in range(40):
        for row in rows:
            row.tokens += [chance.randrange(96) for _ in range(chance.randrange(4))]
        last = kept.upload(rows)
        for r, row in enumerate(rows):
            assert kept.token_ids[r, : len(row.tokens)].tolist() == row.tokens
            assert last[r, 0].tolist() == (row.tokens[::-1] + [-1] * LONGEST)[:LONGEST]
            del row.tokens[(at := max(len(row.prompt), len(row.tokens) - chance.randrange(6))) :]
            kept.rewind(r, at)
        if step == 20:
            rows[0].tokens = list(rows[1].tokens)
            kept.move_row(1, 0)


def test_a_model_feeds_a_row_that_lacks_much_beside_one_that_is_nearly_full():
    """Padding must not pass the end of the longer row's cache."""
    model = tiny("llama")
    rows = texts(range(1, 18), [3, 4])
    drafter = ModelDrafter(ModelRunner(ModelPair(model).target_step, 2, 20, 96, "pad"), SamplingParams())
    prefill = drafter.start(rows)
    while not prefill.done:
        prefill.step()
    rows[0].tokens += [30]
    rows[1].tokens += list(range(40, 54))
    assert said(drafter, rows, most=1) == [reference(model, row.tokens, 1) for row in rows]


def test_a_head_feeds_again_what_was_taken_back_once_its_states_are_observed_again():
    target = tiny("llama")
    pair = ModelPair(target, tiny_head(target))
    runner = ModelRunner(pair.draft_step, 1, 96, len(pair.draft.vocabulary), "pad")
    drafter = HeadDrafter(pair.draft, runner, pair.vocab, SamplingParams())
    rows, states = texts([1, 2]), torch.randn(5, pair.draft.config.hidden)
    drafter.start(rows)
    drafter.observe_states(rows, [states[:2]])
    rows[0].tokens += [3]
    expected = said(drafter, rows)
    rows[0].tokens += [9, 9]
    drafter.observe_states(rows, [states[3:]])
    said(drafter, rows)
    del rows[0].tokens[3:]
    rows[0].tokens += [9]
    drafter.observe_states(rows, [states[3:4]])
    drafter.rewind(0, 3)
    del rows[0].tokens[3:]
    assert runner.lengths[0] == 3
    rows[0].tokens += [4]
    drafter.observe_states(rows, [states[2:3]])
    again = said(drafter, rows)
    fresh = HeadDrafter(pair.draft, runner, pair.vocab, SamplingParams())
    fresh.start(rows)
    fresh.observe_states(rows, [states[:3]])
    assert said(fresh, rows) == again and expected


def test_a_head_does_not_point_at_what_was_taken_back():
    target = tiny("llama")
    head = tiny_head(target)
    head.pointer.by_size += 20
    a, b, x, y, z = head.vocabulary[:5].tolist()
    runner = ModelRunner(ModelPair(target, head).draft_step, 2, 96, len(head.vocabulary), "pad")
    drafter = HeadDrafter(head, runner, 96, SamplingParams())
    rows, states = texts([a, b], [a, b]), torch.randn(2, 9, 64)
    drafter.start(rows)
    for row, following in zip(rows, (x, y), strict=True):
        row.tokens += [following, a, b]
    drafter.observe_states(rows, list(states[:, :4]))
    assert said(drafter, rows, most=1) == [[x], [y]]
    del rows[0].tokens[2:]
    drafter.rewind(0, 2)
    rows[0].tokens += [z, a, b]
    drafter.observe_states(rows, [states[0, 1:4], states[1, :0]])
    assert said(drafter, rows, most=1)[0] == [z]
    rows[1].tokens += [z, b, y]
    drafter.move_row(1, 0)
    drafter.observe_states(rows[1:], [states[1, 4:7]])
    assert said(drafter, rows[1:], most=1) == [[a]]


def test_states_of_tokens_that_were_taken_back_are_missing():
    kept, state = StandInStates(2, 8, 1, CPU), torch.arange(1.0, 20.0)[:, None]
    assert kept.observe([state[:3], state[:0]]) == {0: 0}
    assert kept.complete(0, 4) and not kept.complete(0, 5) and not kept.complete(1, 2)
    kept.keep([0], [4], state[10:11])
    kept.keep([0], [5], state[11:12])
    assert kept.complete(0, 6) and kept.read([0], 6)[0, :, 0].tolist() == [0, 1, 2, 3, 11, 12]
    assert kept.observe([state[3:4], state[:0]]) == {0: 4}, "the slot behind the state that stood in"
    assert kept.read([2], 4)[0, :, 0].tolist() == [2, 3, 4, 12]
    kept.rewind(0, 4)
    assert kept.complete(0, 5) and not kept.complete(0, 6)
    kept.move_row(0, 1)
    assert kept.complete(1, 5) and kept.read([0, 2], 3)[1, :, 0].tolist() == [2, 3, 4]


def test_combined_drafters_hand_it_on_and_all_others_need_not_know_it():
    seen = []

    class Noted(Drafter):
        def propose(self, rows, max_drafts, keys):
            return point_masses([[] for _ in rows])

        def rewind(self, row, length):
            seen.append((row, length))

    class Plain:
        def propose(self, rows, max_drafts, keys):
            return point_masses([[] for _ in rows])

    Cascade(Noted(), Noted()).rewind(1, 7)
    assert seen == [(1, 7)] * 2
    own_drafter(Plain()).rewind(0, 1)

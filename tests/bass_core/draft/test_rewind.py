"""After a rewind, every drafter proposes what it would propose for the remaining text."""

import random

import torch

from bass_core.draft.base import Drafter, point_masses, wrap_user_drafter
from bass_core.draft.head.states import StandInStates
from bass_core.draft.head.texts import Texts
from bass_core.draft.lookup import Cascade, PromptLookupDrafter
from bass_core.draft.model import ModelDrafter
from bass_core.draft.registry import head_drafter
from bass_core.model.pair import ModelPair
from bass_core.model.pointer import LONGEST
from bass_core.model.runner import ModelRunner
from bass_core.sample.noise import NoiseKeys
from bass_core.sample.params import SamplingParams
from bass_core.sequence import Sequence
from tests.support.models import reference, tiny, tiny_head

CPU = torch.device("cpu")
KEYS = NoiseKeys(0, torch.arange(2), torch.zeros(2, dtype=torch.long))


def sequences(*tokens):
    return [Sequence(i, i, list(ids), 200, frozenset()) for i, ids in enumerate(tokens)]


def drafts_of(drafter, rows, most=4):
    proposal = drafter.propose(rows, [most] * len(rows), KEYS)
    return [ids[:count] for ids, count in zip(proposal.tokens.tolist(), proposal.num_drafted, strict=True)]


def test_a_lookup_forgets_text_that_was_rewound():
    """With only three different tokens, nearly every n-gram repeats and replaces an earlier one."""
    rng = random.Random(1)
    rows = sequences(*([rng.randrange(3) for _ in range(6)] for _ in range(2)))
    drafter = PromptLookupDrafter()
    drafter.start(rows)
    num_proposals = 0
    for _ in range(150):
        for r, row in enumerate(rows):
            row.tokens += [rng.randrange(3) for _ in range(rng.randrange(4))]
            drafts_of(drafter, rows)
            at = max(len(row.prompt), len(row.tokens) - rng.randrange(6))
            del row.tokens[at:]
            drafter.rewind(r, at)
            row.tokens += [rng.randrange(3) for _ in range(rng.randrange(3))]
        fresh = PromptLookupDrafter()
        fresh.start(rows)
        assert drafts_of(drafter, rows) == drafts_of(fresh, rows)
        num_proposals += any(drafts_of(fresh, rows))
    assert num_proposals > 100


def test_a_pointer_does_not_search_rewound_text():
    rng, head = random.Random(1), tiny_head(tiny("llama"))
    rows = sequences([7], [8, 9])
    uploaded = Texts(head, 2)
    for step in range(40):
        for row in rows:
            row.tokens += [rng.randrange(96) for _ in range(rng.randrange(4))]
        last = uploaded.upload(rows)
        for r, row in enumerate(rows):
            assert uploaded.token_ids[r, : len(row.tokens)].tolist() == row.tokens
            assert last[r, 0].tolist() == (row.tokens[::-1] + [-1] * LONGEST)[:LONGEST]
            del row.tokens[(at := max(len(row.prompt), len(row.tokens) - rng.randrange(6))) :]
            uploaded.rewind(r, at)
        if step == 20:
            rows[0].tokens = list(rows[1].tokens)
            uploaded.move_row(1, 0)


def test_a_model_feeds_long_pending_text_next_to_a_nearly_full_row():
    """Padding must not go past the end of the longer row's cache."""
    model = tiny("llama")
    rows = sequences(range(1, 18), [3, 4])
    drafter = ModelDrafter(ModelRunner(ModelPair(model).target_step, 2, 20, 96, "pad"), SamplingParams())
    prefill = drafter.start(rows)
    while not prefill.done:
        prefill.step()
    rows[0].tokens += [30]
    rows[1].tokens += list(range(40, 54))
    assert drafts_of(drafter, rows, most=1) == [reference(model, row.tokens, 1) for row in rows]


def test_a_head_feeds_rewound_positions_again_with_new_states():
    target = tiny("llama")
    pair = ModelPair(target, tiny_head(target))
    runner = ModelRunner(pair.draft_step, 1, 96, len(pair.draft.vocabulary), "pad")
    drafter = head_drafter(pair.draft, runner, pair.vocab, SamplingParams())
    rows, states = sequences([1, 2]), torch.randn(5, pair.draft.config.hidden)
    drafter.start(rows)
    drafter.observe_states(rows, [states[:2]])
    rows[0].tokens += [3]
    expected = drafts_of(drafter, rows)
    rows[0].tokens += [9, 9]
    drafter.observe_states(rows, [states[3:]])
    drafts_of(drafter, rows)
    del rows[0].tokens[3:]
    rows[0].tokens += [9]
    drafter.observe_states(rows, [states[3:4]])
    drafter.rewind(0, 3)
    del rows[0].tokens[3:]
    assert runner.lengths[0] == 3
    rows[0].tokens += [4]
    drafter.observe_states(rows, [states[2:3]])
    again = drafts_of(drafter, rows)
    fresh = head_drafter(pair.draft, runner, pair.vocab, SamplingParams())
    fresh.start(rows)
    fresh.observe_states(rows, [states[:3]])
    assert drafts_of(fresh, rows) == again and expected


def test_a_head_does_not_point_at_rewound_text():
    target = tiny("llama")
    head = tiny_head(target)
    head.pointer.by_size += 20
    a, b, x, y, z = head.vocabulary[:5].tolist()
    runner = ModelRunner(ModelPair(target, head).draft_step, 2, 96, len(head.vocabulary), "pad")
    drafter = head_drafter(head, runner, 96, SamplingParams())
    rows, states = sequences([a, b], [a, b]), torch.randn(2, 9, 64)
    drafter.start(rows)
    for row, following in zip(rows, (x, y), strict=True):
        row.tokens += [following, a, b]
    drafter.observe_states(rows, list(states[:, :4]))
    assert drafts_of(drafter, rows, most=1) == [[x], [y]]
    del rows[0].tokens[2:]
    drafter.rewind(0, 2)
    rows[0].tokens += [z, a, b]
    drafter.observe_states(rows, [states[0, 1:4], states[1, :0]])
    assert drafts_of(drafter, rows, most=1)[0] == [z]
    rows[1].tokens += [z, b, y]
    drafter.move_row(1, 0)
    drafter.observe_states(rows[1:], [states[1, 4:7]])
    assert drafts_of(drafter, rows[1:], most=1) == [[a]]


def test_states_of_rewound_tokens_are_missing():
    states, values = StandInStates(2, 8, 1, CPU), torch.arange(1.0, 20.0)[:, None]
    assert states.observe([values[:3], values[:0]]) == {0: 0}
    assert states.complete(0, 4) and not states.complete(0, 5) and not states.complete(1, 2)
    states.keep([0], [4], values[10:11])
    states.keep([0], [5], values[11:12])
    assert states.complete(0, 6) and states.read([0], 6)[0, :, 0].tolist() == [0, 1, 2, 3, 11, 12]
    assert states.observe([values[3:4], values[:0]]) == {0: 4}, "the slot after the stand-in state"
    assert states.read([2], 4)[0, :, 0].tolist() == [2, 3, 4, 12]
    states.rewind(0, 4)
    assert states.complete(0, 5) and not states.complete(0, 6)
    states.move_row(0, 1)
    assert states.complete(1, 5) and states.read([0, 2], 3)[1, :, 0].tolist() == [2, 3, 4]


def test_a_cascade_rewinds_both_drafters_and_a_user_drafter_needs_no_rewind():
    rewinds = []

    class Recording(Drafter):
        def propose(self, rows, max_drafts, keys):
            return point_masses([[] for _ in rows])

        def rewind(self, row, length):
            rewinds.append((row, length))

    class Plain:
        def propose(self, rows, max_drafts, keys):
            return point_masses([[] for _ in rows])

    Cascade(Recording(), Recording()).rewind(1, 7)
    assert rewinds == [(1, 7)] * 2
    wrap_user_drafter(Plain()).rewind(0, 1)

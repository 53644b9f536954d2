"""The draft's side alone, in this process: what it keeps and what it rolls back after a verdict."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from bass_core import ModelPair, SamplingParams
from bass_core.decode.base import DecodingParams
from bass_core.decode.overlapped.session import DraftSession, shared_rows
from bass_core.draft import model as drafting
from bass_core.draft.registry import AHEAD_CONFIDENCE, DRAFTERS, confident_prefix
from bass_core.sample.distribution import probabilities
from bass_core.sample.draw import draw
from bass_core.sample.noise import Role, stream
from bass_core.sequence import Sequence
from bass_core.verify.rules import VERIFICATIONS
from tests.bass_core.draft.test_head import expected_drafts
from tests.support.models import prompts, reference, tiny, tiny_head, tiny_pair

PAIR = tiny_pair()
TARGET, DRAFT = PAIR.target, PAIR.draft
ROWS = prompts(2)


def session(pair=PAIR, lead=4, rows=ROWS, new=40, sampling=None, verification="auto", drafter="model"):
    params = DecodingParams(sampling or SamplingParams(), verification=VERIFICATIONS[verification])
    shared = shared_rows([Sequence(r, r, row, new, frozenset()) for r, row in enumerate(rows)])
    return DraftSession(pair, shared, params, lead, DRAFTERS[drafter], "pad", pair.device, threading.Condition())


def tokens_of(row):
    """The drafts behind a row's text."""
    return [draft.token for draft in row.drafts]


def drafted(one, row):
    """The drafts behind a row's text when the session has nothing left to do."""
    while one.busy:
        one.step()
    return tokens_of(row)


def rolled_back(one):
    return one.totals[3]


@pytest.mark.parametrize("other", [False, True])
def test_a_draft_that_comes_too_late_is_dropped(other, monkeypatch):
    """While the second draft is made the target writes a token: the first draft, or another one."""
    one = session()
    row, text = one.rows[0], reference(DRAFT, ROWS[0], 6)
    one.step()
    one.step()
    written, propose = [(text[0] + other) % 90], one.drafter.propose

    def meanwhile(*arguments):
        row.agree(written, same=not other)
        return propose(*arguments)

    monkeypatch.setattr(one.drafter, "propose", meanwhile)
    one.step()
    monkeypatch.undo()
    assert tokens_of(row) == ([] if other else text[1:2])
    assert drafted(one, row) == reference(DRAFT, ROWS[0] + written, 4)
    assert rolled_back(one) == other


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_a_new_epoch_drafts_with_noise_of_its_own(verification, monkeypatch):
    """Except under coupled verification: drafts use the target's noise, which depends on the position alone."""
    drawn = []

    def recorded(q, seed, ids, positions, streams):
        drawn.append((int(ids[0]), int(positions[0]), int(streams[0])))
        return draw(q, seed, ids, positions, streams)

    monkeypatch.setattr(drafting, "draw", recorded)
    one = session(sampling=SamplingParams(0.9), verification=verification)
    row, start = one.rows[0], len(ROWS[0])
    # A prefill and three drafts, the second of which is refused.
    for _ in range(4):
        one.step()
    first, second, _ = tokens_of(row)
    row.agree([first, (second + 1) % 90], same=False)
    one.step()
    before, after = drawn[:3], drawn[3]
    assert [at for _, at, _ in before] == [start, start + 1, start + 2] and after[1] == start + 2
    if verification == "coupled":
        assert {use for *_, use in drawn} == {int(Role.TARGET)}
    else:
        assert {use for *_, use in before} == {int(Role.DRAFT)}
        assert after[2] == stream(Role.DRAFT, torch.tensor(start + 2))


@pytest.mark.parametrize("seed", range(4))
def test_after_a_refusal_the_drafts_are_those_of_the_new_text(seed, monkeypatch):
    """And after any verdict, whenever it comes: before the prompts are fed, between steps or during one.

    The target writes drafts, other tokens, or drafts and then others; one row ends. No stale token stays.
    """
    chance, one = random.Random(seed), session(lead=5, new=200)
    rows, propose, taken_back = list(one.rows), one.drafter.propose, 0

    def write():
        nonlocal taken_back
        for row in rows:
            ahead = tokens_of(row)
            kept, other = chance.randint(0, len(ahead)), [chance.randrange(90)] * chance.choice((0, 0, 1, 2))
            taken_back += len(ahead) > kept and bool(other) and other[0] != ahead[kept]
            row.agree(ahead[:kept] + other, same=not other)
            assert row.begin == (len(row.text) if other else row.begin)
            written = ahead[:kept] + other
            assert tokens_of(row) == (ahead[len(written) :] if ahead[: len(written)] == written else [])

    def meanwhile(*arguments):
        if chance.random() < 0.3:
            write()
        return propose(*arguments)

    monkeypatch.setattr(one.drafter, "propose", meanwhile)
    for step in range(24):
        if chance.random() < 0.4:
            write()
        if step == 16:
            rows.pop(0).finish_reason = "eos"
        one.step()
        for row in rows:
            assert not row.drafts or tokens_of(row) == reference(DRAFT, row.text, len(row.drafts))
    monkeypatch.undo()
    assert drafted(one, rows[0]) == reference(DRAFT, rows[0].text, 5) and one.rows == rows
    assert taken_back and rolled_back(one)


def test_a_head_goes_on_from_the_targets_states():
    """After each verdict, the first drafts equal the head's output given the target's states."""
    target = tiny("llama")
    head = tiny_head(target)
    fuse, project = head.fuse, head.project
    pair = ModelPair(target, head)
    one = session(pair)
    row = one.rows[0]
    assert drafted(one, row) == [] and one.drafter.calls == 0, "nothing is known before the first verdict"
    text, start = list(ROWS[0]), len(ROWS[0])
    for epoch, new in enumerate((1, 3, 2), start=1):
        text += reference(target, text, new)
        states = target(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
        first = 0 if epoch == 1 else start - 1
        row.agree(text[start:], same=False, states=states[first : len(text) - 1])
        start = len(text)
        kept = len(row.drafts)
        one.step()
        if not kept:
            expected, _ = expected_drafts(target, head, fuse, project, text, 1)
            assert tokens_of(row) == expected
        drafted(one, row)


def test_a_copied_run_comes_at_once_and_the_draft_model_is_not_billed_for_it():
    rows = [[7, 1, 2, 3, 40, 41, 42, 43, 44, 1, 2, 3], ROWS[1]]
    one = session(rows=rows, drafter="adaptive")
    one.step()
    one.step()
    first, second = one.rows
    assert (tokens_of(first), tokens_of(second)) == ([40, 41, 42, 43], reference(DRAFT, ROWS[1], 1))
    assert [[draft.copied for draft in row.drafts] for row in one.rows] == [[True] * 4, [False]]
    assert one.totals == (5, 1, 1, 0)
    # Refused tokens must not be copied later.
    first.agree([40, 50, 1, 2, 3], same=False)
    one.step()
    assert tokens_of(first) == [40, 50, 1, 2]


def test_a_head_is_silent_behind_copies_whose_states_it_lacks():
    target = tiny("llama")
    pair = ModelPair(target, tiny_head(target))
    text = [7, 1, 2, 3, 40, 41, 1, 2, 3]
    one = session(pair, rows=[text[:-1]], drafter="adaptive")
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
    (row,) = one.rows
    row.agree(text[-1:], same=False, states=states[:-1])
    assert drafted(one, row) == [40, 41, 1, 2] and not one.busy
    # The target refuses the first copy and sends the state before its own token.
    states = target(torch.tensor([[*text, 9]]), output_hidden_states=True).hidden_states[-1][0]
    row.agree([9], same=False, states=states[-2:-1])
    head = pair.draft
    expected, _ = expected_drafts(target, head, head.fuse, head.project, [*text, 9], 1)
    assert drafted(one, row)[:1] == expected


def test_beside_a_row_that_drafts_nothing_is_overwritten_of_one_that_copies():
    """The row is fed as padding and must keep its whole prompt: its next q equals that of an uncached forward."""
    rows, warm = [[7, 1, 2, 3, 40, 41, 42, 43, 44, 1, 2, 3], ROWS[1]], SamplingParams(0.9)
    one = session(rows=rows, sampling=warm, drafter="adaptive")
    one.step()
    one.step()
    assert [row.drafts[0].copied for row in one.rows] == [True, False]
    text, row = [*rows[0], 60], one.rows[0]
    row.agree([60], same=False)
    one.step()
    expected = probabilities(DRAFT(torch.tensor([text]), use_cache=False).logits[0, -1], warm)
    (draft,) = row.drafts
    assert not draft.copied
    torch.testing.assert_close(draft.q, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("same", [False, True])
def test_drafts_that_agree_are_kept(same):
    """In the same epoch, or in a new one."""
    one = session()
    row = one.rows[0]
    ahead = drafted(one, row)
    row.agree(ahead[:1], same)
    assert tokens_of(row) == ahead[1:] and row.begin == (0 if same else len(ROWS[0]) + 1)
    assert drafted(one, row) == reference(DRAFT, ROWS[0], 5)[1:] and rolled_back(one) == 0


def test_whether_a_draft_is_verified_never_depends_on_the_token_drawn_there():
    """Only on q's largest value there, and on the drafts before it."""
    for own in (1e-6, 0.5, 1.0):
        assert confident_prefix([0.9], [own]) == 1
        assert confident_prefix([AHEAD_CONFIDENCE / 2], [own]) == 0
        assert confident_prefix([0.9, 0.9], [0.8, own]) == 2
    assert confident_prefix([0.9, 0.9, 0.9], [0.8, AHEAD_CONFIDENCE / 2, 0.9]) == 2

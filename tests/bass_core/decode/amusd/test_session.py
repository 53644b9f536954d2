"""The draft's side of AMUSD, without a thread: which drafts it keeps after a verdict and which it rolls back."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from bass_core import ModelPair, SamplingParams
from bass_core.decode.amusd.session import DraftSession, shared_rows
from bass_core.decode.base import DecodingParams
from bass_core.draft import chain as drafting
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


def start_session(pair=PAIR, lead=4, rows=ROWS, new=40, sampling=None, verification="auto", drafter="model"):
    params = DecodingParams(sampling or SamplingParams(), verification=VERIFICATIONS[verification])
    shared = shared_rows([Sequence(r, r, row, new, frozenset()) for r, row in enumerate(rows)])
    return DraftSession(pair, shared, params, lead, DRAFTERS[drafter], "pad", pair.device, threading.Condition())


def tokens_of(row):
    """Return the drafts that follow a row's text."""
    return [draft.token for draft in row.drafts]


def drafted(session, row):
    """Step until the session has nothing left to do; return the row's drafts."""
    while session.busy:
        session.step()
    return tokens_of(row)


def count_rolled_back(session):
    return session.totals[3]


@pytest.mark.parametrize("other", [False, True])
def test_a_draft_that_comes_too_late_is_dropped(other, monkeypatch):
    """While the second draft is computed, the target writes either the first draft or a different token."""
    session = start_session()
    row, text = session.rows[0], reference(DRAFT, ROWS[0], 6)
    session.step()
    session.step()
    written, propose = [(text[0] + other) % 90], session.drafter.propose

    def meanwhile(*arguments):
        row.agree(written, same=not other)
        return propose(*arguments)

    monkeypatch.setattr(session.drafter, "propose", meanwhile)
    session.step()
    monkeypatch.undo()
    assert tokens_of(row) == ([] if other else text[1:2])
    assert drafted(session, row) == reference(DRAFT, ROWS[0] + written, 4)
    assert count_rolled_back(session) == other


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_a_new_epoch_drafts_with_new_noise(verification, monkeypatch):
    """Only coupled drafts use the same noise again: the target's noise, which depends only on the position."""
    drawn = []

    def recorded(q, seed, ids, positions, streams, vocabulary):
        drawn.append((int(ids[0]), int(positions[0]), int(streams[0])))
        return draw(q, seed, ids, positions, streams, vocabulary)

    monkeypatch.setattr(drafting, "draw", recorded)
    session = start_session(sampling=SamplingParams(0.9), verification=verification)
    row, start = session.rows[0], len(ROWS[0])
    # A prefill and three drafts, the second of which is rejected.
    for _ in range(4):
        session.step()
    first, second, _ = tokens_of(row)
    row.agree([first, (second + 1) % 90], same=False)
    session.step()
    before, after = drawn[:3], drawn[3]
    assert [at for _, at, _ in before] == [start, start + 1, start + 2] and after[1] == start + 2
    if verification == "coupled":
        assert {use for *_, use in drawn} == {int(Role.TARGET)}
    else:
        assert {use for *_, use in before} == {int(Role.DRAFT)}
        assert after[2] == stream(Role.DRAFT, torch.tensor(start + 2))


@pytest.mark.parametrize("seed", range(4))
def test_after_a_rejection_the_drafts_follow_the_new_text(seed, monkeypatch):
    """Verdicts come before the prompts are fed, between steps and during steps; one row ends.

    The target writes only drafts, only its own tokens, or drafts followed by its own tokens. No stale token may
    stay in the cache.
    """
    chance, session = random.Random(seed), start_session(lead=5, new=200)
    rows, propose, taken_back = list(session.rows), session.drafter.propose, 0

    def write():
        nonlocal taken_back
        for row in rows:
            ahead = tokens_of(row)
            num_agreed, other = chance.randint(0, len(ahead)), [chance.randrange(90)] * chance.choice((0, 0, 1, 2))
            taken_back += len(ahead) > num_agreed and bool(other) and other[0] != ahead[num_agreed]
            row.agree(ahead[:num_agreed] + other, same=not other)
            assert row.begin == (len(row.text) if other else row.begin)
            written = ahead[:num_agreed] + other
            assert tokens_of(row) == (ahead[len(written) :] if ahead[: len(written)] == written else [])

    def meanwhile(*arguments):
        if chance.random() < 0.3:
            write()
        return propose(*arguments)

    monkeypatch.setattr(session.drafter, "propose", meanwhile)
    for step in range(24):
        if chance.random() < 0.4:
            write()
        if step == 16:
            rows.pop(0).finish_reason = "eos"
        session.step()
        for row in rows:
            assert not row.drafts or tokens_of(row) == reference(DRAFT, row.text, len(row.drafts))
    monkeypatch.undo()
    assert drafted(session, rows[0]) == reference(DRAFT, rows[0].text, 5) and session.rows == rows
    assert taken_back and count_rolled_back(session)


def test_a_head_continues_from_the_targets_states():
    """After each verdict, the first drafts are the head's output for the target's states."""
    target = tiny("llama")
    head = tiny_head(target)
    fuse, project = head.fuse, head.project
    pair = ModelPair(target, head)
    session = start_session(pair)
    row = session.rows[0]
    assert drafted(session, row) == [] and session.drafter.calls == 0, (
        "a head has no states before the first verdict"
    )
    text, start = list(ROWS[0]), len(ROWS[0])
    for epoch, new in enumerate((1, 3, 2), start=1):
        text += reference(target, text, new)
        states = target(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
        first = 0 if epoch == 1 else start - 1
        row.agree(text[start:], same=False, states=states[first : len(text) - 1])
        start = len(text)
        num_drafts = len(row.drafts)
        session.step()
        if not num_drafts:
            expected, _ = expected_drafts(target, head, fuse, project, text, 1)
            assert tokens_of(row) == expected
        drafted(session, row)


def test_a_copied_run_arrives_at_once_and_costs_no_forward():
    rows = [[7, 1, 2, 3, 40, 41, 42, 43, 44, 1, 2, 3], ROWS[1]]
    session = start_session(rows=rows, drafter="adaptive")
    session.step()
    session.step()
    first, second = session.rows
    assert (tokens_of(first), tokens_of(second)) == ([40, 41, 42, 43], reference(DRAFT, ROWS[1], 1))
    assert [[draft.copied for draft in row.drafts] for row in session.rows] == [[True] * 4, [False]]
    assert session.totals == (5, 1, 1, 0)
    # Rejected tokens must not be copied later.
    first.agree([40, 50, 1, 2, 3], same=False)
    session.step()
    assert tokens_of(first) == [40, 50, 1, 2]


def test_a_head_drafts_nothing_after_copies_whose_states_it_lacks():
    target = tiny("llama")
    pair = ModelPair(target, tiny_head(target))
    text = [7, 1, 2, 3, 40, 41, 1, 2, 3]
    session = start_session(pair, rows=[text[:-1]], drafter="adaptive")
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
    (row,) = session.rows
    row.agree(text[-1:], same=False, states=states[:-1])
    assert drafted(session, row) == [40, 41, 1, 2] and not session.busy
    # The target rejects the first copy, writes 9 instead, and sends the state before that token.
    states = target(torch.tensor([[*text, 9]]), output_hidden_states=True).hidden_states[-1][0]
    row.agree([9], same=False, states=states[-2:-1])
    head = pair.draft
    expected, _ = expected_drafts(target, head, head.fuse, head.project, [*text, 9], 1)
    assert drafted(session, row)[:1] == expected


def test_a_row_that_copies_is_not_overwritten_while_another_drafts():
    """While another row drafts, the copying row is fed padding, which must not overwrite its prompt in the cache.

    If the row's prompt is intact in the cache, its next q equals the q of a forward without a cache.
    """
    rows, warm = [[7, 1, 2, 3, 40, 41, 42, 43, 44, 1, 2, 3], ROWS[1]], SamplingParams(0.9)
    session = start_session(rows=rows, sampling=warm, drafter="adaptive")
    session.step()
    session.step()
    assert [row.drafts[0].copied for row in session.rows] == [True, False]
    text, row = [*rows[0], 60], session.rows[0]
    row.agree([60], same=False)
    session.step()
    expected = probabilities(DRAFT(torch.tensor([text]), use_cache=False).logits[0, -1], warm)
    (draft,) = row.drafts
    assert not draft.copied
    torch.testing.assert_close(draft.q, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("same", [False, True])
def test_drafts_that_agree_are_kept(same):
    session = start_session()
    row = session.rows[0]
    ahead = drafted(session, row)
    row.agree(ahead[:1], same)
    assert tokens_of(row) == ahead[1:] and row.begin == (0 if same else len(ROWS[0]) + 1)
    assert drafted(session, row) == reference(DRAFT, ROWS[0], 5)[1:] and count_rolled_back(session) == 0


def test_whether_a_draft_is_verified_never_depends_on_the_token_drawn_there():
    """Whether a draft is verified depends only on its largest q, and on q at the drafts before it."""
    for q_of_token in (1e-6, 0.5, 1.0):
        assert confident_prefix([0.9], [q_of_token]) == 1
        assert confident_prefix([AHEAD_CONFIDENCE / 2], [q_of_token]) == 0
        assert confident_prefix([0.9, 0.9], [0.8, q_of_token]) == 2
    assert confident_prefix([0.9, 0.9, 0.9], [0.8, AHEAD_CONFIDENCE / 2, 0.9]) == 2

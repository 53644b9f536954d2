"""The draft's side alone, in this process: what it keeps and what it rolls back after a verdict."""

from __future__ import annotations

import pytest
import torch

from bass_core import ModelPair, SamplingParams
from bass_core.amusd.messages import Open, RowUpdate
from bass_core.amusd.session import DraftSession
from bass_core.amusd.shared_memory import Arena
from bass_core.drafting import model as drafting
from bass_core.sampling.distribution import probabilities
from bass_core.sampling.draw import draw
from bass_core.sampling.noise import Role, stream
from bass_core.verification.table import VERIFICATIONS

from ...models import NEAR, perturbed, prompts, reference, tiny
from ..drafting.test_head import expected_drafts, tiny_head

TARGET = tiny("llama")
DRAFT = perturbed(TARGET, NEAR["llama"])
PAIR = ModelPair(TARGET, DRAFT)
ROWS = prompts(2)


def session(
    pair=PAIR, lead=4, rows=ROWS, new=40, layout=None, sampling=None, verification="auto", drafter="model"
):
    ends, ids, sampling = [len(row) + new for row in rows], list(range(len(rows))), sampling or SamplingParams()
    spec = Open(1, rows, ids, ends, lead, sampling, 0, VERIFICATIONS[verification], "pad", layout or {}, drafter)
    return DraftSession(spec, Arena(spec.layout), pair)


def drafted(one, row, epoch):
    """All tokens drafted for a row until the session has nothing left to do."""
    found = []
    while one.busy:
        found += [block for block in one.step() if block.row == row]
    assert all(block.epoch == epoch for block in found)
    return [token for block in found for token in block.tokens]


def test_it_drafts_as_far_as_the_lead_and_no_further():
    one = session(lead=5)
    assert drafted(one, 0, 0) == reference(DRAFT, ROWS[0], 5)
    assert one.made == 10 and not one.busy


def test_drafts_that_agree_are_kept_and_announced_again_under_a_new_epoch():
    one = session()
    ahead = drafted(one, 0, 0)
    (block,) = one.judge([RowUpdate(0, 1, len(ROWS[0]), ahead[:1])])
    assert (block.epoch, block.start, block.tokens) == (1, len(ROWS[0]) + 1, ahead[1:])
    assert one.rolled_back == 0
    assert drafted(one, 0, 1) == reference(DRAFT, ROWS[0], 5)[4:]


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_a_new_epoch_drafts_with_noise_of_its_own(verification, monkeypatch):
    """Except under coupled verification: drafts use the target's noise, which depends on the position alone."""
    drawn = []

    def recorded(q, seed, ids, positions, streams):
        drawn.append((int(ids[0]), int(positions[0]), int(streams[0])))
        return draw(q, seed, ids, positions, streams)

    monkeypatch.setattr(drafting, "draw", recorded)
    one = session(sampling=SamplingParams(0.9), verification=verification)
    start = len(ROWS[0])
    # A prefill and three drafts, the second of which is refused.
    first, second, _ = (block.tokens[0] for _ in range(4) for block in one.step() if block.row == 0)
    one.judge([RowUpdate(0, 1, start, [first, (second + 1) % 90])])
    one.step()
    before, after = drawn[:3], drawn[3]
    assert [at for _, at, _ in before] == [start, start + 1, start + 2] and after[1] == start + 2
    if verification == "coupled":
        assert {use for *_, use in drawn} == {int(Role.TARGET)}
    else:
        assert {use for *_, use in before} == {int(Role.DRAFT)}
        assert after[2] == stream(Role.DRAFT, torch.tensor(start + 2))


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_different_token_takes_back_what_was_drafted_from_there(at):
    """No stale token stays in the cache: the next drafts continue the new text."""
    one = session()
    ahead = drafted(one, 0, 0)
    text = [*ahead[:at], (ahead[at] + 1) % 90]
    assert one.judge([RowUpdate(0, 1, len(ROWS[0]), text)]) == []
    assert one.rolled_back == 1
    assert drafted(one, 0, 1) == reference(DRAFT, ROWS[0] + text, 4)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_after_a_refusal_the_drafts_are_those_of_the_new_text(at):
    """Four steps, a verdict with two other tokens at draft `at` of one row, three steps; checked uncached."""
    one = session(lead=8)
    one.step()
    ahead = [block.tokens for _ in range(4) for block in one.step() if block.row == 0]
    other = [(ahead[at][0] + 1) % 90, (ahead[at][0] + 2) % 90]
    text = [token for block in ahead[:at] for token in block] + other
    one.judge([RowUpdate(0, 1, len(ROWS[0]), text)])
    for _ in range(3):
        (block,) = [block for block in one.step() if block.row == 0]
        ids = torch.tensor([ROWS[0] + text])
        assert block.tokens == [int(DRAFT(ids, use_cache=False).logits[0, -1].argmax())]
        assert (block.epoch, block.start) == (1, ids.shape[1])
        text += block.tokens


def test_a_verdict_that_is_longer_than_the_drafts_and_one_that_comes_before_the_prompt_is_fed():
    one = session()
    text = reference(TARGET, ROWS[1], 7)
    one.judge([RowUpdate(1, 1, len(ROWS[1]), text), RowUpdate(0, 1, len(ROWS[0]), [5], finished=True)])
    assert drafted(one, 1, 1) == reference(DRAFT, ROWS[1] + text, 4)
    assert [row.index for row in one.rows] == [1]


def test_a_head_goes_on_from_the_targets_states():
    """After each verdict, the first drafts equal the head's output given the target's states."""
    target = tiny("llama")
    head = tiny_head(target)
    fuse, project = head.fuse, head.project
    pair = ModelPair(target, head)
    one = session(pair, layout={"states": ((2, 80, 64), torch.float32)})
    assert drafted(one, 0, 0) == [] and one.drafter.calls == 0, "nothing is known before the first verdict"
    text, start = list(ROWS[0]), len(ROWS[0])
    for epoch, new in enumerate((1, 3, 2), start=1):
        text += reference(target, text, new)
        states = target(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
        first = 0 if epoch == 1 else start - 1
        one.arena["states"][0, first : len(text) - 1] = states[first : len(text) - 1]
        one.judge([RowUpdate(0, epoch, start, text[start:])])
        start = len(text)
        own = [block for block in one.step() if block.row == 0]
        if own:
            assert own[0].tokens == expected_drafts(target, head, fuse, project, text, 1)[:1]
        drafted(one, 0, epoch)


def test_a_copied_run_comes_at_once_and_the_draft_model_is_not_billed_for_it():
    rows = [[7, 1, 2, 3, 40, 41, 42, 43, 44, 1, 2, 3], ROWS[1]]
    one = session(rows=rows, drafter="adaptive")
    one.step()
    first, second = one.step()
    assert (first.tokens, first.copied, second.copied) == ([40, 41, 42, 43], [True] * 4, [False])
    assert second.tokens == reference(DRAFT, ROWS[1], 1)
    assert (one.made, one.drafter.drafted, one.drafter.calls) == (5, 1, 1)
    # Refused tokens must not be copied later.
    one.judge([RowUpdate(0, 1, len(rows[0]), [40, 50, 1, 2, 3])])
    (again,) = [block for block in one.step() if block.row == 0]
    assert again.tokens == [40, 50, 1, 2]


def test_a_head_is_silent_behind_copies_whose_states_it_lacks():
    target = tiny("llama")
    pair = ModelPair(target, tiny_head(target))
    text = [7, 1, 2, 3, 40, 41, 1, 2, 3]
    one = session(pair, rows=[text[:-1]], layout={"states": ((1, 80, 64), torch.float32)}, drafter="adaptive")
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
    one.arena["states"][0, : len(text) - 1] = states[:-1]
    one.judge([RowUpdate(0, 1, len(text) - 1, text[-1:])])
    assert drafted(one, 0, 1) == [40, 41, 1, 2] and not one.busy
    # The target refuses the first copy and sends the state before its own token.
    states = target(torch.tensor([[*text, 9]]), output_hidden_states=True).hidden_states[-1][0]
    one.arena["states"][0, len(text) - 1] = states[len(text) - 1]
    one.judge([RowUpdate(0, 2, len(text), [9])])
    head = pair.draft
    assert drafted(one, 0, 2)[:1] == expected_drafts(target, head, head.fuse, head.project, [*text, 9], 1)


def test_beside_a_row_that_drafts_nothing_is_overwritten_of_one_that_copies():
    """The row is fed as padding and must keep its whole prompt: its next q equals that of an uncached forward."""
    rows, warm = [[7, 1, 2, 3, 40, 41, 42, 43, 44, 1, 2, 3], ROWS[1]], SamplingParams(0.9)
    one = session(rows=rows, layout={"q": ((2, 5, 96), torch.float32)}, sampling=warm, drafter="adaptive")
    one.step()
    assert [block.copied[0] for block in one.step()] == [True, False]
    text = [*rows[0], 60]
    one.judge([RowUpdate(0, 1, len(rows[0]), [60])])
    (block,) = [block for block in one.step() if block.row == 0]
    expected = probabilities(DRAFT(torch.tensor([text]), use_cache=False).logits[0, -1], warm)
    assert block.copied == [False]
    torch.testing.assert_close(one.arena["q"][0, len(text) % 5], expected, rtol=1e-3, atol=1e-6)

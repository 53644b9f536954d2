"""What holds for every drafter: its counters, chains only (no trees), and a user's drafter with only `propose`."""

import pytest
import torch

from bass_core import ModelPair, RequestError, generate, stream
from bass_core.drafting.base import Proposal, own_drafter
from bass_core.drafting.registry import DRAFTERS, DrafterKind, choose_drafter, runs_model

from ...conformance.table import DRAFTS
from ...conformance.table import pair as made_pair
from ...models import NEAR, perturbed, prompts, small_window, tiny

# Prompts that repeat themselves, so that there is something to copy.
ROWS = [prompt * 2 for prompt in prompts(3)]


class Tree:
    """Proposes two drafts that are both children of the newest token."""

    def propose(self, rows, max_drafts, keys):
        parents = torch.full((len(rows), 2), -1)
        return Proposal(torch.full((len(rows), 2), 3), [2] * len(rows), parents=parents)


class Threes:
    """Has no method but `propose`."""

    def propose(self, rows, max_drafts, keys):
        return Proposal(torch.full((len(rows), max(max_drafts)), 3), max_drafts)


def test_a_tree_is_refused_in_one_sentence():
    with pytest.raises(RequestError, match="verifies chains alone"):
        generate(ModelPair(tiny("llama")), ROWS, drafter=Tree(), draft_length=3)


def test_a_drafter_of_ones_own_needs_propose_alone():
    pair = ModelPair(tiny("llama"))
    drafter = Threes()
    ours = generate(pair, ROWS, drafter=drafter, draft_length=3, max_new_tokens=12)
    theirs = generate(pair, ROWS, method="regular", max_new_tokens=12)
    assert [s.token_ids for s in ours.sequences] == [s.token_ids for s in theirs.sequences]
    assert not hasattr(drafter, "calls"), "a copy of it was used"
    made = own_drafter(drafter)
    assert (made.calls, made.drafted, made.observes_states, made.start([])) == (0, 0, False, None)
    drafter.observe_states = lambda rows, states: None
    assert own_drafter(drafter).observes_states


@pytest.mark.parametrize("name", [name for name, draft in DRAFTS.items() if "llama" in draft.only])
def test_a_round_counts_what_a_draft_model_drew(name, monkeypatch):
    """Copies cost no forward and do not count as drawn; all other drafted tokens do."""
    small_window(monkeypatch)
    draft = DRAFTS[name]
    pair = made_pair("llama", draft.kind)
    rounds = [
        round_
        for round_ in stream(
            pair, ROWS, drafter=draft.drafter, draft_length=4, max_new_tokens=24, eos_token_id=None
        )
        if round_.kind != "prefill"
    ]
    drafted = [sum(len(row.drafted) for row in round_.rows) for round_ in rounds]
    drawn = [round_.draft_tokens for round_ in rounds]
    kind = DRAFTERS[draft.drafter]
    assert all((round_.windowed is not None) == kind.windows for round_ in rounds if round_.draft_tokens)
    if kind.windows and (kind.copies or kind.runs_model):
        assert sum(drafted) and sum(drawn)
    elif kind.windows:
        assert sum(drawn) and drawn == drafted
    elif not kind.runs_model:
        assert sum(drafted) and not any(drawn)
        assert not any(round_.draft_forwards for round_ in rounds)
    elif not kind.copies:
        assert drawn == drafted
    else:
        assert all(some <= every for some, every in zip(drawn, drafted, strict=True))
        assert sum(drawn)


def test_a_new_drafter_is_one_line(monkeypatch):
    monkeypatch.setitem(DRAFTERS, "threes", DrafterKind("always three", lambda parts: own_drafter(Threes())))
    target = tiny("llama")
    pair = ModelPair(target, perturbed(target, NEAR["llama"]))
    assert choose_drafter(pair, "threes") == "threes" and not runs_model("threes")
    out = generate(pair, ROWS, drafter="threes", draft_length=3, max_new_tokens=12)
    assert out.metrics.drafted and len(out.sequences[0].token_ids) == 12


def test_the_conformance_suite_knows_every_drafter():
    assert {draft.drafter for draft in DRAFTS.values()} == set(DRAFTERS)


def test_a_drafter_with_an_old_name_is_refused() -> None:
    class Old:
        def propose(self, rows, max_drafts, keys):
            raise AssertionError("it is refused before it is asked")

        def settle(self, rows, proposal, accepted):
            raise AssertionError("nothing calls this")

    with pytest.raises(RequestError, match="`settle` is called `on_verified` now"):
        choose_drafter(ModelPair(tiny("llama")), Old())

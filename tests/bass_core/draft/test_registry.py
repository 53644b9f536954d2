"""What holds for every drafter: its counters, the types of its proposals, and that it needs only `propose`."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bass_core import ModelPair, RequestError, SamplingParams, generate, stream
from bass_core.draft.base import Drafter, Proposal, TreeProposal, check_proposal, wrap_user_drafter
from bass_core.draft.head.chain import HeadDrafter
from bass_core.draft.model import ModelDrafter
from bass_core.draft.registry import DRAFTERS, DrafterKind
from bass_core.length.policies import FixedLength
from tests.conformance.table import DRAFTS
from tests.conformance.table import pair as conformance_pair
from tests.support.models import prompts, small_window, texts_of, tiny

# Prompts that repeat themselves, so that there is something to copy.
ROWS = [prompt * 2 for prompt in prompts(3)]


class Tree:
    """Proposes three drafts; by default, two follow the newest token and one follows the first draft."""

    branches = True

    def __init__(self, parents=None):
        self.parents = [-1, -1, 0] if parents is None else parents

    def propose(self, rows, max_drafts, keys):
        tokens = torch.tensor([[3, 5, 7]] * len(rows))
        return TreeProposal(tokens, [3] * len(rows), parents=[self.parents] * len(rows))


class Threes:
    """Proposes only the token 3, and has no other method."""

    def propose(self, rows, max_drafts, keys):
        return Proposal(torch.full((len(rows), max(max_drafts)), 3), max_drafts)


@pytest.mark.parametrize("parents", [[-1, 1, 0], [-1, -2, 0], [-1, 0], torch.tensor([-1, -1, 0])])
def test_invalid_parents_are_refused(parents):
    with pytest.raises(RequestError, match="one number per draft"):
        generate(ModelPair(tiny("llama")), ROWS, drafter=Tree(parents), draft_length=3)


@pytest.mark.parametrize(("proposal_type", "branches"), [(TreeProposal, False), (Proposal, True)])
def test_a_proposal_of_the_wrong_type_is_refused(proposal_type, branches):
    """A proposal's type selects the verification rule, so even a tree without branches may not pass as a chain."""

    class WrongType(Threes):
        def propose(self, rows, max_drafts, keys):
            fields = {} if branches else {"parents": [[-1]] * len(rows)}
            return proposal_type(torch.full((len(rows), 1), 3), [1] * len(rows), **fields)

    drafter = WrongType()
    drafter.branches = branches
    with pytest.raises(RequestError, match="branches = True"):
        generate(ModelPair(tiny("llama")), ROWS, drafter=drafter, draft_length=3)


TWO = torch.full((3, 2), 3)


@pytest.mark.parametrize(
    ("proposal", "reason"),
    [
        ([[3], [3], [3]], "must return a Proposal; got a list: use point_masses"),
        (None, "must return a Proposal; got a NoneType"),
        (Proposal(torch.full((3, 9), 3), [2, 9, 2]), "proposed 9 drafts for row 1, which may have from 0 to 2"),
        (Proposal(TWO, [2, 2, 3]), "proposed 3 drafts for row 2"),
        (Proposal(TWO, [2, -1, 2]), "proposed -1 drafts for row 1"),
        (Proposal(TWO, [2, 2]), r"num_drafted must be a list of 3 whole numbers, one per row; got \[2, 2\]"),
        (Proposal(TWO, [2, 2.0, 2]), "num_drafted must be a list of 3 whole numbers"),
        (Proposal(TWO[:2], [2, 2, 2]), r"int64 tensor \[3, drafts\].*got torch.int64 \[2, 2\]"),
        (Proposal(TWO.float(), [2, 2, 2]), r"got torch.float32 \[3, 2\]"),
        (Proposal([[3]] * 3, [1, 1, 1]), "int64 tensor .*got a list"),
        (Proposal(TWO + 93, [2, 2, 2]), "proposed the token 96: token ids are from 0 to 95"),
        (Proposal(torch.full((3, 3), 3), [2, 2, 2]), r"at most max\(max_drafts\) columns, here 2; got 3"),
        *(
            (Proposal(TWO, [2, 2, 2], probs), r"probs must be a tensor of floats \[3, 2, 96\]")
            for probs in (
                torch.ones(3, 2, 95),
                torch.ones(3, 1, 96),
                torch.ones(1, 2, 96),
                torch.ones(6, 96),
                [[1]],
            )
        ),
        (Proposal(TWO, [2, 2, 2], torch.ones(3, 2, 96, dtype=torch.long)), "probs must be a tensor of floats"),
    ],
)
def test_a_proposal_that_cannot_be_verified_is_refused_in_one_sentence(proposal, reason):
    drafter = SimpleNamespace(propose=lambda rows, max_drafts, keys: proposal)
    with pytest.raises(RequestError, match=reason):
        generate(ModelPair(tiny("llama")), ROWS, drafter=drafter, draft_length=2)


def test_proposals_of_a_users_class_that_has_a_name_are_checked(monkeypatch):
    class TooMany(Drafter):
        def propose(self, rows, max_drafts, keys):
            return Proposal(torch.full((3, 9), 3), [9] * 3)

    monkeypatch.setitem(DRAFTERS, "too many", DrafterKind("nine drafts", lambda parts: TooMany()))
    with pytest.raises(RequestError, match="proposed 9 drafts for row 0, which may have from 0 to 2"):
        generate(ModelPair(tiny("llama")), ROWS, drafter="too many", draft_length=2)
    assert not ModelDrafter.is_user_object


def test_the_probs_of_trees_have_a_row_per_distribution():
    tree = Tree().propose([0, 1], [3, 3], None)
    tree.probs, tree.drawn = torch.ones(5, 96), [[-1, 0, np.int64(4)], [3, -1, -1]]
    check_proposal(tree, [3, 3], 96)
    assert tree.drawn == [[-1, 0, 4], [3, -1, -1]]
    tree.probs = torch.ones(2, 3, 96)
    with pytest.raises(RequestError, match=r"probs must be a tensor of floats \[D, 96\]"):
        check_proposal(tree, [3, 3], 96)


FORK, PROBS = [[-1, 0]] * 3, torch.full((3, 96), 1 / 96)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"drawn": [[0], [1], [2]]}, "`drawn` of a tree must have one list per row"),
        ({"drawn": [[3, -1]] * 3}, r"from -1 to less than 3, .*; got \[\[3, -1\]"),
        ({"drawn": [[-2, 0]] * 3}, "from -1 to less than 3"),
        ({"drawn": [[0.0, -1]] * 3}, "whole number per draft"),
        ({"drawn": torch.zeros(3, 2)}, "one list per row, .*; got torch.float32"),
        ({"drawn": [[0, -1]] * 3, "probs": None}, "from -1 to less than 0"),
        ({"parents": [[-1.0, 0.0]] * 3, "probs": None}, "parents of a tree must be"),
        ({}, "The tree has probs, but no `drawn`"),
        ({"probs": torch.ones(3, 96, dtype=torch.long), "drawn": [[0, -1]] * 3}, "tensor of floats"),
    ],
)
def test_a_tree_that_cannot_be_verified_is_refused_in_one_sentence(parts, reason):
    tree = TreeProposal(TWO, [2, 2, 2], **({"probs": PROBS, "parents": FORK} | parts))
    drafter = SimpleNamespace(branches=True, propose=lambda rows, max_drafts, keys: tree)
    with pytest.raises(RequestError, match=reason):
        generate(ModelPair(tiny("llama")), ROWS, drafter=drafter, draft_length=2, sampling=SamplingParams(1.0))


@pytest.mark.parametrize(
    "change",
    [lambda tokens: tokens.append(3), lambda tokens: tokens.__setitem__(0, 3), lambda tokens: tokens.pop()],
)
def test_a_drafter_that_changes_a_text_is_refused(change):
    def propose(rows, max_drafts, keys):
        change(rows[1].tokens)
        return Proposal(TWO, [0, 0, 0])

    with pytest.raises(RequestError, match=r"The drafter changed the tokens of row 1: .* list\(row.tokens\)"):
        generate(ModelPair(tiny("llama")), ROWS, drafter=SimpleNamespace(propose=propose), draft_length=2)


def test_counts_may_be_numpys():
    proposal = Proposal(TWO, [np.int64(2), np.int32(1), 0])
    check_proposal(proposal, [2, 2, 2], 96)
    assert proposal.num_drafted == [2, 1, 0] and {type(count) for count in proposal.num_drafted} == {int}
    with pytest.raises(RequestError, match="whole numbers"):
        check_proposal(Proposal(TWO, [np.bool_(True), 1, 1]), [2, 2, 2], 96)


def test_a_tree_is_refused_by_a_rule_for_chains():
    with pytest.raises(RequestError, match="judges chains"):
        generate(
            ModelPair(tiny("llama")), ROWS, drafter=Tree(), draft_length=3, sampling=SamplingParams(1.0),
            verification="block",
        )  # fmt: skip


def test_a_user_drafter_needs_only_propose():
    pair = ModelPair(tiny("llama"))
    drafter = Threes()
    drafted = generate(pair, ROWS, drafter=drafter, draft_length=3, max_new_tokens=12)
    regular = generate(pair, ROWS, method="regular", max_new_tokens=12)
    assert texts_of(drafted) == texts_of(regular)
    assert not hasattr(drafter, "calls"), "generate must use a copy"
    assert [type(copy) for copy in drafted.copies] == [Threes] and not regular.copies
    drafter.name = lambda: "not to be pickled"
    unpickled = pickle.loads(pickle.dumps(generate(pair, ROWS, drafter=drafter, max_new_tokens=4)))
    assert unpickled.copies == [] and unpickled.sequences
    wrapped = wrap_user_drafter(drafter)
    assert (wrapped.calls, wrapped.drafted, wrapped.observes_states, wrapped.start([])) == (0, 0, False, None)
    drafter.observe_states = lambda rows, states: None
    assert wrap_user_drafter(drafter).observes_states


@pytest.mark.parametrize("name", [name for name, draft in DRAFTS.items() if "llama" in draft.only])
def test_a_round_counts_the_tokens_that_a_draft_model_drew(name, monkeypatch):
    """A copied token costs no forward and is not counted as drawn; every other drafted token is."""
    small_window(monkeypatch)
    draft = DRAFTS[name]
    pair = conformance_pair("llama", draft.kind)
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
    if kind.windows and kind.runs_model:
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


def test_the_conformance_suite_covers_every_drafter():
    assert {draft.drafter for draft in DRAFTS.values()} == set(DRAFTERS)


class LateLength(FixedLength):
    """Drafts nothing in the first three rounds."""

    rounds = 0

    def lengths(self, offers):
        return super().lengths(offers) if self.rounds >= 3 else [0] * len(offers)

    def observe(self, feedback):
        self.rounds += 1


@pytest.mark.parametrize("length", [1, LateLength(1), 0])
@pytest.mark.parametrize("drafter", ["model", "adaptive"])
def test_a_head_reads_the_prompts_during_the_prefill(drafter, length, monkeypatch):
    """Then the first round with drafts costs no more than later ones, however long the prompts are."""
    pair, read, calls = conformance_pair("llama", "head"), HeadDrafter.read, []
    monkeypatch.setattr(HeadDrafter, "read", lambda self, rows: calls.append(read(self, rows) is None))
    rounds = list(stream(pair, [[3] * 300, [5, 6] * 140], drafter=drafter, draft_length=length, max_new_tokens=9))
    decoding = [round_ for round_ in rounds if round_.kind != "prefill"]
    assert {round_.draft_forwards for round_ in decoding} <= {0, 1} and any(calls) == (length != 0)
    assert any(round_.draft_tokens for round_ in decoding) == (length != 0)


def test_drafters_that_are_unknown_or_lack_a_draft_model_are_refused():
    pair = ModelPair(tiny("llama"))
    for drafter, reason in (
        ("adaptive", "no draft model"),
        ("ngram", "must be auto, model, prompt_lookup, adaptive, window, window_model or"),
        ("magic", "got 'magic'"),
    ):
        with pytest.raises(RequestError, match=reason):
            generate(pair, [1, 2, 3], drafter=drafter)

"""Draft-length policies: Algorithm 1 of the BASS paper, number by number."""

import gc
import weakref
from threading import Lock
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from bass_core import ModelPair, RequestError, SamplingParams, generate, race, stream
from bass_core.decode import batch
from bass_core.decode.base import DecodingParams
from bass_core.decode.batch import BatchDecoder
from bass_core.decode.request import make_request
from bass_core.decode.verifier import Verifier
from bass_core.draft.model import ModelDrafter
from bass_core.errors import MemoryShortage
from bass_core.length.base import Feedback
from bass_core.length.options import POLICIES, PolicyKind, make_policy
from bass_core.length.policies import Algorithm1, FixedLength
from bass_core.model.runner import ModelRunner
from bass_core.sequence import Sequence
from tests.support.models import NEAR, VOCAB, perturbed, prompts, texts_of, tiny


def lengths(best):
    policy = Algorithm1()
    seen = [policy.length]
    for accepted in best:
        policy.update(accepted)
        seen.append(policy.length)
    return seen


def test_algorithm_1():
    assert lengths([7, 9, 3, 2, 0, 0, 0, 0, 0, 0]) == [7, 9, 11, 9, 7, 5, 3, 1, 1, 1, 1]
    assert lengths([0, 0, 0, 0, 0]) == [7, 6, 4, 2, 1, 1]
    assert lengths([*range(7, 32, 2), 32, 32])[-3:] == [32, 32, 32]


def test_make_policy():
    fixed = FixedLength(3)
    assert make_policy("bass") == Algorithm1()
    assert make_policy(5) == FixedLength(5)
    assert make_policy(fixed) == fixed and make_policy(fixed) is not fixed
    for bad in ("fast", -1, 2.5, None, True):
        with pytest.raises(RequestError, match="draft_length"):
            make_policy(bad)


def test_a_policy_by_name_decides(monkeypatch):
    """It is the one that its line makes, not Algorithm 1, and its limit bounds the request."""
    monkeypatch.setitem(POLICIES, "odd", PolicyKind(6, lambda parts: OddRows()))
    pair, text = ModelPair(tiny("llama")), prompts(3)
    steps = stream(pair, text, drafter="prompt_lookup", draft_length="odd", max_new_tokens=9, eos_token_id=None)
    assert {tuple(round_.lengths) for round_ in steps if round_.kind != "prefill"} <= {(6, 0, 2), (6, 0), (6,)}
    assert make_request(pair, text, draft_length="odd").longest_draft == 6
    with pytest.raises(RequestError, match="one of auto, bass, cost-aware, odd, a whole"):
        make_policy("even")


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        ([1, 1, 1, 1], "one length per row, here 3; got"),
        ([1, 1], "one length per row, here 3; got"),
        (None, "one length per row, here 3; got None"),
        ([1, 1.0, 1], "whole numbers from 0 to its `limit`, which must not grow, here 4; got 1.0"),
        ([1, True, 1], "got True"),
        ([1, -1, 1], "got -1"),
        ([1, 5, 1], "got 5"),
    ],
)
def test_wrong_lengths_are_refused_in_one_sentence(lengths, reason):
    policy = SimpleNamespace(limit=4, lengths=lambda offers: lengths, observe=lambda feedback: None)
    with pytest.raises(RequestError, match=reason):
        generate(ModelPair(tiny("llama")), prompts(3), draft_length=policy)


class Growing:
    """Drafts as much as its limit, which a round raises."""

    limit = 2

    def lengths(self, offers):
        return [np.int64(self.limit)] * len(offers)

    def observe(self, feedback):
        self.limit = 9


@pytest.mark.parametrize("method", ["bass", "speculative"])
def test_a_limit_that_grows_is_refused(method):
    with pytest.raises(RequestError, match="which must not grow, here 2; got "):
        generate(
            ModelPair(tiny("llama"), tiny("llama", seed=1)), prompts(3), method=method, draft_length=Growing()
        )


@pytest.mark.parametrize("run", [race, stream])
def test_only_generate_keeps_the_copies(run):
    """A race has one request for all lanes, and would keep every lane's caches alive."""

    class Short(OddRows):
        copies: ClassVar[list[Any]] = []

        def __deepcopy__(self, memo):
            self.copies.append(weakref.ref(copied := Short()))
            return copied

    for _ in run(ModelPair(tiny("llama")), prompts(2), draft_length=Short(), max_new_tokens=6):
        pass
    gc.collect()
    assert Short.copies and not any(copied() for copied in Short.copies)


def test_a_copy_for_which_there_is_no_memory_is_a_shortage():
    class Large(OddRows):
        def __deepcopy__(self, memo):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(MemoryShortage):
        generate(ModelPair(tiny("llama")), prompts(1), draft_length=Large(), max_new_tokens=4)


def test_the_copy_of_a_policy_can_be_read_and_the_users_stays_as_it_was():
    pair, policy = ModelPair(tiny("llama")), OddRows()
    for method, copies in (("bass", 1), ("speculative", 3), ("regular", 0)):
        out = generate(pair, prompts(3), method=method, draft_length=policy, max_new_tokens=9)
        assert len(out.copies) == copies and all(copy.calls for copy in out.copies)
    assert not policy.calls
    policy.lock = Lock()
    with pytest.raises(RequestError, match=r"draft_length object can't be copied .*: give its class"):
        generate(pair, prompts(3), draft_length=policy)


class Recorder(Algorithm1):
    """Algorithm 1 that records its updates. A decoder copies its policy, so the class holds the record."""

    updates: ClassVar[list[int]] = []

    def update(self, best: int) -> None:
        self.updates.append(best)
        super().update(best)


@pytest.mark.parametrize("amount", [0.0, NEAR["llama"]])
def test_a_decoder_uses_the_lengths_of_its_policy(amount):
    """Algorithm 1 changes its length only after rounds in which some row drafted the full length."""
    target = tiny("llama")
    pair = ModelPair(target, perturbed(target, amount) if amount else target)
    Recorder.updates.clear()
    steps = stream(pair, prompts(4), max_new_tokens=70, draft_length=Recorder())
    rounds = [round_ for round_ in steps if round_.kind != "prefill"]
    replayed, updates = Algorithm1(), iter(list(Recorder.updates))
    num_short_rounds = 0
    for round_ in rounds:
        assert round_.draft_length == replayed.length
        if any(len(row.drafted) == round_.draft_length for row in round_.rows):
            best = max(row.accepted for row in round_.rows)
            assert next(updates) == best
            replayed.update(best)
        else:
            num_short_rounds += 1
    assert next(updates, None) is None
    assert num_short_rounds
    if not amount:
        assert [round_.draft_length for round_ in rounds] == [7, 9, 11, 13, 15, 17]


class OddRows:
    """Sets a different draft length for each row, for some more than they can use."""

    limit = 6

    def __init__(self):
        self.calls = []

    def lengths(self, offers):
        self.calls.append(offers)
        return [6, 0, 2][: len(offers)]

    def observe(self, feedback):
        self.calls.append(feedback)


def test_a_policy_sets_the_length_of_each_row():
    target, tokens = tiny("llama"), 9
    runners = [ModelRunner(ModelPair(target).target_step, 3, 60, VOCAB, "pad") for _ in range(2)]
    drafter, policy = ModelDrafter(runners[1], SamplingParams()), OddRows()
    rows = [Sequence(i, i, prompt, tokens, frozenset()) for i, prompt in enumerate(prompts(3))]
    decoder = BatchDecoder(rows, runners[0], DecodingParams(SamplingParams()), drafter, policy)
    rounds = []
    while not decoder.finished:
        rounds.append(decoder.step())
    first, second, *_ = (round_ for round_ in rounds if round_.kind == "verify")
    assert [len(row.drafted) for row in first.rows] == [6, 0, 2] and first.draft_length == 6
    feedback = next(call for call in policy.calls if isinstance(call, Feedback))
    assert [offer.most for offer in feedback.offers] == [7, 7, 7] and {
        offer.source for offer in feedback.offers
    } == {"model"}
    assert [offer.unread for offer in feedback.offers] == [1, 1, 1], "the prompts were read before"
    assert feedback[1:5] == ([6, 0, 2], [6, 0, 2], [6, 0, 2], first.draft_forwards)
    assert feedback.ms > feedback.draft_ms > 0
    # The first row has one token left to write, which the target writes itself, so it drafts none.
    assert [len(row.drafted) for row in second.rows] == [0, 0, 2]
    regular = generate(ModelPair(target), prompts(3), method="regular", max_new_tokens=tokens)
    assert [row.token_ids for row in rows] == texts_of(regular)


def test_set_up_is_no_part_of_a_rounds_time(monkeypatch):
    """Each verification captures a graph for a second, and takes 7 ms besides."""
    clock = SimpleNamespace(ms=0.0, setup=0.0)
    monkeypatch.setattr(batch, "time", SimpleNamespace(perf_counter=lambda: clock.ms / 1000))
    monkeypatch.setattr(batch, "setup_ms", lambda: clock.setup, raising=False)
    launch = Verifier.launch

    def captures(*arguments):
        clock.ms, clock.setup = clock.ms + 1007, clock.setup + 1000
        return launch(*arguments)

    monkeypatch.setattr(Verifier, "launch", captures)
    target, policy = tiny("llama"), OddRows()
    runners = [ModelRunner(ModelPair(target).target_step, 1, 60, VOCAB, "pad") for _ in range(2)]
    rows, params = [Sequence(0, 0, [1, 2, 3], 9, frozenset())], SamplingParams()
    decoder = BatchDecoder(rows, runners[0], DecodingParams(params), ModelDrafter(runners[1], params), policy)
    while not decoder.finished:
        decoder.step()
    times = [call.ms for call in policy.calls if isinstance(call, Feedback)]
    assert times == pytest.approx([7.0, 7.0])

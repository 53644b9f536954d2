"""Draft-length policies: Algorithm 1 of BASS, number by number."""

from typing import ClassVar

import pytest

from bass_core import ModelPair, RequestError, SamplingParams, generate, stream
from bass_core.budget.options import make_policy
from bass_core.budget.policies import Algorithm1, CommonStop, FixedLength

from ...models import NEAR, perturbed, prompts, tiny


def lengths(best):
    policy = Algorithm1()
    seen = [policy.length]
    for accepted in best:
        policy.update([0, accepted])
        seen.append(policy.length)
    return seen


def test_algorithm_1():
    assert lengths([7, 9, 3, 2, 0, 0, 0, 0, 0, 0]) == [7, 9, 11, 9, 7, 5, 3, 1, 1, 1, 1]
    assert lengths([0, 0, 0, 0, 0]) == [7, 6, 4, 2, 1, 1]
    assert lengths([*range(7, 32, 2), 32, 32])[-3:] == [32, 32, 32]


def test_make_policy():
    own = FixedLength(3)
    assert make_policy("bass").length == 7
    assert make_policy(5).length == 5
    assert make_policy(own) == own
    assert make_policy(own) is not own
    for bad in ("fast", -1, 2.5, None, True):
        with pytest.raises(RequestError, match="draft_length"):
            make_policy(bad)


class Recorder(Algorithm1):
    """Algorithm 1 that writes down what it is told; each decoder works on a copy, so the notes are the class's."""

    told: ClassVar[list[list[int]]] = []

    def update(self, accepted: list[int]) -> None:
        self.told.append(list(accepted))
        super().update(accepted)


@pytest.mark.parametrize("amount", [0.0, NEAR["llama"]])
def test_a_decoder_asks_for_what_the_policy_says(amount):
    """It is told of rounds in which some row drafted the whole length; those that cut all rows change nothing."""
    target = tiny("llama")
    pair = ModelPair(target, perturbed(target, amount) if amount else target)
    Recorder.told.clear()
    steps = stream(pair, prompts(4), max_new_tokens=70, draft_length=Recorder())
    rounds = [round_ for round_ in steps if round_.kind != "prefill"]
    replayed, told = Algorithm1(), iter(list(Recorder.told))
    cut = 0
    for round_ in rounds:
        assert round_.draft_length == replayed.length
        if any(len(row.drafted) == round_.draft_length for row in round_.rows):
            accepted = [row.accepted for row in round_.rows]
            assert next(told) == accepted
            replayed.update(accepted)
        else:
            cut += 1
    assert next(told, None) is None
    assert cut
    if not amount:
        assert [round_.draft_length for round_ in rounds] == [7, 9, 11, 13, 15, 17]


def test_a_common_stop_keeps_the_lengths_alike_and_the_text():
    """All rows of a round write what the batch's first rejection leaves; the words are the target's."""
    target = tiny("llama")
    pair = ModelPair(target, perturbed(target, NEAR["llama"]))
    rows = prompts(3, longest=8)
    plain = [s.token_ids for s in generate(pair, rows, method="regular", max_new_tokens=20).sequences]
    others = 0
    texts = [[] for _ in rows]
    own = list(stream(pair, rows, draft_length=4, max_new_tokens=20))
    for round_ in stream(pair, rows, draft_length=CommonStop(4), max_new_tokens=20):
        assert len({len(row.tokens) for row in round_.rows}) <= 1
        least = min((row.accepted for row in round_.rows), default=0)
        for row in round_.rows:
            texts[row.sequence] += row.tokens
            assert row.accepted == least or row.finish_reason
            if round_.kind == "verify" and len(row.tokens) > least and len(row.drafted) > least:
                # The last token is a draft that stood, or the target's own where this row was refused.
                stood = row.p[least] == 1
                assert row.origins[least] == ("accepted" if stood else "recovered")
                assert row.tokens[least] == row.drafted[least] or not stood
                others += stood
    assert texts == plain
    assert others
    assert any(len({len(row.tokens) for row in round_.rows}) > 1 for round_ in own), "nothing was cut short"


def test_a_common_stop_hands_on_the_draft_with_its_probability():
    """Sampled: the draft in the place of the target's own token keeps p as it was tested by."""
    target = tiny("llama")
    pair = ModelPair(target, perturbed(target, NEAR["llama"]))
    cut = 0
    arguments = {"draft_length": CommonStop(4), "max_new_tokens": 20, "sampling": SamplingParams(0.9)}
    for round_ in stream(pair, prompts(4, longest=8), **arguments):
        for row in round_.rows:
            n = row.accepted
            if round_.kind == "verify" and row.origins[n:] == ["accepted"]:
                cut += 1
                assert row.tokens[n] == row.drafted[n] and row.next_p == row.p[n]
                assert row.u[n] * row.q[n] < row.p[n]
            elif len(row.origins) > n and round_.kind == "verify" and len(row.drafted) > n:
                assert row.origins[n] == "recovered" and row.u[n] * row.q[n] >= row.p[n]
    assert cut

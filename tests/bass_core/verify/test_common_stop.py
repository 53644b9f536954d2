"""Common stop: all rows stop at the batch's first rejection, lengths stay equal, the text is the target's."""

import pytest

from bass_core import ModelPair, RequestError, SamplingParams, generate, stream
from bass_core.verify.acceptance import DraftTest, RowOutcome
from bass_core.verify.rules import VERIFICATIONS, find_verification, stop_together

from ...models import NEAR, perturbed, prompts, tiny


def test_a_common_stop_keeps_the_lengths_alike_and_the_text():
    """In a round, all rows write as many tokens as the first rejection leaves; the text is the target's."""
    target = tiny("llama")
    pair = ModelPair(target, perturbed(target, NEAR["llama"]))
    rows = prompts(3, longest=8)
    plain = [s.token_ids for s in generate(pair, rows, method="regular", max_new_tokens=20).sequences]
    others = 0
    texts = [[] for _ in rows]
    own = list(stream(pair, rows, draft_length=4, max_new_tokens=20))
    for round_ in stream(pair, rows, draft_length=4, verification="common_stop", max_new_tokens=20):
        assert len({len(row.tokens) for row in round_.rows}) <= 1
        least = min((row.accepted for row in round_.rows), default=0)
        for row in round_.rows:
            texts[row.sequence] += row.tokens
            assert row.accepted == least or row.finish_reason
            if round_.kind == "verify" and len(row.tokens) > least and len(row.drafted) > least:
                # The last token is an accepted draft or, where this row was refused, the target's own token.
                stood = row.p[least] == 1
                assert row.origins[least] == ("accepted" if stood else "recovered")
                assert row.tokens[least] == row.drafted[least] or not stood
                others += stood
    assert texts == plain
    assert others
    assert any(len({len(row.tokens) for row in round_.rows}) > 1 for round_ in own), "nothing was cut short"


def test_a_common_stop_hands_on_the_draft_with_its_probability():
    """Sampled: an accepted draft in the place of the target's own token keeps the p it was tested with."""
    target = tiny("llama")
    pair = ModelPair(target, perturbed(target, NEAR["llama"]))
    cut = 0
    arguments = {
        "draft_length": 4,
        "verification": "common_stop",
        "max_new_tokens": 20,
        "sampling": SamplingParams(0.9),
    }
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


def test_a_row_is_cut_to_the_shortest():
    tests = [DraftTest(0.5, 0.25, 0.1, 7), DraftTest(0.75, 0.5, 0.2, 8)]
    long, short = RowOutcome(2, 9, 0.5, tests), RowOutcome(1, 4, 0.25, tests)
    assert stop_together([long, short]) == [RowOutcome(1, 8, 0.75, tests, next_drafted=True), short]
    assert stop_together([long, long]) == [long, long]


def test_users_are_offered_the_others_alone():
    assert list(VERIFICATIONS) == ["auto", "block", "rejection", "coupled"]
    assert find_verification("chen") is find_verification("rejection")
    assert find_verification("common_stop").adjust is stop_together
    for name in ("hope", None, ["chen"]):
        with pytest.raises(RequestError, match="verification must be one of auto, block, rejection, coupled; got"):
            find_verification(name)

"""Metrics of hand-made rounds, and of a lane whose clock the test sets."""

from contextlib import contextmanager

import pytest

from bass_core.decode.request import make_request
from bass_core.lanes.lane import Lane
from bass_core.lanes.metrics import Counts, latency, summarise
from bass_core.sequence import Round, RowRound, Sequence
from tests.support.models import prompts, tiny_pair

PAIR = tiny_pair("self")
TARGET = PAIR.target


def _row(drafted, accepted):
    return RowRound(0, [0] * drafted, [], [], [], accepted, [0] * (accepted + 1), [], None)


def test_metrics_of_hand_made_rounds():
    counts = Counts()
    counts.add(Round("prefill"), 4.0)
    counts.add(Round("prefill", rows=[_row(0, 0), _row(0, 0)], time_ms=10.0), 6.0)
    counts.add(Round("verify", 3, [_row(3, 3), _row(3, 1)]), 40.0)
    counts.add(Round("verify", 3, [_row(2, 0), _row(0, 0)]), 40.0)
    done = Sequence(0, 0, [1], 9, frozenset(), [1] * 5, [], [10.0, 20.0, 30.0, 40.0, 50.0], "length")
    slow = Sequence(1, 1, [1], 9, frozenset(), [1] * 5, [], [10.0, 30.0, 50.0, 70.0, 90.0], "eos")
    figures = summarise(counts, [done, slow], 90.0, 3)
    assert figures.acceptance_rate == 4 / 8
    assert figures.token_acceptance == 4 / (3 + 2 + 1)
    assert figures.mean_acceptance_length == 1 + 4 / 3
    assert figures.per_position_acceptance == [2 / 3, 1 / 3, 1 / 2]
    assert figures.rounds == 2
    assert figures.ttft_ms == 10
    assert (figures.ptl_first_ms, figures.ptl_last_ms, figures.ptl_all_ms) == (10, 20, 15)
    assert figures.throughput_tps == 1000 * 10 / 90
    assert latency(Sequence(0, 0, [1], 9, frozenset(), [1], [], [5.0], "eos"), 0.0) is None
    assert summarise(Counts(), [done], 50.0, 1).acceptance_rate is None


@pytest.mark.parametrize(("method", "prefills", "tokens_per_step"), [("regular", 1, 3), ("speculative", 3, 1)])
def test_ms_per_token_excludes_prefills_and_their_tokens(method, prefills, tokens_per_step, monkeypatch):
    """Each step takes 10 ms and each prefill 1000 ms. No draft model reads the prompts."""
    lane = Lane(PAIR, make_request(PAIR, prompts(3), max_new_tokens=5, draft_length=0), method)
    lane.clock = FakeClock({"prefill": 1000.0, "plain": 10.0})
    step = lane._decoder.step
    monkeypatch.setattr(lane._decoder, "step", lambda: lane.clock.spend(step()))
    first = lane.step()
    assert first.kind == "prefill" and lane.metrics().ms_per_token is None
    while not lane.finished:
        if lane.step().kind != "prefill":
            assert lane.metrics().ms_per_token == pytest.approx(3 * 10 / tokens_per_step)
    metrics = lane.metrics()
    assert metrics.ms_per_token == pytest.approx(3 * 10 / tokens_per_step)
    assert lane.decode_ms == pytest.approx(10 * 12 / tokens_per_step)
    assert metrics.throughput_tps == pytest.approx(1000 * 15 / (1000 * prefills + lane.decode_ms))
    assert metrics.ttft_ms == 1000


class FakeClock:
    """A lane's clock on which each round takes the time of its kind."""

    def __init__(self, costs):
        self.costs, self.ms, self.due = costs, 0.0, 0.0

    def spend(self, round_):
        self.due = self.costs[round_.kind]
        return round_

    @contextmanager
    def running(self):
        yield
        self.ms += self.due

    def next_begins(self, event):
        pass

    def count(self, round_, sequences):
        pass

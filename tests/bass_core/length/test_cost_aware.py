"""The cost-aware draft length: a function of the cost table and of the drafted and accepted counts."""

import json
import math
import os
from statistics import median

import numpy as np
import pytest

from bass_core import ModelPair
from bass_core.decode.calibrate import MeasuredCosts
from bass_core.decode.cost_store import MAX_MEASURED_ROWS, missing_sizes
from bass_core.decode.measuring import measure_ahead, with_costs
from bass_core.decode.request import make_request
from bass_core.draft.registry import DRAFTERS
from bass_core.length import cost_aware
from bass_core.length.acceptance import FIRST_RATE, AcceptanceEstimate
from bass_core.length.base import Feedback, Offer
from bass_core.length.cost_aware import CostAware
from bass_core.length.costs import CostTable, read_table
from bass_core.sample.params import SamplingParams
from tests.support.models import tiny, tiny_pair

# In milliseconds: a round costs 10 plus 1 per token; a draft forward costs 0.5.
CHEAP = CostTable({1: [(1, 11), (17, 27)], 8: [(8, 18), (136, 146)]}, {1: 0.5, 8: 0.5}, padded=False)
# Every token costs as much as the first, so drafting can only lose.
DEAR = CostTable({8: [(8, 80), (136, 1360)]}, {8: 5.0}, padded=False)


@pytest.fixture(autouse=True)
def separate_cost_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("BASS_MEASURE")
    # Costs come with the CPU's peak rates, which tests/bass_core/decode/test_peaks.py tests.
    monkeypatch.setattr("bass_core.decode.peaks.peaks_path", lambda dtype: None)


HEAD, COPY = Offer(40, "head", True, 1), Offer(40, "copy", False, 0)


def play(policy, rounds, offers, accepts, clock=None, unread=0):
    """Play rounds in which every row drafts all it may and accepts at most `accepts`; return their lengths.

    clock: returns a round's time in ms, given its number of tokens and of draft forwards. None: not measured.
    """
    history = []
    for _ in range(rounds):
        told = [offer._replace(unread=offer.unread + unread) for offer in offers]
        lengths = policy.lengths(told)
        assert policy.lengths(told) == lengths, "asking changes nothing"
        history.append(lengths)
        forwards = max((n for n, offer in zip(lengths, offers, strict=True) if offer.forwards), default=0)
        ms = math.nan if clock is None else clock(len(offers) + sum(lengths), forwards)
        accepted = [min(length, accepts) for length in lengths]
        policy.observe(Feedback(told, lengths, lengths, accepted, forwards, ms, 0.5 * forwards))
    return history


def test_costs_are_interpolated_and_extrapolated():
    assert CHEAP.verify_ms(1, 1) == 11
    assert CHEAP.verify_ms(1, 9) == 19
    assert CHEAP.verify_ms(1, 33) == pytest.approx(43)
    assert CHEAP.verify_ms(8, 16) == 26
    assert CHEAP.verify_ms(64, 16) == 26
    # For a row count between two measured ones, interpolate between their times for the same number of tokens.
    assert CostTable({2: [(2, 10), (4, 12)], 4: [(4, 30), (8, 38)]}, {}, False).verify_ms(3, 4) == 21
    assert CostTable({1: [(1, 5)]}, {}, False).draft_ms(1) == 0


def test_it_drafts_as_many_tokens_as_are_accepted():
    assert play(CostAware(CHEAP), 60, [HEAD], 16)[-1] == [16]
    assert median(length for (length,) in play(CostAware(CHEAP), 60, [HEAD], 3)[-20:]) == 3
    assert set(map(max, play(CostAware(CHEAP), 60, [HEAD] * 8, 2)[-4:])) == {2}


def test_the_best_drafts_of_all_rows_are_taken_first():
    """Copies are accepted and the head's drafts are not, so only the rows that copy draft."""
    policy = CostAware(CHEAP, timed=False)
    play(policy, 40, [COPY], 16)
    play(policy, 40, [HEAD], 0)
    lengths = play(policy, 1, [HEAD, COPY, HEAD, COPY], 16)[0]
    assert lengths[0] == lengths[2] == 0 and min(lengths[1], lengths[3]) > 4
    assert play(policy, 1, [HEAD._replace(most=0), COPY._replace(most=3)], 16)[0] == [0, 3], "as its room allows"
    assert policy.lengths([Offer(0), Offer(-1)]) == [0, 0]


def test_drafts_that_are_never_proposed_gain_nothing():
    """In each round the drafter may draft eight tokens but drafts only one, which is accepted.

    The policy must therefore estimate a second accepted draft as unlikely.
    """
    believed = AcceptanceEstimate(16, copies=False)
    for _ in range(60):
        believed.fade()
        believed.add([0, 1], allowed=np.array([8, 8]), drafted=np.array([1, 1]), accepted=np.array([1, 1]))
    first, second, *_ = believed.accepted([0])[0, 0]
    assert first > 0.9 and second < 0.1


def test_acceptance_is_estimated_per_row():
    """All of one row's drafts are accepted and none of the other's."""
    policy, easy, hard = CostAware(CHEAP), HEAD._replace(row=7), HEAD._replace(row=3)
    for _ in range(40):
        offers = [easy, hard]
        lengths = policy.lengths(offers)
        policy.observe(Feedback(offers, lengths, lengths, [lengths[0], 0], max(lengths), math.nan, math.nan))
    long, short = policy.lengths([easy, hard])
    assert long > 8 and short <= 1
    assert policy.lengths([hard, easy]) == [short, long], "in whatever order the rows come"


def test_the_rejections_of_a_single_row_count_once():
    """Otherwise an unlucky start ends drafting for a whole text. With a second row, the rows differ."""
    believed, one = AcceptanceEstimate(1, copies=False), np.array([1])
    for _ in range(5):
        believed.add([0], allowed=one, drafted=one, accepted=np.array([0]))
    first_guess = 8 * FIRST_RATE / (8 + 5)
    alone = 8 * first_guess / (8 + 5)
    assert believed.accepted([0]).item() == pytest.approx(alone)
    believed.add([1], allowed=one, drafted=one, accepted=one)
    rejected, accepted = believed.accepted([0, 1])[0, :, 0]
    assert rejected < alone < accepted


def test_a_row_that_is_ahead_waits_for_the_others():
    """The row has half as many tokens left to write, so drafts for it would not end the batch earlier."""
    policy = CostAware(CHEAP, timed=False)
    play(policy, 40, [COPY], 3)
    assert play(policy, 1, [COPY, COPY], 3)[0] == [3, 3]
    behind, ahead = play(policy, 1, [COPY, COPY._replace(most=20)], 3)[0]
    assert behind >= 3 and ahead == 0


def test_a_row_whose_drafts_are_rejected_is_waited_for_too():
    """It will finish last, so drafts of the other row bring little, as long as a token costs something."""
    table = CostTable({2: [(2, 20), (34, 148)]}, {2: 0.5}, padded=False)
    policy, easy, hard = CostAware(table, timed=False), HEAD._replace(row=7), HEAD._replace(row=3)
    for _ in range(40):
        policy.observe(Feedback([easy, hard], [4, 4], [4, 4], [4, 0], 4, math.nan, math.nan))
    assert sum(policy.lengths([easy, hard])) <= 1
    assert sum(policy.lengths([easy, easy._replace(row=8)])) > 4


def test_rows_with_nothing_to_copy_do_not_affect_the_others():
    none = COPY._replace(most=0)
    policy = CostAware(CHEAP)
    play(policy, 5, [none, none], 0)
    assert play(policy, 1, [COPY, none], 16)[0][0] > 0, "a round without offers says nothing of the next"
    lost = play(CostAware(DEAR), 40, [COPY] + [none] * 7, 0, lambda tokens, forwards: 10 * tokens)
    assert sum(map(any, lost)) <= 6, "at 10 ms each, of 3,200"


def test_rows_get_equal_lengths_if_padding_costs_as_much_as_tokens():
    wide = CostTable({8: [(8, 10), (64, 11)]}, {8: 0.1}, padded=True)
    lengths = play(CostAware(wide), 30, [HEAD._replace(most=3)] * 7 + [HEAD._replace(most=1)], 3)[-1]
    assert lengths == [3] * 7 + [1]


def test_trials_lose_little_if_drafting_does_not_pay():
    """A plain round takes 80 ms here. Trials of drafting may cost 1 % of the total time."""
    lengths = play(CostAware(DEAR), 400, [HEAD] * 8, 0, lambda tokens, forwards: 10 * tokens + 5 * forwards)
    tried = [sum(row) for row in lengths if any(row)]
    assert len(tried) >= 3 and max(tried[1:]) == 1, "a try is as small as it can be"
    assert sum(10 * drafts + 5 for drafts in tried) <= 0.02 * 400 * 80 + 0.5 * 80


def test_rows_copy_more_than_one_token_while_the_model_is_too_dear():
    """The worth of a second copied token is below that of the model's first one in another row."""
    dear = CostTable({8: [(8, 18), (136, 146)]}, {8: 0.5}, padded=False, proposal={8: 40.0})
    lengths = CostAware(dear).lengths([COPY] * 4 + [HEAD] * 4)
    assert min(lengths[:4]) >= 2 and not any(lengths[4:])


def test_a_trial_that_only_copies_does_not_pay_for_what_the_model_has_not_read():
    """Four rows; one can copy. The other three have text that the model has not read, and it does not draft."""
    table = CostTable({4: [(4, 20), (68, 148)]}, {4: 2.0}, padded=False, proposal={4: 20.0})
    for unread in (0, 20, 100):
        offers = [COPY, *(HEAD._replace(unread=unread, row=row) for row in (1, 2, 3))]
        plan = CostAware(table, timed=False).plan(offers)
        assert plan.lengths[0] and not any(plan.lengths[1:]) and plan.charged_ms < 4


def test_a_trial_waits_until_it_can_pay_for_unread_text():
    """Before its first draft, the drafter must read 250 tokens of each of 8 rows.

    That takes too long for a trial.
    """
    policy = CostAware(DEAR)
    lengths = play(policy, 300, [HEAD] * 8, 0, lambda tokens, forwards: 10 * tokens + 5 * forwards, unread=250)
    assert not any(map(any, lengths))


def test_a_plain_round_is_tried_too():
    """Drafts are cheap according to the table, but really cost so much that plain rounds win."""
    policy = CostAware(CHEAP)
    lengths = play(policy, 200, [HEAD], 1, lambda tokens, forwards: 11 if tokens == 1 else 40)
    assert sum(map(any, lengths[60:])) < 10


def test_few_rounds_draft_if_wide_rounds_are_slower_than_the_table_says():
    """Plain rounds are not. As long as none was timed, the policy believes that they are slower by as much."""
    table = CostTable({8: [(8, 16.0), (16, 19.0), (48, 31.0)]}, {8: 0.5}, padded=False, proposal={8: 2.5})
    lengths = play(
        CostAware(table), 60, [HEAD._replace(most=60, row=row) for row in range(8)], 1,
        lambda tokens, forwards: 16 if tokens == 8 else 36,
    )  # fmt: skip
    assert any(lengths[0]) and not any(lengths[1]) and sum(map(any, lengths)) <= 5


def test_a_batch_of_sixteen_rows_is_measured_itself():
    """Each of 32 tokens costs more in 16 rows than in 8: more rows draft."""
    assert missing_sizes(None, 16) == [1, 2, 4, 8, 16] and missing_sizes(None, 16, ends=True) == [1, 16]
    # A measured larger batch is as good as the last, and doubted costs are measured again.
    assert missing_sizes(CHEAP, 4, ends=True) == [] and missing_sizes(CHEAP, 4, [1, 8], ends=True) == [1]
    assert missing_sizes(CHEAP, 8, [8]) == [2, 4, 8] and missing_sizes(CHEAP, 8, [8], ends=True) == [8]


def test_the_fixed_cost_of_a_proposal_counts():
    """A draft forward takes 0.5 ms in both tables; in the second, each proposal takes another 20 ms."""
    dear = CostTable(CHEAP.verify, CHEAP.draft, padded=False, proposal={1: 20.0, 8: 20.0})
    assert CostAware(CHEAP).lengths([HEAD]) != [0]
    assert CostAware(dear).lengths([HEAD]) == [0]


def test_costs_that_were_measured_under_load_are_corrected():
    """Rounds really take a third of the table's time, and wide ones a tenth, so the policy soon drafts."""
    policy = CostAware(DEAR)
    lengths = play(policy, 400, [HEAD] * 8, 16, lambda tokens, forwards: 26 + 0.1 * tokens)
    assert min(lengths[-1]) >= 3


def test_it_drafts_again_once_drafts_are_accepted_again():
    policy = CostAware(CHEAP)
    play(policy, 60, [HEAD] * 8, 0)
    assert max(play(policy, 300, [HEAD] * 8, 16)[-1]) >= 7


def test_a_longer_length_costs_nothing_if_the_drafter_stops_early():
    """The drafter never proposes more than two tokens, so a longer length costs and gains nothing."""
    policy = CostAware(CHEAP)
    for _ in range(60):
        policy.observe(Feedback([HEAD], [8], [2], [2], 2, math.nan, math.nan))
    assert max(map(max, play(policy, 4, [HEAD], 2))) >= 2


def cost_table(*ask, rows):
    """Return the costs of up to `rows` rows; measure and store what is missing."""
    costs = MeasuredCosts(*ask)
    for _ in costs.measure(missing_sizes(costs.table, rows)):
        pass
    return costs.table


def test_the_table_is_measured_once_and_stored(tmp_path, monkeypatch):
    target = tiny("llama")
    pair = tiny_pair(0.05, target=target)
    ask = (pair, DRAFTERS["model"], "sdpa", SamplingParams())
    table = cost_table(*ask, rows=3)
    assert list(table.verify) == list(table.draft) == [1, 2, 4]
    for rows, points in table.verify.items():
        tokens, times = zip(*points, strict=True)
        assert tokens[0] == rows and list(times) == sorted(times) and times[0] > 0
    (path,) = (tmp_path / "bass" / "costs").iterdir()
    assert json.loads(path.read_text())["padded"] is not pair.target_step.skips_padding
    monkeypatch.setattr("bass_core.decode.calibrate._RoundTimer", None)
    assert cost_table(*ask, rows=4) == table
    # The table has no times for MAX_MEASURED_ROWS rows. Measuring them would need _RoundTimer, so it raises here.
    with pytest.raises(TypeError):
        cost_table(*ask, rows=MAX_MEASURED_ROWS)
    path.write_text("{")
    with pytest.raises(TypeError):
        cost_table(*ask, rows=1)


SOUND = {
    "verify": {"1": [[1, 5.0], [2, 6.0]], "2": [[2, 7.0]]},
    "draft": {"1": 0.5, "2": 0.5},
    "padded": True,
    "proposal": {"1": 1.5, "2": 1.5},
}


@pytest.mark.parametrize(
    "damage",
    [
        {"verify": {"1": []}},
        {"verify": {"1": [[1, "5"]]}},
        {"verify": {"1": [[1, None]]}},
        {"verify": {"1": [[1, 5.0], [1, 6.0]]}},
        {"verify": {"1": [[1, 0.0]]}},
        {"verify": {"1": [[1, -2.0]]}},
        {"verify": {"1": [[1, float("nan")]]}},
        {"verify": {"1": [[float("inf"), 1.0]]}},
        {"verify": {"1": [[1, 10**400]]}},
        {"verify": {"1": [[2, 5.0], [1, 6.0]]}},
        {"verify": {"1": [[1, 20.0], [9, 10.0]]}},
        {"verify": {"2": [[2, 5.0]], "1": [[1, 6.0]]}},
        {"verify": {"0": [[1, 5.0]]}},
        {"draft": {"1": -0.5, "2": 0.5}},
        {"draft": {"1": "0.5", "2": 0.5}},
        {"draft": {"1": 0.5}},
        {"proposal": {"1": 1.5}},
        {"proposal": {"1": -1.5, "2": 1.5}},
        {"padded": "no"},
        {"verify": {}},
        {"verify": {"1": [[1, True]]}},
    ],
)
def test_an_invalid_table_is_not_used(damage, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(SOUND))
    assert read_table(path).verify_ms(2, 2) == 7.0
    # If the verify times are damaged, drop the draft times too: otherwise their different row counts would suffice
    # to reject the table.
    path.write_text(json.dumps(SOUND | ({"draft": {}, "proposal": {}} if "verify" in damage else {}) | damage))
    assert read_table(path) is None


def test_a_table_without_draft_times_is_measured_again(tmp_path, monkeypatch):
    """If a table without draft times were used, the policy would always treat drafts as free."""
    target = tiny("llama")
    ask = (tiny_pair(0.05, target=target), DRAFTERS["model"], "sdpa", SamplingParams())
    cost_table(*ask, rows=1)
    (path,) = (tmp_path / "bass" / "costs").iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"draft": {}}))
    assert cost_table(*ask, rows=1).draft
    monkeypatch.setattr("bass_core.decode.calibrate._RoundTimer", None)
    assert cost_table(*ask, rows=1).draft_ms(1) >= 0


def test_a_table_nested_too_deeply_is_not_used(tmp_path):
    (tmp_path / "table.json").write_text("[" * 100_000)
    assert read_table(tmp_path / "table.json") is None


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("drafter", "head"), [("model", "head"), ("adaptive", "head"), ("model", "eagle")])
def test_costs_are_measured_with_a_draft_head(temperature, drafter, head):
    """The head reads the target's states: if `_RoundTimer` did not pass them on, the first proposal would fail."""
    sampling = SamplingParams(temperature=temperature)
    table = cost_table(tiny_pair(head), DRAFTERS[drafter], "sdpa", sampling, rows=2)
    assert list(table.verify) == list(table.draft) == [1, 2]
    assert all(ms > 0 for points in table.verify.values() for _, ms in points)


def test_costs_measured_ahead_are_not_measured_again(tmp_path, monkeypatch):
    target = tiny("llama")
    pair = tiny_pair(0.05, target=target)
    assert len(list(measure_ahead(pair, 2))) > 10 and len(list(tmp_path.rglob("*.json"))) == 2
    assert not list(measure_ahead(pair, 2))
    monkeypatch.setattr("bass_core.decode.calibrate._RoundTimer", None)
    for temperature in (0.0, 0.7):
        sampling = SamplingParams(temperature=temperature, top_p=0.9)
        request = make_request(pair, [1, 2, 3], n=2, draft_length="cost-aware", sampling=sampling)
        assert with_costs(pair, request, 2).costs.verify_ms(2, 2) > 0
    with pytest.raises(TypeError):
        with_costs(pair, request, 4)


@pytest.mark.parametrize("home", [True, False])
def test_costs_work_without_a_writable_cache(home, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if home else "")
    if not home:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    pair = ModelPair(tiny("gpt2"))
    arguments = {"drafter": "prompt_lookup", "draft_length": "cost-aware"}
    costs = with_costs(pair, make_request(pair, [1, 2, 3], **arguments), 1).costs
    assert costs.padded and costs.draft_ms(1) == 0
    assert with_costs(pair, make_request(pair, [1, 2, 3]), 1).costs is None, "measured with no place to keep it"


@pytest.mark.parametrize("rows", [2, 4, 16])
def test_the_last_row_finishes_as_late_as_in_a_simulation(rows, monkeypatch):
    """Compared with simulated rows that accept each of two drafts with probability 0.5."""
    monkeypatch.setattr(cost_aware, "LAST_ROW_WEIGHT", 1.0)
    left, pace, variance = 512, 1.75, 3 * 0.25 + 0.5 - 0.75**2
    first, second = np.random.default_rng(0).random((2, 400, rows, left)) < 0.5
    written = np.cumsum(1 + first + (first & second), axis=2)
    rounds = 1 + (written < left).sum(2)
    (share,) = cost_aware._last_row_share(rows, np.array([pace]), np.array([variance]), left)
    assert share == pytest.approx(rounds.mean() / rounds.max(1).mean(), abs=0.005)


def test_a_single_row_has_no_last_row_to_wait_for():
    assert cost_aware._last_row_share(1, np.array([1.5]), np.array([0.4]), 64) == 1


def test_rows_that_finish_apart_draft_less(monkeypatch):
    """Drafts that pay slightly for the mean row don't pay for the last of eight."""
    table = CostTable({1: [(1, 10), (17, 10.2)], 8: [(8, 10), (136, 80.4)]}, {1: 0.01, 8: 0.01}, padded=False)
    offers = [Offer(24, "head", True, 0, row) for row in range(8)]

    def drafts():
        return sum(CostAware(table, timed=False).lengths(offers))

    # Without trials of drafting, which otherwise begin at once.
    monkeypatch.setattr(cost_aware, "START", 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_aware, "LAST_ROW_WEIGHT", 0.0)
        without = drafts()
    assert drafts() < without

"""The cost-aware draft length: a function of the cost table and of the drafted and accepted counts."""

import itertools
import json
import os

import pytest

from bass_core import ModelPair, generate
from bass_core.budget.cost_aware import FIRST_WAIT, CostAware
from bass_core.budget.cost_table import CostTable, read_table
from bass_core.budget.options import make_policy
from bass_core.budget.policies import FixedLength
from bass_core.decoding.budgets import measure_ahead, with_costs
from bass_core.decoding.calibrate import cost_table
from bass_core.decoding.cost_store import MOST_ROWS
from bass_core.decoding.request import make_request
from bass_core.sampling.params import SamplingParams

from ...conformance.table import head
from ...models import NEAR, perturbed, prompts, tiny

# Milliseconds: a round costs 10 and 1 more per token; a draft forward costs 0.5.
CHEAP = CostTable({1: [(1, 11), (17, 27)], 8: [(8, 18), (136, 146)]}, {1: 0.5, 8: 0.5}, padded=False)
# Every token costs as much as the first, so drafting can only lose.
DEAR = CostTable({8: [(8, 80), (136, 1360)]}, {8: 5.0}, padded=False)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("BASS_MEASURE")
    # The CPU's peaks, which come with the costs, have tests of their own (tests/bass_core/decoding/test_peaks.py).
    monkeypatch.setattr("bass_core.decoding.peaks.peaks_path", lambda dtype: None)


def play(policy, rounds, rows, accepts):
    """The requested lengths, if every row drafts as many as requested and accepts at most `accepts` of them."""
    requested = []
    for _ in range(rounds):
        length = policy.length
        requested.append(length)
        policy.observe(length, [length] * rows, [min(length, accepts)] * rows, length)
    return requested


def test_costs_are_interpolated_and_go_on_at_the_ends():
    assert CHEAP.verify_ms(1, 1) == 11
    assert CHEAP.verify_ms(1, 9) == 19
    assert CHEAP.verify_ms(1, 33) == pytest.approx(43)
    assert CHEAP.verify_ms(8, 16) == 26
    assert CHEAP.verify_ms(64, 16) == 26
    # Between two measured row counts, the two tables' times for the same tokens are interpolated.
    assert CostTable({2: [(2, 10), (4, 12)], 4: [(4, 30), (8, 38)]}, {}, False).verify_ms(3, 4) == 21
    assert CostTable({1: [(1, 5)]}, {}, False).draft_ms(1) == 0


def test_it_drafts_long_where_all_is_accepted_and_short_where_nothing_is():
    assert play(CostAware(CHEAP, rows=1), 40, 1, 16)[-1] == 16
    assert play(CostAware(CHEAP, rows=1), 40, 1, 3)[-1] == 3
    assert play(CostAware(CHEAP, rows=8), 40, 8, 2)[-1] == 2


def test_where_drafting_loses_it_stops_and_tries_again_ever_more_seldom():
    requested = play(CostAware(DEAR, rows=8), 200, 8, 0)
    tried = [at for at, length in enumerate(requested) if length]
    gaps = [b - a for a, b in itertools.pairwise(tried)]
    assert gaps[0] >= FIRST_WAIT
    assert gaps == sorted(gaps) and gaps[-1] > gaps[0]
    assert all(requested[at] == 1 for at in tried[1:])


def test_it_comes_back_when_drafts_are_accepted_again():
    policy = CostAware(CHEAP, rows=8)
    play(policy, 60, 8, 0)
    assert policy.length <= 1
    assert max(play(policy, 200, 8, 16)) == 16


def test_rows_that_stop_early_make_a_longer_cap_no_dearer():
    """The drafter never proposes more than two: a longer request costs nothing and gains nothing."""
    policy = CostAware(CHEAP, rows=1)
    for _ in range(40):
        policy.observe(8, [2], [2], 2)
    rates = policy.rates()
    assert rates[8] == pytest.approx(rates[2], rel=0.05)
    assert policy.length >= 2


def test_it_is_a_policy_that_sees_rounds():
    policy = CostAware(CHEAP)
    assert isinstance(make_policy(policy), CostAware) and hasattr(policy, "observe")
    assert not hasattr(FixedLength(2), "observe")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_stays_the_targets_and_a_run_repeats(temperature):
    target = tiny("llama")
    pair = ModelPair(target, perturbed(target, NEAR["llama"]))
    same = {"max_new_tokens": 40, "sampling": SamplingParams(temperature=temperature), "seed": 3}
    runs = [generate(pair, prompts(4), draft_length="cost-aware", **same) for _ in range(2)]
    assert runs[0].metrics.drafted > 0
    assert [s.token_ids for s in runs[0].sequences] == [s.token_ids for s in runs[1].sequences]
    if not temperature:
        regular = generate(pair, prompts(4), method="regular", **same)
        assert [s.token_ids for s in runs[0].sequences] == [s.token_ids for s in regular.sequences]


def test_the_table_is_measured_once_and_kept(tmp_path, monkeypatch):
    target = tiny("llama")
    pair = ModelPair(target, perturbed(target, 0.05))
    ask = (pair, "model", "sdpa", SamplingParams())
    table = cost_table(*ask, rows=3)
    assert list(table.verify) == list(table.draft) == [1, 2, 4]
    for rows, points in table.verify.items():
        tokens, times = zip(*points, strict=True)
        assert tokens[0] == rows and list(times) == sorted(times) and times[0] > 0
    (path,) = (tmp_path / "bass" / "costs").iterdir()
    assert json.loads(path.read_text())["padded"] is False
    monkeypatch.setattr("bass_core.decoding.calibrate._Lab", None)
    assert cost_table(*ask, rows=4) == table
    # MOST_ROWS, whose times also serve for more rows, is not in the table: measuring it fails here (no _Lab).
    with pytest.raises(TypeError):
        cost_table(*ask, rows=MOST_ROWS)
    path.write_text("{")
    with pytest.raises(TypeError):
        cost_table(*ask, rows=1)


SOUND = {
    "verify": {"1": [[1, 5.0], [2, 6.0]], "2": [[2, 7.0]]},
    "draft": {"1": 0.5, "2": 0.5},
    "root": {},
    "level": {},
    "padded": True,
    "coarse": [],
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
        {"padded": "no"},
        {"coarse": [3]},
        {"coarse": None},
        {"verify": {}},
        {"verify": {"1": [[1, True]]}},
    ],
)
def test_a_table_that_was_not_measured_is_measured_anew(damage, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(SOUND))
    assert read_table(path).verify_ms(2, 2) == 7.0
    # With only the verifications damaged, the table is given no draft times: they would reveal the missing rows.
    path.write_text(json.dumps(SOUND | ({"draft": {}} if "verify" in damage else {}) | damage))
    assert read_table(path) is None


def test_a_table_without_its_draft_is_measured_anew(tmp_path, monkeypatch):
    """Otherwise the draft model would count as free for ever."""
    target = tiny("llama")
    ask = (ModelPair(target, perturbed(target, 0.05)), "model", "sdpa", SamplingParams())
    cost_table(*ask, rows=1)
    (path,) = (tmp_path / "bass" / "costs").iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"draft": {}}))
    assert cost_table(*ask, rows=1).draft
    monkeypatch.setattr("bass_core.decoding.calibrate._Lab", None)
    assert cost_table(*ask, rows=1).draft_ms(1) >= 0


def test_a_table_nested_too_deeply_is_measured_anew(tmp_path):
    (tmp_path / "table.json").write_text("[" * 100_000)
    assert read_table(tmp_path / "table.json") is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["model", "adaptive"])
def test_costs_are_measured_with_a_draft_head(temperature, drafter):
    """The head reads the target's states: if `_Lab` did not pass them on, the first proposal would fail."""
    target = tiny("llama")
    sampling = SamplingParams(temperature=temperature)
    table = cost_table(ModelPair(target, head(target)), drafter, "sdpa", sampling, rows=2)
    assert list(table.verify) == list(table.draft) == [1, 2]
    assert all(ms > 0 for points in table.verify.values() for _, ms in points)


def test_the_most_rows_measured_serve_for_more(tmp_path):
    ask = (ModelPair(tiny("gpt2")), "prompt_lookup", "sdpa", SamplingParams())
    table = cost_table(*ask, rows=10**6)
    assert max(table.verify) == MOST_ROWS and not table.draft
    assert table.verify_ms(10**6, MOST_ROWS) == table.verify_ms(MOST_ROWS, MOST_ROWS)


def test_what_was_measured_ahead_is_not_measured_for_a_request(tmp_path, monkeypatch):
    target = tiny("llama")
    pair = ModelPair(target, perturbed(target, 0.05))
    assert len(list(measure_ahead(pair, 2))) > 10 and len(list(tmp_path.rglob("*.json"))) == 2
    assert not list(measure_ahead(pair, 2))
    monkeypatch.setattr("bass_core.decoding.calibrate._Lab", None)
    for temperature in (0.0, 0.7):
        sampling = SamplingParams(temperature=temperature, top_p=0.9)
        request = make_request(pair, [1, 2, 3], n=2, draft_length="cost-aware", sampling=sampling)
        assert with_costs(pair, request, 2).costs.verify_ms(2, 2) > 0
    with pytest.raises(TypeError):
        with_costs(pair, request, 4)


@pytest.mark.parametrize("home", [True, False])
def test_a_cache_that_cant_be_written_is_no_obstacle(home, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if home else "")
    if not home:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    pair = ModelPair(tiny("gpt2"))
    asked = {"drafter": "prompt_lookup", "draft_length": "cost-aware"}
    costs = with_costs(pair, make_request(pair, [1, 2, 3], **asked), 1).costs
    assert costs.padded and costs.draft_ms(1) == 0
    assert with_costs(pair, make_request(pair, [1, 2, 3]), 1).costs is None, "measured with no place to keep it"

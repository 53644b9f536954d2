"""Sweeps: requests, the races of each arm, events with a real pair, and the tab in a browser."""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Generator
from typing import Any

import gradio as gr
import pytest
from playwright.sync_api import Locator, Page, expect

from bass_core import BassError, ModelPair, Snapshot
from tests.support.memory import alive, frees_at_once
from ui.page.events import UNEXPECTED, Events
from ui.page.limits import Limits
from ui.page.request import RaceRequest
from ui.page.setting import shown
from ui.sources.local import race_source
from ui.sources.source import RaceSource, waiting
from ui.sweep.answer import T, answer, overall
from ui.sweep.events import SweepEvents
from ui.sweep.figures import sentences
from ui.sweep.measure import MAX_REPEATS, WARM_UP, measured
from ui.sweep.request import TEMPERATURE, Arm, make_sweep, own_prompts

from .browser import assert_accessible, assert_fits, fill, saved

PROMPT = {"prompt": "Hello"}


def test_the_default_sweep_has_three_draft_lengths_for_each_batch() -> None:
    request = make_sweep(PROMPT, Limits())
    assert request.arms() == [Arm(batch, length) for batch in (1, 2, 4, 8) for length in ("bass", "auto", 4)]
    assert request.seconds == 60 and not request.resampled
    small = make_sweep(PROMPT, Limits(max_batch=5, max_seconds=30))
    assert small.batches == (1, 2, 4) and small.seconds == 15


def test_each_race_has_its_arm_and_the_other_settings_and_can_be_pickled() -> None:
    settings = PROMPT | {
        "temperature": 1.1,
        "seed": 2**32 - 1,
        "top_k": 7,
        "verification": "coupled",
        "batch_size": 3,
    }
    request = make_sweep(settings | {"lanes": ["speculative"], "time_budget_ms": 5}, Limits())
    race = request.race_of(Arm(4, "bass"))
    assert (race.batch_size, race.draft_length, race.lanes) == (4, "bass", ("regular", "bass"))
    assert (race.temperature, race.top_k, race.verification) == (1.1, 7, "coupled")
    assert (race.scheduling, race.time_budget_ms) == ("fair", None)
    # The next race of an arm has the next seed. After the largest seed comes 0.
    assert race.seed == 2**32 - 1 and request.race_of(Arm(4, "bass"), 2).seed == 1
    unpickled = pickle.loads(pickle.dumps(race))
    assert unpickled == race and unpickled.arguments()["n"] == 4 and unpickled.arguments()["inspect"] is False


def test_rows_of_one_prompt_are_sampled_even_at_temperature_0() -> None:
    request = make_sweep(PROMPT | {"temperature": 0}, Limits())
    assert request.resampled and request.race_of(Arm(2, 4)).temperature == TEMPERATURE
    assert request.settings()["temperature"] == TEMPERATURE and request.settings()["resampled"]
    lines = make_sweep({"prompt": "one\ntwo", "prompts": "lines", "temperature": 0}, Limits())
    assert not lines.resampled and lines.race_of(Arm(2, 4)).temperature == 0


def test_rows_take_the_lines_of_the_prompt_in_turn() -> None:
    request = make_sweep({"prompt": "one\n\n two \nthree", "prompts": "lines"}, Limits())
    for batch, rows in ((1, ["one"]), (2, ["one", "two"]), (8, ["one", "two", "three"] * 2 + ["one", "two"])):
        assert request.race_of(Arm(batch, 4)).arguments()["prompt"] == rows


def test_repeated_batches_and_lengths_are_used_once() -> None:
    request = make_sweep(PROMPT | {"batches": [4, 1, 4], "draft_lengths": ["2", 2, "auto"]}, Limits())
    assert request.batches == (1, 4) and request.draft_lengths == (2, "auto")


PLAIN_MS, DRAFTING_MS = 100.0, 160.0


class ToySource:
    """A source of races whose lanes take turns: a plain step takes 100 ms, a round of drafts 160 ms.

    `now` is the clock in seconds, which advances with the rounds. Each row of BASS writes `each` tokens per round.
    """

    def __init__(self, rounds: int = 1000, each: int = 2) -> None:
        self.rounds, self.each = rounds, each
        self.now, self.asked, self.open = 0.0, [], 0  # type: ignore[var-annotated]

    def clock(self) -> float:
        return self.now

    def __call__(self, request: RaceRequest) -> Generator[Snapshot, None, None]:
        self.asked.append(request)
        self.open += 1
        try:
            rounds = min(self.rounds, request.max_new_tokens)
            for count in range(1, rounds + 1):
                self.now += (PLAIN_MS + DRAFTING_MS) / 1000
                yield self.snapshot(request, count, count == rounds)
        finally:
            self.open -= 1

    def snapshot(self, request: RaceRequest, count: int, done: bool) -> Any:
        rows = request.batch_size
        lanes = {"regular": _lane(rows, count, PLAIN_MS, 1), "bass": _lane(rows, count, DRAFTING_MS, self.each)}
        return {"done": done, "lanes": lanes, "device": {"name": "toy"}, "phase": "running"}


def _lane(rows: int, count: int, ms: float, each: int) -> dict[str, Any]:
    kind = "plain" if each == 1 else "verify"
    rounds = [{"kind": "prefill", "time_ms": 5.0, "rows": _rows(rows, 0, 1)}]
    rounds += [
        {"kind": kind, "time_ms": 5 + ms * (i + 1), "rows": _rows(rows, 1 + i * each, each)} for i in range(count)
    ]
    metrics = {
        "drafted": 0 if each == 1 else 4 * count, "token_acceptance": 0.5,
        # At peak rates, reading takes 80 ms per step, and multiplying 2.5 ms per token.
        "bandwidth_utilization": 80 / ms, "flops_utilization": 2.5 * rows / ms,
    }  # fmt: skip
    sequences = [{"token_ids": [0] * (1 + count * each), "finish_reason": None}] * rows
    return {"rounds": rounds, "sequences": sequences, "metrics": metrics, "error": None, "finished": False}


def _rows(count: int, start: int, written: int) -> list[dict[str, int]]:
    return [{"sequence": i, "start": start, "written": written} for i in range(count)]


def a_sweep(**given: Any) -> Any:
    return make_sweep({"prompt": "Hello", "batches": [1, 4], "draft_lengths": ["bass", 4], **given}, Limits())


def test_points_have_the_figures_of_their_races() -> None:
    toy = ToySource()
    *states, last = measured(a_sweep(), toy, Limits(), toy.clock)
    assert last["done"] and last["progress"] is None and last["device"] == "toy"
    assert [(point["batch"], point["draft_length"]) for point in last["points"]] == [
        (1, "bass"),
        (1, 4),
        (4, "bass"),
        (4, 4),
    ]
    for point in last["points"]:
        # BASS writes two tokens in 160 ms, regular decoding one in 100 ms. Equal rounds have no scatter.
        assert point["speedup"] == pytest.approx(2 / 1.6) and point["error"] == pytest.approx(0, abs=1e-6)
        assert (point["ms_per_token"], point["regular_ms_per_token"]) == (pytest.approx(80), pytest.approx(100))
        assert (point["tokens"], point["acceptance"], point["against"]) == (2, 0.5, "ahead")
    assert last["ridge"]["tokens"] == pytest.approx(32)
    # Points arrive one by one, and each state is a new object.
    assert sorted({len(state["points"]) for state in states}) == [0, 1, 2, 3]
    assert len({id(state) for state in states}) == len(states)


def test_each_arm_gets_its_share_of_the_time_and_the_rest_is_estimated() -> None:
    toy = ToySource()
    *states, _ = measured(a_sweep(seconds=40), toy, Limits(), toy.clock)
    # The arms get four fifths of 40 s: each of the four gets 8 s.
    assert toy.asked[0].max_new_tokens == WARM_UP
    arms = [state["progress"] for state in states if state["progress"] and state["progress"]["done"] == 2]
    assert arms[0]["races"] == 4 and arms[0]["left_s"] == pytest.approx(16, rel=0.05)
    assert arms[-1]["left_s"] < arms[0]["left_s"] and "batch 4, Algorithm 1" in arms[0]["now"]
    assert toy.open == 0


def test_a_short_race_is_run_again_with_other_seeds() -> None:
    toy = ToySource(rounds=4)
    *_, last = measured(a_sweep(seconds=20), toy, Limits(), toy.clock)
    # Each arm has 4 s. A race has four rounds of both lanes and takes 1.04 s.
    seeds = [race.seed for race in toy.asked[1:]]
    assert seeds == [0, 1, 2, 3] * 4
    assert all(one["rounds"] == 16 for one in last["points"])
    assert all(one["speedup"] == pytest.approx(1.25) for one in last["points"])
    toy = ToySource(rounds=2)
    *_, last = measured(a_sweep(seconds=600, batches=[1], draft_lengths=[4]), toy, Limits(), toy.clock)
    assert len(toy.asked) == 1 + MAX_REPEATS and last["points"][0]["rounds"] == 2 * MAX_REPEATS


def test_the_operators_limit_ends_the_sweep_and_closes_its_race() -> None:
    toy, counts = ToySource(), []
    with pytest.raises(BassError, match="The sweep was stopped after 30 s, this server's limit"):
        for state in measured(a_sweep(seconds=40), toy, Limits(max_seconds=30), toy.clock):
            counts.append(len(state["points"]))
    assert counts[-1] >= 1 and toy.now < 60 and toy.open == 0


def test_waiting_for_a_worker_is_shown_and_does_not_count_towards_the_limit() -> None:
    class Busy(ToySource):
        """Each race waits 20 s for a free worker."""

        def __call__(self, request: RaceRequest) -> Generator[Snapshot, None, None]:
            for place in (2, 1):
                self.now += 10
                yield waiting(place, None)
            yield from super().__call__(request)

    toy, busy = ToySource(), Busy()
    *_, expected = measured(a_sweep(seconds=20), toy, Limits(max_seconds=30), toy.clock)
    *states, last = measured(a_sweep(seconds=20), busy, Limits(max_seconds=30), busy.clock)
    assert last["points"] == expected["points"] and last["device"] == "toy" and busy.now > 100
    statuses = [state["progress"]["now"] for state in states if state["progress"]]
    assert "waiting for a free worker: place 2 in the queue" in statuses


class Scattered(ToySource):
    """Every second round of BASS writes only one token, so its speed is uncertain. `error` makes BASS fail."""

    error: str | None = None

    def snapshot(self, request: RaceRequest, count: int, done: bool) -> Any:
        shot = super().snapshot(request, count, done)
        for record in shot["lanes"]["bass"]["rounds"][1::2]:
            record["rows"] = [{**row, "written": 1} for row in record["rows"]]
        shot["lanes"]["bass"]["error"] = self.error
        return shot


def test_scatter_makes_lanes_level_and_a_lanes_error_ends_the_sweep() -> None:
    toy = Scattered(rounds=12, each=3)
    *_, last = measured(a_sweep(seconds=5, batches=[2], draft_lengths=[4]), toy, Limits(), toy.clock)
    (point,) = last["points"]
    written, ms = [1.0 if i % 12 % 2 == 0 else 3.0 for i in range(point["rounds"])], DRAFTING_MS
    rate = sum(written) / (ms * len(written))
    squares = sum((tokens - rate * ms) ** 2 for tokens in written)
    error = math.sqrt(squares * len(written) / (len(written) - 1)) / sum(written)
    assert point["speedup"] == pytest.approx(2 / 1.6, rel=0.1)
    assert point["error"] == pytest.approx(error, rel=1e-6)
    assert point["against"] == (
        "level" if 2 * point["error"] * point["speedup"] >= point["speedup"] - 1 else "ahead"
    )
    toy.error = "out of luck"
    with pytest.raises(BassError, match="out of luck"):
        list(measured(a_sweep(), toy, Limits(), toy.clock))


def test_the_sentences_name_the_batches_at_which_each_line_is_ahead() -> None:
    toy = ToySource(each=1)
    *_, last = measured(a_sweep(batches=[1, 2, 4, 8]), toy, Limits(), toy.clock)
    lines = sentences(last)
    assert lines[0] == "Algorithm 1: slower than regular decoding at batch 1 to 8."
    assert lines[1] == "Fixed length 4: slower than regular decoding at batch 1 to 8."
    assert lines[2] == (
        "Ridge: from 32 tokens per step on, multiplying takes longer than reading. Plain steps reach it at batch "
        "32; with 4 drafts per row at batch 6.4."
    )
    against = {1: "ahead", 2: "level", 4: "behind", 8: "ahead"}
    mixed: Any = {**last, "points": [{**one, "against": against[one["batch"]]} for one in last["points"]]}
    assert sentences(mixed)[0] == (
        "Algorithm 1: ahead of regular decoding at batch 1 and 8, level with it at batch 2, slower than it at "
        "batch 4."
    )
    assert "Ridge: n/a" in sentences({**last, "ridge": {"tokens": None}})[-1]


def test_own_prompts_are_separated_by_lines_or_blank_lines() -> None:
    for text, prompts in (
        ("one\ntwo\n", ("one", "two")),
        ("\n one\n  more of it\n \n\ntwo\n\nthree ", ("one\n  more of it", "two", "three")),
        ("a\r\nb", ("a", "b")),
        (" \n ", ()),
        (["one\n\nmore of it", "two"], ("one\n\nmore of it", "two")),
    ):
        assert own_prompts(text, Limits()) == prompts
    for bad, message in (
        ("one", "One prompt gives no interval: write at least two"),
        ("\n".join("abcdefghijklm"), "There are 13 prompts, and a sweep takes at most 12"),
        (["one", " "], "The prompt is empty"),
        (7, "own_prompts must be a list"),
        ("one\n" + 30_000 * "x", "The prompt has 30000 characters"),
    ):
        with pytest.raises(BassError, match=message):
            own_prompts(bad, Limits())


def test_a_sweep_over_prompts_has_one_batch_and_no_synthetic_acceptance() -> None:
    settings = {"prompt": "", "prompts": "lines", "acceptance": 0.9, "own_prompts": "one\ntwo", "temperature": 1.1}
    request = make_sweep(settings | {"batches": [3]}, Limits())
    assert request.arms() == [Arm(3, "auto", 1), Arm(3, "auto", 2)] and request.visits == 2
    race = request.race_of(Arm(3, "auto", 2), 1)
    assert (race.arguments()["prompt"], race.batch_size, race.seed) == ("two", 3, 1)
    assert race.acceptance is None and request.settings()["own_prompts"] == ["one", "two"]
    with pytest.raises(BassError, match="one batch and one draft length"):
        make_sweep(settings | {"batches": [1, 2]}, Limits())


def test_prompts_take_turns_with_equal_time() -> None:
    class Each(ToySource):
        """BASS writes one token per round for each letter of the prompt."""

        def snapshot(self, request: RaceRequest, count: int, done: bool) -> Any:
            self.each = len(request.prompt)
            return super().snapshot(request, count, done)

    toy = Each()
    settings = {"own_prompts": "aa\na\naaaa", "seconds": 60}
    *states, last = measured(make_sweep(settings, Limits()), toy, Limits(), toy.clock)
    assert [race.prompt for race in toy.asked[1:]] == 2 * ["aa", "a", "aaaa"]
    assert [race.seed for race in toy.asked[1:]] == [0, 0, 0, 1, 1, 1]
    # The three prompts get four fifths of 60 s: 16 s each.
    rounds = 16_000 / (PLAIN_MS + DRAFTING_MS)
    assert [one["rounds"] for one in last["points"]] == [pytest.approx(rounds, abs=2)] * 3
    assert [one["prompt"] for one in last["points"]] == [1, 2, 3]
    assert [one["speedup"] for one in last["points"]] == pytest.approx([2 / 1.6, 1 / 1.6, 4 / 1.6])
    # The middle speed-up is 2 / 1.6. Logarithms of neighbours differ by ln 2, so t standard errors of the mean
    # logarithm are 4.303 ln 2 / sqrt(3).
    factor = 2 ** (4.303 / 3**0.5)
    assert last["overall"] == {
        "prompts": 3,
        "speedup": pytest.approx(1.25),
        "low": pytest.approx(1.25 / factor),
        "high": pytest.approx(1.25 * factor),
    }
    assert {state["progress"]["races"] for state in states if state["progress"]} == {6}
    two = next(state for state in states if len(state["points"]) == 2)
    assert answer(two)[0].startswith("At batch 4 these prompts leave open whether it pays off: on 2 of your 3 ")
    assert all(answer(state) == [] for state in states if len(state["points"]) < 2)


@pytest.mark.parametrize("freedom", range(1, 12))
def test_students_t_follows_from_its_density(freedom: int) -> None:
    """Simpson's rule over the density from -t to t gives 95 %."""
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    steps, end = 4000, T[freedom - 1]
    density = [
        scale * (1 + (end * (2 * i / steps - 1)) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(steps + 1)
    ]
    inner = 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2])
    assert 2 * end / steps / 3 * (density[0] + inner + density[-1]) == pytest.approx(0.95, abs=5e-5)


def answer_for(*points: tuple[float, str]) -> str:
    measured_points = [
        {"prompt": i + 1, "batch": 4, "speedup": speedup, "against": against}
        for i, (speedup, against) in enumerate(points)
    ]
    sweep: Any = {
        "points": measured_points,
        "overall": overall(measured_points),
        "settings": {"own_prompts": ["x"] * len(points)},
    }  # type: ignore[arg-type]
    (sentence,) = answer(sweep)
    return sentence


def test_one_sentence_sums_up_the_own_prompts() -> None:
    # For two prompts, t is 12.706. The standard error of the mean logarithm is half of the logarithms' difference.
    assert answer_for((1.5, "ahead"), (1.5, "ahead"), (0.9, "behind"), (1.6, "ahead")).startswith(
        "At batch 4 these prompts leave open whether it pays off: on your 4 prompts BASS is 1.34 times as fast as "
    )
    assert answer_for((1.5, "ahead"), (1.48, "ahead")) == (
        "On your 2 prompts BASS is 1.49 times as fast as regular decoding at batch 4 (95 % interval over the "
        "prompts: 1.37 to 1.62); it helps most on prompt 1 (1.50) and least on prompt 2 (1.48)."
    )
    assert answer_for((0.8, "behind"), (0.79, "behind"), (0.8, "behind")).startswith(
        "At batch 4 it does not pay off: on your 3 prompts BASS is 0.80 times as fast as regular decoding (95 % "
    )
    assert answer_for((0.8, "behind"), (1.0, "level")).endswith(
        "; it helps on none of them, and comes closest on prompt 2 (1.00)."
    )
    assert answer_for((1.8, "ahead"), (0.9, "behind"), (1.3, "ahead")).endswith(
        "; it helps most on prompt 1 (1.80) and not on prompt 2 (0.90)."
    )
    assert answer_for((1.8, "ahead"), (0.9, "behind"), (0.8, "behind")).endswith(
        "; it helps most on prompt 1 (1.80) and not on 2 of them, least on prompt 3 (0.80)."
    )


# A value for each setting of the form: a prompt, a temperature, all lanes, and the defaults of the others.
FORM = [{"prompt": "Hello", "temperature": 0.9, "lanes": None}.get(one.name, one.default) for one in shown()]


def events(source: RaceSource, **limits: Any) -> SweepEvents:
    return SweepEvents(Events(source, Limits(**limits)))


def states(updates: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
    return [json.loads(text) for text, _ in updates]


def test_the_button_is_disabled_during_a_sweep_and_points_arrive_one_by_one(pair: ModelPair) -> None:
    first, *middle, last = events(race_source(pair), max_batch=2, max_seconds=6).measure(3, "", *FORM)
    assert first[1]["interactive"] is False and json.loads(first[0])["sweep"] is None
    updates = states(middle)
    assert [len(state["sweep"]["points"]) for state in updates][-1] == 6
    assert {state["phase"] for state in updates} == {"running"} and len({state["run"] for state in updates}) == 1
    assert last[1]["interactive"] is True and states([last])[0]["phase"] == "done"
    assert [line["label"] for line in updates[-1]["sweep"]["lines"]] == [
        "Algorithm 1", "automatic, by measured cost", "fixed length 3",
    ]  # fmt: skip
    assert updates[-1]["sweep"]["sentences"] and math.isfinite(updates[-1]["sweep"]["points"][0]["speedup"])


def test_closing_the_event_frees_the_caches_at_once(pair: ModelPair) -> None:
    with frees_at_once() as before:
        running = events(race_source(pair)).measure(4, "", *FORM)
        while alive() == before:
            next(running)
        running.close()


def test_bad_input_is_refused_in_one_sentence() -> None:
    for fixed, prompt, message in (
        (4, "", "The prompt is empty"),
        (0, "Hello", "A fixed draft length must be"),
        (None, "Hello", "A fixed draft"),
    ):
        *_, (text, button) = events(never).measure(fixed, "", prompt, *FORM[1:])
        state = json.loads(text)
        assert state["phase"] == "error" and state["message"].startswith(message) and button["interactive"] is True


def never(request: RaceRequest) -> Generator[Snapshot, None, None]:
    raise AssertionError("no race was asked for")
    yield


@pytest.mark.parametrize(
    ("error", "message"), [(BassError("Too big: ask for less."), "Too big"), (KeyError("x"), UNEXPECTED)]
)
def test_an_error_during_a_race_keeps_the_points(pair: ModelPair, error: Exception, message: str) -> None:
    source = race_source(pair)

    def breaking(request: RaceRequest) -> Generator[Snapshot, None, None]:
        if request.batch_size > 1:
            raise error
        yield from source(request)

    *_, (text, button) = events(breaking, max_seconds=6).measure(4, "", *FORM)
    state = json.loads(text)
    assert state["phase"] == "error" and state["message"].startswith(message) and button["interactive"] is True
    assert [one["batch"] for one in state["sweep"]["points"]] == [1, 1, 1]
    states: list[dict[str, Any]] = []
    with pytest.raises(gr.Error, match=message[:7]):
        states.extend(events(breaking).api("Hello", batches=[2], draft_lengths=[4]))
    assert states[-1]["done"] and states[-1]["error"].startswith(message) and states[-1]["lines"]


def predicted(*values: Any) -> dict[str, Any]:
    return dict(json.loads(events(never).predict(*values)))


def test_a_prediction_runs_no_model_and_lists_its_assumptions() -> None:
    state = predicted(4, "A100", "7.8B", "0.8", "given")
    sweep = state["sweep"]
    assert sweep["kind"] == "predicted" and sweep["done"] and sweep["device"] == "A100 with 7.8B and 310M"
    assert (
        [one["batch"] for one in sweep["points"][::3]] == [1, 2, 4, 8, 16, 32, 64] == sweep["settings"]["batches"]
    )
    assert sweep["points"][9]["speedup"] > 2, "batch 8 under Algorithm 1"
    words = " ".join(sweep["assumptions"])
    assert "chance 0.80, as given" in words and "80 % of the bandwidth and 60 % of the FLOP/s" in words
    assert "A100 Tensor Core GPU" in words and "predicted costs" in words
    assumed = predicted(4, "A100", "7.8B", "", "assumed")["sweep"]
    assert assumed["points"] == sweep["points"] and "0.80, assumed" in assumed["assumptions"][0]
    swept = predicted(4, "A100", "7.8B", "0.61", "sweep")["sweep"]
    assert "0.61, measured in the last sweep" in swept["assumptions"][0]


def test_bad_input_of_a_prediction_is_refused_in_one_sentence() -> None:
    for values, message in (
        ((17, "A100", "7.8B", "", ""), "A fixed draft length must be"),
        ((4, "abacus", "7.8B", "", ""), "hardware must be one of"),
        ((4, "A100", "9b", "", ""), "The models must be one of"),
        ((4, "laptop", "70B", "", ""), "70B and 8B do not fit"),
        ((4, "A100", "7.8B", "high", ""), "Acceptance must be a number from 0 to 1"),
        ((4, "A100", "7.8B", "1.2", ""), "Acceptance must be"),
        ((4, "A100", "7.8B", "nan", ""), "Acceptance must be"),
    ):
        state = predicted(*values)
        assert state["phase"] == "error" and state["message"].startswith(message) and state["sweep"] is None


# The sweep's two figures.
MEASURED, PREDICTED = "#sweep-measured", "#sweep-predicted"


def points(page: Page, figure: str) -> Locator:
    return page.locator(f"{figure} tbody tr")


def line(page: Page, figure: str) -> Locator:
    return page.locator(f"{figure} .sweep-line")


@pytest.mark.slow
def test_the_tab_measures_stops_and_predicts(page: Page) -> None:
    fill(page, tokens=20)
    page.get_by_role("tab", name="Sweep").click()
    expect(page.locator("#sweep-measure")).to_be_visible()
    expect(points(page, MEASURED)).to_have_count(0)
    # There is no empty chart.
    expect(page.locator(f"{MEASURED} .chart")).to_be_hidden()
    # States that arrive after Stop don't start it again.
    page.click("#sweep-measure")
    page.click("#sweep-stop")
    page.wait_for_timeout(1000)
    expect(line(page, MEASURED)).to_have_text("Stopped.")
    expect(page.locator("#sweep-measure")).to_be_enabled()
    page.click("#sweep-measure")
    expect(line(page, MEASURED)).to_have_text(re.compile(r"Part \d+ of 12: .+ About \d+ s left\."))
    expect(page.locator("#sweep-measure")).to_be_disabled()
    # The first points appear during the sweep.
    expect(points(page, MEASURED).nth(1)).to_be_visible()
    expect(line(page, MEASURED)).to_have_attribute("data-phase", "running")
    page.click("#sweep-stop")
    expect(line(page, MEASURED)).to_have_text("Stopped. The points so far are kept.")
    expect(page.locator("#sweep-measure")).to_be_enabled()
    kept = points(page, MEASURED).count()
    assert 2 <= kept < 12
    page.locator(f"{MEASURED} .plot").scroll_into_view_if_needed()  # only a chart in view is drawn
    page.wait_for_function("() => document.querySelector('#sweep-measured .plot').data?.length >= 2")
    assert page.locator(f"{MEASURED} .badge-predicted").count() == 0
    _predict(page)
    _exports(page, kept)
    _own_prompts(page)
    assert_accessible(page)
    assert_fits(page, 390)


def _own_prompts(page: Page) -> None:
    """The button also measures the visitor's prompts. If they are refused, the earlier results stay."""
    field, answers = page.locator("#sweep-prompts textarea"), page.locator(f"{MEASURED} .sweep-said li")
    before = answers.all_inner_texts()
    field.fill("Hello")
    page.click("#sweep-measure")
    expect(line(page, MEASURED)).to_contain_text("One prompt gives no interval")
    assert answers.all_inner_texts() == before
    field.fill("\n".join(f"Hello {i}" for i in range(12)))
    page.click("#sweep-measure")
    expect(line(page, MEASURED)).to_have_text(re.compile(r"Part \d+ of 24: prompt \d+, batch 2, automatic\."))
    expect(answers).to_have_text(
        [re.compile(r"on \d+ of your 12 prompts BASS is [\d.]+ times as fast as regular decoding.*95 % interval")]
    )
    page.click("#sweep-stop")
    expect(line(page, MEASURED)).to_have_text("Stopped. The points so far are kept.")
    expect(page.locator("#sweep-measure")).to_be_enabled()
    expect(answers).to_have_count(1)
    expect(points(page, MEASURED).first).to_contain_text("1: Hello 0")
    page.click("#sweep-measure")
    page.click("#sweep-stop")
    expect(line(page, MEASURED)).to_have_text(
        "Stopped before its first point. The points are those of the sweep before."
    )
    expect(page.locator("#sweep-measure")).to_be_enabled()
    expect(points(page, MEASURED).first).to_contain_text("1: Hello 0")


def _predict(page: Page) -> None:
    """A prediction appears at once, with the acceptance of the last sweep."""
    page.click("#sweep-predict")
    expect(points(page, PREDICTED)).to_have_count(21)
    assert page.locator(f"{PREDICTED} figcaption .badge-predicted").inner_text() == "predicted"
    page.locator(f"{PREDICTED} .sweep-assumed summary").click()
    expect(page.locator(f"{PREDICTED} .sweep-assumed li").first).to_contain_text("measured in the last")
    page.fill("#sweep-acceptance input, #sweep-acceptance textarea", "2")
    page.click("#sweep-predict")
    expect(line(page, PREDICTED)).to_have_text(re.compile("Acceptance must be a number from 0 to 1"))
    expect(points(page, PREDICTED)).to_have_count(21)
    page.fill("#sweep-acceptance input, #sweep-acceptance textarea", "0.5")
    page.click("#sweep-predict")
    expect(page.locator(f"{PREDICTED} .sweep-of")).to_contain_text("A100 with 7.8B and 310M; acceptance 0.50")


def _exports(page: Page, kept: int) -> None:
    for figure, kind, count in ((MEASURED, "measured", kept), (PREDICTED, "predicted", 21)):
        document = json.loads(saved(page, f"{figure} [data-take=json]"))
        assert (document["sweep"], document["kind"], len(document["points"])) == (1, kind, count)
        head, *rows = saved(page, f"{figure} [data-take=csv]").splitlines()
        assert head.startswith("kind,batch,draft_length,speedup") and len(rows) == count
        assert all(row.startswith(f"{kind},") for row in rows)

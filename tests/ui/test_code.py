"""The code that the page shows running on a round: its lines and values are those of a run of reference.py."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from playwright.sync_api import Page, expect

from bass_core import ModelPair, SamplingParams, race, reference
from ui.page.limits import Limits
from ui.page.request import make_request
from ui.race.code import FILE, MARKS, listing

from .browser import assert_accessible, assert_fits, play

ROWS, LENGTH, SEED, TOKENS = 3, 3, 5, 24
PROMPTS = [[1 + row, 7, 3] for row in range(ROWS)]
MARK_OF = {line.number: line.mark for function in MARKS for line in listing(function)}
TRACES = """() => Bass.run().lanes.get("bass").sequences.map((sequence) => Bass.roundsIn(sequence).map((step) => {
  const own = step.written > step.accepted ? sequence.tokens[step.start + step.written - 1] : null;
  return { row: step.row, own: own?.id ?? null, states: Bass.trace(step, own) };
}))"""
Event = dict[str, Any]


def test_the_listing_is_the_file() -> None:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    for function in MARKS:
        for line in listing(function):
            assert line.text == lines[line.number - 1]


@contextmanager
def traced(calls: list[dict[int, list[Event]]]) -> Iterator[None]:
    """Append to `calls`, for each call of `step`, the lines that ran, by row, with the variables after them."""
    codes = {getattr(reference, name).__code__: name for name in MARKS}
    judged = iter(())

    def watch(frame: Any, event: str, _: object) -> Any:
        nonlocal judged
        if frame.f_code not in codes:
            return None
        name, events, pending = codes[frame.f_code], [], []
        if name == "step":
            rows = [noise.id for noise in frame.f_locals["noise"]]
            calls.append(defaultdict(list))
            judged = iter(rows)
        else:
            events = calls[-1][next(judged)]

        def line(frame: Any, event: str, _: object) -> Any:
            if pending:
                pending.pop().update(values(frame.f_locals))
            if event == "line":
                pending.append({"mark": MARK_OF[frame.f_lineno]})
                (calls[-1][-1] if name == "step" else events).append(pending[0])
            return line

        return line

    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(None)


def values(variables: dict[str, Any]) -> Event:
    """The numbers that the page shows of a frame's variables."""
    if "noise" not in variables or isinstance(variables["noise"], list):
        x = [list(row) for row in variables.get("x", [])]
        q = variables.get("q", [])
        chances = [[float(q[b][j][token]) for j, token in enumerate(row)] for b, row in enumerate(x)]
        return {"b": variables.get("b"), "x": x, "q": chances}
    at = variables.get("i", variables.get("n"))
    shown = {"n": variables.get("n"), "t": variables.get("t"), "h": variables.get("h")}
    if at is not None and at < len(variables["x"]):
        shown |= {"r": variables["noise"].r(at), "p": float(variables["p"][at][variables["x"][at]])}
    return shown


def of_row(call: dict[int, list[Event]], row: int, at: int) -> list[Event]:
    """The lines of a call of `step` for one row, which is in place `at`, without those for other rows."""
    events, kept = [event for event in call[-1] if event["mark"]], []
    for event, after in zip(events, [*events[1:], {"mark": ""}], strict=True):
        mark = event["mark"]
        if mark == "step.rows" and not (event["b"] == at and after["mark"] == "step.if"):
            continue
        if mark in ("step.if", "step.q", "step.L4") and event["b"] != at:
            continue
        if not (kept and mark == kept[-1]["mark"] == "step.return"):
            kept.append(event)
    return kept + call[row]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block", "greedy"])
def test_the_lines_and_values_are_those_of_a_run_of_the_file(opened: Page, pair: ModelPair, rule: str) -> None:
    temperature = 0.0 if rule == "greedy" else 0.9
    verification = "rejection" if rule == "greedy" else rule
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "draft_length": LENGTH, "seed": SEED}
    *_, final = race(
        pair, PROMPTS, n=ROWS, sampling=SamplingParams(temperature), verification=verification, drafter="model",
        eos_token_id=None, inspect=True, **options,
    )  # fmt: skip
    settings = {"prompt": "Hello", "temperature": temperature, "verification": verification}
    play(opened, [final], make_request(settings, Limits()).settings())
    calls: list[dict[int, list[Event]]] = []
    with torch.inference_mode(), traced(calls):
        reference.bass(
            pair.target,
            pair.draft,
            PROMPTS,
            TOKENS,
            temperature,
            length=LENGTH,
            seed=SEED,
            together=rule == "block",
        )
    traces = opened.evaluate(TRACES)
    runs = {row: [call for call in calls[1:] if row in call] for row in range(ROWS)}
    rejected = 0
    for row, rounds in enumerate(traces):
        assert len(rounds) == len(runs[row])
        for shown, call in zip(rounds, runs[row], strict=True):
            at = sorted(key for key in call if key >= 0).index(row)
            compare(shown, of_row(call, row, at), at, rule)
            rejected += shown["row"]["accepted"] < len(shown["row"]["drafted"])
    assert rejected
    walk(opened, runs[0])


def compare(shown: dict[str, Any], run: list[Event], at: int, rule: str) -> None:
    """The states of a round have the lines of a run, and after each line its values."""
    states, record = shown["states"], shown["row"]
    assert [state["mark"] for state in states] == [event["mark"] for event in run]
    close = lambda value: pytest.approx(value, abs=2e-5, rel=1e-4)  # noqa: E731
    for state, event in zip(states, run, strict=True):
        mark = event["mark"]
        if mark.startswith("step."):
            assert record["drafted"][: state["drafts"]] == event["x"][at]
            assert record["q"][: state["drafts"]] == close(event["q"][at])
            continue
        assert state["n"] == event["n"]
        assert (shown["own"] if state["t"] else None) == event["t"]
        if mark.endswith((".L9", ".test")) and state["testing"] is not None:
            i = state["testing"]
            assert record["p"][i] == close(event["p"])
            assert rule == "greedy" or record["u"][i] == close(event["r"])
        if mark.endswith(".test"):
            assert state["chances"] == state["testing"] + 1
            assert record["chance"][state["testing"]] == close(float(event["h"]))


def walk(page: Page, calls: list[dict[int, list[Event]]]) -> None:
    """Going forward and back lights the lines of the run, and the values of the round appear."""
    page.evaluate("() => Bass.openRound('bass', 0, Bass.roundsIn(Bass.run().lanes.get('bass').sequences[0])[0])")
    page.keyboard.press("Home")
    panel, lit = page.locator(".step-part"), page.locator(".code [aria-current=step]")
    run = of_row(calls[0], 0, 0)
    for event in run[1:]:
        page.click("[data-line='1']")
        expect(lit).to_have_attribute("data-mark", event["mark"])
        assert MARK_OF[int(lit.locator("i").text_content() or "")] == event["mark"]
    texts = page.evaluate(
        "() => Bass.run().lanes.get('bass').sequences[0].steps[1].drafts.map(({ text }) => text)"
    )
    cells = panel.locator(".step-values tr").first.locator("td")
    assert cells.all_text_contents() == [json.dumps(text, ensure_ascii=False)[1:-1] for text in texts]
    page.keyboard.press("ArrowLeft")
    expect(lit).to_have_attribute("data-mark", run[-2]["mark"])
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    expect(panel.locator(".step-line")).to_contain_text("Round 2 ")


@pytest.mark.slow
def test_a_recorded_round_runs_without_a_model(film: Page) -> None:
    """A click on a recorded token runs the code of its round. It plays by itself unless motion is reduced."""
    film.click("[data-recording=loss]")
    film.wait_for_function("() => Bass.tape.state.recorded.name === 'loss'")
    film.evaluate("() => Bass.tape.live()")
    film.locator("#lane-bass .sequence").first.locator(".token.recovered").first.click()
    panel, lit = film.locator(".step-part"), film.locator(".code [aria-current=step]")
    expect(panel).to_be_visible()
    film.wait_for_function("() => document.querySelector('.code-now')?.dataset.mark === 'step.L4'")
    expect(panel.locator("[data-run-code]")).to_have_text("Pause")
    film.keyboard.press("End")
    expect(panel.locator("[data-run-code]")).to_have_text("Play")
    expect(lit).to_have_attribute("data-mark", "judge_together.L18")
    assert panel.locator("[data-function=judge]").is_hidden()
    assert panel.locator(".step-top tr.is-written").count() == 1
    assert_fits(film, 390, 1400)
    assert_accessible(film)
    film.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    film.emulate_media(reduced_motion="reduce")
    film.locator("#lane-bass .sequence").first.locator(".token.recovered").first.click()
    expect(lit).to_have_attribute("data-mark", "judge_together.L18")
    # A greedy round shows the model's own probabilities next to p and q, which are 0 or 1.
    film.click("[data-recording=win]")
    film.wait_for_function("() => Bass.tape.state.recorded.name === 'win'")
    film.evaluate("() => Bass.tape.live()")
    film.locator("#lane-bass .sequence").first.locator(".token.accepted").first.click()
    step = film.evaluate("() => Bass.run().lanes.get('bass').sequences[0].steps.find((s) => s.accepted).row")
    row = panel.locator(".step-values tr").filter(has_text="ptemperature 1")
    expect(row.locator("td")).to_have_text(
        [f"{p:.3f}" if p >= 0.001 else f"{p:.6f}" for p in step["detail"]["own_p"]]
    )


@pytest.mark.slow
def test_the_lecture_opens_the_code_on_a_sampled_round(film: Page) -> None:
    film.get_by_role("tab", name="How it works").click()
    film.click("[data-real-round]")
    expect(film.locator(".step-part")).to_be_visible()
    expect(film.locator(".step-rule")).to_contain_text("Block verification")
    film.keyboard.press("End")
    step = film.evaluate("() => Bass.tape.state.recorded.name")
    assert step == "loss"
    accepted = film.locator(".step-values tr:last-child .is-accepted").count()
    assert 1 < accepted < film.locator(".step-values tr:last-child td").count()

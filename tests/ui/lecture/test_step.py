"""Step by step: rounds are walked one by one, with the export's numbers, while the page holds what it shows."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from ..browser import fill, run_to_the_end, shown
from ..numbers.formulas import running_chance
from ..numbers.reading import same as close
from ..page.test_access import AXE, violations

pytestmark = pytest.mark.slow


def steps_of(page: Page) -> list[dict[str, Any]]:
    """The drafting rounds of the first row of lane "bass", as the page exports them, each with its last token."""
    row = json.loads(page.evaluate("() => Bass.asJson()"))["lanes"]["bass"]["sequences"][0]
    found = []
    for step in row["rounds"]:
        if step["drafts"]:
            last = step["start"] + step["written"] - 1
            found.append(step | {"last": row["token_ids"][last], "origin": row["origins"][last]})
    return found


def same(text: str | None, value: float | None) -> bool:
    """Whether a text shows this number, with three digits or, of a small one, six."""
    if value is None:
        return text == "n/a"
    return abs(float(text or "nan") - value) <= (0.00051 if value >= 0.001 or value == 0 else 6e-7)


def check_end(panel: Locator, step: dict[str, Any]) -> bool:
    """The table where the round ended shows the export's numbers; whether it has a residual."""
    ending = step["detail"]["ending"]
    rows = panel.locator(".step-top tr:has(td)")
    assert rows.count() == (len(ending["top"]) if ending else 0)
    for row, one in zip(rows.all(), ending["top"] if ending else [], strict=True):
        numbers = [cell.text_content() for cell in row.locator(".step-share").all()]
        expected = [one["p"], *([one["q"], one["residual"]] if ending["mass"] else [])]
        assert all(same(*both) for both in zip(numbers, expected, strict=True))
        assert ("written" in (row.text_content() or "")) == (one["id"] == step["last"])
        if ending["mass"]:
            left = max(0.0, ending["reach"] * one["p"] - one["q"]) / ending["mass"]
            assert one["residual"] == pytest.approx(left, abs=1e-4)
    if ending and ending["mass"]:
        assert ending["reach"] == pytest.approx(running_chance(step, ending["after"]), rel=1e-3)
        shown = (panel.locator(".step-ending").text_content() or "").rsplit("/", 1)[1]
        assert close(shown, ending["mass"])
    return bool(ending and ending["mass"])


def check_draft(card: Locator, step: dict[str, Any], i: int) -> None:
    draft, detail = step["drafts"][i], step["detail"]
    text = card.text_content() or ""
    assert card.locator(".step-source").text_content() == detail["sources"][i] == "model"
    if detail["rule"] == "greedy":
        assert draft["u"] is None or card.locator(".step-u").count() == 0
        p, q = (card.locator(".step-numbers").text_content() or "").split(" · ")
        assert same(p[2:], detail["ownP"][i]) and same(q[2:], detail["ownQ"][i])
        assert "likeliest" in text or "not tested" in text
    elif detail["rule"] == "coupled":
        assert "the target draws" in text or "not tested" in text
    else:
        assert ("accepted: u" in text) == (i < step["accepted"])
        at = float(card.locator(".step-u").evaluate("ball => ball.style.getPropertyValue('--at')"))
        assert at == draft["u"]


def walk(page: Page, rule: str) -> int:
    """Walk through all drafting rounds; how many had a residual."""
    panel, steps, residuals = page.locator(".step-part"), steps_of(page), 0
    page.click("[data-switch=stepping]")
    expect(panel.locator("[data-walk=lane]")).to_have_value("bass")
    for at, step in enumerate(steps):
        count = len(step["drafts"])
        expect(panel.locator(".step-line")).to_contain_text(f"{count} draft")
        assert step["detail"]["rule"] == rule
        cards = panel.locator(".step-draft")
        assert cards.count() == count == len(step["detail"]["sources"])
        assert panel.locator(".step-draft.is-accepted").count() == step["accepted"]
        assert panel.locator(".step-context del").count() == count - step["accepted"]
        assert page.locator("#lane-bass .token.stepped").count() >= step["written"]
        for i in range(count):
            check_draft(cards.nth(i), step, i)
        residuals += check_end(panel, step)
        # The first press completes the animation, the second goes on.
        page.keyboard.press("ArrowRight")
        if at + 1 < len(steps):
            page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(panel.locator(".step-line")).to_contain_text("there is no later round")
    page.click("[data-close]")
    expect(panel).to_be_hidden()
    assert page.locator(".token.stepped").count() == 0
    return residuals


def test_each_rules_rounds_are_walked_with_the_numbers_of_the_export(page: Page) -> None:
    fill(page, batch=1, tokens=30)
    run_to_the_end(page)
    assert walk(page, "block") > 0
    page.click("[data-switch=stepping]")
    page.keyboard.press("ArrowRight")  # half-faded texts have too little contrast
    expect(page.locator(".step-part")).to_contain_class("at-end")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    assert violations(page) == []
    page.click("text=More settings")
    page.click("#verification input")
    page.get_by_role("option", name=re.compile("coupled")).click()
    run_to_the_end(page)
    assert walk(page, "coupled") == 0
    fill(page, batch=1, tokens=30, temperature=0)
    run_to_the_end(page)
    assert walk(page, "greedy") == 0


def test_the_page_holds_what_it_shows_until_it_is_told_to_go_on(page: Page) -> None:
    fill(page, batch=1, tokens=60)
    # Held from the start, so that the test does not depend on how fast the race is.
    page.evaluate("() => { document.querySelector('#run').click(); Bass.hold(true); }")
    expect(page.locator("#run")).to_be_disabled()
    expect(page.locator("#run")).to_be_enabled(timeout=120_000)
    assert shown(page, "bass") == []
    page.evaluate("() => document.dispatchEvent(new CustomEvent('bass:pause'))")
    line = page.locator(".step-part .step-line")
    expect(line).to_contain_text("No round yet")
    for _ in range(2):
        page.evaluate("() => document.dispatchEvent(new CustomEvent('bass:step'))")
        page.evaluate("() => document.dispatchEvent(new CustomEvent('bass:step'))")
    expect(line).to_contain_text("so far")
    held = page.evaluate("() => Bass.run().done")
    page.evaluate("() => document.dispatchEvent(new CustomEvent('bass:pause'))")
    expect(page.locator("#status-line .message")).to_have_attribute("data-phase", "done")
    assert held is False
    assert sum(map(len, shown(page, "bass"))) > 0

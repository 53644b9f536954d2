"""Accessibility: axe-core finds nothing serious in either theme, and a race can be run without a mouse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from playwright.sync_api import Page, expect

from ..browser import fill, run_to_the_end

AXE = Path(axe_playwright_python.__file__).parent / "axe.min.js"
# Violations in Gradio's own markup, which the page can't change: {rule: where}.
NOT_OURS: dict[str, str] = {}


def violations(page: Page) -> list[str]:
    """The violations that axe-core calls serious or critical, one line for each element."""
    found: list[dict[str, Any]] = page.evaluate("async () => (await axe.run()).violations")
    return [
        f"{v['id']}: {node['target']} {node['html'][:160]}"
        for v in found
        if v["impact"] in ("serious", "critical")
        for node in v["nodes"]
        if NOT_OURS.get(v["id"], "\0") not in json.dumps(node["target"])
    ]


@pytest.mark.slow
def test_axe_finds_nothing_serious(page: Page) -> None:
    fill(page, tokens=24)
    run_to_the_end(page)
    page.click("text=More settings")
    page.click(".snippet summary")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = {"light": violations(page)}
    page.get_by_role("tab", name="How it works").click()
    page.locator(".what-if .plot").scroll_into_view_if_needed()
    page.locator(".what-if .plot .main-svg").first.wait_for(state="attached")
    found["light, how"] = violations(page)
    page.evaluate("document.body.classList.add('dark')")
    page.wait_for_timeout(500)
    found["dark, how"] = violations(page)
    page.get_by_role("tab", name="Race").click()
    found["dark"] = violations(page)
    assert not any(found.values()), json.dumps(found, indent=1)


@pytest.mark.slow
def test_a_race_by_keyboard_alone(page: Page) -> None:
    page.locator("#prompt textarea").focus()
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type("Hello")
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.closest('[id]')?.id ?? ''"))
        if reached[-1] == "run":
            break
        if page.evaluate("document.activeElement.closest('#max-new-tokens') !== null"):
            page.keyboard.press("ControlOrMeta+A")
            page.keyboard.type("6")
    assert reached[-1] == "run"
    page.keyboard.press("Enter")
    expect(page.locator("#lane-bass .state")).to_contain_text("Finished", timeout=60_000)
    page.locator("[data-switch=colours]").focus()
    page.keyboard.press("Space")
    expect(page.locator("[data-switch=colours]")).to_have_attribute("aria-pressed", "false")

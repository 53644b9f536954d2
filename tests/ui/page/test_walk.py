"""How it works: six steps whose pictures are computed, by rules that agree with bass_core's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from bass_core import Algorithm1

from ..conftest import watched

STEPS = ("memory", "drafting", "rule", "ragged", "policies", "roofline")


@pytest.fixture(scope="module")
def walk(context: BrowserContext, server: str) -> Iterator[Page]:
    """The tab, shared by all tests here."""
    with watched(context, server) as page:
        page.get_by_role("tab", name="How it works").click()
        expect(page.locator("#how-memory")).to_be_visible()
        yield page


def data(page: Page, step: str, key: str) -> Any:
    """What a step's picture was drawn from."""
    return json.loads(page.locator(f"#how-{step}").get_attribute(f"data-{key}") or "null")


def put(page: Page, step: str, **values: float) -> None:
    for key, value in values.items():
        page.locator(f"#how-{step} .walk-controls [data-slider={key}]").fill(str(value))


def test_six_steps_have_a_picture_and_an_answer_that_can_be_revealed(walk: Page) -> None:
    assert walk.eval_on_selector_all(".walk-step", "all => all.map(e => e.dataset.stepName)") == list(STEPS)
    for name in STEPS:
        step = walk.locator(f"#how-{name}")
        walk.locator(f".walk-way [href='#how-{name}']").click()
        expect(step.locator("h2")).to_be_in_viewport()
        assert step.locator(".walk-play .picture svg > *").count() > 3, name
        expect(step.locator(".exercise-answer")).to_be_hidden()
        step.locator("summary").focus()
        walk.keyboard.press("Enter")
        expect(step.locator(".exercise-answer")).to_be_visible()
        expect(step.locator(".exercise-answer")).not_to_be_empty()


def test_a_thousand_draws_meet_p_whatever_the_draft(walk: Page) -> None:
    button = walk.locator("#how-rule [data-draw]")
    for q in ((25, 45, 10, 15, 5), (1, 0, 0, 0, 100), (40, 25, 20, 10, 5)):
        put(walk, "rule", **{f"q{i}": value for i, value in enumerate(q)})
        assert data(walk, "rule", "q") == pytest.approx([value / sum(q) for value in q])
        p, total = data(walk, "rule", "p"), [0] * 5
        for _ in range(4):
            total = [sum(pair) for pair in zip(total, data(walk, "rule", "counts"), strict=True)]
            button.click()
        assert sum(total) == 4000
        chi = sum((n - 4000 * one) ** 2 / (4000 * one) for n, one in zip(total, p, strict=True))
        assert chi < 18.47, "one of 1,000 honest series of draws from p is above, at four degrees of freedom"
    assert "recovered tokens" in walk.inner_text("#how-rule .walk-said")
    assert " 0 recovered" in walk.inner_text("#how-rule .walk-said"), "q is p"


@pytest.mark.parametrize(("a", "b"), [(0.8, 8), (0, 1), (0.99, 32)])
def test_algorithm_1_is_played_as_bass_core_plays_it(walk: Page, a: float, b: int) -> None:
    put(walk, "policies", a=a, b=b)
    policy, accepted = Algorithm1(), data(walk, "policies", "accepted")
    for length, counts in zip(data(walk, "policies", "lengths"), accepted, strict=True):
        assert length == policy.length and len(counts) == b
        policy.update(max(counts))
    then = [str(policy.length)]
    for _ in range(3):
        policy.update(0)
        then.append(str(policy.length))
    answer = walk.locator("#how-policies .exercise-answer").text_content() or ""
    assert f"the length is {then[0]}; then {', '.join(then[1:])}." in answer


def test_answers_follow_the_sliders(walk: Page) -> None:
    put(walk, "ragged", a=0.5, b=2)
    put(walk, "roofline", b=32, l=7)
    put(walk, "drafting", a=0.3, c=0.4)
    texts = {name: walk.locator(f"#how-{name} .exercise-answer").text_content() or "" for name in STEPS}
    # 0.5^2 = 0.25; (1 - 0.25^8) / 0.75 = 1.33, and (1 - 0.5^8) / 0.5 = 1.99.
    assert "= 0.250:" in texts["ragged"] and "1.33 tokens a row in place of 1.99" in texts["ragged"]
    # An A100: 312e12 x 2 / (2 x 2039e9) = 153.02 tokens, so batch 20 has 160 of them.
    assert texts["memory"].startswith("154 tokens") and "From batch 20 on" in texts["roofline"]
    # 256 tokens: 2 x 7.8e9 x 256 / 312e12 = 12.80 ms; reading: 15.6e9 / 2039e9 = 7.65 ms.
    assert "takes 7.65 ms" in walk.inner_text("#how-roofline .walk-said")
    assert "takes 12.80 ms: 1.67 plain steps" in walk.inner_text("#how-roofline .walk-said")
    assert texts["drafting"].startswith("None: a = 0.3 is not above c = 0.4")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_colour_has_one_meaning_on_the_whole_page(walk: Page, theme: str) -> None:
    walk.evaluate("dark => document.body.classList.toggle('dark', dark)", theme == "dark")
    put(walk, "rule", q0=1)
    put(walk, "ragged", a=0.7)
    used = walk.evaluate("""() => {
      const probe = (name) => {
        const e = document.createElement('i');
        e.style.color = `var(--${name})`;
        document.querySelector('.bass-how').append(e);
        const found = getComputedStyle(e).color;
        e.remove();
        return found;
      };
      const of = (place, key) => getComputedStyle(document.querySelector(place))[key];
      return Object.fromEntries(['accepted', 'recovered', 'bonus'].map((name) => [name, {
        variable: probe(name),
        tokens: of(`.bass-lanes .legend .${name}`, 'textDecorationColor'),
        walk: of(`.walk-key .${name}`, 'textDecorationColor'),
        drawing: name === 'bonus' ? probe(name)
          : of(`.picture .is-${name}`, name === 'accepted' ? 'fill' : 'stroke'),
        shape: of(`.walk-key .${name}`, 'textDecorationStyle'),
      }]));
    }""")
    for name, colours in used.items():
        assert len({colours[key] for key in ("variable", "tokens", "walk", "drawing")}) == 1, (name, colours)
    assert len({colours["variable"] for colours in used.values()}) == 3
    assert [colours["shape"] for colours in used.values()] == ["solid", "dashed", "double"], "without colours too"
    walk.evaluate("document.body.classList.remove('dark')")


@pytest.mark.parametrize("width", [390, 1400, 1920])
def test_the_walk_fits_its_page(walk: Page, width: int) -> None:
    walk.set_viewport_size({"width": width, "height": 900})
    walk.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
    walk.wait_for_function("""() => [...document.querySelectorAll('.walk-play .picture')].every((place) =>
      place.querySelector('svg').viewBox.baseVal.width <= Math.max(260, place.clientWidth) + 1)""")
    walk.set_viewport_size({"width": 1400, "height": 900})

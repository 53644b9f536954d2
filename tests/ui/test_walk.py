"""The tab "How it works": six steps whose pictures follow bass_core's rules."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from bass_core import Algorithm1

from .browser import assert_accessible, fill, run_to_the_end

STEPS = ("memory", "drafting", "rule", "ragged", "policies", "roofline")


@pytest.mark.slow
def test_every_step_of_how_it_works_follows_the_rules(page: Page) -> None:
    fill(page, tokens=24)
    run_to_the_end(page)
    page.get_by_role("tab", name="How it works").click()
    expect(page.locator("#how-memory")).to_be_visible()
    _steps(page)
    _draws(page)
    for a, b in ((0.8, 8), (0, 1), (0.99, 32)):
        _algorithm_1(page, a, b)
    _answers(page)
    _what_if(page)
    for theme in ("light", "dark"):
        _colours(page, theme)
    assert_accessible(page)
    for width in (390, 1400, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
        page.wait_for_function("""() => [...document.querySelectorAll('.walk-play .picture')].every((place) =>
          place.querySelector('svg').viewBox.baseVal.width <= Math.max(260, place.clientWidth) + 1)""")


def data(page: Page, step: str, key: str) -> Any:
    """The data of a step's picture."""
    return json.loads(page.locator(f"#how-{step}").get_attribute(f"data-{key}") or "null")


def set_sliders(page: Page, step: str, **values: float) -> None:
    for key, value in values.items():
        page.locator(f"#how-{step} .walk-controls [data-slider={key}]").fill(str(value))


def _steps(walk: Page) -> None:
    """Each of the six steps has a picture and an answer that can be revealed."""
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


def _draws(walk: Page) -> None:
    """The tokens of a thousand draws are distributed as p, whatever q is."""
    button = walk.locator("#how-rule [data-draw]")
    for q in ((25, 45, 10, 15, 5), (1, 0, 0, 0, 100), (40, 25, 20, 10, 5)):
        set_sliders(walk, "rule", **{f"q{i}": value for i, value in enumerate(q)})
        assert data(walk, "rule", "q") == pytest.approx([value / sum(q) for value in q])
        p, total = data(walk, "rule", "p"), [0] * 5
        for _ in range(4):
            total = [sum(pair) for pair in zip(total, data(walk, "rule", "counts"), strict=True)]
            button.click()
        assert sum(total) == 4000
        chi = sum((n - 4000 * share) ** 2 / (4000 * share) for n, share in zip(total, p, strict=True))
        assert chi < 18.47, "only one in 1,000 series of draws from p exceeds this, at four degrees of freedom"
    assert "recovered tokens" in walk.inner_text("#how-rule .walk-said")
    assert " 0 recovered" in walk.inner_text("#how-rule .walk-said"), "q is p"


def _algorithm_1(walk: Page, a: float, b: int) -> None:
    """Algorithm 1 chooses the same lengths as in bass_core."""
    set_sliders(walk, "policies", a=a, b=b)
    policy, accepted = Algorithm1(), data(walk, "policies", "accepted")
    for length, counts in zip(data(walk, "policies", "lengths"), accepted, strict=True):
        assert length == policy.length and len(counts) == b
        policy.update(max(counts))
    then = [str(policy.length)]
    for _ in range(3):
        policy.update(0)
        then.append(str(policy.length))
    answer = walk.locator("#how-policies .exercise-answer").text_content() or ""
    assert f"the next length is {then[0]}; then come {', '.join(then[1:])}." in answer


def _answers(walk: Page) -> None:
    """Answers depend on the sliders."""
    set_sliders(walk, "ragged", a=0.5, b=2)
    set_sliders(walk, "roofline", b=32, l=7)
    set_sliders(walk, "drafting", a=0.3, c=0.4)
    texts = {name: walk.locator(f"#how-{name} .exercise-answer").text_content() or "" for name in STEPS}
    # 0.5^2 = 0.25; (1 - 0.25^8) / 0.75 = 1.33, and (1 - 0.5^8) / 0.5 = 1.99.
    assert "= 0.250," in texts["ragged"] and "1.33 tokens per row instead of 1.99" in texts["ragged"]
    # On an A100, compute exceeds reading from 312e12 x 2 / (2 x 2039e9) = 153.02 tokens on. Batch 20 has 160.
    assert texts["memory"].startswith("154 tokens") and "From batch 20 on" in texts["roofline"]
    # Computing 256 tokens takes 2 x 7.8e9 x 256 / 312e12 = 12.80 ms; reading takes 15.6e9 / 2039e9 = 7.65 ms.
    assert "takes 7.65 ms" in walk.inner_text("#how-roofline .walk-said")
    assert "takes 12.80 ms: 1.67 plain steps" in walk.inner_text("#how-roofline .walk-said")
    assert texts["drafting"].startswith("Zero: a = 0.3 is not above c = 0.4")


def _what_if(walk: Page) -> None:
    """The chart of expected speed-ups contains the race's measured points."""
    expect(walk.locator(".drawing")).to_have_count(1)
    walk.locator(".what-if .plot").scroll_into_view_if_needed()
    names = "(document.querySelector('.what-if .plot').data?.map(t => t.name) ?? [])"
    walk.wait_for_function(f"() => {names}.length === 5")
    assert walk.evaluate(names)[3:] == ["Speculative, measured", "BASS, measured"]
    for slider, value in (("a", "0.5"), ("l", "3"), ("c", "0.25"), ("b", "2")):
        walk.locator(f".what-if [data-slider={slider}]").fill(value)
    # (1 - 0.5^4) / 0.5 = 1.875 tokens, and 1.875 / (3 x 0.25 + 1) = 1.07. With a common stop, a^2 = 0.25 is the
    # acceptance, so (1 - 0.25^4) / 0.75 = 1.328 and 1.328 / 1.75 = 0.76.
    line = walk.locator(".what-if-line")
    expect(line).to_contain_text("1.88 tokens per round, 1.07×")
    expect(line).to_contain_text("0.76× with one common stop for the batch of 2")


def _colours(walk: Page, theme: str) -> None:
    """Each colour has one meaning on the whole page."""
    walk.evaluate("dark => document.body.classList.toggle('dark', dark)", theme == "dark")
    set_sliders(walk, "rule", q0=1)
    set_sliders(walk, "ragged", a=0.7)
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
        # In the texts, the target's own tokens have a line in their lane's colour.
        same = ("variable", "walk", "drawing", *(["tokens"] if name == "accepted" else []))
        assert len({colours[key] for key in same}) == 1, (name, colours)
    assert used["recovered"]["tokens"] == used["bonus"]["tokens"] != used["accepted"]["tokens"]
    assert len({colours["variable"] for colours in used.values()}) == 3
    assert [colours["shape"] for colours in used.values()] == ["solid", "dashed", "double"], "without colours too"
    walk.evaluate("document.body.classList.remove('dark')")

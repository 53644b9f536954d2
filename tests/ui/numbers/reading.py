"""What the page displays, as texts, read from its document.

Contract: plays the part of a reader: chooses lanes, sequences and rounds with the page's own controls. Numbers
stay the texts that the page shows.
"""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Page

LANES = """() => Object.fromEntries([...document.querySelectorAll('.lane')]
  .filter((e) => e.offsetParent).map((e) => [
  e.dataset.lane, {
    label: e.querySelector('h2').textContent,
    figures: Object.fromEntries([...e.querySelectorAll('[data-figure]')]
      .map((f) => [f.dataset.figure, f.textContent])),
    state: e.querySelector('.state').textContent,
    caption: e.querySelector('.strip figcaption').textContent,
  }]))"""
TABLE = """() => [...document.querySelectorAll('.figures-table tr')]
  .map((row) => [...row.children].map((c) => c.textContent))"""
VERDICT = """() => [document.querySelector('.verdict-head').textContent,
  [...document.querySelectorAll('.verdict li')].map((line) => line.textContent)]"""
INSPECTOR = """() => {
  const box = document.querySelector('.bass-inspector'), pick = (name) => box.querySelector(`[data-pick=${name}]`);
  const set = (name, value) => { pick(name).value = value; pick(name).dispatchEvent(new Event('change')); };
  const found = [];
  for (const lane of [...pick('lane').options].map((o) => o.value)) {
    set('lane', lane);
    for (const sequence of [...pick('sequence').options].map((o) => o.value)) {
      set('sequence', sequence);
      const count = Number(box.querySelector('[data-rounds]').textContent.slice(3));
      for (let at = 1; at <= count; at += 1) {
        set('round', at);
        const rows = [...box.querySelectorAll('.round [data-row]')].filter((row) => !row.hidden);
        found.push({
          lane, sequence: Number(sequence), at: at - 1, line: box.querySelector('.round-line').textContent,
          note: box.querySelector('.round-note').textContent, shown: !box.querySelector('.round').hidden,
          rows: Object.fromEntries(rows.map((row) =>
            [row.dataset.row, [...row.cells].slice(1).map((c) => c.textContent)])),
        });
      }
    }
  }
  return found;
}"""


def displayed(page: Page) -> dict[str, Any]:
    """Everything at the end of a race."""
    page.click("[data-switch=whole-race]")  # draws the timelines, whether they are in view or not
    page.wait_for_timeout(300)
    lanes = page.evaluate(LANES)
    page.click("[data-switch=whole-race]")
    head, lines = page.evaluate(VERDICT)
    columns, *rows = page.evaluate(TABLE)
    return {
        "lanes": lanes,
        "table": {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in rows},
        "head": head,
        "lines": lines,
        "inspector": page.evaluate(INSPECTOR),
    }


def number(text: str) -> float | None:
    """The first number of a text; None for "n/a" and dashes."""
    found = re.search(r"-?\d[\d,]*\.?\d*(e-?\d+)?", text.replace("\u2212", "-"))
    return float(found[0].replace(",", "")) if found else None


def same(text: str, value: float | str | None, share: float = 1e-3) -> bool:
    """Whether the text shows the value: its words, or within half of its last digit and `share`, as times are
    rounded."""
    if isinstance(value, str):
        return text == value
    shown = number(text)
    if shown is None or value is None:
        return shown is None and value is None
    digits = re.search(r"\d[\d,]*\.?(\d*)", text)
    return abs(shown - value) <= 0.5001 * 10 ** -len(digits[1] if digits else "") + share * abs(value)

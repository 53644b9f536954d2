"""The table of formulas: plain text, complete, and the same in the documents."""

from __future__ import annotations

import re
from html import unescape

import pytest

from bass_core import Metrics
from ui.race.formulas import FORMULAS, markdown, template, what
from ui.race.parts import charts, inspector, lanes, summary

from ..conftest import ROOT

TEMPLATES = {part.__name__: part() for part in (charts, inspector, lanes, summary)}


def test_a_formula_is_one_line_of_plain_text() -> None:
    for key, formula in FORMULAS.items():
        assert re.fullmatch(r"[a-z_]+", key) and formula.name and "\n" not in formula.text
        # The page's templates evaluate these characters, and the document's table is divided by one.
        assert not set("`${}<>|\\") & set(formula.name + formula.text), key
        assert formula.text[0] != " " and formula.text.endswith(".") and "  " not in formula.text


def test_a_question_mark_opens_the_formula_that_the_page_has() -> None:
    page = template()
    for key, formula in FORMULAS.items():
        assert f'popovertarget="what-{key}"' in what(key) and f'aria-describedby="what-{key}"' in what(key)
        (words,) = re.findall(rf'id="what-{key}" class="formula">(.*?)</div>', page)
        assert unescape(re.sub("<.*?>", "", words)) == f"{formula.name} {formula.text}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_question_marks_of_a_template_are_in_the_table(name: str) -> None:
    keys = set(re.findall(r'popovertarget="what-(\w+)"', TEMPLATES[name]))
    assert keys and keys <= FORMULAS.keys()


def test_each_formula_is_asked_for_somewhere() -> None:
    script = (ROOT / "ui/static/race/summary.js").read_text(encoding="utf-8")
    asked = set(re.findall(r'popovertarget="what-(\w+)"', "".join(TEMPLATES.values())))
    asked |= set(re.findall(r'^    \["(\w+)", ', script, re.MULTILINE))
    assert asked == FORMULAS.keys()


def test_figures_of_the_lanes_are_called_as_in_the_library() -> None:
    shown = set(re.findall(r'data-figure="(\w+)"', TEMPLATES[lanes.__name__]))
    assert shown <= FORMULAS.keys() & set(Metrics.__dataclass_fields__)


def test_the_document_has_the_table() -> None:
    assert markdown() in (ROOT / "docs/formulas.md").read_text(encoding="utf-8")

"""A method is one line of bass_core's table: the page shows it, and no other file of the page names a method."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import gradio as gr
import pytest
from playwright.sync_api import BrowserContext, expect

from bass_core import DEFAULT_LANES, METHODS, Method, ModelPair, register, unregister
from ui.page.choices import choices
from ui.page.events import Events
from ui.page.limits import Limits
from ui.page.page import build
from ui.page.setting import shown as settings
from ui.race.looks import COLOURS, DASHES, OTHER_COLOUR, OTHER_DASH, look, looks, reference
from ui.race.parts import charts, lanes
from ui.sources.local import race_source

from ..browser import fill, run_to_the_end, shown
from ..conftest import ROOT, hosted, watched

SOURCES = [path for kind in ("py", "js", "css") for path in (ROOT / "ui").rglob(f"*.{kind}")]


@pytest.fixture
def toy() -> Iterator[str]:
    method = Method("toy", "Toy", "Decodes for a test.", METHODS[reference()].build, drafts=False)
    register(method)
    yield method.name
    unregister(method.name)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_of_the_page_names_a_method(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    # As a draft length, "bass" is the name of Algorithm 1.
    text = text.replace('"bass": "Algorithm 1', "").replace('"draft_length": "bass"', "")
    text = text.replace('null: "bass" (Algorithm 1)', "").replace('["bass", "auto"', "")
    # The document's events have the project's name in front.
    text = re.sub(r"\bbass:(pause|step|back|fold|\$\{name\})", "", text)
    for name, method in METHODS.items():
        assert not re.findall(rf"""["'`]({name}|{method.label})["'`]|lane-{name}\b|\b{name}:""", text), name


def test_each_method_has_a_colour_and_a_line_of_its_own() -> None:
    known = looks(list(METHODS))
    assert len({(one["colour"], one["dash"]) for one in known.values()}) == len(METHODS)
    style = (ROOT / "ui/static/page/page.css").read_text()
    for colour in (*COLOURS, OTHER_COLOUR):
        assert style.count(f"--{colour}:") == 2, "one for light, one for dark"
    for dash in {*DASHES, OTHER_DASH} - {"solid"}:
        assert f".line-{dash} " in style


def test_the_lanes_that_draft_say_how_their_lengths_can_be_set_again() -> None:
    assert [look(name)["lengths"] for name in METHODS] == ["", "row", "batch", "", ""]


def test_a_lane_that_is_not_in_the_table_is_called_by_its_name() -> None:
    assert look("my_lane")["label"] == "my lane" and look("my_lane")["colour"] == OTHER_COLOUR


def test_the_templates_have_the_default_lanes() -> None:
    for name in DEFAULT_LANES:
        label = METHODS[name].label
        assert f'id="lane-{name}"' in lanes() and f">{label}</h2>" in lanes()
        assert f"</span>{label}</li>" in charts()


def test_a_registered_method_is_in_the_choices_the_api_and_the_charts_data(toy: str, pair: ModelPair) -> None:
    offered = choices(pair, "auto")
    assert offered.lanes[-1] == ("Toy", toy)
    events = Events(race_source(pair), Limits())
    *_, last = events.api("Hello", 1, 4, 0, 0, lanes=[reference(), toy])
    assert list(last["lanes"]) == [reference(), toy] and last["lanes"][toy]["metrics"]["speedup"] is not None
    values = [setting.default if setting.start is None else setting.start for setting in settings()]
    at = [setting.name for setting in settings()].index("lanes")
    values[at], values[2] = [toy], 4
    drawn = [log for log, *_ in events.run(*values) if isinstance(log, str)]
    head = json.loads(drawn[0].split("\n")[0])
    assert head["lanes"] == [toy] and set(head["looks"]) == {toy, reference()}
    assert (head["looks"][toy]["label"], head["looks"][toy]["about"]) == ("Toy", "Decodes for a test.")
    page = build(race_source(pair), limits=Limits(), about="here", choices=offered)
    (boxes,) = [block for block in page.blocks.values() if isinstance(block, gr.CheckboxGroup)]
    assert ("Toy", toy) in boxes.choices and toy not in boxes.value


@pytest.mark.slow
def test_a_registered_method_gets_a_column_and_a_line_in_the_legend(
    toy: str, pair: ModelPair, context: BrowserContext
) -> None:
    with (
        hosted(race_source(pair), choices=choices(pair, "auto")) as address,
        watched(context, address) as page,
    ):
        fill(page, batch=2, tokens=8)
        page.click("text=More settings")
        page.get_by_role("checkbox", name="Toy").check()
        run_to_the_end(page, (*DEFAULT_LANES, toy))
        assert page.inner_text(f"#lane-{toy} h2") == "Toy"
        assert page.inner_text(f"#lane-{toy} .about") == "Decodes for a test."
        assert shown(page, toy) == shown(page, reference()) != ["", ""]
        labels = [METHODS[name].label for name in (*DEFAULT_LANES, toy)]
        assert page.locator(".line-key li").all_text_contents() == labels
        expect(page.locator(".figures-table thead th")).to_have_text(["Figure", *labels])

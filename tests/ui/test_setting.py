"""One line in a table adds a setting, a method or a formula to the form, API, address, documents and scripts."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import gradio as gr
import pytest
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from bass_core import (
    DEFAULT_LANES,
    METHODS,
    Method,
    Metrics,
    ModelPair,
    RequestError,
    count_tokens,
    race,
    register,
    unregister,
)
from tests.support import ROOT
from tests.support.models import byte_tokenizer, tiny
from ui.page import presets
from ui.page.assets import FILE_STYLE, MODES, STAGE_STYLE, STATIC, STYLES, bundle, head, import_map, style, url
from ui.page.choices import COUPLED, NEAR_TIES, Choices, choices
from ui.page.events import Events, Snapshot
from ui.page.limits import Limits, whole
from ui.page.page import build
from ui.page.presets import long_document
from ui.page.request import RaceRequest, about, make_request
from ui.page.setting import SETTINGS, Setting, shown
from ui.race.formulas import FORMULAS, WORDS, formula_button, markdown, template
from ui.race.looks import COLOURS, DASHES, OTHER_COLOUR, OTHER_DASH, look, looks, reference
from ui.race.parts import charts, inspector, lanes, summary
from ui.sources.local import prompt_count, race_source

TOY = Setting(
    "first_id", 3, int, whole(0, lambda _: 9), "first_id", "First id", "number", "of the sequences"
)  # fmt: skip


def nothing(request: RaceRequest) -> Generator[Snapshot, None, None]:
    yield from ()


def parameters(blocks: gr.Blocks) -> dict[str, dict[str, Any]]:
    """The parameters of /race, as in /gradio_api/info and "Use via API"."""
    info: Any = blocks.get_api_info()
    return {one["parameter_name"]: one for one in info["named_endpoints"]["/race"]["parameters"]}


def test_the_api_keeps_its_parameters_and_describes_them() -> None:
    described = parameters(build(nothing, limits=Limits(max_batch=5, max_prompt=1234), about="nothing"))
    assert [(name, one["python_type"]["type"], one["parameter_default"]) for name, one in described.items()] == [
        ("prompt", "str", "Write a Python function that reverses a string."),
        ("batch_size", "int", 4), ("max_new_tokens", "int", 64), ("temperature", "float", 0.7), ("seed", "int", 0),
        ("top_k", "int", 0), ("top_p", "float", 1.0), ("draft_length", "str", "auto"), ("drafter", "str", "auto"),
        ("attention", "str", "auto"), ("scheduling", "str", "fair"), ("verification", "str", "auto"),
        ("time_budget_ms", "None | float", None), ("lanes", "None | list[str]", None), ("pair", "str", ""),
        ("prompts", "str", "one"), ("clock", "str", "measured"), ("clock_models", "str", "7.8b"),
        ("clock_bandwidth", "None | float", 1000.0), ("clock_tflops", "None | float", 100.0),
        ("clock_target", "None | float", 7.8), ("clock_draft", "None | float", 0.31),
        ("clock_bytes", "None | float", 2.0), ("acceptance", "None | float", None),
        ("min_p", "float", 0.0), ("repetition_penalty", "float", 1.0), ("stop", "None | list[str]", None),
        ("system", "None | str", None), ("chat_template_kwargs", "None | dict(str, Any)", None),
        ("json_schema", "dict(str, Any) | str | None", None), ("regex", "None | str", None),
        ("grammar", "None | str", None),
    ]  # fmt: skip
    prompt_line = {}
    for name, parameter in described.items():
        prompt_line[name] = words = parameter["python_type"]["description"]
        assert words == parameter["type"]["description"] and len(words) > 15 and words.endswith(".")
        assert words[0].isupper() or words[0].isdigit()
        assert parameter["label"] and parameter["label"] != "1st" and parameter["parameter_has_default"], name
    assert "1 to 5" in prompt_line["batch_size"] and "1,234 characters" in prompt_line["prompt"]
    assert "from 0 to 4294967295" in prompt_line["seed"]
    for setting in SETTINGS.values():
        for _, value in setting.choices(Choices()) if setting.choices else ():
            assert value.isdecimal() or repr(value) in prompt_line[setting.name], (setting.name, value)
    assert (
        "or a whole number from 1 to 16" in prompt_line["draft_length"]
        and "'7'" not in prompt_line["draft_length"]
    )
    toy = Setting(
        "toy", "a", str, SETTINGS["drafter"].check, "", "Toy", "list", "what it plays",
        lambda known: (("a: the first", "a"), ("the second", "b")), script="For scripts",
    )  # fmt: skip
    words = about(toy, Limits(), Choices())
    assert words == "What it plays. For scripts. Values: 'a' (the first); 'b' (the second)."


def test_the_page_advises_a_pair_that_suits_the_gpu_better() -> None:
    def templates(**options: Any) -> str:
        page = build(nothing, limits=Limits(), about="nothing", **options)
        return " ".join(str(getattr(block, "html_template", "")) for block in page.blocks.values())

    assert "pair-advice" not in templates() and ">larger suits this GPU better.<" in templates(
        advice="larger suits this GPU better."
    )


def test_a_new_setting_is_in_the_form_the_api_the_address_and_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, TOY.name, TOY)
    page = build(nothing, limits=Limits(), about="nothing")
    name, parameter = list(parameters(page).items())[-1]
    assert (name, parameter["python_type"]["type"], parameter["parameter_default"]) == (TOY.name, "int", 3)
    (control,) = [b for b in page.blocks.values() if getattr(b, "elem_id", None) == "first-id"]
    assert isinstance(control, gr.Number)
    assert (control.label, control.value, control.info) == ("First id", 3, "of the sequences")
    (restored,) = [f.js for f in page.fns.values() if f.js and "Bass.restore(" in str(f.js)]
    assert f'"{TOY.name}": {json.dumps({"control": "number", "choices": None})}' in str(restored)
    assert '"pair"' not in str(restored), "the form has no such control"
    (run,) = [f for f in page.fns.values() if len(f.inputs) == len(shown()) and f.fn is not None]
    assert run.inputs[-1] is control
    # Values from the page and from the API reach the request.
    requests: list[RaceRequest] = []

    def source(request: RaceRequest) -> Generator[Snapshot, None, None]:
        requests.append(request)
        yield from ()

    events = Events(source, Limits())
    values = [setting.default if setting.start is None else setting.start for setting in shown()]
    list(events.run(*values[:-1], 5))
    list(events.api(first_id=6))
    assert [request.arguments()[TOY.name] for request in requests] == [5, 6]
    assert requests[0].settings()[TOY.name] == 5
    *_, refused = events.run(*values[:-1], 10)
    assert "First id must be a whole number from 0 to 9." in refused[3]


def test_equal_texts_are_promised_only_without_16_bit_sums() -> None:
    for low_precision, words, note in (
        (False, "coupled: the same text in every lane", COUPLED),
        (True, "coupled: the same text, except at near ties", NEAR_TIES),
    ):
        pair = ModelPair(tiny("llama"))
        pair.target_step.low_precision = low_precision
        offered = choices(pair, "auto")
        assert (words, "coupled") in offered.verifications and offered.verification == note


def test_scripts_and_sheets_are_fetched_once_and_an_idle_queue_polls_rarely() -> None:
    sheets, scripts = (
        sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob(f"*.{kind}")) for kind in ("css", "js")
    )
    assert sorted([*STYLES, *MODES, FILE_STYLE, STAGE_STYLE]) == sheets
    assert all(head().count(url(STATIC / name)) == 1 for name in MODES)
    modules = json.loads(import_map())["imports"]
    assert list(modules) == [f"bass/{name}" for name in scripts]
    assert all(unquote(modules[f"bass/{name}"]).count((STATIC / name).read_text("utf-8")) == 1 for name in scripts)
    assert json.dumps(import_map()) in bundle().read_text("utf-8")
    assert style().count("--type") > 10, "lengths of type follow presenter mode"
    queue = build(nothing, limits=Limits(), about="nothing")._queue
    assert queue.sleep_when_free >= 0.05 and queue.progress_update_sleep_when_free >= 0.05


TEMPLATES = "".join(part() for part in (charts, inspector, lanes, summary))


def test_a_formula_is_one_line_of_plain_text_that_a_question_mark_opens() -> None:
    page = template()
    for key, formula in FORMULAS.items():
        assert re.fullmatch(r"[a-z_]+", key) and formula.name and "\n" not in formula.text
        # The page's templates would evaluate these characters, and | would divide a cell of the document's table.
        assert not set("`${}<>|\\") & set(formula.name + formula.text), key
        assert formula.text[0] != " " and formula.text.endswith(".") and "  " not in formula.text
        button = formula_button(key)
        assert f'popovertarget="what-{key}"' in button and f'aria-describedby="what-{key}"' in button
        (words,) = re.findall(rf'id="what-{key}" class="formula">(.*?)</div>', page)
        assert unescape(re.sub("<.*?>", "", words)) == f"{formula.name} {formula.text}"
    summary_rows, step = (
        (ROOT / f"ui/static/race/{name}.js").read_text(encoding="utf-8") for name in ("summary", "step")
    )
    opened = set(re.findall(r'popovertarget="what-(\w+)"', TEMPLATES))
    rows = set(re.findall(r'^  \["(\w+)", ', summary_rows, re.MULTILINE))
    rows |= set(re.findall(r' row\(.*, "(\w+)"\);', step))
    assert (opened | rows) - WORDS.keys() == FORMULAS.keys()
    # Figures of the lanes have their names in the library.
    figures = set(re.findall(r'data-figure="(\w+)"', lanes()))
    assert figures <= FORMULAS.keys() & set(Metrics.__dataclass_fields__)
    assert markdown() in (ROOT / "docs/formulas.md").read_text(encoding="utf-8")


@pytest.fixture
def toy() -> Iterator[str]:
    method = Method("toy", "Toy", "Decodes for a test.", METHODS[reference()].build, drafts=False)
    register(method)
    yield method.name
    unregister(method.name)


def test_no_file_of_the_page_names_a_method() -> None:
    for path in [path for kind in ("py", "js", "css") for path in (ROOT / "ui").rglob(f"*.{kind}")]:
        if path.stem == "readers":
            continue  # its figures are those of the three decoders that it names
        text = path.read_text(encoding="utf-8")
        # As a draft length, "bass" is the name of Algorithm 1.
        text = text.replace('"bass": "Algorithm 1', "").replace('"draft_length": "bass"', "")
        text = text.replace('null: "bass" (Algorithm 1)', "").replace('["bass", "auto"', "")
        # The document's events begin with the project's name.
        text = re.sub(r"\bbass:(pause|step|back|fold|\$\{name\})", "", text)
        for name, method in METHODS.items():
            named = re.findall(rf"""["'`]({name}|{method.label})["'`]|lane-{name}\b|\b{name}:""", text)
            assert not named, (path, name)


def test_each_method_has_a_distinct_colour_and_line() -> None:
    known = looks(list(METHODS))
    assert len({(method_look["colour"], method_look["dash"]) for method_look in known.values()}) == len(METHODS)
    sheet = (ROOT / "ui/static/page/page.css").read_text()
    for colour in (*COLOURS, OTHER_COLOUR):
        assert sheet.count(f"--{colour}:") == 2, "one for light, one for dark"
    for dash in {*DASHES, OTHER_DASH} - {"solid"}:
        assert f".line-{dash} " in sheet
    # How the snippet repeats each method's draft lengths: not at all (""), per row, or per batch.
    assert [look(name)["lengths"] for name in METHODS] == ["", "row", "batch", "", ""]
    # A lane that is not in the table is labelled with its name.
    assert look("my_lane")["label"] == "my lane" and look("my_lane")["colour"] == OTHER_COLOUR
    for name in DEFAULT_LANES:
        label = METHODS[name].label
        assert f'id="lane-{name}"' in lanes() and f">{label}</button></h2>" in lanes()
        assert f"</span>{label}</li>" in charts()


def test_a_registered_method_is_in_the_choices_the_api_and_the_log(toy: str, pair: ModelPair) -> None:
    offered = choices(pair, "auto")
    assert offered.lanes[-1] == ("Toy", toy)
    events = Events(race_source(pair), Limits())
    *_, last = events.api("Hello", 1, 4, 0, 0, lanes=[reference(), toy])
    assert list(last["lanes"]) == [reference(), toy] and last["lanes"][toy]["metrics"]["speedup"] is not None
    values = [setting.default if setting.start is None else setting.start for setting in shown()]
    at = [setting.name for setting in shown()].index("lanes")
    values[at], values[2] = [toy], 4
    drawn = [log for log, *_ in events.run(*values) if isinstance(log, str)]
    first = json.loads(drawn[0].split("\n")[0])
    assert first["lanes"] == [toy] and set(first["looks"]) == {toy, reference()}
    assert (first["looks"][toy]["label"], first["looks"][toy]["about"]) == ("Toy", "Decodes for a test.")
    page = build(race_source(pair), limits=Limits(), about="here", choices=offered)
    (boxes,) = [block for block in page.blocks.values() if isinstance(block, gr.CheckboxGroup)]
    assert ("Toy", toy) in boxes.choices and toy not in boxes.value


def prompt_line(pair: ModelPair, prompt: object, limits: Limits | None = None) -> tuple[str, bool]:
    """The line below the prompt, and whether it is a refusal."""
    count = prompt_count(pair, limits or Limits())
    assert count is not None
    line = json.loads(count(prompt))  # type: ignore[arg-type]
    return line["text"], line["refused"]


def test_the_prompt_line_has_the_requests_length_and_refusals() -> None:
    pair, bare = ModelPair(tiny("llama"), tokenizer=byte_tokenizer()), ModelPair(tiny("llama"))
    assert prompt_line(pair, "Hello") == (f"{count_tokens(pair, 'Hello')} of 512 tokens", False)
    assert [prompt_line(pair, empty) for empty in ("", " \n", None, 7)] == [("", False)] * 4
    for prompt, limits in (("x" * 600, Limits()), ("x" * 20, Limits(max_prompt=9)), ("\ud800", Limits())):
        with pytest.raises(RequestError) as refusal:
            race(pair, make_request({"prompt": prompt}, limits).prompt)
        assert prompt_line(pair, prompt, limits) == (str(refusal.value), True)
    # Without a tokenizer there is no line.
    assert prompt_count(bare, Limits()) is None
    for source in (pair, bare):
        page = build(race_source(source), limits=Limits(), about="", count=prompt_count(source, Limits()))
        lines = [block for block in page.blocks.values() if getattr(block, "elem_id", None) == "prompt-length"]
        assert len(lines) == (source is pair)


def test_the_long_example_has_about_3000_tokens_and_never_ends_inside_code(
    smollm2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real tokenizer and context, with a tiny model.
    config = AutoConfig.from_pretrained(smollm2_folder)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 18, 8, 1
    config.head_dim = 2
    real = ModelPair(LlamaForCausalLM(config), tokenizer=AutoTokenizer.from_pretrained(smollm2_folder))
    assert 2500 <= count_tokens(real, long_document()) <= 3500
    assert prompt_line(real, long_document())[0].endswith(" of 8,192 tokens")
    for characters in (11_000, 7_500):
        monkeypatch.setattr(presets, "LONGEST_TEXT", characters)
        assert "## The page" in long_document() and long_document().count("```") % 2 == 0

"""The library, the command and the page refuse a bad value in one sentence that names it.

BAD has the arguments that several of them take; MODELS, SERVE and BENCH have the other options of the commands,
which refuse them with exit status 2, before they load a model. The library's prompts, policies and drafters are
tested in bass_core/decode/test_request.py, the page's clocks and sweeps in ui/test_request.py.
"""

from __future__ import annotations

import importlib
import math
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

import app
from bass_core import BassError, RequestError, SamplingParams, generate, race, stream
from bass_core.__main__ import Parser, main
from bass_core.model.loading import catalogue, sources
from bench import __main__ as bench
from tests.support.models import tiny_pair
from ui.page.limits import Limits
from ui.page.request import make_request

PAIR = tiny_pair("random")
HUGE = "9" * 5000
COUNT = ("0", "-1", "1.5", "nan", "", "x", HUGE)
NAME = ("", " ", "nothing-of-that-name", "a" * 5000, "~nobody-of-that-name/x")
MODELS: Mapping[str, tuple[str, ...]] = {
    "--pair": NAME,
    "--draft": NAME,
    "--device": ("", "gpu", "meta", "cuda:99", "-1"),
    "--dtype": ("", "int3", "float64"),
}
SERVE = {
    **MODELS,
    "--threads": (*COUNT, "1025"),
    "--port": (*COUNT, "65536"),
    "--max-batch": (*COUNT, str(2**20 + 1)),
    "--max-new-tokens": (*COUNT, str(2**31)),
    "--max-prompt": (*COUNT, str(2**31)),
    "--max-seconds": (*COUNT, str(2**31)),
    "--workers": (*COUNT, str(2**31)),
    "--draft-length": ("", "x", "3"),
    "--device-map": ("", "everywhere"),
    "--host": ("host.invalid", "256.0.0.1", "a..b"),
    "--worker-resources": ("", "x", "CPU=0"),
    "--ray": ("", "local"),
}
BENCH = {
    "--batch": COUNT,
    "--seed": ("-1", "x"),
    "--temperature": ("-1", "nan"),
    "--top-p": ("0", "1.1"),
    "--budget-ms": ("0", "inf"),
    "--draft-length": ("long", "1025"),
    "--problems": ("0", "165"),
    "--json": ("", "no/such/folder/file.json"),
    "--dtype": ("int3",),
    "--device": ("gpu",),
    "--pair": ("nothing-of-that-name",),
}
NUMBER = ("", "x", math.nan)
WHOLE = (*NUMBER, HUGE, 1.5, -1)


@dataclass(frozen=True)
class Setting:
    """A setting's bad values, and its name at each interface.

    Attributes:
        values: Values that all three interfaces refuse. The command gets them as text.
        option: The command's option, or None if it has none.
        field: The page's field.
        words: The setting's name in the page's sentences.
        sampled: Whether it is a field of SamplingParams.
        library: More values that the library and the command refuse.
        page: More values that the page refuses.
    """

    values: tuple[Any, ...]
    option: str | None
    field: str
    words: str
    sampled: bool = False
    library: tuple[Any, ...] = ()
    page: tuple[Any, ...] = ()


BAD = {
    "n": Setting((*WHOLE, 0, 2**20 + 1, 10**400, True), "-n", "batch_size", "Batch size", library=(2.0,),
                 page=(None, "4", 9)),
    "max_new_tokens": Setting((*WHOLE, 0), "--max-new-tokens", "max_new_tokens", "Max new tokens", page=(1025,)),
    "temperature": Setting((*NUMBER, HUGE, -0.1, math.inf, None, True), "--temperature", "temperature",
                           "Temperature", sampled=True),
    "top_k": Setting(WHOLE, "--top-k", "top_k", "Top-k", sampled=True, library=(2.0,)),
    "top_p": Setting((*NUMBER, 0, -1, 1.1, math.inf), "--top-p", "top_p", "Top-p", sampled=True),
    "min_p": Setting((*NUMBER, 2, -0.1), None, "min_p", "Min-p", sampled=True),
    "repetition_penalty": Setting((*NUMBER, 0, 1001), None, "repetition_penalty", "Repetition penalty",
                                  sampled=True),
    "seed": Setting((*WHOLE, 2**63), "--seed", "seed", "Seed"),
    "draft_length": Setting((1.5, -1, 1025, HUGE), "--draft-length", "draft_length", "draft length",
                            library=("", "long", "\u00b2", math.nan), page=(17, "0")),
    "time_budget_ms": Setting((0, math.inf, math.nan, True), None, "time_budget_ms", "time budget"),
    "synthetic_acceptance": Setting((1.5, math.nan, 10**400, True), None, "acceptance", "Acceptance",
                                    page=("often",)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Fail the test if it reads or fetches a model."""
    for module, name in (
        (catalogue, "load_model"), (catalogue, "load_tokenizer"), (sources, "_ask_hub"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *args, name=name: pytest.fail(f"{name} was called"))
    entry = catalogue.CATALOGUE["smollm2"]
    monkeypatch.setitem(catalogue.CATALOGUE, "smollm2", _without_files(entry))
    monkeypatch.chdir(tmp_path)


def _without_files(entry: catalogue.CatalogueEntry) -> catalogue.CatalogueEntry:
    return catalogue.CatalogueEntry(entry.name, entry.target, prepare=lambda: pytest.fail("smollm2 was prepared"))


def refusal(capsys: pytest.CaptureFixture[str], command: Any, *arguments: str) -> str:
    """Check that a command ends with status 2 and one line on stderr; return that line."""
    try:
        status = command(list(arguments))
    except SystemExit as ended:
        status = ended.code
    output = capsys.readouterr()
    assert status == 2 and output.out == ""
    (line,) = (line for line in output.err.splitlines() if not line.startswith("Loading;"))
    return line


def argument(option: str, value: str) -> str:
    """Return the argument for an option whose value may begin with a dash."""
    return f"{option}={value}" if option.startswith("--") else f"{option}{value or ' '}"


def cases(options: Mapping[str, tuple[str, ...]]) -> list[Any]:
    return [pytest.param(option, values, id=option) for option, values in options.items()]


@pytest.fixture(autouse=True)
def no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if it runs a model or makes a cache."""
    for step in (PAIR.target_step, PAIR.draft_step):
        for name in ("forward", "new_cache"):
            monkeypatch.setattr(step, name, lambda *_, **__: pytest.fail("a model ran before the check"))


def by_library(name: str, setting: Setting, value: Any) -> Iterator[str]:
    """Check that generate, stream and race refuse the value at once, with the same message; yield it."""
    messages = set()
    for call in (generate, stream, race):
        with pytest.raises(RequestError) as refused:
            call(
                PAIR,
                [5, 6, 7],
                **({"sampling": SamplingParams(**{name: value})} if setting.sampled else {name: value}),
            )
        assert isinstance(refused.value, BassError) and isinstance(refused.value, ValueError)
        messages.add(str(refused.value))
    (message,) = messages
    assert name in message
    yield message


def by_command(setting: Setting, value: Any, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    for command in ("generate", "race"):
        yield refusal(capsys, main, command, "Hello", argument(str(setting.option), str(value)))


def by_page(setting: Setting, value: Any) -> Iterator[str]:
    with pytest.raises(RequestError) as refused:
        make_request({"prompt": "Hello", setting.field: value}, Limits(max_batch=8))
    assert setting.words.lower() in str(refused.value).lower()
    yield str(refused.value)


INTERFACES: dict[str, Callable[[Setting], tuple[Any, ...]]] = {
    "library": lambda setting: setting.values + setting.library,
    "command": lambda setting: setting.values + setting.library if setting.option else (),
    "page": lambda setting: setting.values + setting.page,
}


@pytest.mark.parametrize(
    ("interface", "name"),
    [(interface, name) for interface, values in INTERFACES.items() for name in BAD if values(BAD[name])],
)
def test_bad_values_are_refused_in_one_sentence(
    interface: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = BAD[name]
    for value in INTERFACES[interface](setting):
        if interface == "library":
            messages = by_library(name, setting, value)
        elif interface == "command":
            messages = by_command(setting, value, capsys)
        else:
            messages = by_page(setting, value)
        for message in messages:
            assert message.endswith(".") and "\n" not in message, value


@pytest.mark.parametrize(("option", "values"), cases(MODELS))
def test_generate_and_race_refuse_bad_options_before_they_load(
    option: str, values: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for value in values:
        for command in ("generate", "race"):
            assert refusal(capsys, main, command, "Hello", argument(option, value)).endswith("."), value


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "Hello", "--method", "fast"), ("generate", "Hello", "--method="), ("generate", " "),
        ("generate", "half \udc80"), ("race", "Hello", "--lanes", "bass", "fast"), ("race", ""),
        ("race", "Hello", "--lanes", "bass", "bass"), ("generate",), ("race", "Hello", "--lanes"), ("fast",), (),
        ("serve", "--what"), ("race", "Hello", "--html", "no/such/race.html"), ("race", "Hello", "--html", "."),
    ],
)  # fmt: skip
def test_generate_and_race_refuse_bad_names_and_prompts(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, main, *arguments)


@pytest.mark.parametrize(("option", "values"), cases(SERVE))
def test_serve_refuses_bad_options_before_it_loads(
    option: str, values: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for value in values:
        assert refusal(capsys, main, "serve", argument(option, value)).endswith("."), value


def test_serve_refuses_a_port_in_use_and_bad_gradio_variables_before_it_loads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert refusal(capsys, main, "serve", "--port", port).startswith(
            f"Cannot listen on 127.0.0.1, port {port}"
        )
    for name in app.NUMBERS:
        for value in ("", "x", "0", "65536"):
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                assert refusal(capsys, main, "serve").startswith(f"{name} must be a whole number")


@pytest.mark.parametrize(("option", "values"), cases(BENCH))
def test_a_bench_refuses_bad_options_before_it_loads(
    option: str, values: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in values:
        monkeypatch.setattr(sys, "argv", ["bench", "passk", argument(option, value)])
        assert refusal(capsys, lambda _: bench.main()).endswith("."), value


@pytest.mark.parametrize("name", bench.MODULES)
def test_every_numeric_option_of_a_bench_has_bounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen(Exception):
        pass

    def parse(self: Parser, *args: object) -> None:
        unbounded = [action.dest for action in self._actions if action.type in (int, float)]
        assert not unbounded
        raise Seen

    monkeypatch.setattr(Parser, "parse_args", parse)
    with pytest.raises(Seen):
        importlib.import_module(f"bench.{bench.MODULES[name]}").main([])

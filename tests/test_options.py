"""Every command refuses bad options in one sentence, with exit status 2, before it loads a model.

tests/faults/test_bad_values.py has the numbers that are out of range.
"""

from __future__ import annotations

import importlib
import io
import socket
import sys
from collections.abc import Mapping
from typing import Any

import pytest

import app
from bass_core.__main__ import Parser, checked_options, main, parser
from bass_core.model.loading import catalogue, sources
from bench import __main__ as bench

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


def test_a_prompt_on_stdin_is_utf_8(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is read as UTF-8 on any system, with or without the byte order mark that Windows writes."""

    def write_stdin(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="cp1252"))

    options = parser().parse_args(["generate", "-"])
    for mark in ("", "\ufeff"):
        write_stdin(f"{mark}Grüße".encode())
        assert checked_options(options)[0] == "Grüße"
    for content, message in ((b"Gr\xfc\xdfe", "not UTF-8"), (b" ", "empty")):
        write_stdin(content)
        assert message in refusal(capsys, main, "generate", "-")


def test_ctrl_c_shows_no_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bass_core.__main__._pair", interrupted)
    monkeypatch.setattr(app, "serve", interrupted)
    assert main(["generate", "Hello"]) == main(["serve"]) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Loading;")


def test_a_broken_connection_while_loading_is_not_taken_for_a_closed_stdout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("bass_core.__main__._pair", broken)
    with pytest.raises(BrokenPipeError):
        main(["generate", "Hello"])


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

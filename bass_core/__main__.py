"""The command line: `bass generate`, `bass race` and `bass serve`, or `python -m bass_core`.

Texts and tables go to stdout, everything else to stderr. An error prints one sentence on stderr and
ends with exit status 2; errors that need no model are reported before a model is loaded. `bass serve` passes its
options on to app.py.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from . import __version__

if TYPE_CHECKING:
    from .options import Options

COMMANDS = "generate, race or serve"
DEFAULT_BATCH = 4
# Exit statuses after Ctrl-C, and after the program that reads our output (e.g. `head`) has closed the pipe.
INTERRUPTED, UNREAD = 130, 141


class _Unread(Exception):
    """The program that reads our output has closed the pipe."""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one sentence; argparse would print all options first."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.rstrip('.')}; see {self.prog} --help.\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
    root = Parser(prog="bass", description="Batched speculative decoding (arXiv 2404.15778).")
    root.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar=COMMANDS)
    formatter = argparse.ArgumentDefaultsHelpFormatter
    generate = commands.add_parser("generate", help="answer a prompt with one method", formatter_class=formatter)
    _shared(generate, rows=1)
    generate.add_argument("--method", default="bass", help="bass, regular, speculative, amusd or transformers")
    race = commands.add_parser(
        "race", help="run several methods on one prompt and compare them in a table", formatter_class=formatter
    )
    _shared(race, rows=DEFAULT_BATCH)
    race.add_argument(
        "--lanes", nargs="+", metavar="METHOD", help="methods to compare; by default those of the page"
    )
    race.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write the race as a page that any browser plays",
    )
    commands.add_parser("serve", help="start the web page; for its options run bass serve --help", add_help=False)
    return root


def _shared(parser: argparse.ArgumentParser, rows: int) -> None:
    add = parser.add_argument
    add("prompt", help="the prompt; - reads it from stdin as UTF-8")
    add("--pair", default="smollm2", help="a pair's name, a Hub id, or a folder with the target model")
    add("--draft", help="a Hub id or a folder with the draft model or head, instead of the pair's own")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", default="auto", help="auto, float32, bfloat16, float16; on a CPU int8, int4")
    add("-n", type=int, default=rows, help="number of answers; each is one row of the batch")
    add("--max-new-tokens", type=int, default=64, help="maximum number of new tokens per row")
    add(
        "--temperature", type=float, default=0.0, help="sampling temperature; 0 always picks the most likely token"
    )
    add("--top-k", type=int, default=0, help="sample only from the k most likely tokens; 0 means all")
    add(
        "--top-p",
        type=float,
        default=1.0,
        help="sample only from the most likely tokens whose probabilities add up to p",
    )
    add("--seed", type=int, default=0, help="seed of all random numbers")
    add(
        "--draft-length",
        default="auto",
        help="tokens to draft per row and round: auto, cost-aware, bass or a number",
    )
    add("--json-schema", metavar="FILE", help="write only JSON that fits this schema: a file, or its JSON text")
    add("--regex", help="write only texts that match this regular expression as a whole")
    add("--grammar", metavar="FILE", help="write only texts of the grammar in this file, in Lark's syntax")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command line without the program's name; None means `sys.argv[1:]`.

    Returns:
        The exit status.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if argv[:1] == ["serve"]:
        return int(import_module("app").main(argv[1:]))
    options = parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        # A model may write characters that the console can't encode.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    from .errors import BassError

    try:
        {"generate": _generate, "race": _race}[options.command](options)
    except BassError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except _Unread:
        return UNREAD
    return 0


def _write(text: str, stream: TextIO) -> None:
    """Print and flush, so that a full disk is reported here and not at exit."""
    from .errors import BassError

    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        _discard_output(stream)
        if isinstance(error, BrokenPipeError):
            raise _Unread from error
        raise BassError(
            f"The answer can't be written ({error.strerror}): make room, or choose another file."
        ) from error


def _discard_output(stream: TextIO) -> None:
    """Send buffered output to the null device, so that flushing at exit raises no second error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _generate(options: argparse.Namespace) -> None:
    from .lanes.generate import generate
    from .lanes.methods import find_method

    find_method(options.method)
    prompt, settings = checked_options(options)
    out = generate(_pair(options), prompt, method=options.method, options=settings)
    answers = [str(sequence.token_ids) if sequence.text is None else sequence.text for sequence in out.sequences]
    _write("\n---\n".join(answers), sys.stdout)
    if cut := [str(row) for row, sequence in enumerate(out.sequences) if sequence.complete is False]:
        _write(f"The text of row {', '.join(cut)} is incomplete: raise --max-new-tokens.", sys.stderr)
    ms_per_token, acceptance_rate = out.metrics.ms_per_token, out.metrics.acceptance_rate
    _write(
        f"{_formatted(ms_per_token, '.1f')} ms per token, acceptance rate {_formatted(acceptance_rate, '.2f')}",
        sys.stderr,
    )


def _race(options: argparse.Namespace) -> None:
    from .lanes.methods import DEFAULT_LANES, find_methods
    from .lanes.race import race

    lanes = options.lanes or DEFAULT_LANES
    find_methods(lanes)
    prompt, settings = checked_options(options)
    if options.html:
        import_module("ui.recordings.webpage").check_place(options.html)
        settings = replace(settings, inspect=True)
    pair = _pair(options)
    snapshots = race(pair, prompt, lanes=lanes, options=settings)
    if options.html:
        snapshots = _saved(snapshots, options, pair, prompt, lanes, settings)
    last: Any = deque(snapshots, maxlen=1).pop()
    lines = [f"{'lane':14}{'tokens':>8}{'ms/token':>10}{'speed-up':>10}{'accepted':>10}"]
    for name, lane in last["lanes"].items():
        metrics = lane["metrics"]
        numbers = (("ms_per_token", ".1f"), ("speedup", ".2f"), ("acceptance_rate", ".2f"))
        columns = "".join(f"{_formatted(metrics[key], spec):>10}" for key, spec in numbers)
        lines.append(
            f"{name:14}{metrics['new_tokens']:8}{columns}" + (f"  {lane['error']}" if lane["error"] else "")
        )
    _write("\n".join(lines), sys.stdout)


def _saved(
    snapshots: Iterator[Any],
    options: argparse.Namespace,
    pair: Any,
    prompt: str,
    lanes: Sequence[str],
    settings: Options,
) -> Iterator[Any]:
    """Yield the snapshots of a race, then write it as a page."""
    from torch import get_num_threads

    webpage = import_module("ui.recordings.webpage")
    asked = import_module("ui.sources.source").PairOptions(
        options.pair, options.draft, options.device, options.dtype
    )
    models = import_module("ui.sources.local").facts(pair, asked, get_num_threads())
    yield from webpage.saved(snapshots, options.html, models, webpage.settings_of(prompt, lanes, settings))


def _pair(options: argparse.Namespace) -> Any:
    from .model.loading.catalogue import load_pair

    return load_pair(options.pair, draft=options.draft, device=options.device, dtype=options.dtype)


def checked_options(options: argparse.Namespace) -> tuple[str, Options]:
    """Return the prompt and the options that `generate` and `race` share, both checked.

    Raises:
        RequestError: if an option or the prompt can't be used.
    """
    from .decode.prompts import check_text
    from .decode.request import check_options
    from .options import Options
    from .sample.params import SamplingParams

    draft_length = options.draft_length
    checked = Options(
        n=options.n,
        max_new_tokens=options.max_new_tokens,
        sampling=SamplingParams(options.temperature, options.top_k, options.top_p),
        seed=options.seed,
        # Longer numbers stay strings, because int() raises an error for thousands of digits.
        draft_length=int(draft_length) if draft_length.isdecimal() and len(draft_length) < 9 else draft_length,
        json_schema=_schema(options.json_schema),
        regex=options.regex,
        grammar=None if options.grammar is None else _file("--grammar", options.grammar),
    )
    check_options(checked)
    prompt = _stdin() if options.prompt == "-" else str(options.prompt)
    check_text(prompt)
    return prompt, checked


def _schema(given: str | None) -> str | None:
    """Return the JSON text of a schema, which is given as such or as the name of a file."""
    return given if given is None or given.lstrip().startswith("{") else _file("--json-schema", given)


def _file(option: str, name: str) -> str:
    from .errors import RequestError

    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise RequestError(f"{option} names a file that can't be read ({reason}): {name!r}.") from None


def _stdin() -> str:
    from .errors import RequestError

    if sys.stdin is None:
        raise RequestError("There is no stdin to read the prompt from: give the prompt itself in place of -.")
    try:
        # Decode as UTF-8 here, because on Windows sys.stdin would decode a pipe with the local code page.
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError("The prompt on stdin is not UTF-8: save it as UTF-8.") from error
    except OSError as error:
        raise RequestError(
            f"The prompt on stdin can't be read ({error.strerror}): give the prompt as an argument."
        ) from error


def _formatted(value: float | None, spec: str) -> str:
    return "n/a" if value is None else format(value, spec)


if __name__ == "__main__":
    sys.exit(main())

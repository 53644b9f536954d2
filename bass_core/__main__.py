"""The command line: `bass generate`, `bass race` and `bass serve`, or `python -m bass_core`.

Contract: texts and tables go to stdout, everything else to stderr. Every refusal is one sentence on stderr and
exit status 2, and comes before a model is loaded where it does not take one. Non-goals: the page, whose options
`bass serve` hands to app.py as they are.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from . import __version__

if TYPE_CHECKING:
    from .options import Options

COMMANDS = "generate, race or serve"
DEFAULT_BATCH = 4
# The exit statuses of a program that Ctrl-C ends, and of one whose reader has gone away.
INTERRUPTED, UNREAD = 130, 141


class _Unread(Exception):
    """Nobody reads the output any more."""


class Parser(argparse.ArgumentParser):
    """Refuses in one sentence, where argparse would print all options before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.rstrip('.')}; see {self.prog} --help.\n")


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    made = Parser(prog="bass", description="Batched speculative decoding (arXiv 2404.15778).")
    made.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar=COMMANDS)
    shape = argparse.ArgumentDefaultsHelpFormatter
    generate = commands.add_parser("generate", help="answer a prompt with one method", formatter_class=shape)
    _shared(generate, rows=1)
    generate.add_argument("--method", default="bass", help="bass, regular, speculative, amusd or transformers")
    race = commands.add_parser("race", help="compare methods on a prompt, in a table", formatter_class=shape)
    _shared(race, rows=DEFAULT_BATCH)
    race.add_argument("--lanes", nargs="+", metavar="METHOD", help="the methods; without it the page's own")
    commands.add_parser("serve", help="open the page; bass serve --help lists its options", add_help=False)
    return made


def _shared(parser: argparse.ArgumentParser, rows: int) -> None:
    add = parser.add_argument
    add("prompt", help="the text to answer; - reads it from stdin, in UTF-8")
    add("--pair", default="smollm2", help="a pair's name, a Hub id, or a folder with the target model")
    add("--draft", help="a Hub id or a folder with the draft model or head, instead of the pair's own")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", default="auto", help="auto, float32, bfloat16, float16; on a CPU int8, int4")
    add("-n", type=int, default=rows, help="answers, each a row of the batch")
    add("--max-new-tokens", type=int, default=64, help="most new tokens a row")
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    add("--top-k", type=int, default=0, help="sample from the k likeliest tokens; 0: from all")
    add("--top-p", type=float, default=1.0, help="sample from the likeliest tokens that sum to p")
    add("--seed", type=int, default=0, help="of all random numbers")
    add("--draft-length", default="auto", help="auto, bass, cost-aware or a number of tokens")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["serve"]:
        return int(import_module("app").main(given[1:]))
    options = parser().parse_args(given)
    for stream in (sys.stdout, sys.stderr):
        # A console may lack the characters that a model writes.
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
    """Send buffered output to the null device, so that the exit raises no second error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _generate(options: argparse.Namespace) -> None:
    from .lanes.generate import generate
    from .lanes.methods import find_method

    find_method(options.method)
    prompt, chosen = asked(options)
    out = generate(_pair(options), prompt, method=options.method, options=chosen)
    answers = [str(one.token_ids) if one.text is None else one.text for one in out.sequences]
    _write("\n---\n".join(answers), sys.stdout)
    ms, rate = out.metrics.ms_per_token, out.metrics.acceptance_rate
    _write(f"{_number(ms, '.1f')} ms per token, acceptance rate {_number(rate, '.2f')}", sys.stderr)


def _race(options: argparse.Namespace) -> None:
    from .lanes.methods import DEFAULT_LANES, find_methods
    from .lanes.race import race

    lanes = options.lanes or DEFAULT_LANES
    find_methods(lanes)
    prompt, chosen = asked(options)
    snapshots = race(_pair(options), prompt, lanes=lanes, options=chosen)
    last: Any = deque(snapshots, maxlen=1).pop()
    lines = [f"{'lane':14}{'tokens':>8}{'ms/token':>10}{'speed-up':>10}{'accepted':>10}"]
    for name, lane in last["lanes"].items():
        shown = lane["metrics"]
        numbers = (("ms_per_token", ".1f"), ("speedup", ".2f"), ("acceptance_rate", ".2f"))
        rest = "".join(f"{_number(shown[key], form):>10}" for key, form in numbers)
        lines.append(f"{name:14}{shown['new_tokens']:8}{rest}" + (f"  {lane['error']}" if lane["error"] else ""))
    _write("\n".join(lines), sys.stdout)


def _pair(options: argparse.Namespace) -> Any:
    from .model.loading.catalogue import load_pair

    return load_pair(options.pair, draft=options.draft, device=options.device, dtype=options.dtype)


def asked(options: argparse.Namespace) -> tuple[str, Options]:
    """The prompt, and the options that both commands have, checked."""
    from .decode.prompts import check_text
    from .decode.request import check_options
    from .options import Options
    from .sample.params import SamplingParams

    length = options.draft_length
    made = Options(
        n=options.n,
        max_new_tokens=options.max_new_tokens,
        sampling=SamplingParams(options.temperature, options.top_k, options.top_p),
        seed=options.seed,
        # Python reads no number of thousands of digits.
        draft_length=int(length) if length.isdecimal() and len(length) < 9 else length,
    )
    check_options(made)
    prompt = _stdin() if options.prompt == "-" else str(options.prompt)
    check_text(prompt)
    return prompt, made


def _stdin() -> str:
    from .errors import RequestError

    if sys.stdin is None:
        raise RequestError("There is no stdin to read the prompt from: give the prompt itself in place of -.")
    try:
        # Windows would read a pipe in the encoding of its region.
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError("The prompt on stdin is not UTF-8: save it as such.") from error
    except OSError as error:
        raise RequestError(
            f"The prompt on stdin can't be read ({error.strerror}): give the prompt as an argument."
        ) from error


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


if __name__ == "__main__":
    sys.exit(main())

"""SETTINGS: the table of a race's settings.

Everything else is made from it: the form, the checks of its values, the parameters of `/race`, the link to share,
the settings in a recording, and the arguments of bass_core's `race`. The order is part of the API, so a new
setting goes to the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from bass_core import DEFAULT_LANES
from ui.page import clock, limits
from ui.page.choices import Choice, Choices
from ui.page.limits import Check, Limits

Words = str | Callable[[Limits, Choices], str]


@dataclass(frozen=True)
class Setting:
    """One setting of a race.

    Attributes:
        name: the parameter of the API and, with dashes, the DOM id of the control.
        check: checks and converts a value (ui/page/limits.py).
        argument: the keyword of bass_core's `race` that takes the value, "sampling.x" for a field of
            SamplingParams, or "" if there is none.
        control: the kind of the control, or "" for a setting that only scripts can change.
        explain: the line below the label.
        choices: the entries of a list or of checkboxes. A list starts with its first entry.
        start: the form's initial value, if it is not the default.
        shares_row: whether the control shares a row with neighbours that also set this.
        script: further information for scripts.
    """

    name: str
    default: Any
    type: Any
    check: Check
    argument: str
    label: str = ""
    control: Literal["", "text", "number", "list", "boxes"] = ""
    explain: Words = ""
    choices: Callable[[Choices], tuple[Choice, ...]] | None = None
    start: Any = None
    section: Literal["prompt", "numbers", "machine", "more"] = "more"
    shares_row: bool = False
    step: float = 1
    placeholder: str | None = None
    script: Words = ""


_TABLE = (
    Setting(
        "prompt", "Write a Python function that reverses a string.", str, limits.prompt, "prompt",
        "Prompt", "text", section="prompt",
        script=lambda most, _: f"The text that all rows answer, at most {most.max_prompt:,} characters. With "
        'prompts="lines", one prompt per line; a single line is for all rows.',
    ),
    Setting(
        "batch_size", 4, int, limits.whole(1, lambda most: most.max_batch), "n",
        "Batch size", "number", section="numbers",
        script=lambda most, _: f"Sequences, 1 to {most.max_batch}.",
    ),
    Setting(
        "max_new_tokens", 64, int, limits.whole(1, lambda most: most.max_new_tokens), "max_new_tokens",
        "Max new tokens", "number", lambda most, _: f"per sequence, up to {most.max_new_tokens}",
        shares_row=True, script="A whole number of at least 1. A sequence may end earlier by itself.",
    ),
    Setting(
        "temperature", 0.7, float, limits.temperature, "sampling.temperature",
        "Temperature", "number", "0: always the most likely token", step=0.1, shares_row=True,
        script="A number of 0 or more.",
    ),
    Setting(
        "seed", 0, int, limits.whole(0, lambda _: limits.MAX_SEED), "seed",
        "Seed", "number", "of all random numbers", shares_row=True,
        script=f"A whole number from 0 to {limits.MAX_SEED}.",
    ),
    Setting(
        "top_k", 0, int, limits.whole(0, lambda _: limits.MAX_TOP_K), "sampling.top_k",
        "Top-k", "number", "keep the k most likely tokens; 0: all", shares_row=True,
        script=f"A whole number from 0 to {limits.MAX_TOP_K}.",
    ),
    Setting(
        "top_p", 1.0, float, limits.top_p, "sampling.top_p",
        "Top-p", "number", "keep the fewest tokens whose probabilities reach p", step=0.05, shares_row=True,
        script="Above 0 and at most 1; 1 keeps every token.",
    ),
    Setting(
        "draft_length", "auto", str, limits.draft_length, "draft_length",
        "Draft length", "list", "How many tokens to draft before the target verifies them.",
        lambda known: known.draft_lengths,
    ),
    Setting(
        "drafter", "auto", str, limits.name, "drafter",
        "Drafter", "list", "Who proposes the drafts. A bad draft costs time, never quality.",
        lambda known: known.drafters,
    ),
    Setting(
        "attention", "auto", str, limits.name, "attention",
        "Attention", "list", "How attention handles rows of different lengths.", lambda known: known.attentions,
    ),
    Setting(
        "scheduling", "fair", str, limits.name, "scheduling",
        "Scheduling", "list", "How the lanes share the device.", lambda known: known.schedulings,
    ),
    Setting(
        "verification", "auto", str, limits.name, "verification",
        "Verification", "list", lambda _, known: known.verification, lambda known: known.verifications,
    ),
    Setting(
        "time_budget_ms", None, float | None, limits.time_budget, "time_budget_ms",
        "Time budget, ms", "number", "Each lane stops when its own clock shows this time. Empty: no budget.",
        step=500, placeholder="none", script="A number above 0, or null for no budget.",
    ),
    Setting(
        "lanes", None, list[str] | None, limits.lanes, "lanes",
        "Lanes", "boxes", "The decoders that take part.", lambda known: known.lanes, start=DEFAULT_LANES,
        script=f"A list of names, or null for {', '.join(DEFAULT_LANES)}.",
    ),
    # A script may name another pair. The page always races the operator's own.
    Setting(
        "pair", "", str, limits.pair, "",
        script="A pair's name, a Hub id or a folder on the server, if its operator allows that; empty for the "
        "server's own pair.",
    ),
    # With "lines", RaceRequest splits the prompt into a list with one prompt per line.
    Setting(
        "prompts", "one", str, limits.prompts, "",
        "Rows", "list", "With one prompt per line, there are as many rows as lines; the batch size is ignored.",
        lambda known: known.prompts,
    ),
    # From these seven settings, clock.py makes the argument `clock`.
    Setting(
        "clock", clock.MEASURED, str, limits.name, "",
        "Clock", "list", "The machine whose times the lanes' clocks show. Texts, and which drafts are accepted, "
        "come from this run.",
        lambda _: clock.CLOCKS, section="machine",
    ),
    Setting(
        "clock_models", clock.DEFAULT_MODELS, str, limits.name, "",
        "Models", "list", "The target and the draft whose steps are predicted.",
        lambda _: clock.MODELS, section="machine",
    ),
    Setting(
        "clock_bandwidth", 1000.0, float | None, limits.number, "",
        "Bandwidth, GB/s", "number", "of the memory", section="machine", shares_row=True,
        script='With clock "own": a number above 0.',
    ),
    Setting(
        "clock_tflops", 100.0, float | None, limits.number, "",
        "Peak, TFLOP/s", "number", "dense, 16 bits", section="machine", shares_row=True,
        script='With clock "own": a number above 0.',
    ),
    Setting(
        "clock_target", 7.8, float | None, limits.number, "",
        "Target, billions", "number", "of parameters", step=0.1, section="machine", shares_row=True,
        script='With clock_models "own": a number above 0.',
    ),
    Setting(
        "clock_draft", 0.31, float | None, limits.number, "",
        "Draft, billions", "number", "of parameters", step=0.01, section="machine", shares_row=True,
        script='With clock_models "own": a number above 0.',
    ),
    Setting(
        "clock_bytes", 2.0, float | None, limits.number, "",
        "Bytes per weight", "number", "bfloat16: 2, int8: 1", step=0.5, section="machine", shares_row=True,
        script='With clock_models "own": a number above 0.',
    ),
    Setting(
        "acceptance", None, float | None, limits.acceptance, "synthetic_acceptance",
        "Acceptance", "number", "Each draft is accepted at random with this chance, so the texts mean nothing. "
        "Empty: this run's drafts are tested.",
        step=0.1, section="machine", placeholder="this run's own", script="A number from 0 to 1, or null.",
    ),
    Setting(
        "min_p", 0.0, float, limits.min_p, "sampling.min_p",
        "Min-p", "number", "keep tokens at least this likely, relative to the most likely one", step=0.05,
        shares_row=True, script="From 0 to 1; 0 keeps every token.",
    ),
    Setting(
        "repetition_penalty", 1.0, float, limits.penalty, "sampling.repetition_penalty",
        "Repetition penalty", "number", "above 1: fewer repeated words", step=0.1, shares_row=True,
        script="A number from 0.001 to 1000; 1 means no penalty.",
    ),
    Setting(
        "stop", None, list[str] | None, limits.stop, "stop",
        script=f"A list of at most {limits.MAX_STOPS} texts; a row ends before the first one that appears in it. "
        "Null: none.",
    ),
    Setting(
        "system", None, str | None, limits.system, "system",
        script="A system message before each prompt, if the chat template takes one, or null for none.",
    ),
    Setting(
        "chat_template_kwargs", None, dict[str, Any] | None, limits.variables, "chat_template_kwargs",
        script='Variables of the chat template, e.g. {"enable_thinking": false}, or null for none.',
    ),
    Setting(
        "json_schema", None, dict[str, Any] | str | None, limits.json_schema, "json_schema",
        "JSON schema", "text", "All rows write JSON that fits it. Empty: any text.",
        script="An object or its JSON text: all rows write JSON that fits this schema. A row that is cut is "
        "incomplete. Null for none.",
    ),
    Setting(
        "regex", None, str | None, limits.grammar, "regex",
        script="All rows match this regular expression as a whole, or null for none.",
    ),
    Setting(
        "grammar", None, str | None, limits.grammar, "grammar",
        script="All rows fit this grammar in Lark's syntax, or null for none. Give one of json_schema, regex and "
        "grammar.",
    ),
)  # fmt: skip
SETTINGS = {setting.name: setting for setting in _TABLE}


def shown() -> list[Setting]:
    """Return the settings that the form has, in the order in which its events send them."""
    return [setting for setting in SETTINGS.values() if setting.control]

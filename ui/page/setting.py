"""The settings of a race, one line each.

Contract: everything that knows a setting is made from SETTINGS: the form and the check of what it sends, the
parameters of `/race` with their order and defaults, the address that can be shared, the settings in a recording
and the arguments of bass_core's `race`. The order is part of the API: a new setting goes to the end.
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
    """One setting of a race. Its name is that of the API's parameter and, with dashes, the id of its control.

    default, type: the API's default value and type. check: see ui/page/limits.py. argument: the keyword of
    bass_core's `race` that takes the value, "sampling.x" for a field of SamplingParams, "" for none.

    control: the kind of the form's control; "" for one that only scripts can set. explain: the line below the
    label. choices: what a list or checkboxes offer; a list starts with its first value. start: the form's initial
    value if it is not the default. section: the part of the form. beside: whether the control shares a row with
    neighbours that set this too. step, placeholder: for number fields. script: what a script has to know besides.
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
    beside: bool = False
    step: float = 1
    placeholder: str | None = None
    script: Words = ""


_TABLE = (
    Setting(
        "prompt", "Write a Python function that reverses a string.", str, limits.prompt, "prompt",
        "Prompt", "text", section="prompt",
        script=lambda most, _: f"The text that all rows answer, at most {most.max_prompt:,} characters. With "
        'prompts="lines", one prompt a line.',
    ),
    Setting(
        "batch_size", 4, int, limits.whole(1, lambda most: most.max_batch), "n",
        "Batch size", "number", section="numbers",
        script=lambda most, _: f"Sequences, 1 to {most.max_batch}.",
    ),
    Setting(
        "max_new_tokens", 64, int, limits.whole(1, lambda most: most.max_new_tokens), "max_new_tokens",
        "Max new tokens", "number", lambda most, _: f"per sequence, to {most.max_new_tokens}",
        beside=True, script="A whole number from 1 on; a sequence may end earlier by itself.",
    ),
    Setting(
        "temperature", 0.7, float, limits.temperature, "sampling.temperature",
        "Temperature", "number", "0: greedy, the likeliest token", step=0.1, beside=True,
        script="A number of 0 or more.",
    ),
    Setting(
        "seed", 0, int, limits.whole(0, lambda _: limits.MAX_SEED), "seed",
        "Seed", "number", "same seed, same text", beside=True,
        script=f"A whole number from 0 to {limits.MAX_SEED}.",
    ),
    Setting(
        "top_k", 0, int, limits.whole(0, lambda _: limits.MAX_TOP_K), "sampling.top_k",
        "Top-k", "number", "keep the k likeliest tokens; 0: all", beside=True,
        script=f"A whole number from 0 to {limits.MAX_TOP_K}.",
    ),
    Setting(
        "top_p", 1.0, float, limits.top_p, "sampling.top_p",
        "Top-p", "number", "keep the likeliest tokens that sum to p", step=0.05, beside=True,
        script="Above 0 and at most 1; 1 keeps every token.",
    ),
    Setting(
        "draft_length", "auto", str, limits.draft_length, "draft_length",
        "Draft length", "list", "How many tokens to draft before the target checks them.",
        lambda known: known.draft_lengths,
    ),
    Setting(
        "drafter", "auto", str, limits.name, "drafter",
        "Drafter", "list", "What makes the drafts. A bad draft costs time, never quality.",
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
        "Time budget, ms", "number", "Stops each lane at this time on its own clock; empty: no budget.",
        step=500, placeholder="none", script="A number above 0, or null for no budget.",
    ),
    Setting(
        "lanes", None, list[str] | None, limits.lanes, "lanes",
        "Lanes", "boxes", "The decoders that take part.", lambda known: known.lanes, start=DEFAULT_LANES,
        script=f"A list of names, or null for {', '.join(DEFAULT_LANES)}.",
    ),
    # A script may name another pair; the page races the operator's own.
    Setting(
        "pair", "", str, limits.pair, "",
        script="A pair's name, a Hub id or a folder of the server, where its operator allows that; empty for the "
        "server's own pair.",
    ),
    # With "lines", RaceRequest turns the prompt into a list of them.
    Setting(
        "prompts", "one", str, limits.prompts, "",
        "Rows", "list", "One prompt a line: as many rows as lines, whatever the batch size.",
        lambda known: known.prompts,
    ),
    # These make the argument `clock`, see clock.py.
    Setting(
        "clock", clock.MEASURED, str, limits.name, "",
        "Clock", "list", "Whose time the lanes count. Texts and acceptances stay this run's.",
        lambda _: clock.CLOCKS, section="machine",
    ),
    Setting(
        "clock_models", clock.FIRST, str, limits.name, "",
        "Models", "list", "The target and the draft whose steps are predicted.",
        lambda _: clock.MODELS, section="machine",
    ),
    Setting(
        "clock_bandwidth", 1000.0, float | None, limits.number, "",
        "Bandwidth, GB/s", "number", "of its memory", section="machine", beside=True,
        script='With clock "own": a number above 0.',
    ),
    Setting(
        "clock_tflops", 100.0, float | None, limits.number, "",
        "Peak, TFLOP/s", "number", "dense, 16 bits", section="machine", beside=True,
        script='With clock "own": a number above 0.',
    ),
    Setting(
        "clock_target", 7.8, float | None, limits.number, "",
        "Target, billions", "number", "of parameters", step=0.1, section="machine", beside=True,
        script='With clock_models "own": a number above 0.',
    ),
    Setting(
        "clock_draft", 0.31, float | None, limits.number, "",
        "Draft, billions", "number", "of parameters", step=0.01, section="machine", beside=True,
        script='With clock_models "own": a number above 0.',
    ),
    Setting(
        "clock_bytes", 2.0, float | None, limits.number, "",
        "Bytes a weight", "number", "bfloat16: 2, int8: 1", step=0.5, section="machine", beside=True,
        script='With clock_models "own": a number above 0.',
    ),
    Setting(
        "acceptance", None, float | None, limits.acceptance, "synthetic_acceptance",
        "Acceptance", "number", "A coin accepts each draft with this chance, and the texts mean nothing; empty: "
        "this run's own drafts.",
        step=0.1, section="machine", placeholder="this run's own", script="A number from 0 to 1, or null.",
    ),
    Setting(
        "min_p", 0.0, float, limits.min_p, "sampling.min_p",
        "Min-p", "number", "keep tokens so many times as likely as the likeliest", step=0.05, beside=True,
        script="From 0 to 1; 0 keeps every token.",
    ),
    Setting(
        "repetition_penalty", 1.0, float, limits.penalty, "sampling.repetition_penalty",
        "Repetition penalty", "number", "above 1: fewer words that were there before", step=0.1, beside=True,
        script="A number above 0; 1 is none.",
    ),
    Setting(
        "stop", None, list[str] | None, limits.stop, "stop",
        script=f"A list of at most {limits.MAX_STOPS} texts; a row ends before the first of them. Null: none.",
    ),
    Setting(
        "system", None, str | None, limits.system, "system",
        script="A system message before each prompt, where the chat template takes one, or null for none.",
    ),
    Setting(
        "chat_template_kwargs", None, dict[str, Any] | None, limits.variables, "chat_template_kwargs",
        script='Variables of the chat template, as {"enable_thinking": false}, or null for none.',
    ),
)  # fmt: skip
SETTINGS = {setting.name: setting for setting in _TABLE}


def shown() -> list[Setting]:
    """The settings that the form has, in the order in which its events send them."""
    return [setting for setting in SETTINGS.values() if setting.control]

"""The prompt's length in tokens, on a line below it.

Contract: a Count says what the line shows of a prompt, as JSON {"text", "refused"}: its tokens, the model's
template included, or the sentence with which a race of it would be refused; nothing of an empty prompt. It runs
beside a race and takes no place in the queue; ui/static/page/prompt.js decides when it is asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import gradio as gr

from bass_core import ModelPair, RequestError, count_tokens
from ui.page import assets, limits
from ui.page.limits import Limits

# Takes the text, and whether it holds one prompt a line.
Count = Callable[[str, bool], str]
# JavaScript for the prompt's change event, which presets and links cause as well.
CHANGED = "() => window.Bass?.promptChanged?.()"


def prompt_count(pair: ModelPair, bounds: Limits) -> Count | None:
    """The Count of this pair's tokenizer; None for a pair without one."""
    if pair.tokenizer is None:
        return None

    def count(prompt: str, by_line: bool = False) -> str:
        if not isinstance(prompt, str) or not prompt.strip():
            return json.dumps({"text": "", "refused": False})
        try:
            # A prompt with too many characters is not tokenized.
            text = limits.prompt("", prompt, bounds)
            prompts = limits.lines(text, bounds) if by_line else [text]
            tokens = max(count_tokens(pair, one) for one in prompts)
        except RequestError as error:
            return json.dumps({"text": str(error), "refused": True})
        words = f"{tokens:,} of {pair.context_length:,} tokens"
        if by_line:
            words = f"{len(prompts)} prompts, the longest {words}" if len(prompts) > 1 else f"1 prompt, {words}"
        return json.dumps({"text": words, "refused": False})

    return count


def counter(count: Count) -> gr.HTML:
    """The line, in the current layout."""

    # Gradio marks the function that it is given.
    def prompt_tokens(asked: Any) -> str:
        prompt, by_line = asked if isinstance(asked, list) and len(asked) == 2 else (asked, False)
        return count(prompt, by_line is True)

    return gr.HTML(
        html_template='<p class="prompt-length" role="status"></p>',
        js_on_load="Bass.mountPromptLength(element, server)",
        server_functions=[prompt_tokens],
        head=assets.head(),
        apply_default_css=False,
        elem_id="prompt-length",
    )

"""How long a prompt is in tokens, and the sentence with which a race of it would be refused.

Contract: a Count returns JSON {"text", "refused"}: the prompt's tokens, the model's template included, or the
refusal; nothing of an empty prompt. It runs beside a race and takes no place in the queue.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from bass_core import ModelPair, RequestError, count_tokens
from ui.page import limits
from ui.page.limits import Limits

# Takes the text, and whether it holds one prompt a line.
Count = Callable[[str, bool], str]
NOTHING = json.dumps({"text": "", "refused": False})


def prompt_count(pair: ModelPair, bounds: Limits) -> Count | None:
    """The Count of this pair's tokenizer; None for a pair without one."""
    if pair.tokenizer is None:
        return None

    def count(prompt: str, by_line: bool = False) -> str:
        if not isinstance(prompt, str) or not prompt.strip():
            return NOTHING
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

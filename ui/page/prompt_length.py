"""The prompt's length in tokens, on a line below it.

Contract: the line shows what a Count (ui/sources/count.py) says of the prompt; ui/static/page/prompt.js decides
when it is asked.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from ui.page import assets
from ui.sources.count import Count

# JavaScript for the prompt's change event, which presets and links cause as well.
CHANGED = "() => window.Bass?.promptChanged?.()"


def counter(count: Count) -> gr.HTML:
    """The line, in the current layout."""

    # Gradio marks the function that it is given.
    def prompt_tokens(asked: Any) -> str:
        prompt, by_line = asked if isinstance(asked, list) and len(asked) == 2 else (asked, False)
        return count(prompt, by_line is True)

    line = '<p class="prompt-length" role="status"></p>'
    script = "Bass.mountPromptLength(element, server)"
    return assets.part(line, script, "prompt-length", server_functions=[prompt_tokens])

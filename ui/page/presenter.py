"""Static HTML of presenter mode: a line that replaces the folded settings, the list of keys, the head of a print.

presenter.js fills it, using only textContent. The labels of the draft lengths come from outside and are escaped.
"""

from __future__ import annotations

import json
from html import escape

from ui.page.choices import Choices

SWITCH = '<button type="button" class="action present-switch" data-present>Presenter mode</button>'
# presenter.js adds the keys 1 to 9 for the presets.
KEYS = {
    "r": "run",
    "s": "stop",
    "a b c": "bet on a lane, when Run asks for it",
    "Space": "pause the page, or go on",
    "→": "pause, then the next line of code",
    "←": "the line before",
    "?": "this list",
    "Esc": "close this list, the rounds or the settings",
}


def template(choices: Choices) -> str:
    """Return the bar, the list of keys and the place for the settings of a print."""
    # Shorten "automatic: by measured cost" to "automatic": the bar names all settings in one line.
    words = {value: label.split(":")[0].split(",")[0] for label, value in choices.draft_lengths}
    words |= {value: label for label, value in choices.draft_lengths if value.isdecimal()}
    keys = "".join(f"<div><dt><kbd>{key}</kbd></dt><dd>{does}</dd></div>" for key, does in KEYS.items())
    return f"""<section class="present-bar" aria-label="Presenter mode" data-words="{escape(json.dumps(words))}">
<button type="button" class="present-line" aria-expanded="false" aria-controls="settings">
<span class="present-prompt"></span><span class="present-rest"></span></button>
<button type="button" class="action" data-keys aria-haspopup="dialog">Keys</button>
<button type="button" class="action" data-print>Print</button></section>
<dialog class="keys" aria-labelledby="keys-title"><h2 id="keys-title" tabindex="-1" autofocus>Keys</h2>
<p>They work only in presenter mode, while no input field has the focus.</p>
<dl>{keys}</dl>
<label><input type="checkbox" data-keys-on checked> Keys are on</label>
<button type="button" class="action" data-keys-close>Close</button></dialog>
<dl class="print-settings" hidden></dl>"""

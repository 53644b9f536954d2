"""Presenter mode: the line in place of the folded settings, the list of keys, and the head of a print.

Contract: static HTML, which presenter.js fills with textContent alone. Of the values in it,
only the words of the offered draft lengths are not written here, and they are escaped.
"""

from __future__ import annotations

import json
from html import escape

from ui.page.choices import Choices

SWITCH = '<button type="button" class="action present-switch" data-present>Presenter mode</button>'
# Presets have keys of their own, 1 to 9, which presenter.js adds.
KEYS = {
    "r": "run",
    "s": "stop",
    "Space": "hold what the page shows, or go on",
    "→": "hold, and one round on",
    "←": "one round back",
    "?": "this list",
    "Esc": "close this list, the rounds or the settings",
}


def template(choices: Choices) -> str:
    """The bar, the list of keys, and the settings of a print."""
    # "automatic: by measured cost" is too long for a line that names all settings.
    words = {value: label.split(":")[0].split(",")[0] for label, value in choices.draft_lengths}
    words |= {value: label for label, value in choices.draft_lengths if value.isdecimal()}
    keys = "".join(f"<div><dt><kbd>{key}</kbd></dt><dd>{does}</dd></div>" for key, does in KEYS.items())
    return f"""<section class="present-bar" aria-label="Presenter mode" data-words="{escape(json.dumps(words))}">
<button type="button" class="present-line" aria-expanded="false" aria-controls="settings">
<span class="present-prompt"></span><span class="present-rest"></span></button>
<button type="button" class="action" data-keys aria-haspopup="dialog">Keys</button>
<button type="button" class="action" data-print>Print</button></section>
<dialog class="keys" aria-labelledby="keys-title"><h2 id="keys-title">Keys</h2>
<p>They act while no field has the focus, and in presenter mode alone.</p>
<dl>{keys}</dl>
<label><input type="checkbox" data-keys-on checked> Keys are on</label>
<button type="button" class="action" data-keys-close>Close</button></dialog>
<dl class="print-settings" hidden></dl>"""

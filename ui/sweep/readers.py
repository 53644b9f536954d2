"""The slider "How many readers at once?": its figures, which `python -m bench readers` predicts, and its HTML.

The figures are in the HTML, so ui/static/sweep/readers.js needs no server.
"""

from __future__ import annotations

import json
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from bass_core import DEFAULT_LANES
from ui.race.looks import look

FILE = Path(__file__).with_name("readers.json")
START = 4


@cache
def figures() -> dict[str, Any]:
    """Return the predicted figures; see `predicted` in bench/report/readers.py."""
    document: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return document


def template() -> str:
    """Return the HTML of the slider, its curve, and the steps of the three decoders."""
    known = figures()
    lanes = "".join(
        f'<li data-lane="{name}" style="--lane: var(--{look(name)["colour"]})"><h3>{look(name)["label"]}</h3>'
        '<svg aria-hidden="true"></svg><p></p></li>'
        for name in DEFAULT_LANES
    )
    most = max(known["readers"])
    shown = escape(json.dumps(known, separators=(",", ":")))
    return f"""<section class="readers" data-figures="{shown}" aria-labelledby="readers-title">
<header><h2 id="readers-title">How many readers at once?</h2>
<div class="readers-choices">{_choice("machine", "Machine", known["machines"])}
{_choice("text", "Text", known["texts"])}</div></header>
<p class="readers-said" role="status"></p>
<div class="readers-curve"><svg aria-hidden="true"></svg>
<input type="range" min="1" max="{most}" step="1" value="{START}" aria-label="Readers at once"></div>
<ul class="readers-steps" aria-label="Steps of the three decoders">{lanes}</ul>
<p class="readers-source"></p></section>"""


def _choice(name: str, label: str, offered: dict[str, Any]) -> str:
    """Return radio buttons; the first is chosen."""
    buttons = "".join(
        f'<label><input type="radio" name="readers-{name}" value="{value}"{" checked" * (at == 0)}>'
        f"<span>{entry['label']}</span></label>"
        for at, (value, entry) in enumerate(offered.items())
    )
    return f'<div role="radiogroup" aria-label="{label}" data-choice="{name}">{buttons}</div>'

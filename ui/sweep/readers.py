"""The slider "How many readers at once?": its figures, which `python -m bench readers` predicts, and its HTML.

`here` predicts those of this machine from its own costs. They come first.

The figures are in the HTML, so ui/static/sweep/readers.js needs no server.
"""

from __future__ import annotations

import json
import math
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from bass_core import ModelPair, mean_steps, stored_costs

FILE = Path(__file__).with_name("readers.json")
# Simulated runs for each number of readers on this machine.
TRIALS = 4


@cache
def figures() -> dict[str, Any]:
    """Return the predicted figures; see `predicted` in bench/report/readers.py."""
    document: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return document


def here(pair: ModelPair) -> dict[str, Any] | None:
    """Return this machine as an entry of "machines", from its stored costs, or None if nothing is known.

    Its "balance" is the tokens of a step for which multiplying takes as long as reading, or None.
    """
    known, costs = figures(), stored_costs(pair)
    # The acceptance was measured with one pair, so it says nothing about the others.
    if costs is None or pair.name != known["pair"]:
        return None
    sizes = known["readers"], known["drafts"], known["new_tokens"], TRIALS
    bass = {name: mean_steps(costs, text["acceptance"], *sizes) for name, text in known["texts"].items()}
    balance = round(costs.balance) if math.isfinite(costs.balance) else None
    regular = [costs.verify_ms(rows, rows) for rows in known["readers"]]
    source = f"rounds measured on this machine, with up to {max(costs.verify)} rows"
    return {"label": "This machine", "source": source, "regular": regular, "bass": bass, "balance": balance}


def slider() -> str:
    """Return the HTML of the slider next to the lanes. It begins with one reader, as the opening does."""
    return (
        f'<label class="axis-readers">Readers <input type="range" min="1" max="{max(figures()["readers"])}" '
        f'step="1" value="1" aria-label="Readers at once"><output>1</output></label>'
    )


def template(own: dict[str, Any] | None = None) -> str:
    """Return the HTML of the curve and its choices. `own`: see `here`."""
    known = figures()
    known = known | {"machines": ({"here": own} if own else {}) | known["machines"]}
    shown = escape(json.dumps(known, separators=(",", ":")))
    return f"""<section class="readers" data-figures="{shown}" aria-labelledby="readers-title">
<header><h2 id="readers-title">How many readers at once? <span class="badge-predicted">predicted</span></h2>
<div class="readers-choices">{_choice("machine", "Machine", known["machines"])}
{_choice("text", "Text", known["texts"])}</div></header>
<p class="readers-said" role="status"></p>
<div class="readers-curve"><svg aria-hidden="true"></svg></div>
<p class="readers-source"></p></section>"""


def _choice(name: str, label: str, offered: dict[str, Any]) -> str:
    """Return radio buttons; the first is chosen."""
    buttons = "".join(
        f'<label><input type="radio" name="readers-{name}" value="{value}"{" checked" * (at == 0)}>'
        f"<span>{entry['label']}</span></label>"
        for at, (value, entry) in enumerate(offered.items())
    )
    return f'<div role="radiogroup" aria-label="{label}" data-choice="{name}">{buttons}</div>'

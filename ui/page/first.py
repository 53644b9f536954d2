"""The preset that the page starts with: `first_preset`.

It is QUESTIONS if this machine lets BASS win that race, else REPEAT. BASS wins it if the predicted speed-up is at
least LEAST. The prediction uses this machine's measured costs of rounds, which are stored between starts, and the
acceptance of the drafts for the questions of Spec-Bench. So it takes a tenth of a second, and no model runs.
"""

from __future__ import annotations

from bass_core import ModelPair, expected_speedup
from ui.page.presets import QUESTIONS, REPEAT, presets
from ui.sweep.readers import figures

LEAST = 1.1


def first_preset(pair: ModelPair) -> str:
    """Return the name of the first preset for this pair, on this machine."""
    known = figures()
    # The acceptance was measured with one pair, so it says nothing about the others.
    if pair.name != known["pair"]:
        return REPEAT
    race = presets()[QUESTIONS].values
    expected = expected_speedup(
        pair,
        known["texts"]["questions"]["acceptance"],
        rows=race["batch_size"],
        draft_length=int(race["draft_length"]),
        temperature=race["temperature"],
    )
    return QUESTIONS if expected is not None and expected >= LEAST else REPEAT

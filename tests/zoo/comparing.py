"""Tries a model as a user would bring it: it must write transformers' own text or be refused at load.

Call `outcome`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from bass_core import ModelPair, PairError, generate
from tests.support.models import reference, texts_of

from .making import WORDS, NotTried

LENGTHS = (40, 8, 21)
NEW = 16


def texts() -> list[list[int]]:
    """Return three prompts: one longer than two chunks, one as long as a window, and one longer than a chunk."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, WORDS, (length,), generator=generator).tolist() for length in LENGTHS]


def outcome(model: Any) -> str:
    """Return "runs", or the sentence of the refusal.

    Raises:
        AssertionError: If a text differs from transformers' own.
        NotTried: If transformers itself can't run the model.
    """
    rows = texts()
    try:
        expected = [reference(model, row, NEW) for row in rows]
    except Exception as error:
        raise NotTried(f"transformers' own generate fails: {error}") from error
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(9)) * 0.02)
    try:
        pair = ModelPair(model, draft)
    except PairError as refusal:
        return str(refusal)
    for options in ({"method": "regular"}, {"method": "bass", "draft_length": "bass"}):
        written = generate(pair, rows, max_new_tokens=NEW, eos_token_id=None, **options)
        assert texts_of(written) == expected, options
    assert [reference(model, row, NEW) for row in rows] == expected, "the user's model writes another text now"
    return "runs"

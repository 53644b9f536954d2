"""How many calls of our functions it takes from a caller to the first forward, and in a round."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import bass_core
from bass_core import generate, stream
from bass_core.model.runner import ModelRunner
from tests.support.models import tiny_pair

ROOT = Path(bass_core.__file__).parents[1]
PAIR = tiny_pair()
OPTIONS: dict[str, Any] = {"draft_length": 2, "max_new_tokens": 24, "eos_token_id": None}


def calls_of(run: Callable[[], object], until: CodeType | None = None) -> Counter[str]:
    """Count the calls of functions in bass_core and kernels, by file, before the first that runs `until`."""
    calls: Counter[str] = Counter()
    ours = tuple(f"{ROOT / package}/" for package in ("bass_core", "kernels"))

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            if frame.f_code is until:
                sys.setprofile(None)
            else:
                calls[str(Path(frame.f_code.co_filename).relative_to(ROOT))] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls


def test_the_way_to_the_first_forward_and_through_a_round_is_short() -> None:
    """Comprehensions count as calls, and each item of a generator expression. Python's versions differ by some."""
    prompt = list(range(1, 9))
    generate(PAIR, prompt, **OPTIONS)  # warms up
    first = calls_of(lambda: generate(PAIR, prompt, **OPTIONS), ModelRunner.forward.__code__)
    rounds = stream(PAIR, prompt, **OPTIONS)
    while next(rounds).kind == "prefill":
        pass
    steady = calls_of(lambda: next(rounds))
    print(f"{first.total()} calls before the first forward, {steady.total()} in a round of one row")
    print(first.most_common(9), steady.most_common(9), sep="\n")
    assert 100 < first.total() <= 450 and 100 < steady.total() <= 350

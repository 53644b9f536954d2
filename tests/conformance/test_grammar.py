"""Texts under grammars have the law of masked regular decoding: all of their tokens' probabilities are enumerated.

The grammars are lists of texts of three letters, so a text's next tokens are known without llguidance.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest

from bass_core import SamplingParams
from bass_core.length.cost_aware import CostAware
from bass_core.length.policies import FixedLength, RecordedLengths
from tests.support.models import slow_but, small_window

from .enumerated import Enumeration, Scene, Table, distance, enumerate_scene
from .test_amusd import SCHEDULES, Overlapped
from .test_enumeration import CHEAP, DRAFTERS, Q3, RULES, TREES, _model

# Token 3 occurs only at the end of a prompt.
P: Table = ((0.2, 0.3, 0.5), (0.15, 0.4, 0.45), (0.6, 0.3, 0.1), (0.7, 0.2, 0.1))
# In "bcabc", all letters after the second are certain.
WORDS = ("aabc", "abbb", "acab", "acbc", "bcabc", "bbbca", "cabba", "cacb")
# Texts that may end at several places, with the letter c as the end of the text.
ENDED = ("a", "ab", "abb", "aab", "bba", "bbaab")
TOLERANCE = 1e-15


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let windowed drafts see few tokens, and let the head stop after an unlikely draft too."""
    small_window(monkeypatch, sinks=1, unit=1, window=1)
    monkeypatch.setattr("bass_core.draft.chain.HEADROOM", 1.0)


def check_law(scene: Scene, patch: pytest.MonkeyPatch) -> Enumeration:
    """Compare the texts' distribution with that of masked regular decoding."""
    result = enumerate_scene(scene, patch)
    assert math.isclose(math.fsum(result.law.values()), 1, abs_tol=1e-12), "a path was lost, or taken twice"
    assert distance(scene.completed(result.law), scene.expected()) <= TOLERANCE
    return result


QUICK = [
    ("model", "rejection"),
    ("model", "block"),
    ("a head that stops", "block"),
    ("copies, else a model", "block"),
]


@pytest.mark.parametrize(("drafter", "rule"), slow_but(QUICK, product(DRAFTERS, RULES)))
def test_drafters_keep_the_law_of_a_grammar(drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(P, DRAFTERS[drafter], FixedLength(2), rule, ((2, 1, 2, 1, 2),), 5, 2, languages=(WORDS,))
    check_law(scene, monkeypatch)
    assert distance(scene.expected(), replace(scene, languages=()).expected()) > 0.1


@pytest.mark.parametrize(
    ("drafter", "rule"),
    slow_but(
        [("(2, 1)", "rejection"), ("a user's trees, wider after 0", "auto")],
        product(TREES, ["auto", "rejection", "coupled"]),
    ),
)
def test_trees_keep_the_law_of_a_grammar(drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_law(Scene(P, TREES[drafter], FixedLength(2), rule, ((1, 0, 1, 3),), 5, languages=(WORDS,)), monkeypatch)


@pytest.mark.parametrize(("drafter", "rule"), slow_but([("model", "block")], product(DRAFTERS, RULES)))
def test_a_text_may_end_wherever_its_grammar_may(drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a text may be drafted, also in front of other drafts."""
    scene = Scene(
        P, DRAFTERS[drafter], FixedLength(2), rule, ((1, 0, 3),), 5, 9, frozenset({2}), languages=(ENDED,)
    )
    check_law(scene, monkeypatch)
    assert {(0, 2), (0, 1, 2), (1, 1, 0, 2), (1, 1, 0, 0, 1)} < {text for (text,) in scene.expected()}


@pytest.mark.parametrize("rule", slow_but(["rejection"], RULES))
def test_rows_with_different_grammars_and_without_one_are_independent(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = RecordedLengths([[1, 2, 1], [2, 1, 1]])
    scene = Scene(
        P, _model(Q3), policy, rule, ((0,), (1,), (2,)), 2, 2, languages=(("aa", "ab", "cb"), None, ("ab", "bc"))
    )
    check_law(scene, monkeypatch)


@pytest.mark.parametrize("rule", slow_but(["block"], RULES))
def test_penalties_and_bad_words_come_before_the_grammar(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(
        1.3, min_p=0.2, repetition_penalty=1.3, presence_penalty=0.3, logit_bias={2: 0.5}, bad_words=((0, 2),)
    )
    scene = Scene(P, _model(Q3), FixedLength(2), rule, ((2, 1, 2),), 5, 2, sampling=sampling, languages=(WORDS,))
    check_law(scene, monkeypatch)
    assert distance(scene.expected(), replace(scene, sampling=SamplingParams(1.0)).expected()) > 0.01


@pytest.mark.parametrize("rule", slow_but(["block"], RULES))
def test_the_default_policy_takes_all_certain_drafts(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text begins "bcabc" or "ca"; a draft model alone would not pay."""
    words = ("bcabc", "cabcb", "cabba")
    scene = Scene(P, _model(Q3), CostAware(CHEAP), rule, ((2, 1, 2),), 5, 2, languages=(words,))
    result = check_law(scene, monkeypatch)
    assert {2, 3} & result.drafted, "the row drafts all that is certain but the last token"


def test_the_law_is_not_that_of_the_target_given_that_the_text_fits() -> None:
    """The numbers are those of docs/formulas.md."""
    words, table = ("ab", "ba", "bb"), ((0.9, 0.1), (0.5, 0.5))
    scene = Scene(table, _model(Q3), FixedLength(0), new_tokens=2, languages=(words,))
    masked = {text: chance for (text,), chance in scene.expected().items()}
    free = replace(scene, languages=()).expected()
    total = math.fsum(free[text,] for text in masked)
    assert masked == pytest.approx({(0, 1): 0.9, (1, 0): 0.05, (1, 1): 0.05})
    given = {text: free[text,] / total for text in masked}
    assert given == pytest.approx({(0, 1): 0.474, (1, 0): 0.263, (1, 1): 0.263}, abs=5e-4)


@pytest.mark.parametrize(
    ("schedule", "rule"), slow_but([("depends on the text", "block")], product(SCHEDULES, RULES))
)
def test_amusd_keeps_the_law_of_a_grammar(schedule: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Overlapped(
        P,
        _model(Q3),
        FixedLength(1),
        rule,
        ((2, 1, 2, 1, 2),),
        5,
        2,
        languages=(WORDS,),
        schedule=SCHEDULES[schedule],
    )
    check_law(scene, monkeypatch)

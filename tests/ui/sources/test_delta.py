"""Deltas give back what was encoded, and a race's cost no more than what is new."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bass_core import ModelPair, race
from ui.sources.delta import KEEP, LIST, Decoder, Encoder, difference

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
PLAIN = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=2), inner, max_size=4)),
    max_leaves=12,
)


def travelled(values: list[Any]) -> list[Any]:
    """The values, encoded, pickled and decoded one after another."""
    encoder, decoder = Encoder(), Decoder()
    return [decoder.decode(pickle.loads(pickle.dumps(encoder.encode(value)))) for value in values]


@given(st.lists(PLAIN, max_size=6))
@settings(max_examples=300, deadline=None)
def test_any_plain_data_comes_back(values: list[Any]) -> None:
    assert travelled(values) == values


@given(PLAIN, PLAIN)
@settings(max_examples=200, deadline=None)
def test_what_was_decoded_never_changes(first: Any, second: Any) -> None:
    encoder, decoder = Encoder(), Decoder()
    kept = decoder.decode(encoder.encode(first))
    before = copy.deepcopy(kept)
    decoder.decode(encoder.encode(second))
    assert kept == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),  # equal, in another order
        ({"a": 1}, {}),
        ([1, [2], 3], [1, [2, 4], 3, 5]),
        (["a", "b"], ["a", "bc"]),  # a last piece that grows, as at the end of a text
        ("", "x"),
        ("ab", "b"),
        ([], [[]]),
        (None, {"a": None}),
        ({"a": float("inf")}, {"a": -float("inf")}),
    ],
)
def test_cases(old: Any, new: Any) -> None:
    _, back = travelled([old, new])
    assert back == new and repr(back) == repr(new)


def test_a_longer_list_costs_its_end() -> None:
    long = list(range(1000))
    assert difference(long, [*long, 7]) == (LIST, {}, [7])
    assert difference({"a": long}, {"a": [*long]}) == (KEEP,)


def test_a_race_comes_back_and_each_token_travels_once(pair: ModelPair) -> None:
    encoder, decoder = Encoder(), Decoder()
    sent = 0
    for snapshot in race(pair, "Hello", n=3, max_new_tokens=200, inspect=True):
        data = pickle.dumps(encoder.encode(snapshot))
        back = decoder.decode(pickle.loads(data))
        assert back == snapshot
        sent += len(data)
    assert snapshot["done"] and repr(back) == repr(snapshot)
    # All deltas together are about as long as the last snapshot, however many there were.
    assert sent < 2 * len(pickle.dumps(snapshot))

"""Sources of races without Ray: app.py's options, a worker, and its deltas."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import app
from bass_core import BassError, ModelPair, RequestError, race
from bass_core.decode.batch import BatchDecoder
from tests.support.memory import alive
from tests.support.page import lane_texts
from ui.page.limits import Limits
from ui.page.request import RaceRequest, make_request
from ui.sources.cluster.start import MISSING, actor_options
from ui.sources.cluster.worker import Worker
from ui.sources.delta import KEEP, LIST, DeltaDecoder, DeltaEncoder, difference
from ui.sources.local import Local
from ui.sources.service import open_service
from ui.sources.source import PairOptions


@pytest.fixture(scope="module")
def ask(pair_folders: tuple[Path, Path]) -> PairOptions:
    return PairOptions(str(pair_folders[0]), str(pair_folders[1]), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def worker(ask: PairOptions) -> Worker:
    return Worker(ask, Limits(), 1, 7)


def asked(tokens: int = 40) -> RaceRequest:
    return make_request({"prompt": "Hello", "batch_size": 2, "max_new_tokens": tokens, "seed": 5}, Limits())


def test_a_worker_describes_its_pair(worker: Worker, ask: PairOptions) -> None:
    facts = worker.load()
    runs = "transformers' own model (our kernels take 16 bits and fewer)"
    assert facts.about.endswith(f"on cpu, float32, 1 thread, {runs}") and facts.counts
    assert facts.pair == {"pair": "target", "draft": "draft", "device": "cpu", "dtype": "float32"}
    assert "tokens" in worker.count("Hello", False)


def test_a_workers_race_equals_the_librarys(worker: Worker, pair: ModelPair) -> None:
    decoder = DeltaDecoder()
    *_, last = map(decoder.decode, worker.race(1, asked()))
    *_, same = race(pair, **asked().arguments())
    assert last["done"] and lane_texts(last) == lane_texts(same)
    assert last["device"]["name"].split(", worker ")[1].startswith("7 on ")


def test_a_stop_reaches_the_worker_within_one_round(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    before = alive(collect=True)
    steps = 0
    step = BatchDecoder.step

    def counted(decoder: BatchDecoder) -> object:
        nonlocal steps
        steps += 1
        if steps == 9:
            worker.stop(2)  # in the middle of a round, as from another thread
        return step(decoder)

    monkeypatch.setattr(BatchDecoder, "step", counted)
    # No snapshot is ever due, so the race has to notice the stop between snapshots.
    monkeypatch.setattr(import_module("bass_core.lanes.race"), "SNAPSHOT_SECONDS", 1e9)
    assert list(worker.race(2, asked(1000))) == []
    assert steps == 9
    assert alive(collect=True) == before


def test_a_stop_before_the_race_ends_it_at_once(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.stop(3)
    assert len(list(worker.race(3, asked(1000)))) <= 1
    *_, last = map(DeltaDecoder().decode, worker.race(4, asked(4)))
    assert last["done"]


def test_a_new_wait_for_the_workers_end_replaces_the_last(worker: Worker) -> None:
    """A caller of `stay` blocks a thread of the worker, but only until another caller calls `stay`."""
    first, second = (threading.Thread(target=worker.stay, daemon=True) for _ in range(2))
    first.start()
    first.join(0.2)
    assert first.is_alive()
    second.start()
    first.join(10)
    assert not first.is_alive() and second.is_alive()


def test_a_missing_model_is_named_in_the_error(ask: PairOptions) -> None:
    with pytest.raises(BassError, match="nothing-here"):
        Worker(replace(ask, pair="/nothing-here"), Limits(), 1, 1).load()


SPLIT = {
    "model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers": "cpu",
    "model.norm": "cpu", "lm_head": "disk",
}  # fmt: skip


def refused(*options: str) -> str:
    """The error for these options, raised before any model is loaded."""
    chosen = app.parse([*options, "--pair", "/nothing-here"])
    ask = PairOptions(chosen.pair, device=chosen.device, device_map=chosen.device_map)
    with pytest.raises(BassError) as error:
        open_service(ask, chosen, Limits(), lambda: 1, 1)
    return str(error.value)


def test_conflicting_options_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused("--worker-resources", "CPU=1").startswith("--worker-resources is for workers on a cluster")
    assert refused("--workers", "2", "--device-map", "auto").startswith("With --workers each worker has one GPU")
    assert refused("--workers", "2", "--device", "cuda:1").startswith("With --workers each worker has its own GPU")
    # Without Ray, the error names the package to install.
    monkeypatch.setitem(sys.modules, "ray", None)
    assert refused("--workers", "2") == refused("--ray", "127.0.0.1:1") == MISSING


@pytest.mark.slow
def test_a_split_pair_names_its_devices(pair_folders: tuple[Path, Path]) -> None:
    target, draft = map(str, pair_folders)
    facts = Local(PairOptions(target, draft, dtype="float32", device_map=SPLIT)).facts(1)
    assert facts.about.startswith(f"{Path(target).name} on cpu and disk, float32")
    assert "device" not in facts.pair and facts.pair["device_map"] == SPLIT
    assert Local(PairOptions(target, draft, device="cpu")).facts(1).pair["device"] == "cpu"
    # A visitor's pair is split in the same way.
    local = Local(PairOptions(target, draft, dtype="float32", any_model=True, device_map=SPLIT))
    assert local.models.get(target).places == ("cpu", "disk")
    with pytest.raises(RequestError):
        Local(PairOptions(target, device="cpu", device_map="auto"))


def test_worker_resources_become_actor_options_or_are_refused() -> None:
    assert actor_options("GPU=0.5, CPU=4") == {"num_gpus": 0.5, "num_cpus": 4}
    assert actor_options("fast=2") == {"resources": {"fast": 2}}
    for text in ("", "CPU", "CPU=0", "GPU=1.5", "CPU=0.00001", "CPU=1,=2", "CPU=1;GPU=1"):
        with pytest.raises(RequestError, match=r"^--worker-resources must be names with amounts above 0"):
            actor_options(text)


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
PLAIN = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=2), inner, max_size=4)),
    max_leaves=12,
)


def sent_and_decoded(values: list[Any]) -> list[Any]:
    """The values after one encoder and one decoder have passed them on, pickled, one after another."""
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    return [decoder.decode(pickle.loads(pickle.dumps(encoder.encode(value)))) for value in values]


@given(st.lists(PLAIN, max_size=6))
@settings(max_examples=60, deadline=None)
def test_any_plain_data_survives_encoding(values: list[Any]) -> None:
    assert sent_and_decoded(values) == values


@given(PLAIN, PLAIN)
@settings(max_examples=100, deadline=None)
def test_decoded_values_never_change_later(first: Any, second: Any) -> None:
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    decoded = decoder.decode(encoder.encode(first))
    before = copy.deepcopy(decoded)
    decoder.decode(encoder.encode(second))
    assert decoded == before


def test_edge_cases_of_deltas() -> None:
    for old, new in (
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),  # equal, in another order
        ({"a": 1}, {}),
        ([1, [2], 3], [1, [2, 4], 3, 5]),
        (["a", "b"], ["a", "bc"]),  # a last piece that grows, as at the end of a text
        ("", "x"),
        ("ab", "b"),
        ([], [[]]),
        (None, {"a": None}),
        ({"a": float("inf")}, {"a": -float("inf")}),
    ):
        _, back = sent_and_decoded([old, new])
        assert back == new and repr(back) == repr(new)
    # A longer list sends only its new end.
    long = list(range(1000))
    assert difference(long, [*long, 7]) == (LIST, {}, [7])
    assert difference({"a": long}, {"a": [*long]}) == (KEEP,)


def test_a_race_survives_encoding_and_sends_each_token_once(pair: ModelPair) -> None:
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    sent = 0
    for snapshot in race(pair, "Hello", n=2, max_new_tokens=60, inspect=True):
        data = pickle.dumps(encoder.encode(snapshot))
        decoded = decoder.decode(pickle.loads(data))
        assert decoded == snapshot
        sent += len(data)
    assert snapshot["done"] and repr(decoded) == repr(snapshot)
    # All deltas together are about as long as the last snapshot.
    assert sent < 2 * len(pickle.dumps(snapshot))

"""A worker without Ray: its deltas are the race's snapshots, and a stop reaches it within one round."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from bass_core import BassError, ModelPair, Snapshot, race
from bass_core.decode.batch import BatchDecoder
from ui.page.limits import Limits
from ui.page.request import RaceRequest, make_request
from ui.sources.cluster.worker import Worker
from ui.sources.delta import Decoder
from ui.sources.source import Ask

from ..conftest import caches


@pytest.fixture(scope="module")
def ask(tiny_pair: tuple[Path, Path]) -> Ask:
    return Ask(str(tiny_pair[0]), str(tiny_pair[1]), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def worker(ask: Ask) -> Worker:
    return Worker(ask, Limits(), 1, 7)


def asked(tokens: int = 40) -> RaceRequest:
    return make_request({"prompt": "Hello", "batch_size": 2, "max_new_tokens": tokens, "seed": 5}, Limits())


def texts(snapshot: Snapshot) -> dict[str, list[str | None]]:
    return {name: [one["text"] for one in lane["sequences"]] for name, lane in snapshot["lanes"].items()}


def test_it_says_what_it_has_loaded(worker: Worker, ask: Ask) -> None:
    facts = worker.load()
    runs = "transformers' own model (our kernels take 16 bits and fewer)"
    assert facts.about.endswith(f"on cpu, float32, 1 thread, {runs}") and facts.counts
    assert facts.pair == {"pair": "target", "draft": "draft", "device": "cpu", "dtype": "float32"}
    assert "tokens" in worker.count("Hello", False)


def test_its_race_is_the_librarys(worker: Worker, pair: ModelPair) -> None:
    decoder = Decoder()
    *_, last = map(decoder.decode, worker.race(1, asked()))
    *_, same = race(pair, **asked().arguments())
    assert last["done"] and texts(last) == texts(same)
    assert last["device"]["name"].split(", worker ")[1].startswith("7 on ")


def test_a_stop_reaches_it_within_one_round(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before = caches()
    steps = 0
    step = BatchDecoder.step

    def counted(decoder: BatchDecoder) -> object:
        nonlocal steps
        steps += 1
        if steps == 9:
            worker.stop(2)  # as another thread would, in the middle of a round
        return step(decoder)

    monkeypatch.setattr(BatchDecoder, "step", counted)
    # No snapshot falls due for ever: the race must look at the flag by itself.
    monkeypatch.setattr(import_module("bass_core.lanes.race"), "SNAPSHOT_SECONDS", 1e9)
    assert list(worker.race(2, asked(1000))) == []
    assert steps == 9
    gc.collect()
    assert caches() == before


def test_a_stop_before_the_race_ends_it_at_once(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.stop(3)
    assert len(list(worker.race(3, asked(1000)))) <= 1
    *_, last = map(Decoder().decode, worker.race(4, asked(4)))
    assert last["done"]


def test_whoever_waits_for_its_end_waits_once(worker: Worker) -> None:
    """Each caller takes a thread of the worker until the next one comes."""
    first, second = (threading.Thread(target=worker.stay, daemon=True) for _ in range(2))
    first.start()
    first.join(0.2)
    assert first.is_alive()
    second.start()
    first.join(10)
    assert not first.is_alive() and second.is_alive()


def test_a_model_that_is_not_there_is_one_sentence(ask: Ask) -> None:
    with pytest.raises(BassError, match="nothing-here"):
        Worker(replace(ask, pair="/nothing-here"), Limits(), 1, 1).load()

"""Missing, truncated, changed or unwritable files give a one-sentence error, and the next start works.

tests/bass_core/model/loading/test_weights.py covers a kill during conversion, two starts at once and a damaged
folder of the real model.
"""

from __future__ import annotations

import logging
import multiprocessing
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from bass_core import WeightsError, load_pair, race
from bass_core.errors import PairError
from bass_core.model.loading import catalogue, smollm2, weights, wheel
from tests.support.models import byte_tokenizer, tiny

CONTENT = b"stand-in for the weights" * 1000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "target"
    tiny("llama").save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def runs(pair: Any) -> bool:
    *_, last = race(pair, [5, 6, 7], max_new_tokens=6)
    return bool(last["done"]) and all(lane["error"] is None for lane in last["lanes"].values())


def test_a_missing_draft_of_a_catalogue_entry_is_replaced_with_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry = replace(
        catalogue.CATALOGUE["smollm2"], name="mine", target=str(folder), draft="drafts/gone", prepare=None
    )
    monkeypatch.setitem(catalogue.CATALOGUE, "mine", entry)
    with caplog.at_level(logging.WARNING):
        pair = load_pair("mine", device="cpu", dtype="float32")
    assert pair.draft is None and pair.default_drafter == "prompt_lookup" and runs(pair)
    assert "The draft of mine can't be used" in caplog.text


def test_a_missing_requested_draft_is_refused(folder: Path) -> None:
    with pytest.raises(PairError, match="no pair and no folder called"):
        load_pair(str(folder), draft=str(folder.parent / "gone"), device="cpu", dtype="float32")
    assert runs(load_pair(str(folder), device="cpu", dtype="float32"))


@pytest.mark.parametrize("damage", ["truncated", "header", "empty"])
def test_damaged_weights_are_refused_in_one_sentence(folder: Path, damage: str) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes({"truncated": whole[:-1000], "header": b"\xff" * 8 + whole[8:], "empty": b""}[damage])
    with pytest.raises(WeightsError) as refusal:
        load_pair(str(folder), device="cpu", dtype="float32")
    assert "\n" not in str(refusal.value) and str(folder) in str(refusal.value)
    file.write_bytes(whole)
    assert runs(load_pair(str(folder), device="cpu", dtype="float32"))


def test_a_full_disk_is_one_sentence_and_the_next_start_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of 10 kB per file (RLIMIT_FSIZE) makes the system refuse the write."""
    import hashlib

    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        shutil.copyfile(gguf, folder / "model.safetensors")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(wheel, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(smollm2, "convert", convert)
    root = tmp_path / "bass"
    root.mkdir()
    (root / wheel.GGUF_NAME).write_bytes(CONTENT)
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_on_a_full_disk, args=(send,))
    child.start()
    message = receive.recv() if receive.poll(60) else "nothing"
    child.join()
    assert "could not be prepared" in message and "XDG_CACHE_HOME" in message
    assert not (root / weights.FOLDER).exists() and not list(root.glob("*.partial-*"))
    assert weights.is_complete(weights.ensure_smollm2())


def _on_a_full_disk(send: Any) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    try:
        weights.ensure_smollm2()
        send.send("no error")
    except WeightsError as error:
        send.send(str(error))


def test_the_shipped_draft_holds_only_tensors() -> None:
    shipped = Path(catalogue.REPOSITORY) / "drafts" / "smollm2"
    assert {file.suffix for file in shipped.iterdir()} <= {".safetensors", ".json", ".md"}
    with safe_open(shipped / "model.safetensors", "pt") as tensors:
        assert len(list(tensors.keys())) > 1

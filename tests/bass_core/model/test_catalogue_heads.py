"""Folders with a draft head: load_pair builds it from the target's rows, then quantizes or moves the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bass_core import generate, load_pair
from bass_core.model.draft_head import DraftHead, HeadConfig
from bass_core.model.loading import catalogue, quantized
from bass_core.model.weights.quantized import is_quantized
from tests.bass_core.model.test_catalogue import save
from tests.models import VOCAB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("target") / "model")


def test_a_folder_with_a_draft_head_is_a_draft(folder: Path, tmp_path: Path) -> None:
    target = load_pair(str(folder), device="cpu", dtype="float32").target
    head = DraftHead(target, HeadConfig(1, target.config.hidden_size), torch.arange(VOCAB // 2))
    head.save(tmp_path / "head")
    pair = load_pair(str(folder), draft=str(tmp_path / "head"), device="cpu", dtype="float32")
    assert isinstance(pair.draft, DraftHead) and len(pair.draft.vocabulary) == VOCAB // 2


@pytest.mark.parametrize("zero", [False, True])
def test_a_head_takes_its_rows_on_the_host_and_before_they_are_quantised(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero: bool
) -> None:
    """A quantized weight has no rows to take; on ZeroGPU the device, here torch's "meta", holds no numbers yet."""
    target = load_pair(str(folder), device="cpu", dtype="float32").target
    DraftHead(target, HeadConfig(1, target.config.hidden_size), torch.arange(VOCAB // 2)).save(tmp_path / "head")
    done: list[tuple[str, str]] = []
    real = catalogue.load_draft_head

    def load_head(folder: Path, target: Any) -> Any:
        done.append(("rows", target.device.type))
        return real(folder, target)

    monkeypatch.setattr(catalogue, "load_draft_head", load_head)
    monkeypatch.setattr(quantized, "quantise_model", lambda model, *_: done.append(("int8", model.device.type)))
    if zero:
        monkeypatch.setenv("SPACES_ZERO_GPU", "true")
        monkeypatch.setattr(catalogue, "pick_device", lambda device: torch.device("meta"))
    pair = load_pair(str(folder), draft=str(tmp_path / "head"), device="cpu", dtype="float32" if zero else "int8")
    assert done == [("rows", "cpu"), ("int8", "cpu")][: 1 if zero else 2]
    parts = [pair.target, pair.draft, pair.draft.body]
    assert {weight.device.type for part in parts for weight in part.parameters()} == {"meta" if zero else "cpu"}
    shared = pair.target.get_input_embeddings().weight
    assert pair.draft.embedding.untyped_storage()._cdata == shared.untyped_storage()._cdata


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_head_keeps_its_rows_and_reads_the_quantised_embedding(folder: Path, tmp_path: Path, dtype: str) -> None:
    plain = load_pair(str(folder), device="cpu").target
    DraftHead(plain, HeadConfig(1, plain.config.hidden_size), torch.arange(VOCAB // 2)).save(tmp_path / "head")
    pair = load_pair(str(folder), draft=str(tmp_path / "head"), device="cpu", dtype=dtype)
    head, table = pair.draft, pair.target.get_input_embeddings()
    assert torch.equal(head.body.lm_head.weight, plain.get_output_embeddings().weight[: VOCAB // 2])
    assert head.embedding is None and head.quantized is table.quantized and not is_quantized(head)
    out = generate(pair, [[1, 2, 3]], method="bass", drafter="model", max_new_tokens=6, eos_token_id=None)
    assert len(out.sequences[0].token_ids) == 6 and out.metrics.drafted > 0

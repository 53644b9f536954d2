"""A corpus is written, and a head trained on it, on an emulated device: nothing stays on the CPU by mistake."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map_only

from bass_core import ModelPair, stream
from bass_core.model.draft_head import load_draft_head
from distill.batches import Reader, load_rows
from distill.corpus import shards, write_corpus
from distill.train import train

from ..distill.conftest import chatting_pair, small_settings
from .emulation import ledger

pytestmark = pytest.mark.slow


def test_the_device_writes_and_trains_as_the_cpu_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The emulated device's storages can't be pickled, as those of a GPU can.
    real = torch.save
    monkeypatch.setattr(
        torch, "save", lambda state, path: real(tree_map_only(torch.Tensor, torch.Tensor.cpu, state), path)
    )
    settings = small_settings()
    greedy = replace(settings.corpus, temperatures=[0.0], conversations=4, layers=None)
    settings = replace(settings, corpus=greedy, train=replace(settings.train, own_states=2, qk_norm=True))
    texts, overlaps, drafts = tmp_path / "cpu", [], []
    for device in ("cpu", "emul"):
        pair, folder = chatting_pair(device), tmp_path / device
        write_corpus(pair, settings, folder, 80)
        for row in load_rows(shards(folder)):
            expected = pair.target.cpu()(row.tokens[None]).logits[0].argmax(-1)
            assert torch.equal(row.tokens[1:][row.scored[:-1]], expected[row.scored]), device
        pair.target.to(device)
        train(pair, settings, texts, folder / "head", 2)
        log = train(pair, settings, texts, folder / "head", 3)
        overlaps.append([entry[1:] for entry in log["overlap"]])
        # Of the CPU's head, because the device rounds differently in training.
        head = load_draft_head(texts / "head", pair.target)
        assert head.vocabulary.device.type == device and head.config.qk_norm
        rounds = stream(
            ModelPair(pair.target, head, pair.tokenizer), "say", draft_length=2, drafter="model", max_new_tokens=8
        )
        drafts.append([row.drafted for round_ in rounds for row in round_.rows])
        assert Reader(pair, (0, 1), 60)(load_rows(shards(texts))[:2]).states.device.type == device
    assert not ledger.races
    assert drafts[0] == drafts[1] and sum(map(len, drafts[0])) > 3
    torch.testing.assert_close(torch.tensor(overlaps[0]), torch.tensor(overlaps[1]), atol=2e-3, rtol=0)

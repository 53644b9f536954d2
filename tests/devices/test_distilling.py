"""A corpus is written, and a head trained on it, on an emulated device: nothing stays on the CPU by mistake."""

from __future__ import annotations

import subprocess
import sys
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
from tests.support import ROOT

from ..distill.conftest import chatting_pair, small_settings
from .emulation import emulated, ledger  # noqa: F401  registers the device


@pytest.mark.slow
def test_the_device_writes_and_trains_as_the_cpu_does(tmp_path: Path) -> None:
    """In a separate process: autograd knows only devices that were registered before its first backward pass."""
    command = [sys.executable, "-m", "tests.devices.test_distilling", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def compare(work: Path) -> None:
    """Write, train and draft on both devices, below a folder."""
    settings = small_settings()
    greedy = replace(settings.corpus, temperatures=[0.0], conversations=4, layers=None)
    settings = replace(settings, corpus=greedy, train=replace(settings.train, own_states=2, qk_norm=True))
    texts, overlaps, drafts = work / "cpu", [], []
    for device in ("cpu", "emul"):
        pair, folder = chatting_pair(device), work / device
        write_corpus(pair, settings, folder, 80)
        for row in load_rows(shards(folder)):
            expected = pair.target.cpu()(row.tokens[None]).logits[0].argmax(-1)
            assert torch.equal(row.tokens[1:][row.scored[:-1]], expected[row.scored]), device
        pair.target.to(device)
        train(pair, settings, texts, folder / "head", 2)
        log = train(pair, settings, texts, folder / "head", 3)
        overlaps.append([entry[1:] for entry in log["overlap"]])
        assert Reader(pair, (0, 1), 60)(load_rows(shards(texts))[:2]).states.device.type == device
        # The CPU's head, because the device may round differently in training.
        head = load_draft_head(texts / "head", pair.target)
        assert head.vocabulary.device.type == device and head.config.qk_norm
        drafting = ModelPair(pair.target, head, pair.tokenizer)
        rounds = stream(drafting, "say", draft_length=2, drafter="model", max_new_tokens=8)
        drafts.append([row.drafted for round_ in rounds for row in round_.rows])
    assert not ledger.races
    assert drafts[0] == drafts[1] and sum(map(len, drafts[0])) > 3
    torch.testing.assert_close(torch.tensor(overlaps[0]), torch.tensor(overlaps[1]), atol=2e-3, rtol=0)


if __name__ == "__main__":
    save = torch.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bass_core.lanes.generate.warm_up", lambda pair, request: None)
        # A GPU's tensors can be pickled, those of the emulated device can't.
        on_cpu = (torch.Tensor, torch.Tensor.cpu)
        patch.setattr(torch, "save", lambda state, path: save(tree_map_only(*on_cpu, state), path))
        compare(Path(sys.argv[1]))

"""One row has pending text longer than a chunk, while another row has little."""

from __future__ import annotations

import torch

from bass_core.draft import pending
from bass_core.draft.pending import feed_pending
from bass_core.model.cache import RaggedCache
from bass_core.model.forward import ForwardBatch, ForwardOutput
from bass_core.model.runner import ModelRunner

VOCAB = 8


class OneBuffer:
    """A model whose forwards share one logits buffer; the logits are the one-hot of each row's chosen token."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.logits = torch.zeros(4, VOCAB)

    def forward(self, batch: ForwardBatch, cache: RaggedCache, backend: str) -> ForwardOutput:
        assert batch.wanted_columns is not None
        chosen = batch.tokens[torch.arange(len(batch.tokens)), batch.wanted_columns]
        logits = self.logits[: len(chosen)]
        return ForwardOutput(logits.zero_().scatter_(1, chosen[:, None], 1.0))


def test_a_short_row_keeps_its_logits_while_a_longer_one_is_fed(monkeypatch):
    monkeypatch.setattr(pending, "CHUNK", 2)
    model = OneBuffer()
    runner = ModelRunner(model, 2, 16, VOCAB, "pad", cache=RaggedCache(1, 2, 16, 1, 2, torch.float32))
    ids = torch.tensor([[1, 0, 0, 0, 0], [2, 3, 4, 5, 6]])
    logits, _, forwards = feed_pending(runner, ids, [0, 0], [1, 5])
    assert forwards == 3
    assert logits.argmax(-1).tolist() == [1, 6]

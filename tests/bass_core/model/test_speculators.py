"""EAGLE-3 heads against the library that defines their format, where it is installed (`speculators` on PyPI).

test_eagle.py compares our drafts with `expected_logits`; here `expected_logits` is compared with their model.
"""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from tests.bass_core.model.test_eagle import HEADS, READS, expected_logits
from tests.support.models import eagle_parts, prompts, tiny

eagle3 = pytest.importorskip("speculators.models.eagle3")
DRAFTS = 3


@pytest.mark.parametrize("name", HEADS)
def test_a_chains_logits_equal_those_of_speculators(name: str) -> None:
    target = tiny("llama", layers=6)
    flags = {"layers": 1, **HEADS[name]}
    parts = eagle_parts(target, READS, **flags)
    text, vocab = prompts(1)[0] * 2, target.config.vocab_size
    shape = parts[0].layers.to_dict() | {"vocab_size": vocab, "rms_norm_eps": 1e-6, "head_dim": 16}
    for field in ("model_type", "architectures"):
        shape.pop(field, None)
    config = (tf.Qwen3Config if flags.get("head_norms") else tf.LlamaConfig)(**shape)
    config._attn_implementation = "eager"
    norms = {
        flag: flags.get(flag, False)
        for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    model = eagle3.Eagle3DraftModel(
        eagle3.Eagle3SpeculatorConfig(
            transformer_layer_config=config, draft_vocab_size=len(parts[1]),
            eagle_aux_hidden_state_layer_ids=list(READS), **norms,
        )
    ).float()  # fmt: skip
    table = {"embed_tokens.weight": target.get_input_embeddings().weight}
    left = model.load_state_dict(table | parts[2], strict=False)
    assert not left.unexpected_keys and all("verifier" in key or "2" in key for key in left.missing_keys)
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda *call: logits.append(call[-1][0]))
    with torch.no_grad():
        streams = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        ids = torch.tensor([text[1:]])
        read = torch.cat([streams[layer] for layer in READS], dim=-1)
        model(hidden_states=read, input_ids=ids, document_ids=torch.zeros_like(ids), ttt_steps=DRAFTS)
        for place in range(2, len(text) - DRAFTS):
            ours = expected_logits(target, parts, text[:place], text[place : place + DRAFTS])
            theirs = torch.stack([each[place - 2] for each in logits])
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)

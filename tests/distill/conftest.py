"""A tiny random target, with weights scaled up so that its hidden states vary, and a corpus of its texts."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bass_core import ModelPair
from distill.corpus import write_corpus
from distill.settings import load

from ..models import byte_tokenizer


@pytest.fixture(scope="session")
def pair():
    torch.manual_seed(3)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(6)
    return ModelPair(model, None, tokenizer)


@pytest.fixture(scope="session")
def settings():
    loaded = load()
    return replace(
        loaded,
        corpus=replace(loaded.corpus, rows=4, own_share=0.0, max_new_tokens=16, layers=[0, 1]),
        train=replace(
            loaded.train,
            vocabulary=128,
            tokens_per_step=512,
            longest_row=128,
            warmup_steps=2,
            learning_rate=0.003,
            held_out_shards=1,
        ),
    )


@pytest.fixture(scope="session")
def corpus(pair, settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    assert write_corpus(pair, settings, folder, 180) >= 180
    return folder

"""A tiny random target, with weights scaled up so that its hidden states vary, and a corpus of its texts."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bass_core import ModelPair
from distill.corpus import write_corpus
from distill.settings import load
from tests.support.models import byte_tokenizer

END = 2.5


@pytest.fixture(scope="session")
def pair():
    torch.manual_seed(3)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for turn in messages %}<s>{{ turn.role[0] }}{{ turn.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>a{% endif %}"
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(6)
    # Some of its turns end by themselves.
    model.lm_head.weight[tokenizer.eos_token_id] *= END
    return ModelPair(model, None, tokenizer)


@pytest.fixture(scope="session")
def settings():
    loaded = load()
    # What the tests count on does not change with the recipe.
    small = replace(loaded.corpus, conversations=8, rows=3, max_new_tokens=16, longest_row=400, layers=[0, 1])
    return replace(
        loaded,
        seed=40,
        corpus=replace(small, temperatures=[0.0, 0.7, 1.0]),
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

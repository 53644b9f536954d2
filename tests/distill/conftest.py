"""A tiny random target, scaled so that its hidden states vary, and a corpus of its texts."""

from dataclasses import replace

import pytest

from bass_core import ModelPair
from distill.corpus import shards, write_corpus
from distill.settings import load
from tests.support.models import byte_tokenizer, tiny

END_TOKEN_FACTOR = 2.5


@pytest.fixture(scope="session")
def pair():
    return chatting_pair()


def chatting_pair(device="cpu"):
    """Return the target, whose tokenizer has a chat template, on a device."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for turn in messages %}<s>{{ turn.role[0] }}{{ turn.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>a{% endif %}"
    )
    model = tiny("llama", seed=3, scale=6, vocab_size=len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    # Makes some turns end before the limit.
    model.lm_head.weight[tokenizer.eos_token_id] *= END_TOKEN_FACTOR
    return ModelPair(model.to(device), None, tokenizer)


@pytest.fixture(scope="session")
def settings():
    return small_settings()


def small_settings():
    """Return the settings of config.json, made small for the target."""
    loaded = load()
    # The tests do not depend on the recipe in config.json.
    corpus_settings = replace(
        loaded.corpus, conversations=8, rows=3, max_new_tokens=16, longest_row=400, layers=[0, 1]
    )
    return replace(
        loaded,
        seed=40,
        corpus=replace(corpus_settings, temperatures=[0.0, 0.7, 1.0]),
        train=replace(
            loaded.train,
            vocabulary=128,
            tokens_per_step=512,
            longest_row=128,
            warmup_steps=2,
            learning_rate=0.003,
            held_out_shards=1,
            reads_layers=[0, 1],
        ),
    )


@pytest.fixture(scope="session")
def corpus(pair, settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    assert write_corpus(pair, settings, folder, 180) >= 180
    return folder


@pytest.fixture(scope="session")
def ids_only(pair, settings, corpus, tmp_path_factory):
    """The same corpus without states."""
    folder = tmp_path_factory.mktemp("ids")
    write_corpus(pair, replace(settings, corpus=replace(settings.corpus, layers=None)), folder, 180)
    assert [path.name for path in shards(folder)] == [path.name for path in shards(corpus)]
    return folder

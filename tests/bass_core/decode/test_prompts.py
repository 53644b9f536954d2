"""Texts and conversations are encoded with the tokenizer's chat template, and its errors are quoted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bass_core import ModelPair, RequestError, count_tokens, generate
from bass_core.decode.prompts import Chat, encode_prompts
from tests.support.models import byte_tokenizer, tiny

CHAT = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}[answer{% if enable_thinking is defined and not enable_thinking %}, quick"
    "{% endif %}]{% endif %}"
)
PARTS = "{% for message in messages %}{% for part in message.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]


@pytest.fixture(scope="module")
def model() -> Any:
    llama = tiny("llama")
    llama.resize_token_embeddings(258)
    return llama


def pair_of(model: Any, template: Any) -> ModelPair:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return ModelPair(model, None, tokenizer)


def read(pair: ModelPair, prompt: Any, **chat: Any) -> str:
    return str(pair.tokenizer.decode(encode_prompts(pair, prompt, 1, Chat(**chat))[0]))


def test_a_conversation_a_system_message_and_variables_reach_the_template(model: Any):
    pair = pair_of(model, CHAT)
    assert read(pair, "Hi") == "[user]Hi[answer]"
    assert read(pair, "Hi", system="Be brief.") == "[system]Be brief.[user]Hi[answer]"
    assert read(pair, "Hi", variables={"enable_thinking": False}) == "[user]Hi[answer, quick]"
    assert read(pair, TALK) == "[system]Be brief.[user]Hi[assistant]Hello.[user]Bye[answer]"
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    assert read(pair, TALK[:3], variables=continued) == "[system]Be brief.[user]Hi[assistant]Hello."
    assert read(pair, "Hi", raw=True) == "Hi"
    assert count_tokens(pair, "Hi", "Be brief.") == len("[system]Be brief.[user]Hi[answer]")
    assert count_tokens(pair, TALK) == len(read(pair, TALK))


def test_each_row_may_have_its_own_conversation(model: Any):
    pair = pair_of(model, CHAT)
    options: Any = {"max_new_tokens": 4, "eos_token_id": None, "method": "regular"}
    together = generate(pair, [TALK, "Hi", [5, 6, 7]], **options).sequences
    separate = [generate(pair, prompt, **options).sequences[0] for prompt in (TALK, "Hi", [5, 6, 7])]
    assert [row.token_ids for row in together] == [row.token_ids for row in separate]
    assert len(generate(pair, TALK, n=2, **options).sequences) == 2
    spelled = [{"role": "user", "content": "Hi"}]
    quick = generate(pair, spelled, chat_template_kwargs={"enable_thinking": False}, **options)
    ids = encode_prompts(pair, "Hi", 1, Chat(variables={"enable_thinking": False}))[0]
    assert quick.sequences[0].token_ids == generate(pair, ids, **options).sequences[0].token_ids


def test_a_template_that_reads_parts_gets_parts(model: Any):
    for template in (PARTS, PARTS.replace("part.text", "part['text'] | trim")):
        assert read(pair_of(model, template), "hello") == "<hello>"
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert read(pair_of(model, PARTS), parts) == "<hello>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Only user messages, please.') }}", "Only user messages, please."),
        ("{{ nothing.of.it }}", "'nothing' is undefined."),
        ("{{ 1 / 0 }}", "division by zero."),
        ("{% if %}", "Expected an expression"),
        ({"tool": CHAT, "plain": CHAT}, "multiple chat templates"),
    ],
)
def test_a_templates_error_is_quoted_in_one_sentence(model: Any, template: Any, message: str):
    pair = pair_of(model, template)
    for ask in (lambda: generate(pair, "Hi"), lambda: count_tokens(pair, "Hi"), lambda: generate(pair, TALK)):
        with pytest.raises(RequestError, match=r"The chat template refuses this prompt \(.*\): change") as refusal:
            ask()
        assert message.rstrip(".") in str(refusal.value) and "\n" not in str(refusal.value)


def test_one_of_several_templates_can_be_named(model: Any):
    pair = pair_of(model, {"tool": CHAT, "plain": "{{ messages[0].content }}"})
    assert read(pair, "Hi", variables={"chat_template": "plain"}) == "Hi"


@pytest.mark.parametrize("templates", [CHAT, {"tool": CHAT, "plain": CHAT}])
def test_a_template_given_as_code_is_refused(model: Any, templates: Any):
    for chosen in ("{{ 6 * 7 }}", "", ["tool"], {"tool": CHAT}):
        with pytest.raises(RequestError, match="chat_template names one of a tokenizer's own templates"):
            read(pair_of(model, templates), "Hi", variables={"chat_template": chosen})


def test_a_conversation_of_many_rows_is_templated_once(model: Any, monkeypatch: pytest.MonkeyPatch):
    pair = pair_of(model, CHAT)
    once = encode_prompts(pair, TALK, 1, Chat())
    calls: list[Any] = []
    apply = pair.tokenizer.apply_chat_template
    monkeypatch.setattr(
        pair.tokenizer, "apply_chat_template", lambda *a, **k: calls.append(a) or apply(*a, **k), raising=False
    )
    rows = encode_prompts(pair, TALK, 3, Chat())
    assert rows == once * 3 and len(calls) == 2  # one call returns text, the other token ids
    assert rows[0] is not rows[1]


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no role": ([{"content": "Hi"}], {}, "Each message needs a role"),
    "no content": ([{"role": "user"}], {}, r"Each message needs a role and a content, .*; got \{'role': 'user'\}"),
    "a tensor": (torch.tensor([5, 6]), {}, r"got Tensor: pass its tolist\(\)\."),
    "an array in a list": ([np.array([5, 6])], {}, r"got ndarray: pass its tolist\(\)\."),
    "booleans": ([True, False], {}, "got list with bool"),
    "a number as system": ("Hi", {"system": 3}, "system must be a text"),
    "variables that are a number": ("Hi", {"chat_template_kwargs": 3}, "must be a dictionary"),
    "a variable that we set": ("Hi", {"chat_template_kwargs": {"tokenize": False}}, "can't set tokenize"),
    "raw and system": ("Hi", {"raw": True, "system": "S"}, "raw leaves the chat template out"),
    "raw messages": (TALK, {"raw": True}, "these are messages"),
    "system and messages": (TALK, {"system": "S"}, "these are messages"),
    "half a letter in a message": ([{"role": "user", "content": "\ud800"}], {}, "half a character"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_conversations_and_options_are_refused(model: Any, case: str):
    prompt, options, message = BAD[case]
    with pytest.raises(RequestError, match=message):
        generate(pair_of(model, CHAT), prompt, **options)


def test_without_a_template_a_conversation_is_refused(model: Any):
    bare = ModelPair(model, None, byte_tokenizer())
    for prompt, options in ((TALK, {}), ("Hi", {"system": "S"})):
        with pytest.raises(RequestError, match="no chat template"):
            generate(bare, prompt, **options)

"""Prompts as token ids: texts, ids and conversations, by the tokenizer and its chat template.

Contract: whatever a tokenizer or a template raises becomes a RequestError of one sentence that quotes it. A text
is a user's message and goes through the chat template where there is one. A special token that is spelled in a
text becomes that token, as in transformers. Nothing here runs a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from ..model.pair import ModelPair

# What apply_chat_template is asked here, and nobody else may ask otherwise.
_OURS = ("conversation", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length")


@dataclass(frozen=True)
class Chat:
    """How texts become conversations: see `system`, `chat_template_kwargs` and `raw` of Options."""

    system: str | None = None
    variables: Mapping[str, Any] | None = None
    raw: bool = False

    def __post_init__(self) -> None:
        if self.system is not None and not isinstance(self.system, str):
            raise RequestError(f"system must be a text, or None; got {self.system!r}.")
        given = self.variables
        if given is not None and not (isinstance(given, Mapping) and all(isinstance(one, str) for one in given)):
            raise RequestError(f"chat_template_kwargs must be a dictionary of names, or None; got {given!r}.")
        for name in given or ():
            if name in _OURS:
                raise RequestError(f"chat_template_kwargs can't set {name}, which is set here: leave it out.")
        if self.raw and (self.system or given):
            raise RequestError(
                "raw leaves the chat template out, and system and chat_template_kwargs are for it: leave them out."
            )


def encode_prompts(pair: ModelPair, prompt: str | Seq[Any], n: int, chat: Chat) -> list[list[int]]:
    """The prompts as token ids, one list per row; what several rows share is made once."""
    keyed = [(one if isinstance(one, str) else id(one), one) for one in _listed(prompt, n)]
    made = {key: _encode(pair, one, chat) for key, one in dict(keyed).items()}
    for one in made.values():
        _check_prompt(pair, one)
    return [list(made[key]) for key, _ in keyed]


def count_tokens(pair: ModelPair, prompt: str | Seq[Mapping[str, Any]], system: str | None = None) -> int:
    """Tokens of a text or a conversation as a prompt, the chat template's and a system message's included.

    Raises RequestError as a request with this prompt would: for an empty one, and one too long for the model.
    """
    return len(encode_prompts(pair, prompt, 1, Chat(system))[0])


def _listed(prompt: str | Seq[Any], n: int) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt] * n
    if not isinstance(prompt, list | tuple):
        kind = type(prompt).__name__
        raise RequestError(f"The prompt must be text, token ids, messages, or a list of such; got {kind}.")
    if not prompt:
        raise RequestError("The prompt is empty: write one, as text, as token ids, or as a list of either.")
    if all(isinstance(token, int) for token in prompt):
        return [list(prompt)] * n
    if all(isinstance(one, Mapping) for one in prompt):
        return [list(prompt)] * n
    if n not in (1, len(prompt)):
        raise RequestError(f"n is {n} but {len(prompt)} prompts were given: leave n out.")
    return list(prompt)


def _encode(pair: ModelPair, prompt: Any, chat: Chat) -> list[int]:
    if isinstance(prompt, str):
        check_text(prompt)
        if pair.tokenizer is None:
            raise RequestError("This pair has no tokenizer: give the prompt as a list of token ids.")
        if chat.raw or not getattr(pair.tokenizer, "chat_template", None):
            if chat.system or chat.variables:
                raise _no_template("system and chat_template_kwargs")
            return _tokenized(pair.tokenizer, prompt)
        before = [{"role": "system", "content": chat.system}] if chat.system else []
        return _templated(pair.tokenizer, [*before, {"role": "user", "content": prompt}], chat)
    if isinstance(prompt, list | tuple) and prompt and all(isinstance(one, Mapping) for one in prompt):
        _check_messages(pair, prompt, chat)
        return _templated(pair.tokenizer, [dict(one) for one in prompt], chat)
    if not isinstance(prompt, list | tuple) or not all(type(token) is int for token in prompt):
        raise RequestError(
            f"A prompt must be text, a list of token ids, or a list of messages; got {type(prompt).__name__}."
        )
    return list(prompt)


def _check_messages(pair: ModelPair, messages: Seq[Mapping[str, Any]], chat: Chat) -> None:
    for one in messages:
        if not isinstance(one.get("role"), str):
            raise RequestError(f'Each message needs a role, as {{"role": "user", "content": "..."}}; got {one!r}.')
    if pair.tokenizer is None:
        raise RequestError("This pair has no tokenizer: give the prompt as a list of token ids.")
    if chat.raw or chat.system:
        raise RequestError("raw and system are for prompts that are text, and these are messages: leave them out.")
    if not getattr(pair.tokenizer, "chat_template", None):
        raise _no_template("messages")


def _no_template(what: str) -> RequestError:
    return RequestError(f"This tokenizer has no chat template, which {what} need: give the prompt as one text.")


def _tokenized(tokenizer: Any, text: str) -> list[int]:
    try:
        return list(tokenizer(text)["input_ids"])
    except Exception as error:
        raise RequestError(f"The tokenizer can't read this prompt: {_first_line(error)}") from error


def _templated(tokenizer: Any, messages: list[dict[str, Any]], chat: Chat) -> list[int]:
    """The ids of a conversation. A template that reads no plain content gets it as a list of parts."""
    _check_template(tokenizer, chat.variables or {})
    options = {"add_generation_prompt": True, **(chat.variables or {}), "return_dict": False}
    for one in messages:
        for text in _texts(one.get("content")):
            _check_letters(text)

    def rendered(content: list[dict[str, Any]]) -> str:
        return str(tokenizer.apply_chat_template(content, tokenize=False, **options))

    newest = next(iter(_texts(messages[-1].get("content"))), "").strip()
    try:
        if newest not in rendered(messages):
            messages = _in_parts(messages, rendered, newest) or messages
    except Exception as error:
        parts = _in_parts(messages, rendered, newest)
        if parts is None:
            raise _refused(error) from error
        messages = parts
    try:
        return list(tokenizer.apply_chat_template(messages, tokenize=True, **options))
    except Exception as error:
        raise _refused(error) from error


def _check_template(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Accept the name of one of several templates. Anything else transformers would run as a template."""
    if variables.get("chat_template") is None:
        return
    known = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if variables["chat_template"] not in list(known):
        offered = f"one of {', '.join(sorted(known))}" if known else "left out: this tokenizer has one alone"
        raise RequestError(f"chat_template names one of a tokenizer's own templates: it must be {offered}.")


def _in_parts(
    messages: list[dict[str, Any]], rendered: Callable[[list[dict[str, Any]]], str], newest: str
) -> list[dict[str, Any]] | None:
    """The messages with their contents as parts, if the template then shows the newest text; None if not.

    A template that knows no parts may print them as Python's or JSON's list, which is not the text.
    """
    parts = [one | {"content": _parts(one["content"])} if "content" in one else one for one in messages]
    try:
        text = rendered(parts)
        printed = any(form in text and form not in newest for form in ("'type': 'text'", '"type": "text"'))
        return parts if newest in text and not printed else None
    except Exception:
        return None


def _refused(error: Exception) -> RequestError:
    return RequestError(f"The chat template refuses this prompt: {_first_line(error)}")


def _texts(content: Any) -> list[str]:
    """The texts of a message's content, which is a text or a list of parts."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list | tuple) else ()
    return [one["text"] for one in parts if isinstance(one, Mapping) and isinstance(one.get("text"), str)]


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def check_text(prompt: str) -> None:
    """Refuse, with a RequestError, a text that is blank or that no tokenizer reads."""
    if not prompt.strip():
        raise RequestError("The prompt is empty: write something for the model to answer.")
    _check_letters(prompt)


def _check_letters(text: str) -> None:
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise RequestError("The prompt holds half a character (a lone surrogate): write that place anew.")


def _first_line(error: Exception) -> str:
    """What an error says, in a sentence's form."""
    lines = str(error).strip().splitlines()
    said = lines[0][:300].rstrip(". ") if lines else type(error).__name__
    return f"{said}."


def _check_prompt(pair: ModelPair, ids: list[int]) -> None:
    if not ids:
        raise RequestError("The prompt is empty: write something for the model to answer.")
    if len(ids) >= pair.context_length:
        raise RequestError(
            f"The prompt has {len(ids)} tokens and the model holds {pair.context_length}, answer included: "
            "shorten the prompt."
        )
    if min(ids) < 0 or max(ids) >= pair.vocab:
        raise RequestError(f"Token ids must be from 0 to {pair.vocab - 1}; got {min(ids)} to {max(ids)}.")

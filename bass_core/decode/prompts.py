"""Prompts as token ids: texts, ids and conversations, by the tokenizer and its chat template.

A text is a user's message and goes through the chat template if there is one. A special token spelled in a text
becomes that token, as in transformers. Errors of a tokenizer or a template become a RequestError that quotes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError, is_failure
from ..model.pair import ModelPair

# Arguments of apply_chat_template that this module sets itself, so users can't set them.
_OURS = ("conversation", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length")


@dataclass(frozen=True)
class Chat:
    """How texts become conversations."""

    system: str | None = None
    variables: Mapping[str, Any] | None = None
    raw: bool = False

    def __post_init__(self) -> None:
        if self.system is not None and not isinstance(self.system, str):
            raise RequestError(f"system must be a text, or None; got {self.system!r}.")
        variables = self.variables
        if variables is not None and not (
            isinstance(variables, Mapping) and all(isinstance(key, str) for key in variables)
        ):
            raise RequestError(f"chat_template_kwargs must be a dictionary of names, or None; got {variables!r}.")
        for name in variables or ():
            if name in _OURS:
                raise RequestError(f"chat_template_kwargs can't set {name}, which is set here: leave it out.")
        if self.raw and (self.system or variables):
            raise RequestError(
                "raw leaves the chat template out, and system and chat_template_kwargs need it: leave them out."
            )


def encode_prompts(pair: ModelPair, prompt: str | Seq[Any], n: int, chat: Chat) -> list[list[int]]:
    """Return the prompts as token ids, one list per row; a prompt of several rows is encoded once.

    Raises:
        RequestError: if a prompt can't be encoded, is empty or is too long for the model.
    """
    keyed = [(item if isinstance(item, str) else id(item), item) for item in _prompt_per_row(prompt, n)]
    items = dict(keyed)
    ids_by_key = {key: _encode(pair, item, chat) for key, item in items.items()}
    for key, ids in ids_by_key.items():
        _check_prompt(pair, ids, tokenized=ids != list(items[key]))
    return [list(ids_by_key[key]) for key, _ in keyed]


def count_tokens(pair: ModelPair, prompt: str | Seq[Mapping[str, Any]], system: str | None = None) -> int:
    """Return the number of tokens of a text or a conversation, with the chat template and a system message.

    Raises:
        RequestError: if `generate` would refuse this prompt, e.g. because it is empty or too long for the model.
    """
    return len(encode_prompts(pair, prompt, 1, Chat(system))[0])


def _prompt_per_row(prompt: str | Seq[Any], n: int) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt] * n
    if not isinstance(prompt, list | tuple):
        raise RequestError(
            f"The prompt must be text, token ids, messages, or a list of these; got {_kind(prompt)}."
        )
    if not prompt:
        raise RequestError("The prompt is empty: write one, as text, as token ids, or as a list of either.")
    if all([isinstance(token, int) for token in prompt]):
        return [list(prompt)] * n
    if all([isinstance(item, Mapping) for item in prompt]):
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
                raise _missing_template("system and chat_template_kwargs")
            return _tokenized(pair.tokenizer, prompt)
        before = [{"role": "system", "content": chat.system}] if chat.system else []
        return _templated(pair.tokenizer, [*before, {"role": "user", "content": prompt}], chat)
    if isinstance(prompt, list | tuple) and prompt and all(isinstance(message, Mapping) for message in prompt):
        _check_messages(pair, prompt, chat)
        return _templated(pair.tokenizer, [dict(message) for message in prompt], chat)
    if not isinstance(prompt, list | tuple) or not set(map(type, prompt)) <= {int}:
        raise RequestError(
            f"A prompt must be text, a list of token ids, or a list of messages; got {_kind(prompt)}."
        )
    return list(prompt)


def _kind(value: Any) -> str:
    """Return a value's type for a message, with the way from an array to a list."""
    items = value if isinstance(value, list | tuple) else ()
    other = next((item for item in items if type(item) is not int), None)
    name = type(value).__name__ + (f" with {type(other).__name__}" if items else "")
    return f"{name}: pass its tolist()" if hasattr(value, "tolist") else name


def _check_messages(pair: ModelPair, messages: Seq[Mapping[str, Any]], chat: Chat) -> None:
    for message in messages:
        # Messages of tool calls may have no content.
        if not isinstance(message.get("role"), str) or len(message) < 2:
            raise RequestError(
                'Each message needs a role and a content, as {"role": "user", "content": "..."}; got '
                f"{message!r}."
            )
    if pair.tokenizer is None:
        raise RequestError("This pair has no tokenizer: give the prompt as a list of token ids.")
    if chat.raw or chat.system:
        raise RequestError("raw and system are for prompts that are text, and these are messages: leave them out.")
    if not getattr(pair.tokenizer, "chat_template", None):
        raise _missing_template("messages")


def _missing_template(feature: str) -> RequestError:
    return RequestError(f"This tokenizer has no chat template, which {feature} need: give the prompt as one text.")


def _tokenized(tokenizer: Any, text: str) -> list[int]:
    try:
        with _panics_as_errors():
            return list(tokenizer(text)["input_ids"])
    except Exception as error:
        raise RequestError(f"The tokenizer can't read this prompt: {_first_line(error)}") from error


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Raise a RuntimeError for a panic in a library written in Rust, which is no Exception."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or not is_failure(error):
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _templated(tokenizer: Any, messages: list[dict[str, Any]], chat: Chat) -> list[int]:
    """Return the ids of a conversation. If the template loses plain texts, pass them as lists of parts."""
    _check_template(tokenizer, chat.variables or {})
    options = {"add_generation_prompt": True, **(chat.variables or {}), "return_dict": False}
    for message in messages:
        for text in _texts(message.get("content")):
            _check_surrogates(text)

    def rendered(content: list[dict[str, Any]]) -> str:
        with _panics_as_errors():
            return str(tokenizer.apply_chat_template(content, tokenize=False, **options))

    newest = next(iter(_texts(messages[-1].get("content"))), "").strip()
    try:
        if newest not in rendered(messages):
            messages = _in_parts(messages, rendered, newest) or messages
    except Exception as error:
        parts = _in_parts(messages, rendered, newest)
        if parts is None:
            raise _template_error(error) from error
        messages = parts
    try:
        with _panics_as_errors():
            return list(tokenizer.apply_chat_template(messages, tokenize=True, **options))
    except Exception as error:
        raise _template_error(error) from error


def _check_template(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Accept only names of the tokenizer's own templates; transformers would run any other text as a template."""
    if variables.get("chat_template") is None:
        return
    templates = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if variables["chat_template"] not in list(templates):
        offered = (
            f"one of {', '.join(sorted(templates))}" if templates else "left out: this tokenizer has only one"
        )
        raise RequestError(f"chat_template names one of a tokenizer's own templates: it must be {offered}.")


def _in_parts(
    messages: list[dict[str, Any]], rendered: Callable[[list[dict[str, Any]]], str], newest: str
) -> list[dict[str, Any]] | None:
    """Return the messages with contents as parts; None if the template prints no text, or prints a list."""
    parts = [
        message | {"content": _parts(message["content"])} if "content" in message else message
        for message in messages
    ]
    try:
        text = rendered(parts)
        printed = any(form in text and form not in newest for form in ("'type': 'text'", '"type": "text"'))
        return parts if newest in text and not printed else None
    except Exception:
        return None


def _template_error(error: Exception) -> RequestError:
    return RequestError(
        f"The chat template refuses this prompt ({_first_line(error).rstrip('.')}): change the roles or contents "
        "of its messages, or give one text with raw=True."
    )


def _texts(content: Any) -> list[str]:
    """Return the texts of a message's content, which is a text or a list of parts."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list | tuple) else ()
    return [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def check_text(prompt: str) -> None:
    """Raise RequestError if the text is blank, or if no tokenizer can read it."""
    if not prompt.strip():
        raise RequestError("The prompt is empty: write something for the model to answer.")
    _check_surrogates(prompt)


def _check_surrogates(text: str) -> None:
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise RequestError(
            "The prompt contains an unpaired surrogate (half a character): delete it and retype it."
        )


def _first_line(error: Exception) -> str:
    """Return the first line of an error, with a full stop."""
    lines = str(error).strip().splitlines()
    first = lines[0][:300].rstrip(". ") if lines else type(error).__name__
    return f"{first}."


def _check_prompt(pair: ModelPair, ids: list[int], tokenized: bool) -> None:
    if not ids:
        raise RequestError("The prompt is empty: write something for the model to answer.")
    if len(ids) >= pair.context_length:
        raise RequestError(
            f"The prompt has {len(ids)} tokens and the model holds {pair.context_length}, answer included: "
            "shorten the prompt."
        )
    if tokenized and max(ids) >= pair.vocab:
        raise RequestError(
            f"The tokenizer made token {max(ids)} of this prompt, and the model knows 0 to {pair.vocab - 1}: "
            "use the model's own tokenizer, or resize the model's embeddings and make a new pair."
        )
    if min(ids) < 0 or max(ids) >= pair.vocab:
        raise RequestError(f"Token ids must be from 0 to {pair.vocab - 1}; got {min(ids)} to {max(ids)}.")

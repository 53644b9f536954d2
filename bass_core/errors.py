"""The errors that a user can cause or meet.

Each is a BassError. Its message is one sentence saying what to do. Programming errors are not wrapped;
they keep their traceback. Errors of the user's tokenizer are wrapped by `ask_tokenizer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def is_failure(error: BaseException) -> bool:
    """Return whether this is an Exception or a panic in Rust (of tokenizers). The others are requests to stop.

    Ctrl-C during threading.Condition.wait may arrive as a RuntimeError, which is no failure either.
    """
    if isinstance(error.__context__, KeyboardInterrupt):
        return False
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class BassError(Exception):
    """Base class of all errors with a message that may be shown to a user as it is."""

    def __init__(self, message: str) -> None:
        # The message may quote a user's value, which may have many lines or a million letters.
        message = " ".join(message.split("\n"))
        super().__init__(message if len(message) <= 600 else f"{message[:400]} ... {message[-100:]}")


class RequestError(BassError, ValueError):
    """An argument of a request is out of range, or the request does not fit the model or the memory."""


class PairError(BassError, ValueError):
    """Two models can't work as a pair, or a model is not supported."""


class WeightsError(BassError, RuntimeError):
    """Model weights can't be downloaded or read, or are not the expected ones."""


class ModelError(BassError, RuntimeError):
    """The model produced NaN or infinite logits."""


class TokenizerError(BassError, RuntimeError):
    """The user's tokenizer raised an error."""


class MemoryShortage(BassError, RuntimeError):
    """The device ran out of memory although the request had been admitted."""


def ask_tokenizer(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a method of the user's tokenizer.

    Raises:
        TokenizerError: if the method fails in any way.
    """
    try:
        return method(*arguments, **options)
    except BaseException as error:
        if isinstance(error, BassError) or not is_failure(error):
            raise
        lines = str(error).splitlines()
        name = getattr(method, "__name__", type(method).__name__)
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise TokenizerError(
            f"The tokenizer's {name} failed ({reason}): correct the tokenizer, or make the pair without one."
        ) from error

"""The errors that a user can cause or meet.

Each is a BassError. Its message is one sentence saying what to do. Programming errors are not wrapped;
they keep their traceback.
"""


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


class MemoryShortage(BassError, RuntimeError):
    """The device ran out of memory although the request had been admitted."""

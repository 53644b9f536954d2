"""Contract: every error a user can cause or meet is a BassError whose message is one sentence saying what to do.

Non-goal: wrapping programming errors; those keep their traceback.
"""


class BassError(Exception):
    """Base of all errors whose message may be shown to a user as it is."""


class RequestError(BassError, ValueError):
    """An argument of a request is out of range, or the request does not fit the model or the memory."""

    def __init__(self, message: str) -> None:
        # What was given is quoted, and may be a megabyte.
        super().__init__(message if len(message) <= 600 else f"{message[:400]} ... {message[-100:]}")


class PairError(BassError, ValueError):
    """Two models that can't work as a pair, or a model that is not supported."""


class WeightsError(BassError, RuntimeError):
    """Model weights that can't be reached, or that are not what they should be."""


class ModelError(BassError, RuntimeError):
    """A model that answers with numbers that are none."""


class MemoryShortage(BassError, RuntimeError):
    """The device's memory ran out although the request had been let in."""

"""Run the tiny models on one thread."""

from tests.support.threads import one_thread  # noqa: F401

"""A fixed schedule for AMUSD: its draft's progress does not depend on the machine's load."""

from __future__ import annotations

from threading import TIMEOUT_MAX

import pytest

from bass_core.decode.overlapped.draft import DraftThread
from bass_core.decode.overlapped.session import QueuedDraft


def draft_in_step(patch: pytest.MonkeyPatch) -> None:
    """Make the target wait for a step of the draft whenever it looks at the drafts, if the draft can take one.

    The draft still works in its own thread, on its own stream, while the target verifies.
    """
    look = DraftThread.look

    def waits(self: DraftThread, timeout_s: float = 0.0) -> dict[int, list[QueuedDraft]]:
        with self.lock:
            # If `steps` is true, the draft's thread will take a step or fail. Both end the wait.
            steps = self._running and self.session is not None and self.session.busy
        return look(self, TIMEOUT_MAX if steps else timeout_s)

    patch.setattr(DraftThread, "look", waits)

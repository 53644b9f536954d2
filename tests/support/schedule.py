"""A fixed schedule for AMUSD: its draft's progress does not depend on the machine's load."""

from __future__ import annotations

import pytest

from bass_core.decode.amusd.draft import DraftThread
from bass_core.decode.amusd.session import QueuedDraft


def draft_in_step(patch: pytest.MonkeyPatch) -> None:
    """Make the target wait for a step of the draft on the newest text whenever it looks at the drafts.

    The draft still works in its own thread, on its own stream, while the target verifies.
    """
    look = DraftThread.look

    def waits(self: DraftThread, timeout_s: float = 0.0) -> dict[int, list[QueuedDraft]]:
        with self.lock:
            session = self.session
            if self._running and session is not None:
                # A running step may have begun before the newest text.
                enough = len(self._unseen_steps) + 1 + self._working
                self.changed.wait_for(
                    lambda: (
                        not self.alive
                        or len(self._unseen_steps) >= enough
                        or (not self._working and (self._closed or not session.busy))
                    )
                )
        return look(self, timeout_s)

    patch.setattr(DraftThread, "look", waits)

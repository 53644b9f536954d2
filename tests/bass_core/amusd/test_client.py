"""How the target reads its draft's messages, without a draft: which blocks it accepts and which came too late."""

from __future__ import annotations

from bass_core.amusd.client import Ahead, DraftClient
from bass_core.amusd.messages import Block, Drafts
from bass_core.amusd.timeline import Timeline


def client_at(position: int) -> DraftClient:
    """A client of one row with text up to `position` and no draft process."""
    made = DraftClient.__new__(DraftClient)
    made.timeline, made.ahead = Timeline(), {0: Ahead(position)}
    made._session, made.received, made.step_ms = 1, 0, None
    return made


def drafts(epoch: int, start: int, token: int, session: int = 1) -> Drafts:
    return Drafts(session, [Block(0, epoch, start, [token], [1.0], [1.0], [False])], 0.0, 0.001, made=1)


def test_a_block_of_an_old_epoch_is_dropped_though_it_continues_the_text() -> None:
    """The target wrote another token at 5; the old block starts right after it, so only its epoch is wrong."""
    client = client_at(5)
    client._take([drafts(0, 5, 50)])
    assert client.ahead[0].tokens == [50]
    client.ahead[0].move(6, same=False)
    client._take([drafts(0, 6, 60)])
    assert client.ahead[0].tokens == []
    client._take([drafts(1, 6, 61), drafts(1, 7, 71)])
    assert client.ahead[0].tokens == [61, 71]


def test_a_block_of_another_request_is_dropped() -> None:
    client = client_at(5)
    client._take([drafts(0, 5, 50, session=2)])
    assert client.ahead[0].tokens == [] and client.received == 0

"""How the suite runs: its tiny models on one thread, and AMUSD's drafts in threads, which start at once.

Contract: a lost draft fails its test, because its lane would go on as regular decoding; when the suite ends, no
thread and no process of a draft is left. Prompts share whatever they can, however short, and windows are small.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import psutil
import pytest
import torch

from bass_core import ModelPair
from bass_core.amusd import decoder as amusd
from bass_core.amusd import host as amusd_host
from bass_core.amusd import messages as amusd_messages
from bass_core.models.base import CausalModel
from kernels.plan import SHARE

from ..models import small_window


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """More threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package", autouse=True)
def drafts_in_threads() -> Iterator[None]:
    """A process takes seconds to start; the same draft in a thread sends the same messages in the same order.

    The target is slowed so that the draft gets ahead. How long a draft may be silent is not tested in this suite.
    """
    children, interval = set(psutil.Process().children()), sys.getswitchinterval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelPair, "amusd_draft", "stream", raising=False)
        patch.setattr(amusd, "DELAYS", (0.004, 0.0))
        patch.setattr(amusd_host, "PATIENCE_S", 30.0)
        patch.setattr(amusd_messages, "SEND_PATIENCE_S", 30.0)
        # Draft and target make many short calls, and one waits for the other after each.
        sys.setswitchinterval(interval / 10)
        yield
    sys.setswitchinterval(interval)
    for pair in list(amusd_host._idle):
        amusd_host.close(pair)
    drafts = [thread for thread in threading.enumerate() if thread.name == "bass-amusd-draft"]
    for thread in drafts:
        thread.join(30)
    assert not any(thread.is_alive() for thread in drafts), "a draft's thread is left"
    assert set(psutil.Process().children()) <= children, "a draft's process is left"


@pytest.fixture(scope="package", autouse=True)
def prompts_share_what_they_can() -> Iterator[None]:
    """Tiny models' prompts are shorter than those for which torch's attention in two parts pays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CausalModel, "least_saved", SHARE)
        yield


@pytest.fixture(scope="package", autouse=True)
def windows_are_small() -> Iterator[None]:
    """Tiny models' prompts are shorter than the sinks and a window together."""
    with pytest.MonkeyPatch.context() as patch:
        small_window(patch)
        yield


@pytest.fixture(autouse=True)
def no_draft_is_lost(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    lost = [record.getMessage() for record in caplog.get_records("call") if "amusd" in record.name]
    assert not lost, lost

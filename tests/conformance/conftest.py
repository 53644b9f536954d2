"""How the suite runs: its tiny models on one thread, and AMUSD's draft in step with its target.

Contract: a lost draft fails its test, because its lane would go on as regular decoding; when the suite ends, no
thread of a draft is left. Prompts share whatever they can, however short, and windows are small.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from bass_core.model.base import CausalModel
from kernels.plan import SHARE
from tests.support.models import small_window
from tests.support.schedule import draft_in_step


@pytest.fixture(scope="package", autouse=True)
def small_and_in_step() -> Iterator[None]:
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    # More threads would only wait for each other.
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        draft_in_step(patch)
        # Draft and target make many short calls, and one waits for the other after each.
        sys.setswitchinterval(interval / 10)
        # Tiny models' prompts are shorter than those for which sharing pays, and than the sinks and a window.
        patch.setattr(CausalModel, "least_saved", SHARE)
        small_window(patch)
        yield
    sys.setswitchinterval(interval)
    torch.set_num_threads(threads)
    assert "bass-amusd-draft" not in [thread.name for thread in threading.enumerate()], "a draft's thread is left"


@pytest.fixture(autouse=True)
def no_draft_is_lost(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    lost = [record.getMessage() for record in caplog.get_records("call") if "amusd" in record.name]
    assert not lost, lost

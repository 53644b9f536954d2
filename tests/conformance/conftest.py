"""Setup of the suite: one thread, AMUSD's draft in step with its target, and small windows and prefixes.

A test fails if AMUSD loses its draft, since the lane would then go on as regular decoding and hide the error. No
draft thread may be left when the suite ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from bass_core.model.base import CausalModel
from kernels.plan import PREFIX_UNIT
from tests.support.models import small_window
from tests.support.schedule import draft_in_step


@pytest.fixture(scope="package", autouse=True)
def small_and_in_step() -> Iterator[None]:
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    # With tiny models, more threads would only wait for each other.
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        draft_in_step(patch)
        # Draft and target make many short calls and wait for each other after each, so let Python switch threads
        # sooner.
        sys.setswitchinterval(interval / 10)
        # Without these settings, such short prompts would share no prefix, and would fit into sinks and window.
        patch.setattr(CausalModel, "min_shared_tokens", PREFIX_UNIT)
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

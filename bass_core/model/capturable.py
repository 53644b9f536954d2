"""Test whether a model's forward never waits for the device, so that a CUDA graph can capture it.

`mark_capturable` tests this once, when a model is made. Call `refuse_capture` after a failed capture. Both
functions can set `model.capturable` to False, with one warning. machine/capture.py does the capturing.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..machine.capture import CaptureUnavailable, failed, refuses_waits, waits_refused
from .base import CausalModel
from .forward import CapturedBatch

_log = logging.getLogger(__name__)


def mark_capturable(model: CausalModel) -> None:
    """Set `model.capturable` to False, with a warning, if its forward waits for the device.

    Call it only while a pair is made: during the test, waits in other threads raise as well.
    """
    if model.never_waits or not model.capturable or not refuses_waits(model.device):
        return
    cache = model.new_cache(1, 8)
    ids, lengths = (torch.zeros(shape, dtype=torch.long, device=model.device) for shape in ((1, 2), (1,)))
    batch = CapturedBatch(ids, lengths, return_states=True)
    try:
        model.forward_captured(batch, cache)
        with waits_refused(model.device):
            model.forward_captured(batch, cache)
    except torch.OutOfMemoryError:
        return
    except Exception as error:
        refuse_capture(model, error)


def refuse_capture(model: Any, error: Exception) -> None:
    """Run the model eagerly from now on, and warn.

    There is one warning per model, or one for all models if this process can capture no more graphs.
    """
    if model.capturable and not isinstance(error, CaptureUnavailable):
        # `error` may come from ending the capture. The error that was raised inside the capture is more helpful.
        cause = error.__context__ or error
        reason = f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
        consequence = " Everything else runs eagerly as well until the next start." if failed() else ""
        _log.warning(
            "%s can't be captured in a CUDA graph and runs eagerly (%s).%s", model.name, reason, consequence
        )
    model.capturable = False

"""Where a pair's measured costs are stored, and for which numbers of rows a table needs them.

Contract: a table's file name is a hash of everything that a round's cost depends on, so requests that differ in
anything else share the table. Non-goals: the table and its file format (length/costs.py), measuring
(calibrate.py).
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch
from torch import nn

from kernels.support import is_accelerator, on_zero_gpu, runtime

from ..draft.registry import DrafterKind
from ..draft.window import WINDOW
from ..errors import WeightsError
from ..length.costs import CostTable
from ..machine import cpu_kernels
from ..machine.capture import enabled
from ..machine.user_cache import cache_root
from ..model.draft_head import DraftHead
from ..model.pair import ModelPair
from ..model.weights.modified import hooked_everywhere, is_hooked, is_patched
from ..model.weights.placement import device_map
from ..sample.params import SamplingParams

# Version of the file's layout and of the way costs are measured: increase it whenever either changes.
FORMAT = 12
# The largest number of rows that is measured; beyond it, a round's cost is taken to depend on its tokens only.
MOST_ROWS = 8


def may_measure() -> bool:
    """Whether "auto" may measure costs: not with BASS_MEASURE=0, and not on ZeroGPU, which bills the time."""
    return os.environ.get("BASS_MEASURE") != "0" and not on_zero_gpu()


def costs_path(pair: ModelPair, kind: DrafterKind, backend: str, sampling: SamplingParams) -> Path | None:
    """The table's file; None if the user has no cache folder."""
    try:
        root = cache_root()
    except WeightsError:
        return None
    return root / "costs" / f"{_key(pair, kind, backend, sampling)}.json"


def can_keep(path: Path | None) -> bool:
    """Whether a table can be written to this path; creates the folder."""
    if path is None:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(path.parent, os.W_OK)


def missing_sizes(table: CostTable | None, rows: int) -> list[int]:
    """Numbers of rows still to measure: powers of two up to `rows` rounded up, not measured or only coarsely."""
    sizes = [1 << i for i in range((min(rows, MOST_ROWS) - 1).bit_length() + 1)]
    return [size for size in sizes if table is None or size not in table.verify or size in table.coarse]


def missing_coarse_sizes(table: CostTable | None, rows: int) -> list[int]:
    """Numbers of rows to measure for a coarse estimate up to `rows` rows: 1 and the largest, unless known."""
    known = [] if table is None else list(table.verify)
    most = missing_sizes(None, rows)[-1]
    missing = [] if 1 in known else [1]
    return missing if max(known, default=0) >= most or most in missing else [*missing, most]


def _key(pair: ModelPair, kind: DrafterKind, backend: str, sampling: SamplingParams) -> str:
    """Hash of all that a round's cost depends on. Drafters that only copy share it: their drafts are free."""
    draft = None
    if kind.runs_model:
        draft = str(getattr(pair.draft, "name_or_path", None) or type(pair.draft).__name__)
        if isinstance(pair.draft, DraftHead):
            draft = f"{pair.draft.config} {len(pair.draft.vocabulary)}"
        step = pair.draft_step
        draft = f"{draft} {type(step).__name__} {getattr(step, 'reason', None)} {_made_of(pair.draft)}"
    if kind.windows:
        draft = f"window {draft} {WINDOW}"
    model = pair.target.config.get_text_config()
    facts = [
        FORMAT, str(pair.target.name_or_path), model.hidden_size, model.num_hidden_layers, draft,
        backend, str(pair.dtype), str(pair.device), torch.__version__, torch.get_num_threads(),
        sampling.greedy, type(pair.target_step).__name__, pair.weight_dtype,
        pair.target_step.reason, _made_of(pair.target), hooked_everywhere(),
        not is_accelerator(pair.device) and cpu_kernels.has_tiles(),
        enabled(pair.device) and pair.target_step.capturable, *map(str, device_map(pair.target)),
        runtime(pair.device).get_device_name(pair.device) if is_accelerator(pair.device) else os.cpu_count(),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _made_of(model: nn.Module | None) -> list[str]:
    """The classes of a model's modules, marked if calling one does more than its class's code in transformers."""
    modules = [] if model is None else list(model.modules())
    return [f"{type(one).__qualname__} {is_hooked(one) or is_patched(type(one))}" for one in modules]

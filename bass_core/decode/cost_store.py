"""Storage of a pair's measured costs, and the numbers of rows that a table still needs.

A table's file name is a hash of everything that a round's cost depends on, so requests that differ in anything
else share the table. length/costs.py has the table and its file format, calibrate.py measures.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection
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

# Version of the file's layout and of the measuring method: increase it when either changes.
FORMAT = 12
# Largest number of rows to measure. With more rows, a round's cost is assumed to depend only on its tokens.
MAX_MEASURED_ROWS = 16


def may_measure() -> bool:
    """Return whether "auto" may measure costs.

    Measuring is forbidden with BASS_MEASURE=0, and on ZeroGPU, which bills the time.
    """
    return os.environ.get("BASS_MEASURE") != "0" and not on_zero_gpu()


def costs_path(pair: ModelPair, kind: DrafterKind, backend: str, sampling: SamplingParams) -> Path | None:
    """Return the table's file, or None if the user has no cache folder."""
    try:
        root = cache_root()
    except WeightsError:
        return None
    return root / "costs" / f"{_key(pair, kind, backend, sampling)}.json"


def can_keep(path: Path | None) -> bool:
    """Return whether a table can be written to this path; creates the folder."""
    if path is None:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(path.parent, os.W_OK)


def missing_sizes(table: CostTable | None, rows: int, doubted: Collection[int] = ()) -> list[int]:
    """Return the numbers of rows still to measure, for requests of up to `rows` rows.

    These are the powers of two that are not measured yet, or only coarsely, or whose costs are doubted. For
    example, requests of up to 5 rows need 1, 2, 4 and 8.
    """
    sizes = [1 << i for i in range((min(rows, MAX_MEASURED_ROWS) - 1).bit_length() + 1)]
    known = set() if table is None else table.verify.keys() - {*table.coarse, *doubted}
    return [size for size in sizes if size not in known]


def missing_coarse_sizes(table: CostTable | None, rows: int, doubted: Collection[int] = ()) -> list[int]:
    """Return the numbers of rows to measure for a coarse estimate.

    These are 1 and the last of `missing_sizes`, unless they are measured, and all up to that one whose costs are
    doubted.
    """
    known = [] if table is None else list(table.verify)
    largest = missing_sizes(None, rows)[-1]
    missing = {size for size in doubted if size <= largest}
    missing |= set() if 1 in known else {1}
    return sorted(missing if max(known, default=0) >= largest else missing | {largest})


def _key(pair: ModelPair, kind: DrafterKind, backend: str, sampling: SamplingParams) -> str:
    """Return a hash of everything that a round's cost depends on.

    All drafters that only copy get the same hash, because their drafts cost nothing.
    """
    draft = None
    if kind.runs_model:
        draft = str(getattr(pair.draft, "name_or_path", None) or type(pair.draft).__name__)
        if isinstance(pair.draft, DraftHead):
            draft = f"{pair.draft.config} {len(pair.draft.vocabulary)}"
        step = pair.draft_step
        draft = f"{draft} {type(step).__name__} {getattr(step, 'reason', None)} {_module_classes(pair.draft)}"
    if kind.windows:
        draft = f"window {draft} {WINDOW}"
    model = pair.target.config.get_text_config()
    facts = [
        FORMAT, str(pair.target.name_or_path), model.hidden_size, model.num_hidden_layers, draft,
        backend, str(pair.dtype), str(pair.device), torch.__version__, torch.get_num_threads(),
        sampling.greedy, type(pair.target_step).__name__, pair.weight_dtype,
        pair.target_step.reason, _module_classes(pair.target), hooked_everywhere(),
        not is_accelerator(pair.device) and cpu_kernels.has_tiles(),
        enabled(pair.device) and pair.target_step.capturable, *map(str, device_map(pair.target)),
        runtime(pair.device).get_device_name(pair.device) if is_accelerator(pair.device) else os.cpu_count(),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _module_classes(model: nn.Module | None) -> list[str]:
    """Return one text per module: its class's name, and whether calling the module runs code of other origin.

    Such code is a hook, or a forward that replaced the one in transformers or torch.
    """
    modules = [] if model is None else list(model.modules())
    return [f"{type(module).__qualname__} {is_hooked(module) or is_patched(type(module))}" for module in modules]

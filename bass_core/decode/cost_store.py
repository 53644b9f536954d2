"""Where measured costs are stored, which numbers of rows a table still needs, and doubt in stored figures.

A table's file name is a hash of everything that a round's cost depends on (`_key`). length/costs.py has the file
format, calibrate.py measures.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Collection, Hashable
from pathlib import Path
from statistics import median

import torch

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
from ..model.weights.modified import hooked_everywhere
from ..model.weights.placement import device_map
from ..sample.params import SamplingParams
from ..sequence import Round

# Version of the file's layout and of the measuring method: increase it when either changes.
FORMAT = 13
# Largest number of rows to measure. With more rows, a round's cost is assumed to depend only on its tokens.
MAX_MEASURED_ROWS = 16
# The costs of a number of rows are too high if the median of at least MIN_ROUNDS rounds of one size is less than
# this share of its stored time. Right costs can be a little too high, because longer texts were measured.
MIN_ROUNDS, TOO_FAST = 5, 0.75


def may_measure() -> bool:
    """Return whether "auto" may measure costs: not with BASS_MEASURE=0, nor on ZeroGPU, which bills the time."""
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


def missing_sizes(
    table: CostTable | None, rows: int, doubted: Collection[int] = (), ends: bool = False
) -> list[int]:
    """Return the numbers of rows still to measure, for requests of up to `rows` rows.

    These are the powers of two that are not measured yet, or whose costs are doubted. For example, requests of up
    to 5 rows need 1, 2, 4 and 8. If `ends` is true, the first and the last are enough, or a measured larger one.
    """
    sizes = [1 << i for i in range((min(rows, MAX_MEASURED_ROWS) - 1).bit_length() + 1)]
    known = {} if table is None else table.verify
    if ends:
        sizes = [size for size in sizes if size in (1, *doubted) or size == sizes[-1] > max(known, default=0)]
    return [size for size in sizes if size not in known or size in doubted]


class Doubts:
    """The stored figures that are doubted, each by its file or by the place in its file.

    A lane doubts a figure at its end if it was faster than the figure allows, and the next measurement, while no
    lane runs, measures it again. Each is doubted once per process: a second doubt has another reason, for example
    another size of text.
    """

    def __init__(self) -> None:
        self._open: set[Hashable] = set()
        self._settled: set[Hashable] = set()

    def __contains__(self, figure: Hashable) -> bool:
        return figure in self._open

    def add(self, figure: Hashable) -> None:
        """Doubt a figure, unless it has been measured again already."""
        if figure not in self._settled:
            self._open.add(figure)

    def settle(self, figure: Hashable) -> None:
        """Note that a figure has been measured. If it was doubted, it is not doubted again."""
        if figure in self._open:
            self._open.remove(figure)
            self._settled.add(figure)


DOUBTS = Doubts()


class CostCheck:
    """Compares the times of a lane's rounds with the stored costs that its policy used.

    Only costs that are too high are found: a round that takes longer than the stored cost may have run on a busy
    machine.
    """

    def __init__(self, costs: CostTable) -> None:
        self.costs = costs
        # By rows and tokens: measured time / stored time of each round.
        self._ratios: defaultdict[tuple[int, int], list[float]] = defaultdict(list)

    def add(self, round_: Round, ms: float) -> None:
        """Add a round that took `ms` milliseconds, unless its number of rows or tokens was not measured."""
        if round_.draft_ms is None or round_.fed is None:
            return
        counts = round_.fed.counts
        rows, tokens = len(counts), len(counts) * max(counts) if self.costs.padded else sum(counts)
        if rows in self.costs.verify and tokens <= self.costs.verify[rows][-1][0]:
            ratio = (ms - round_.draft_ms) / self.costs.verify_ms(rows, tokens)
            self._ratios[rows, tokens].append(ratio)

    def too_high(self) -> set[int]:
        """Return the numbers of rows whose costs are too high."""
        return {
            rows
            for (rows, _), ratios in self._ratios.items()
            if len(ratios) >= MIN_ROUNDS and median(ratios) < TOO_FAST
        }


def _key(pair: ModelPair, kind: DrafterKind, backend: str, sampling: SamplingParams) -> str:
    """Return a hash of everything that a round's cost depends on; one for all drafters that only copy."""
    draft = None
    if kind.runs_model:
        draft = str(getattr(pair.draft, "name_or_path", None) or type(pair.draft).__name__)
        if isinstance(pair.draft, DraftHead):
            draft = f"{pair.draft.config} {len(pair.draft.vocabulary)}"
        step = pair.draft_step
        draft = f"{draft} {type(step).__name__} {getattr(step, 'reason', None)} {pair.code[1]}"
    if kind.windows:
        draft = f"window {draft} {WINDOW}"
    model = pair.target.config.get_text_config()
    facts = [
        FORMAT, str(pair.target.name_or_path), model.hidden_size, model.num_hidden_layers, draft,
        backend, str(pair.dtype), str(pair.device), torch.__version__, torch.get_num_threads(),
        sampling.greedy, type(pair.target_step).__name__, pair.weight_dtype,
        pair.target_step.reason, pair.code[0], hooked_everywhere(),
        not is_accelerator(pair.device) and cpu_kernels.has_tiles(),
        enabled(pair.device) and pair.target_step.capturable, *map(str, device_map(pair.target)),
        runtime(pair.device).get_device_name(pair.device) if is_accelerator(pair.device) else os.cpu_count(),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

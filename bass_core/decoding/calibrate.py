"""What a round costs on this machine: measured once for a pair and a device, and kept.

Contract: rounds are measured as they run: a real decoder, whose drafts are random tokens. The table
(budget/cost_table.py) is kept in a file in the user's cache; the same table gives the same answers.
The least of REPEATS times counts: other work on the machine only ever adds to one.
Non-goals: costs that depend on the length of the text (it is CONTEXT tokens here).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.support import is_accelerator, runtime

from ..attention.select import choose_backend
from ..budget.cost_table import CostTable, read_table, write_table
from ..budget.policies import EqualRows, FixedLength
from ..drafting.base import Drafter, Proposal
from ..drafting.registry import choose_drafter, make_drafter, runs_model
from ..engine.cuda_graphs import make_runner
from ..errors import WeightsError
from ..machine.capture import enabled
from ..machine.transfer import to_device
from ..machine.user_cache import cache_root
from ..models.draft_head import DraftHead
from ..models.pair import ModelPair
from ..models.weights.quantize import is_quantized
from ..sampling.noise import NoiseKeys
from ..sampling.params import SamplingParams
from ..sequence import Sequence
from .base import DecodingParams
from .batch import BatchDecoder

CONTEXT = 160
WIDTHS = (1, 2, 3, 5, 9, 17)  # tokens a row in a measured verification
MOST_TOKENS = 96  # of all rows together
DRAFTED = (1, 5)  # tokens a row in two measured proposals
# More rows are taken for as many: from here on a round's cost goes by its tokens.
MOST_ROWS = 8
REPEATS = 4
FORMAT = 4


def cost_table(
    pair: ModelPair, drafter: Any, backend: str, sampling: SamplingParams, rows: int, verification: str = "chen"
) -> CostTable:
    """The stored table of this pair, drafter and machine for `rows` rows; what is missing is measured and kept."""
    path = _path(pair, drafter, backend, sampling)
    table = _stored(path, drafter)
    missing = _missing(table, rows)
    if table is None or missing:
        table = measure_costs(pair, drafter, backend, sampling, verification, missing, table)
        write_table(path, table)
    return table


def measure_ahead(pair: ModelPair, rows: int, tell: Callable[[], None]) -> None:
    """Measure the tables that draft_length="cost-aware" needs with all other settings at their defaults.

    `tell` is called once, before the first measurement; not where every table is there already.
    """
    drafter, backend = choose_drafter(pair, "auto"), choose_backend("auto", pair.device, pair.dtype)
    kinds = [SamplingParams(temperature=temperature) for temperature in (0.0, 1.0)]
    if any(_missing(_stored(_path(pair, drafter, backend, kind), drafter), rows) for kind in kinds):
        tell()
    for kind in kinds:
        cost_table(pair, drafter, backend, kind, rows)


def _stored(path: Path | None, drafter: Any) -> CostTable | None:
    """The table that was kept; None as well where it says of a draft model that it costs nothing."""
    table = read_table(path)
    return table if table is None or bool(table.draft) == runs_model(drafter) else None


def _missing(table: CostTable | None, rows: int) -> list[int]:
    sizes = [1 << i for i in range((min(rows, MOST_ROWS) - 1).bit_length() + 1)]
    return [size for size in sizes if table is None or size not in table.verify]


def _path(pair: ModelPair, drafter: Any, backend: str, sampling: SamplingParams) -> Path | None:
    """Where the table is kept; None for a user who has no folder for such files."""
    try:
        root = cache_root()
    except WeightsError:
        return None
    return root / "costs" / f"{_key(pair, drafter, backend, sampling)}.json"


def _key(pair: ModelPair, drafter: Any, backend: str, sampling: SamplingParams) -> str:
    """Everything that a round's cost depends on."""
    draft = getattr(pair.draft, "name_or_path", None) or type(pair.draft).__name__
    if isinstance(pair.draft, DraftHead):
        draft = f"{pair.draft.config} {len(pair.draft.vocabulary)}"
    model = pair.target.config.get_text_config()
    facts = [
        FORMAT, str(pair.target.name_or_path), model.hidden_size, model.num_hidden_layers, str(draft),
        str(drafter), backend, str(pair.dtype), str(pair.device), torch.__version__, torch.get_num_threads(),
        sampling.greedy, type(pair.target_step).__name__, is_quantized(pair.target),
        enabled(pair.device) and pair.target_step.capturable,
        runtime(pair.device).get_device_name(pair.device) if is_accelerator(pair.device) else os.cpu_count(),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def measure_costs(
    pair: ModelPair,
    drafter: Any,
    backend: str,
    sampling: SamplingParams,
    verification: str,
    sizes: list[int],
    known: CostTable | None = None,
) -> CostTable:
    """Measure now, for these numbers of rows, beside what is known; `cost_table` keeps what it measured."""
    verify = dict(known.verify) if known else {}
    draft = dict(known.draft) if known else {}
    for rows in sizes:
        lab = _Lab(pair, drafter, backend, sampling, verification, rows)
        if lab.model is not None:
            draft[rows] = lab.draft_ms()
        widths = [width for width in WIDTHS if width == 1 or rows * width <= MOST_TOKENS]
        points = sorted((float(rows * width), ms) for width, ms in lab.verify_ms(widths).items())
        # A wider verification is never cheaper: where it seems so, that was noise.
        verify[rows] = [(x, max(y for other, y in points if other <= x)) for x, y in points]
    padded = not pair.target_step.skips_padding
    return CostTable(dict(sorted(verify.items())), dict(sorted(draft.items())), padded)


class _Random(Drafter):
    """Proposes `width` random tokens a row: what is proposed does not change what a round costs."""

    width = 0

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        # Drawn on the host: a GPU's generator refuses once a capture has failed, or while one is under way.
        tokens = to_device(torch.randint(0, self.vocab, (len(rows), self.width)), self.device)
        return Proposal(tokens, [self.width] * len(rows))


class _TimedDecoder(BatchDecoder):
    """A decoder that notes how long its last proposal took, `proposal_ms`."""

    proposal_ms = 0.0

    def _propose(self, max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        start = _now(self.target.device)
        proposal = super()._propose(max_drafts, keys)
        self.proposal_ms = _now(self.target.device) - start
        return proposal


def _now(device: torch.device) -> float:
    """Milliseconds, once the device has done all that was queued."""
    if is_accelerator(device):
        runtime(device).synchronize(device)
    return 1000 * time.perf_counter()


class _Lab:
    """A batch of equal prompts, computed once, on which rounds are timed: the draft model's first, then any."""

    def __init__(
        self, pair: ModelPair, drafter: Any, backend: str, sampling: SamplingParams, verification: str, rows: int
    ) -> None:
        self.device, limit = pair.device, max(WIDTHS)
        generator = torch.Generator().manual_seed(0)
        # As many as would be written if every draft were accepted.
        room = (REPEATS + 1) * (sum(WIDTHS) + sum(1 + requested for requested in DRAFTED)) + limit
        context = max(1, min(CONTEXT, pair.context_length - room))
        prompt = torch.randint(0, pair.vocab, (context,), generator=generator).tolist()
        length = context + room
        self.random = _Random(pair.vocab, pair.device)
        self.model: Drafter | None = None
        if runs_model(drafter):
            self.model = make_drafter(pair, "model", rows, length, backend, sampling, verification)
        made: Drafter = self.model or self.random
        runner = make_runner(pair.target_step, rows, length, pair.vocab, backend)
        sequences = [Sequence(i, i, prompt, 10**6, frozenset()) for i in range(rows)]
        self.decoder = _TimedDecoder(
            sequences, runner, DecodingParams(sampling), made, EqualRows(FixedLength(limit))
        )
        while not sequences[-1].token_ids:
            self.decoder.step()

    def draft_ms(self) -> float:
        """Ms of one more drafted token."""
        assert self.model is not None
        times: dict[int, list[float]] = {requested: [] for requested in DRAFTED}
        for repeat in range(REPEATS + 1):
            for requested, values in times.items():
                self.decoder.budget = EqualRows(FixedLength(requested))
                self.decoder.step()
                if repeat:
                    values.append(self.decoder.proposal_ms)
        few, many = DRAFTED
        return max(0.0, min(times[many]) - min(times[few])) / (many - few)

    def verify_ms(self, widths: list[int]) -> dict[int, float]:
        """Ms of a round of so many tokens a row; the widths take turns. From here on the model drafts no more."""
        self.decoder.drafter, self.decoder.budget = self.random, EqualRows(FixedLength(max(WIDTHS)))
        times: dict[int, list[float]] = {width: [] for width in widths}
        for repeat in range(REPEATS + 1):
            for width in widths:
                self.random.width = width - 1
                start = _now(self.device)
                self.decoder.step()
                if repeat:
                    times[width].append(_now(self.device) - start)
        return {width: min(values) for width, values in times.items()}

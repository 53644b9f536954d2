"""Measure the cost of a round on this machine, for a pair and a device, and store it.

`cost_table` measures all missing costs right away. `MeasuredCosts.measure` measures step by step (a step
is a round or a prefill chunk), so the caller can show progress or stop. measuring.py decides when to measure.

Rounds are timed in a real decoder whose drafts are random tokens. The median of several times is used, because a
single unusual time would distort the comparison with all other costs. The costs for a given number of rows are
stored once all of them are measured. All measurements use texts of about the same length.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch

from kernels.support import is_accelerator, runtime

from ..draft.base import Drafter, Proposal
from ..draft.registry import DrafterInputs, DrafterKind
from ..draft.window import WINDOW, gapped
from ..length.costs import READING, CostTable, read_table, write_table
from ..length.policies import FixedLength
from ..machine.memory import shortage_explained
from ..machine.transfer import to_device
from ..model.graphs import make_runner
from ..model.pair import ModelPair
from ..model.prefix import CachedTexts
from ..sample.noise import NoiseKeys
from ..sample.params import SamplingParams
from ..sequence import Sequence
from ..verify.rules import AUTOMATIC, Verification
from .base import DecodingParams
from .batch import BatchDecoder
from .cost_store import costs_path, missing_sizes
from .doubts import DOUBTS

# Maximum number of tokens, over all rows, in a measured verification.
MAX_TOKENS = 96


@dataclass(frozen=True)
class MeasuringPlan:
    """What to measure for each number of rows.

    Attributes:
        widths: tokens per row of each verification.
        drafted: tokens per row of a short and of a long proposal. The difference of their times, divided by the
            difference of these two numbers, is the cost of a draft token. The rest of a proposal's time is its
            fixed cost.
        repeats: how often each verification and proposal is timed, after one untimed run.
        context: number of tokens of the prompt.
        coarse: whether to mark the costs as coarse in the table.
    """

    widths: tuple[int, ...]
    drafted: tuple[int, int]
    repeats: int
    context: int
    coarse: bool = False


FULL = MeasuringPlan(widths=(1, 2, 3, 4, 5, 6, 8, 10, 13, 17, 24), drafted=(1, 5), repeats=7, context=160)
# For two numbers of rows, this takes about 2 s with SmolLM2-135M on two cores of a 2.5 GHz Xeon.
COARSE = MeasuringPlan(widths=(1, 2, 3, 5, 9), drafted=(1, 3), repeats=3, context=32, coarse=True)


class MeasuredCosts:
    """The cost table of a pair, drafter, backend and kind of sampling: stored costs plus those measured now.

    Attributes:
        table: the costs; None until all costs for at least one number of rows are known.
    """

    def __init__(
        self,
        pair: ModelPair,
        kind: DrafterKind,
        backend: str,
        sampling: SamplingParams,
        verification: Verification = AUTOMATIC,
    ) -> None:
        self.pair, self.kind, self.backend = pair, kind, backend
        # Leave out penalties and biases, because requests with and without them share the stored table.
        self.sampling, self.verification = sampling.unshaped, verification
        self.path = costs_path(pair, kind, backend, sampling)
        self.table = self._read_stored()

    @property
    def doubted(self) -> list[int]:
        """The numbers of rows whose stored costs a lane doubted."""
        return [rows for rows in (self.table.verify if self.table else ()) if (self.path, rows) in DOUBTS]

    def measure(self, sizes: list[int], plan: MeasuringPlan = FULL, seconds: float = math.inf) -> Iterator[float]:
        """Measure for these numbers of rows, one decoder step at a time, for at most `seconds`.

        If time runs out before every verification for a number of rows has been timed, that number of rows is
        left out of the table.

        Args:
            sizes: the numbers of rows.
            plan: what to measure.
            seconds: time limit.

        Yields:
            The share of the work that is done, from 0 to 1.
        """
        end = time.monotonic() + seconds
        for i, rows in enumerate(sizes):
            timer = _RoundTimer(self.pair, self.kind, self.backend, self.sampling, self.verification, rows, plan)
            late = False
            for done in timer.steps():
                yield (i + done) / len(sizes)
                late = time.monotonic() > end
                if late:
                    break
            if timer.timed:
                self._store(timer.costs())
            DOUBTS.settle((self.path, rows))
            if late:
                return

    def _read_stored(self) -> CostTable | None:
        """Return the stored table, or None; a table whose draft costs don't fit the drafter counts as missing."""
        table = read_table(self.path)
        return table if table is None or bool(table.draft) == (self.kind.timed is not None) else None

    def _store(self, measured: CostTable) -> None:
        """Join the new costs with the file, which another process may have extended, and store the result.

        Doubted costs stay if the new ones are higher: the machine was even busier then.
        """
        known = self._read_stored() or self.table
        (rows,) = measured.verify
        table = known or measured
        if (self.path, rows) not in DOUBTS or measured.verify_ms(rows, rows) < table.verify_ms(rows, rows):
            table = table.joined(measured)
        self.table = table
        write_table(self.path, table)


def measure_costs(
    pair: ModelPair, kind: DrafterKind, backend: str, sampling: SamplingParams, sizes: list[int]
) -> CostTable:
    """Measure the costs for these numbers of rows (at least one) now, without storing them."""
    tables = []
    for rows in sizes:
        timer = _RoundTimer(pair, kind, backend, sampling, AUTOMATIC, rows, FULL)
        for _ in timer.steps():
            pass
        tables.append(timer.costs())
    return functools.reduce(CostTable.joined, tables)


def cost_table(pair: ModelPair, kind: DrafterKind, backend: str, sampling: SamplingParams, rows: int) -> CostTable:
    """Return the cost table for `rows` rows on this machine; measures and stores missing costs."""
    costs = MeasuredCosts(pair, kind, backend, sampling)
    for _ in costs.measure(missing_sizes(costs.table, rows, costs.doubted)):
        pass
    assert costs.table is not None
    return costs.table


class _RandomDrafter(Drafter):
    """Proposes `width` random tokens per row: a round's cost does not depend on which tokens are drafted."""

    width = 0

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        # Draw on the host, because a GPU's generator raises during a graph capture and after a failed capture.
        tokens = to_device(torch.randint(0, self.vocab, (len(rows), self.width)), self.device)
        return Proposal(tokens, [self.width] * len(rows))


class _TimedDecoder(BatchDecoder):
    """A decoder that records the time of its last proposal (`proposal_ms`)."""

    proposal_ms = 0.0

    def draft_with(self, drafter: Drafter) -> None:
        """Use another drafter, which drafts chains, from now on."""
        self.drafter, self._branches = drafter, False

    def _propose(self, max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        start = _now(self.target.device)
        proposal = super()._propose(max_drafts, keys)
        self.proposal_ms = _now(self.target.device) - start
        return proposal


def _now(device: torch.device) -> float:
    """Return the time in milliseconds, after the device has finished its queued work."""
    if is_accelerator(device):
        runtime(device).synchronize(device)
    return 1000 * time.perf_counter()


class _RoundTimer:
    """A batch of equal prompts, prefilled once, on which rounds are timed."""

    def __init__(
        self,
        pair: ModelPair,
        kind: DrafterKind,
        backend: str,
        sampling: SamplingParams,
        verification: Verification,
        rows: int,
        plan: MeasuringPlan,
    ) -> None:
        self.device, self.rows, self.plan = pair.device, rows, plan
        self.padded = not pair.target_step.skips_padding
        self.widths = [width for width in plan.widths if width == 1 or rows * width <= MAX_TOKENS]
        generator = torch.Generator().manual_seed(0)
        # `room`: the tokens that each row would get if every draft were accepted.
        limit = max(plan.widths)
        drafted = sum(1 + requested for requested in plan.drafted)
        room = (plan.repeats + 1) * (sum(self.widths) + drafted) + limit
        # A target that drafts for itself proposes nothing to a row without a gap (see draft/window.py), so make
        # the prompt long enough to have one.
        min_context = gapped(WINDOW) if kind.windows else 0
        context = max(1, min(max(plan.context, min_context), pair.context_length - room))
        prompt = torch.randint(0, pair.vocab, (context,), generator=generator).tolist()
        length = context + room
        self.random = _RandomDrafter(pair.vocab, pair.device)
        self.model: Drafter | None = None
        runner = make_runner(pair.target_step, rows, length, pair.vocab, backend)
        if kind.timed is not None:
            texts = CachedTexts([[i] for i in range(rows)], [length] * rows)
            parts = DrafterInputs(pair, rows, texts, backend, sampling, verification, target=runner)
            self.model = kind.timed(parts)
        drafter: Drafter = self.model or self.random
        sequences = [Sequence(i, i, prompt, 10**6, frozenset()) for i in range(rows)]
        self.last = sequences[-1]
        self.decoder = _TimedDecoder(sequences, runner, DecodingParams(sampling), drafter, FixedLength(limit))
        self.draft_times: dict[int, list[float]] = {requested: [] for requested in plan.drafted}
        self.verify_times: dict[int, list[float]] = {width: [] for width in self.widths}

    def steps(self) -> Iterator[float]:
        """Run the prefill and the rounds; after each decoder step, yield the share of the rounds that are done."""
        while not self.last.token_ids:
            self._step()
            yield 0.0
        drafts = self.model is not None
        count = (self.plan.repeats + 1) * (len(self.widths) + drafts * len(self.draft_times))
        for done, _ in enumerate(self._rounds(drafts), start=1):
            yield done / count

    def _rounds(self, drafts: bool) -> Iterator[None]:
        """Run rounds with the draft model, then rounds without it; yield after each."""
        for repeat in range(self.plan.repeats + 1 if drafts else 0):
            for requested, times in self.draft_times.items():
                self.decoder.policy = FixedLength(requested)
                self._step()
                if repeat:
                    times.append(self.decoder.proposal_ms)
                yield
        self.decoder.draft_with(self.random)
        self.decoder.policy = FixedLength(max(self.plan.widths))
        # The widths take turns, so that a slow moment of the machine affects all of them.
        for repeat in range(self.plan.repeats + 1):
            for width, times in self.verify_times.items():
                self.random.width = width - 1
                ms = self._step()
                if repeat:
                    times.append(ms)
                yield

    @property
    def timed(self) -> bool:
        """Whether every verification has been timed at least once. Proposals are timed before verifications."""
        return all(self.verify_times.values())

    def costs(self) -> CostTable:
        """Return the measured costs; requires `timed`."""
        points = [(float(self.rows * width), median(times)) for width, times in self.verify_times.items()]
        # A wider verification is never cheaper. If noise makes it look cheaper, use the narrower one's time.
        verify = [(x, max(y for other, y in points if other <= x)) for x, _ in points]
        draft, proposal = {}, {}
        if self.model is not None:
            short_len, long_len = self.plan.drafted
            short_ms, long_ms = median(self.draft_times[short_len]), median(self.draft_times[long_len])
            # If noise makes the longer proposal look cheaper than the shorter one, use an upper bound of the cost
            # per token: the longer proposal's time divided by its number of tokens.
            token_ms = (long_ms - short_ms) / (long_len - short_len) if long_ms > short_ms else long_ms / long_len
            # Every proposal also reads one written token.
            proposal_ms = (
                max(0.0, short_ms - token_ms * (short_len + READING * self.rows)) if long_ms > short_ms else 0.0
            )
            draft, proposal = {self.rows: token_ms}, {self.rows: proposal_ms}
        coarse = (self.rows,) if self.plan.coarse else ()
        return CostTable({self.rows: verify}, draft, self.padded, coarse, proposal)

    def _step(self) -> float:
        """Run one step of the decoder and return its milliseconds."""
        start = _now(self.device)
        with shortage_explained():
            self.decoder.step()
        return _now(self.device) - start

"""What a round costs on this machine: measured for a pair and a device, and stored.

Contract: rounds are timed in a real decoder whose drafts are random tokens. The median of several times counts: a
luckily short one would make all others seem dear, or cheap. Measuring goes in steps, each a round or a prefill
chunk, so the caller can show progress or stop. The costs for a number of rows are stored once complete. Non-goals:
costs that depend on the length of the text; deciding when to measure (measuring.py).
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
from ..draft.registry import DrafterKind, Parts
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

# Most tokens, over all rows, in a verification that is measured.
MOST_TOKENS = 96


@dataclass(frozen=True)
class Plan:
    """What is measured for each number of rows.

    widths: tokens per row of each verification. drafted: tokens per row of two proposals; a draft token costs the
    difference of their times divided by the difference of their tokens, and a proposal the rest. repeats: timed
    runs of each, after one that does not count. context: tokens of the prompt. coarse: whether the table marks the
    costs as coarse.
    """

    widths: tuple[int, ...]
    drafted: tuple[int, int]
    repeats: int
    context: int
    coarse: bool = False


FULL = Plan(widths=(1, 2, 3, 4, 5, 6, 8, 10, 13, 17, 24), drafted=(1, 5), repeats=7, context=160)
# Measuring two numbers of rows takes about 2 s for SmolLM2-135M on two cores of a 2.5 GHz Xeon.
COARSE = Plan(widths=(1, 2, 3, 5, 9), drafted=(1, 3), repeats=3, context=32, coarse=True)


class MeasuredCosts:
    """The cost table of a pair, drafter, backend and kind of sampling: stored costs plus those measured now.

    `table` is None until the costs of at least one number of rows are complete.
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
        # What penalties and biases cost is left out: the stored table is every request's.
        self.sampling, self.verification = sampling.unshaped, verification
        self.path = costs_path(pair, kind, backend, sampling)
        self.table = self._kept()

    def measure(self, sizes: list[int], plan: Plan = FULL, seconds: float = math.inf) -> Iterator[float]:
        """Measure for these numbers of rows, one decoder step at a time, until `seconds` have passed.

        Yields the share of the work that is done, from 0 to 1. A number of rows is left out unless each of its
        verifications has been timed by then.
        """
        end = time.monotonic() + seconds
        for i, rows in enumerate(sizes):
            lab = _Lab(self.pair, self.kind, self.backend, self.sampling, self.verification, rows, plan)
            late = False
            for done in lab.steps():
                yield (i + done) / len(sizes)
                late = time.monotonic() > end
                if late:
                    break
            if lab.timed:
                self._keep(lab.costs())
            if late:
                return

    def _kept(self) -> CostTable | None:
        """The stored table or None; rejects one with draft costs if drafts take no forward, and the reverse."""
        table = read_table(self.path)
        return table if table is None or bool(table.draft) == (self.kind.timed is not None) else None

    def _keep(self, measured: CostTable) -> None:
        """Join the new costs with the file, which another process may have extended, and store the result."""
        known = self._kept() or self.table
        self.table = measured if known is None else known.joined(measured)
        write_table(self.path, self.table)


def measure_costs(
    pair: ModelPair, kind: DrafterKind, backend: str, sampling: SamplingParams, sizes: list[int]
) -> CostTable:
    """Costs for these numbers of rows (at least one), measured now and not stored."""
    tables = []
    for rows in sizes:
        lab = _Lab(pair, kind, backend, sampling, AUTOMATIC, rows, FULL)
        for _ in lab.steps():
            pass
        tables.append(lab.costs())
    return functools.reduce(CostTable.joined, tables)


def cost_table(pair: ModelPair, kind: DrafterKind, backend: str, sampling: SamplingParams, rows: int) -> CostTable:
    """The cost table of this pair, drafter and machine for `rows` rows; missing costs are measured and stored."""
    costs = MeasuredCosts(pair, kind, backend, sampling)
    for _ in costs.measure(missing_sizes(costs.table, rows)):
        pass
    assert costs.table is not None
    return costs.table


class _Random(Drafter):
    """Proposes `width` random tokens per row: a round's cost does not depend on which tokens are drafted."""

    width = 0

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        # Drawn on the host: a GPU's generator raises during a capture and after a failed one.
        tokens = to_device(torch.randint(0, self.vocab, (len(rows), self.width)), self.device)
        return Proposal(tokens, [self.width] * len(rows))


class _TimedDecoder(BatchDecoder):
    """A decoder that records how long its last proposal took (`proposal_ms`)."""

    proposal_ms = 0.0

    def draft_with(self, drafter: Drafter) -> None:
        """Draft chains with another drafter from now on."""
        self.drafter, self._branches = drafter, False

    def _propose(self, max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        start = _now(self.target.device)
        proposal = super()._propose(max_drafts, keys)
        self.proposal_ms = _now(self.target.device) - start
        return proposal


def _now(device: torch.device) -> float:
    """A monotonic clock in milliseconds, read once the device has finished its queued work."""
    if is_accelerator(device):
        runtime(device).synchronize(device)
    return 1000 * time.perf_counter()


class _Lab:
    """A batch of equal prompts, prefilled once, on which rounds are timed."""

    def __init__(
        self,
        pair: ModelPair,
        kind: DrafterKind,
        backend: str,
        sampling: SamplingParams,
        verification: Verification,
        rows: int,
        plan: Plan,
    ) -> None:
        self.device, self.rows, self.plan = pair.device, rows, plan
        self.padded = not pair.target_step.skips_padding
        self.widths = [width for width in plan.widths if width == 1 or rows * width <= MOST_TOKENS]
        generator = torch.Generator().manual_seed(0)
        # `room`: the tokens each row would get if every draft were accepted.
        limit = max(plan.widths)
        drafted = sum(1 + requested for requested in plan.drafted)
        room = (plan.repeats + 1) * (sum(self.widths) + drafted) + limit
        # Without a gap, a target that drafts for itself proposes nothing, and there is nothing to time.
        least = gapped(WINDOW) if kind.windows else 0
        context = max(1, min(max(plan.context, least), pair.context_length - room))
        prompt = torch.randint(0, pair.vocab, (context,), generator=generator).tolist()
        length = context + room
        self.random = _Random(pair.vocab, pair.device)
        self.model: Drafter | None = None
        runner = make_runner(pair.target_step, rows, length, pair.vocab, backend)
        if kind.timed is not None:
            texts = CachedTexts([[i] for i in range(rows)], [length] * rows)
            parts = Parts(pair, rows, texts, backend, sampling, verification, target=runner)
            self.model = kind.timed(parts)
        made: Drafter = self.model or self.random
        sequences = [Sequence(i, i, prompt, 10**6, frozenset()) for i in range(rows)]
        self.last = sequences[-1]
        self.decoder = _TimedDecoder(sequences, runner, DecodingParams(sampling), made, FixedLength(limit))
        self.draft_times: dict[int, list[float]] = {requested: [] for requested in plan.drafted}
        self.verify_times: dict[int, list[float]] = {width: [] for width in self.widths}

    def steps(self) -> Iterator[float]:
        """Run the prefill and the rounds; yield the share of the rounds that are done after each decoder step."""
        while not self.last.token_ids:
            self._step()
            yield 0.0
        drafts = self.model is not None
        count = (self.plan.repeats + 1) * (len(self.widths) + drafts * len(self.draft_times))
        for done, _ in enumerate(self._rounds(drafts), start=1):
            yield done / count

    def _rounds(self, drafts: bool) -> Iterator[None]:
        """Rounds with the draft model, then rounds without it; yield after each."""
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
        """Whether every verification, and therefore every proposal, has been timed at least once."""
        return all(self.verify_times.values())

    def costs(self) -> CostTable:
        """The measured costs; requires `timed`."""
        points = [(float(self.rows * width), median(times)) for width, times in self.verify_times.items()]
        # A wider verification is never cheaper; if it was measured so, that is noise and the larger time counts.
        verify = [(x, max(y for other, y in points if other <= x)) for x, _ in points]
        draft, proposal = {}, {}
        if self.model is not None:
            few, many = self.plan.drafted
            short, long = median(self.draft_times[few]), median(self.draft_times[many])
            # Noise can make the longer proposal seem the cheaper one; its whole time per token is an upper bound.
            each = (long - short) / (many - few) if long > short else long / many
            # Every proposal also read one token that had been written.
            rest = max(0.0, short - each * (few + READING * self.rows)) if long > short else 0.0
            draft, proposal = {self.rows: each}, {self.rows: rest}
        coarse = (self.rows,) if self.plan.coarse else ()
        return CostTable({self.rows: verify}, draft, self.padded, coarse, proposal)

    def _step(self) -> float:
        """The milliseconds of one step of the decoder."""
        start = _now(self.device)
        with shortage_explained():
            self.decoder.step()
        return _now(self.device) - start

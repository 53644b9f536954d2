"""Measure the cost of a round on this machine, for a pair and a device, and store it (`MeasuredCosts`).

Rounds are timed in a real decoder whose drafts are random tokens; of several times, the median counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
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
from ..sequence import Round, Sequence
from ..verify.rules import AUTOMATIC, Verification
from .base import DecodingParams
from .batch import BatchDecoder
from .cost_store import DOUBTS, costs_path

# Tokens per row of each measured verification, if all rows together have at most MAX_TOKENS.
WIDTHS, MAX_TOKENS = (1, 2, 3, 5, 9, 17), 96
# Tokens per row of a short and of a long proposal. The difference of their times, divided by the difference of
# these two numbers, is the cost of a draft token. The rest of a proposal's time is its fixed cost.
DRAFTED = (1, 3)
# How often each verification and proposal is timed, after one untimed run; and the tokens of the prompt. For two
# numbers of rows, this takes about 2 s with SmolLM2-135M on two cores of a 2.5 GHz Xeon.
REPEATS, CONTEXT = 3, 32


class MeasuredCosts:
    """The cost table of a pair, drafter, backend and kind of sampling: stored costs plus those measured now.

    Attributes:
        path: the table's file, or None to store nothing.
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

    def measure(self, sizes: list[int], seconds: float = math.inf) -> Iterator[float]:
        """Measure for these numbers of rows, one decoder step at a time, for at most `seconds`.

        If time runs out before every verification for a number of rows has been timed, that number of rows is
        left out of the table.

        Yields:
            The share of the work that is done, from 0 to 1.
        """
        end = time.monotonic() + seconds
        for i, rows in enumerate(sizes):
            timer = _RoundTimer(self.pair, self.kind, self.backend, self.sampling, self.verification, rows)
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
        """Join the new costs with the file, which another process may have extended; store them."""
        # Doubted costs stay if the new ones are higher: the machine was even busier then.
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
    costs = MeasuredCosts(pair, kind, backend, sampling)
    costs.path = costs.table = None
    for _ in costs.measure(sizes):
        pass
    assert costs.table is not None
    return costs.table


class _RandomDrafter(Drafter):
    """Proposes random tokens: a round's cost does not depend on which tokens are drafted."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        # Draw on the host, because a GPU's generator raises during a graph capture and after a failed capture.
        tokens = torch.randint(0, self.vocab, (len(rows), max(max_drafts)))
        return Proposal(to_device(tokens, self.device), max_drafts)


class _TimedDecoder(BatchDecoder):
    """Launches no round ahead: each round has another length, set just before it, and is timed alone."""

    launches_ahead = False


class _RoundTimer:
    """Times rounds on a batch of equal prompts: first those of the draft model, then those of random drafts."""

    def __init__(
        self,
        pair: ModelPair,
        kind: DrafterKind,
        backend: str,
        sampling: SamplingParams,
        verification: Verification,
        rows: int,
    ) -> None:
        self.device, self.rows, self.sampling = pair.device, rows, sampling
        self.padded = not pair.target_step.skips_padding
        widths = [width for width in WIDTHS if width == 1 or rows * width <= MAX_TOKENS]
        # The tokens that each row would get if every draft were accepted, and the drafts of the last round.
        room = (REPEATS + 1) * max(sum(widths), sum(DRAFTED) + len(DRAFTED)) + max(widths)
        # A target that drafts for itself proposes nothing to a row without a gap (see draft/window.py), so make
        # the prompt long enough to have one.
        context = max(CONTEXT, gapped(WINDOW) if kind.windows else 0)
        context = max(1, min(context, pair.context_length - room))
        generator = torch.Generator().manual_seed(0)
        self.prompt = torch.randint(0, pair.vocab, (context,), generator=generator).tolist()
        self.random = _RandomDrafter(pair.vocab, pair.device)
        self.model: Drafter | None = None
        self.runner = make_runner(pair.target_step, rows, context + room, pair.vocab, backend)
        if kind.timed is not None:
            texts = CachedTexts([[i] for i in range(rows)], [context + room] * rows)
            parts = DrafterInputs(pair, rows, texts, backend, sampling, verification, target=self.runner)
            self.model = kind.timed(parts)
        # Milliseconds by draft length: of proposals, and of whole rounds with random drafts. The first is untimed.
        self.draft_times: dict[int, list[float]] = {length: [] for length in DRAFTED if self.model is not None}
        self.verify_times: dict[int, list[float]] = {width - 1: [] for width in widths}

    def steps(self) -> Iterator[float]:
        """Run the rounds; after each decoder step, yield the share of the rounds that are done."""
        done, count = 0, (REPEATS + 1) * (len(self.draft_times) + len(self.verify_times))
        for drafter, times_by_length in ((self.model, self.draft_times), (self.random, self.verify_times)):
            if drafter is None:
                continue
            decoder = self._decoder(drafter)
            while not decoder.sequences[-1].token_ids:
                self._step(decoder)
                yield done / count
            # The lengths take turns, so that a slow moment of the machine affects all of them.
            for length, times in (REPEATS + 1) * list(times_by_length.items()):
                decoder.policy = FixedLength(length)
                round_, ms = self._step(decoder)
                times.append(ms if drafter is self.random else round_.draft_ms or 0.0)
                done += 1
                yield done / count

    def _decoder(self, drafter: Drafter) -> BatchDecoder:
        """Return a decoder of the prompts, whose target returns states if the draft model reads them."""
        sequences = [Sequence(i, i, self.prompt, 10**6, frozenset()) for i in range(self.rows)]
        policy, states = FixedLength(max(WIDTHS)), self.model is not None and self.model.observes_states
        params = DecodingParams(self.sampling)
        return _TimedDecoder(sequences, self.runner, params, drafter, policy, return_states=states)

    @property
    def timed(self) -> bool:
        """Whether every verification has been timed at least once. Proposals are timed before verifications."""
        return all(len(times) > 1 for times in self.verify_times.values())

    def costs(self) -> CostTable:
        """Return the measured costs; requires `timed`."""
        points = [(float(self.rows * (n + 1)), median(times[1:])) for n, times in self.verify_times.items()]
        # A wider verification is never cheaper. If noise makes it look cheaper, use the narrower one's time.
        verify = [(x, max(y for other, y in points if other <= x)) for x, _ in points]
        draft, proposal = {}, {}
        if self.model is not None:
            (short_len, short_ms), (long_len, long_ms) = (
                (length, median(times[1:])) for length, times in self.draft_times.items()
            )
            # If noise makes the longer proposal look cheaper than the shorter one, use an upper bound of the cost
            # per token: the longer proposal's time divided by its number of tokens.
            token_ms = (long_ms - short_ms) / (long_len - short_len) if long_ms > short_ms else long_ms / long_len
            # Every proposal also reads one written token.
            proposal_ms = (
                max(0.0, short_ms - token_ms * (short_len + READING * self.rows)) if long_ms > short_ms else 0.0
            )
            draft, proposal = {self.rows: token_ms}, {self.rows: proposal_ms}
        return CostTable({self.rows: verify}, draft, self.padded, proposal)

    def _step(self, decoder: BatchDecoder) -> tuple[Round, float]:
        """Run one step of a decoder and return its round and its milliseconds."""
        start = _now(self.device)
        with shortage_explained():
            round_ = decoder.step()
        return round_, _now(self.device) - start


def _now(device: torch.device) -> float:
    """Return the time in milliseconds, after the device has finished its queued work."""
    if is_accelerator(device):
        runtime(device).synchronize(device)
    return 1000 * time.perf_counter()

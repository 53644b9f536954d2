"""What a round costs on this machine: measured once for a pair and a device, and kept.

Contract: a CostTable gives milliseconds of one verification of so many tokens in so many rows, and of one forward
of the draft, interpolated between what was measured. Rounds are measured as they run: a real decoder, whose drafts
are random tokens. The table is a plain JSON file in the user's cache; the same table gives the same answers.
The least of REPEATS times counts: other work on the machine only ever adds to one.
Non-goals: costs that depend on the length of the text (it is CONTEXT tokens here).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from .attention import choose_backend
from .decoder import BatchDecoder, Rules
from .draft_head import DraftHead
from .drafters import Proposal
from .drafting import choose_drafter, make_drafter, runs_model
from .graphs import make_runner
from .pair import ModelPair
from .policies import FixedLength
from .runner import PrefillSteps
from .sampling import SamplingParams
from .sequence import Sequence
from .verify import Keys
from .weights import cache_root

CONTEXT = 160
WIDTHS = (1, 2, 3, 5, 9, 17)  # tokens a row in a measured verification
MOST_TOKENS = 96  # of all rows together
DRAFTED = (1, 5)  # tokens a row in two measured proposals
# More rows are taken for as many: from here on a round's cost goes by its tokens.
MOST_ROWS = 8
REPEATS = 4
FORMAT = 3

Point = tuple[float, float]


class RoundCosts(Protocol):
    """Milliseconds of a round's parts, measured (CostTable) or predicted; `padded` as in CostTable."""

    @property
    def padded(self) -> bool: ...

    def verify_ms(self, rows: int, tokens: float) -> float: ...

    def draft_ms(self, rows: int) -> float: ...


@dataclass(frozen=True)
class CostTable:
    """verify[rows] lists (tokens of all rows, ms), draft[rows] the ms of one forward of the draft; rows ascend.

    `padded` says that a row's padding costs what its tokens cost: tokens are then rows x the widest row.
    """

    verify: dict[int, list[Point]]
    draft: dict[int, float]
    padded: bool

    def verify_ms(self, rows: int, tokens: float) -> float:
        """One verification of `tokens` in all rows together; beyond what was measured the last slope goes on."""
        return _between([(size, _line(points, tokens)) for size, points in self.verify.items()], rows)

    def draft_ms(self, rows: int) -> float:
        """One forward of the draft; 0 where the drafter runs no model."""
        return _between(list(self.draft.items()), rows) if self.draft else 0.0


def _line(points: list[Point], at: float) -> float:
    """Piecewise linear through the points, going on at both ends."""
    if len(points) == 1:
        return points[0][1]
    index = min(max(bisect_left(points, (at, 0.0)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def _between(points: list[Point], at: float) -> float:
    inside = min(max(at, points[0][0]), points[-1][0])
    return _line(points, inside)


def cost_table(
    pair: ModelPair, drafter: Any, backend: str, sampling: SamplingParams, rows: int, rule: str = "chen"
) -> CostTable:
    """The stored table of this pair, drafter and machine for `rows` rows; what is missing is measured and kept."""
    path = _path(pair, drafter, backend, sampling)
    table = _read(path)
    missing = _missing(table, rows)
    if table is None or missing:
        table = measure_costs(pair, drafter, backend, sampling, rule, missing, table)
        _write(path, table)
    return table


def measure_ahead(pair: ModelPair, rows: int, tell: Callable[[], None]) -> None:
    """Measure now what draft_length="cost-aware", all else left as it is, will ask for: greedy and sampled.

    `tell` is called once, before the first measurement; not where every table is there already.
    """
    drafter, backend = choose_drafter(pair, "auto"), choose_backend("auto", pair.device)
    kinds = [SamplingParams(temperature=temperature) for temperature in (0.0, 1.0)]
    if any(_missing(_read(_path(pair, drafter, backend, kind)), rows) for kind in kinds):
        tell()
    for kind in kinds:
        cost_table(pair, drafter, backend, kind, rows)


def _missing(table: CostTable | None, rows: int) -> list[int]:
    sizes = [1 << i for i in range((min(rows, MOST_ROWS) - 1).bit_length() + 1)]
    return [size for size in sizes if table is None or size not in table.verify]


def _path(pair: ModelPair, drafter: Any, backend: str, sampling: SamplingParams) -> Path:
    return cache_root() / "costs" / f"{_key(pair, drafter, backend, sampling)}.json"


def _key(pair: ModelPair, drafter: Any, backend: str, sampling: SamplingParams) -> str:
    """Everything that a round's cost depends on."""
    draft = getattr(pair.draft, "name_or_path", None) or type(pair.draft).__name__
    if isinstance(pair.draft, DraftHead):
        draft = f"{pair.draft.config} {len(pair.draft.vocabulary)}"
    model = pair.target.config.get_text_config()
    facts = [
        FORMAT, str(pair.target.name_or_path), model.hidden_size, model.num_hidden_layers, str(draft),
        str(drafter), backend, str(pair.dtype), str(pair.device), torch.__version__, torch.get_num_threads(),
        sampling.greedy,
        torch.cuda.get_device_name(pair.device) if pair.device.type == "cuda" else os.cpu_count(),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _read(path: Path) -> CostTable | None:
    try:
        stored = json.loads(path.read_text())
        verify = {int(rows): [(x, y) for x, y in points] for rows, points in stored["verify"].items()}
        return CostTable(verify, {int(rows): ms for rows, ms in stored["draft"].items()}, stored["padded"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(path: Path, table: CostTable) -> None:
    """Kept if it can be: a cache that can't be written costs the next start a few seconds, and nothing else."""
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(table), indent=1))
        os.replace(part, path)
    except OSError:
        return


def measure_costs(
    pair: ModelPair,
    drafter: Any,
    backend: str,
    sampling: SamplingParams,
    rule: str,
    sizes: list[int],
    known: CostTable | None = None,
) -> CostTable:
    """Measure now, for these numbers of rows, beside what is known; `cost_table` keeps what it measured."""
    verify = dict(known.verify) if known else {}
    draft = dict(known.draft) if known else {}
    for rows in sizes:
        lab = _Lab(pair, drafter, backend, sampling, rule, rows)
        if lab.model is not None:
            draft[rows] = lab.draft_ms()
        widths = [width for width in WIDTHS if width == 1 or rows * width <= MOST_TOKENS]
        points = sorted((float(rows * width), ms) for width, ms in lab.verify_ms(widths).items())
        # A wider verification is never cheaper: where it seems so, that was noise.
        verify[rows] = [(x, max(y for other, y in points if other <= x)) for x, y in points]
    padded = not pair.target_step.skips_padding
    return CostTable(dict(sorted(verify.items())), dict(sorted(draft.items())), padded)


class _Random:
    """Proposes `width` random tokens a row: what is proposed does not change what a round costs."""

    calls = 0
    width = 0

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device

    def start(self, rows: list[Sequence]) -> PrefillSteps | None:
        return None

    def propose(self, rows: list[Sequence], caps: list[int], keys: Keys) -> Proposal:
        tokens = torch.randint(0, self.vocab, (len(rows), self.width), device=self.device)
        return Proposal(tokens, [self.width] * len(rows))

    def settle(self, rows: list[Sequence], proposal: Proposal, accepted: list[int]) -> None:
        return None

    def move_row(self, source: int, target: int) -> None:
        return None


class _Timed:
    """A drafter whose proposals are timed."""

    def __init__(self, drafter: Any, now: Callable[[], float]) -> None:
        self.drafter, self.now, self.ms = drafter, now, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, rows: list[Sequence], caps: list[int], keys: Keys) -> Proposal:
        start = self.now()
        proposal: Proposal = self.drafter.propose(rows, caps, keys)
        self.ms = self.now() - start
        return proposal


class _Lab:
    """A batch of equal prompts, computed once, on which rounds are timed: the draft model's first, then any."""

    def __init__(
        self, pair: ModelPair, drafter: Any, backend: str, sampling: SamplingParams, rule: str, rows: int
    ) -> None:
        self.device, limit = pair.device, max(WIDTHS)
        generator = torch.Generator().manual_seed(0)
        # As many as would be written if every draft were accepted.
        room = (REPEATS + 1) * (sum(WIDTHS) + sum(1 + asked for asked in DRAFTED)) + limit
        context = max(1, min(CONTEXT, pair.context_length - room))
        prompt = torch.randint(0, pair.vocab, (context,), generator=generator).tolist()
        length = context + room
        self.random, self.model = _Random(pair.vocab, pair.device), None
        if runs_model(drafter):
            self.model = _Timed(make_drafter(pair, "model", rows, length, backend, sampling, rule), self._now)
        made = self.model or self.random
        runner = make_runner(
            pair.target_step, rows, length, pair.vocab, backend, keep_states=hasattr(made, "read_states")
        )
        sequences = [Sequence(i, i, prompt, 10**6, frozenset()) for i in range(rows)]
        self.decoder = BatchDecoder(sequences, runner, Rules(sampling), made, FixedLength(limit))
        while not sequences[-1].token_ids:
            self.decoder.step()

    def draft_ms(self) -> float:
        """Ms of one more drafted token."""
        assert self.model is not None
        times: dict[int, list[float]] = {asked: [] for asked in DRAFTED}
        for repeat in range(REPEATS + 1):
            for asked, values in times.items():
                self.decoder.policy = FixedLength(asked)
                self.decoder.step()
                if repeat:
                    values.append(self.model.ms)
        few, many = DRAFTED
        return max(0.0, min(times[many]) - min(times[few])) / (many - few)

    def verify_ms(self, widths: list[int]) -> dict[int, float]:
        """Ms of a round of so many tokens a row; the widths take turns. From here on the model drafts no more."""
        self.decoder.drafter, self.decoder.policy = self.random, FixedLength(max(WIDTHS))
        times: dict[int, list[float]] = {width: [] for width in widths}
        for repeat in range(REPEATS + 1):
            for width in widths:
                self.random.width = width - 1
                start = self._now()
                self.decoder.step()
                if repeat:
                    times[width].append(self._now() - start)
        return {width: min(values) for width, values in times.items()}

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 1000 * time.perf_counter()

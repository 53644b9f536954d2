"""`python -m bench floor`: steps of 1 to 24 tokens beside the floor that this CPU's memory and arithmetic set.

Contract: reading = bytes of the weights / bandwidth, the best of the passes over an array of ten last caches (at
most 1 GiB) that take turns with the arms of the same number of tokens; floor = the longer of reading and FLOPs /
FLOP/s of a large product; a part measures attention over long texts (bench/attention/shared.py). The arms,
on the same threads: all products of a step by our code and by the libraries for 16-bit weights
(bench/products.py), whole steps of the target on rows of CONTEXT cached tokens, and a step of the draft. A pass
comes before each, so that weights are read from memory, as in a real step; "again" is a second draft step at
once, whose weights may lie in the cache. Ratios are lowest times over the floor, since both are this machine at
its best. Beside them, "paired" is the median of each time over reading at the speed of the passes just before
and after it, whichever was faster: a shared machine's bandwidth can change within a run. Source: Williams,
Waterman and Patterson, "Roofline", CACM 2009.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bass_core import ModelPair, load_pair
from bass_core.machine.cpu import native_bfloat16
from bass_core.machine.cpu_speed import READS, flops_of, last_cache, read_speeds, room, written
from bass_core.model.attention import choose_backend
from bass_core.model.draft_head import DraftHead
from bass_core.model.forward import ForwardBatch
from bass_core.model.prefill import PrefillSteps
from bass_core.model.runner import ModelRunner

from ..attention import shared as attention
from ..products import libraries, products_of
from ..report.report import claim, document, median, parser, show, table

CONTEXT = 128
# For each number of tokens: rows x tokens a row of the whole steps.
STEPS = {
    1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(1, 3)], 4: [(4, 1), (1, 4)], 6: [(2, 3)], 8: [(8, 1), (4, 2), (1, 8)],
    12: [(12, 1), (4, 3)], 16: [(16, 1), (8, 2), (4, 4)], 24: [(24, 1), (4, 6)],
}  # fmt: skip
# Bars on the products over reading, by tokens: on a CPU with native bfloat16, and on others.
NATIVE = {1: 1.4, 2: 1.4, 3: 1.4, 4: 1.4, 6: 1.4, 8: 1.5, 12: 1.9, 16: 2.4}
OTHERS = {1: 1.4, 2: 1.4, 3: 1.4}
OURS, STEP, DRAFT, AGAIN = "products, ours", "step", "draft step", "draft step, again"
STEP_BARS, DRAFT_ROWS = {(1, 1): 1.6, (8, 1): 2.2}, (1, 8)

# Seconds between a pass and an arm.
_REST = 0.01

Row = dict[str, Any]
Case = tuple[str, int, int]  # what, rows, tokens a row


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("floor", __doc__ or "")
    options.add_argument("--pair", default="smollm2")
    options.add_argument("--draft", help="a folder or Hub id, in place of the pair's own")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--repeats", type=int, default=15)
    arguments = options.parse_args(argv)
    torch.manual_seed(arguments.seed)
    pair = load_pair(arguments.pair, draft=arguments.draft, device="cpu", dtype=arguments.dtype)
    try:
        bench = Floor(pair, 1 if arguments.quick else arguments.repeats)
    except ValueError as error:
        options.error(f"{error}.")
    bench.measure([1, 3, 8] if arguments.quick else list(STEPS))
    results = bench.rows()
    print(table(results))
    made = document("floor", arguments, pair.device, results, bench.claims(results, decide=not arguments.quick))
    made["machine"] = bench.machine()
    print(", ".join(f"{name}: {value}" for name, value in made["machine"].items()))
    show(made, arguments)


@dataclass
class Turns:
    """Arms that took turns. passes: milliseconds of each pass over the array. times: for each arm its milliseconds
    with the number of passes before."""

    passes: list[float]
    times: dict[Case, list[tuple[float, int]]]


class Floor:
    """The arms, their times, and the array that is read between them."""

    def __init__(self, pair: ModelPair, repeats: int) -> None:
        size = room(1 << 30)
        if not size:
            raise ValueError("there is not enough free memory to measure its bandwidth: close other programs")
        self.pair, self.repeats = pair, repeats
        self.products = products_of(pair)
        self.flops: dict[torch.dtype, float] = {}
        self.array = written(size)
        self.speeds = read_speeds(self.array)
        self.read = READS[max(self.speeds, key=self.speeds.__getitem__)]
        self.turns: list[Turns] = []

    @torch.inference_mode()
    def measure(self, counts: list[int]) -> None:
        """Time all arms at these numbers of tokens, and the draft's step."""
        from ..compiled_products import run  # imports numba

        target: Any = self.pair.target_step
        makers: dict[str, Any] = {OURS: partial(run, target.packed), **libraries(self.products)}
        step = _steps(self.pair, max(counts))
        for tokens in counts:
            self._multiply()
            arms = {(name, 1, tokens): make(tokens) for name, make in makers.items()}
            arms |= {(STEP, rows, width): step(rows, width) for rows, width in STEPS[tokens]}
            self._by_turns(arms)
        if self.pair.draft is not None:
            draft = _draft_steps(self.pair, max(DRAFT_ROWS))
            self._by_turns({(DRAFT, rows, 1): draft(rows) for rows in DRAFT_ROWS}, again=AGAIN)
        self._by_turns(attention.arms(self.pair))

    def _multiply(self) -> None:
        """Measure the arithmetic again: what else runs on the machine only lowers it."""
        for dtype in {self.pair.dtype, torch.float32}:
            self.flops[dtype] = max(self.flops.get(dtype, 0.0), flops_of(dtype))

    def _by_turns(self, arms: dict[Case, Callable[[], object]], again: str = "") -> None:
        """Each round runs all arms, with a pass before each; one round to warm up."""
        turns = Turns([self._pass()], {})
        for repeat in range(self.repeats + 1):
            for (name, rows, width), run in arms.items():
                # The threads of the pass before still look for work, on the cores that the arm needs.
                time.sleep(_REST)
                for what in (name, again) if again else (name,):
                    taken = _ms(run)
                    if repeat:
                        times = turns.times.setdefault((what, rows, width), [])
                        times.append((taken, len(turns.passes)))
                turns.passes.append(self._pass())
        self.turns.append(turns)

    def _pass(self) -> float:
        return _ms(lambda: self.read(self.array))

    def machine(self) -> Row:
        """This CPU's peaks and what they were measured with. GB/s are those of the passes between the arms."""
        speeds = [self.array.nbytes / 1e6 / ms for turns in self.turns for ms in turns.passes]
        figures = {
            "GB/s, best": max(speeds),
            "GB/s, median": median(speeds),
            **{f"GB/s alone, {name}": speed / 1e9 for name, speed in self.speeds.items()},
            **{f"GFLOP/s in {str(dtype)[6:]}": speed / 1e9 for dtype, speed in self.flops.items()},
        }
        return {
            **{name: round(value, 1) for name, value in figures.items()},
            "MiB read": self.array.nbytes >> 20,
            "MiB last cache": last_cache() >> 20,
            "native bfloat16": native_bfloat16(),
        }

    def rows(self) -> list[Row]:
        """A row for each arm and number of tokens."""
        return [self._row(case, turns) for turns in self.turns for case in turns.times]

    def _row(self, case: Case, turns: Turns) -> Row:
        what, rows, width = case
        weights, nbytes = self._cost(case)
        share = nbytes / self.array.nbytes
        reading = share * min(turns.passes)
        floor = max(reading, 1000 * 2 * weights * rows * width / max(self.flops.values()))
        times = [taken for taken, _ in turns.times[case]]
        paired = [taken / share / min(turns.passes[at - 1 : at + 1]) for taken, at in turns.times[case]]
        return {
            "what": what,
            "rows": rows,
            "tokens a row": width,
            "GB/s": nbytes / reading / 1e6,
            "reading ms": reading,
            "floor ms": floor,
            "lowest ms": min(times),
            "median ms": median(times),
            "lowest / reading": min(times) / reading,
            "lowest / floor": min(times) / floor,
            "paired / reading": median(paired),
        }

    def _cost(self, case: Case) -> tuple[float, int]:
        """The weights that a token is multiplied with, or half its FLOPs, and the bytes to read."""
        what = case[0]
        if case in attention.CASES:
            return attention.cost(self.pair, *case)
        if what in (DRAFT, AGAIN):
            return _draft_cost(self.pair)
        cost = self.pair.target_step.cost
        if what == STEP:
            return cost.parameters, cost.weight_bytes
        weights = sum(one.outputs * one.inputs for one in self.products)
        return weights, sum(one.nbytes for one in self.products) if what == OURS else 2 * weights

    def claims(self, results: list[Row], decide: bool) -> list[Row]:
        """What must hold: our products and steps near the floor, and no library's products much faster."""
        by = {(row["what"], row["rows"], row["tokens a row"]): row for row in results}
        made = []

        def most(name: str, value: float, bar: float) -> None:
            made.append(claim(name, value, f"at most {bar}", value <= bar if decide else None))

        for tokens, bar in (NATIVE if native_bfloat16() else OTHERS).items():
            if (OURS, 1, tokens) in by:
                most(f"products / reading, tokens: {tokens}", by[OURS, 1, tokens]["lowest / reading"], bar)
        for tokens in STEPS:
            found = {what: row["lowest ms"] for (what, rows, width), row in by.items()
                     if width == tokens and what not in (STEP, DRAFT, AGAIN, *attention.NAMES)}  # fmt: skip
            own = found.pop(OURS, None)
            if own is not None and found:
                fastest = min(found, key=found.__getitem__)
                most(f"products / fastest library's ({fastest}), tokens: {tokens}", own / found[fastest], 1.05)
        for (rows, width), bar in STEP_BARS.items():
            most(f"step / reading, batch {rows}", by[STEP, rows, width]["lowest / reading"], bar)
        if isinstance(self.pair.draft, DraftHead):
            most("draft head's step / reading, batch 1", by[DRAFT, 1, 1]["lowest / reading"], 1.5)
        for case in attention.CASES if native_bfloat16() else []:
            if case in by:
                most(f"{case[0]} / floor, {case[1]} x {case[2]}", by[case]["lowest / floor"], attention.BAR)
        share = sum(one.nbytes for one in self.products) / self.pair.target_step.cost.weight_bytes
        made.append(claim("share of the weights' bytes in these products", share, "0.99 to 1", 0.99 <= share <= 1))
        return made


def _steps(pair: ModelPair, most: int) -> Callable[[int, int], Callable[[], object]]:
    """Makes whole steps of the target for (rows, tokens a row), rows of CONTEXT cached tokens each."""
    model, backend = pair.target_step, choose_backend("auto", pair.device, pair.dtype)
    runner = ModelRunner(model, most, CONTEXT + most, pair.vocab, backend)
    prefill = PrefillSteps(runner, [torch.randint(0, pair.vocab, (CONTEXT,)).tolist()] * most)
    while not prefill.done:
        prefill.step()

    def step(rows: int, width: int) -> Callable[[], object]:
        batch = ForwardBatch(torch.randint(0, pair.vocab, (rows, width)), [CONTEXT] * rows)
        return lambda: model.forward(batch, runner.cache, backend)

    return step


def _draft_steps(pair: ModelPair, most: int) -> Callable[[int], Callable[[], object]]:
    """Makes steps of the pair's draft, one token a row, for a number of rows of CONTEXT cached tokens each."""
    model, head, backend = pair.draft_step, pair.draft, choose_backend("auto", pair.device, pair.dtype)
    assert model is not None
    cache = model.new_cache(most, CONTEXT + 1)

    def fed(rows: int, width: int) -> Callable[[], torch.Tensor]:
        ids = torch.randint(0, pair.vocab, (rows, width))
        states = torch.randn(rows, width, pair.target_step.hidden)
        return (lambda: head.inputs(ids, states)) if isinstance(head, DraftHead) else (lambda: ids)

    model.forward(ForwardBatch(fed(most, CONTEXT)(), [0] * most), cache, backend)
    states = isinstance(head, DraftHead)

    def step(rows: int) -> Callable[[], object]:
        inputs, lengths = fed(rows, 1), [CONTEXT] * rows
        return lambda: model.forward(ForwardBatch(inputs(), lengths, return_states=states), cache, backend)

    return step


def _draft_cost(pair: ModelPair) -> tuple[int, int]:
    """The weights that a draft's step multiplies a token with, and their bytes; a head has its fusing layer."""
    assert pair.draft_step is not None
    cost, fuse = pair.draft_step.cost, 0
    if isinstance(pair.draft, DraftHead):
        hidden = pair.draft.config.hidden
        fuse = (2 if pair.draft.config.reads_states else 1) * hidden * hidden
    return cost.parameters + fuse, cost.weight_bytes + fuse * pair.dtype.itemsize


def _ms(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)

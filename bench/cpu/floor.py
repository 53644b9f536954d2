"""`python -m bench floor`: steps and prompts compared with the floor of this CPU's memory and arithmetic.

We time whole steps of the target on rows of CONTEXT cached tokens, steps of the draft, and the prefill of prompts,
on torch's threads.
reading = bytes of the weights / bandwidth. The bandwidth is that of the fastest of several passes over an array of
ten times the last-level cache (at most 1 GiB). These passes take turns with the steps of one number of tokens.
floor = the longer of reading and FLOPs / the FLOP/s of a large product. The pass before each step evicts the
weights from the caches, so that the step reads them from memory, as in real decoding. "again" is a second draft
step immediately after the first, whose weights may still be in the cache. Ratios use lowest times, so both sides
show this machine at its best. Source: Williams, Waterman and Patterson, "Roofline", CACM 2009.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bass_core import ModelPair
from bass_core.machine.cpu import native_bfloat16
from bass_core.machine.cpu_speed import READS, bandwidth_array_bytes, filled_array, product_flops, read_speeds
from bass_core.model.attention import choose_backend
from bass_core.model.draft_head import DraftHead
from bass_core.model.forward import ForwardBatch
from bass_core.model.prefill import PrefillSteps
from bass_core.model.runner import ModelRunner
from kernels.cpu.calls.jit import cpu_name

from ..report.report import Row, at_most, document, load, median, parser, show, table, whole

CONTEXT = 128
# (rows, tokens per row) for each number of tokens.
STEPS = {
    1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(1, 3)], 4: [(4, 1), (1, 4)], 6: [(2, 3)], 8: [(8, 1), (4, 2), (1, 8)],
    12: [(12, 1), (4, 3)], 16: [(16, 1), (8, 2), (4, 4)], 24: [(24, 1), (4, 6)], 40: [(8, 5)], 64: [(16, 4)],
}  # fmt: skip
# (prompts, tokens per prompt) of each prefill.
PROMPTS = [(1, 64), (8, 48), (1, 512), (1, 2048)]
STEP, DRAFT, AGAIN, PROMPT = "step", "draft step", "draft step, again", "prompt"
# We claim that (time of a step) / (time to read its weights) is at most this, by case.
BARS = {(STEP, 1, 1): 1.6, (STEP, 8, 1): 2.2, (DRAFT, 1, 1): 1.5}
DRAFT_ROWS = (1, 8)
# Seconds between a pass and a step.
_REST = 0.01

Case = tuple[str, int, int]  # (STEP, DRAFT, AGAIN or PROMPT; rows; tokens per row)
Arms = dict[Case, Callable[[], object]]


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("floor", __doc__ or "", "pair", "draft", "dtype")
    options.add_argument("--repeats", type=whole(), default=15)
    arguments = options.parse_args(argv)
    torch.manual_seed(arguments.seed)
    if not (size := bandwidth_array_bytes(1 << 30)):
        options.error("there is not enough free memory to measure its bandwidth: close other programs.")
    pair, array = load(arguments, device="cpu"), filled_array(size)
    speeds = read_speeds(array)
    read = READS[max(speeds, key=speeds.__getitem__)]
    flops = product_flops(pair.dtype)
    counts, repeats = ([1, 8], 1) if arguments.quick else (list(STEPS), arguments.repeats)
    rows: list[Row] = []
    best = float("inf")
    with torch.inference_mode():
        prompts = PROMPTS[:1] if arguments.quick else PROMPTS
        for arms in [*_arms(pair, counts), _prompt_arms(pair, prompts)]:
            passes, times = by_turns(arms, lambda: read(array), repeats)
            best = min(best, *passes)
            rows += [_row(pair, case, times[case], min(passes) / array.nbytes, flops) for case in times]
    print(table(rows))
    ratios = {(row["what"], row["rows"], row["tokens a row"]): row["lowest / reading"] for row in rows}
    claims = [
        at_most(f"{kind} / reading, batch {batch}", ratios[kind, batch, width], bar, not arguments.quick)
        for (kind, batch, width), bar in BARS.items()
        if (kind, batch, width) in ratios
    ]
    report = document("floor", arguments, pair, rows, claims)
    report["machine"] = {"GB/s, best": array.nbytes / best / 1e6, "GFLOP/s": flops / 1e9}
    report["machine"] |= {"native bfloat16": native_bfloat16(), "kernels compiled for": cpu_name()}
    show(report, arguments)


def by_turns(arms: Arms, read: Callable[[], object], repeats: int) -> tuple[list[float], dict[Case, list[float]]]:
    """Return the milliseconds of all passes and of each arm.

    Each round runs all arms, with a pass before each; we discard the arms' times of the first round.
    """
    passes: list[float] = []
    times: dict[Case, list[float]] = {case: [] for case in arms}
    for repeat in range(repeats + 1):
        for case, run in arms.items():
            if case[0] != AGAIN:
                passes.append(_ms(read))
                # Wait until the pass's threads stop spinning on the cores that the arm needs.
                time.sleep(_REST)
            taken = _ms(run)
            if repeat:
                times[case].append(taken)
    return passes, times


def _row(pair: ModelPair, case: Case, times: list[float], ms_a_byte: float, flops: float) -> Row:
    kind, rows, width = case
    model = pair.target_step if kind in (STEP, PROMPT) else pair.draft_step
    assert model is not None
    weights, nbytes = model.cost.parameters, model.cost.weight_bytes
    if kind != STEP and isinstance(pair.draft, DraftHead):  # add the head's fusing layer
        fuse = (2 if pair.draft.config.reads_states else 1) * pair.draft.config.hidden**2
        weights, nbytes = weights + fuse, nbytes + fuse * pair.dtype.itemsize
    reading = nbytes * ms_a_byte
    products = weights * rows * width
    if kind == PROMPT:
        # Only the last token of a prompt has logits, and a prompt's tokens attend to one another.
        products -= model.hidden * model.vocab * rows * (width - 1)
        heads: int = pair.target.config.get_text_config().num_attention_heads
        products += model.layers * heads * model.head_dim * rows * width * (width + 1)
    floor = max(reading, 1000 * 2 * products / flops)
    return {
        "what": kind, "rows": rows, "tokens a row": width, "reading ms": reading, "floor ms": floor,
        "lowest ms": min(times), "median ms": median(times), "lowest / reading": min(times) / reading,
        "lowest / floor": min(times) / floor,
    }  # fmt: skip


def _arms(pair: ModelPair, counts: list[int]) -> list[Arms]:
    """Return groups of arms that take turns: a group for each number of tokens, and one for the draft."""
    backend, most = choose_backend("auto", pair.device, pair.dtype), max(counts)
    target, draft, head = pair.target_step, pair.draft_step, pair.draft
    cache = target.new_cache(most, CONTEXT + most)
    target.forward(ForwardBatch(_ids(pair, most, CONTEXT), [0] * most), cache, backend)

    def step(rows: int, width: int) -> Callable[[], object]:
        batch = ForwardBatch(_ids(pair, rows, width), [CONTEXT] * rows)
        return lambda: target.forward(batch, cache, backend)

    groups: list[Arms] = [{(STEP, *size): step(*size) for size in STEPS[tokens]} for tokens in counts]
    if draft is None:
        return groups
    drafted = draft.new_cache(max(DRAFT_ROWS), CONTEXT + 1)

    def draft_step(rows: int, width: int, cached: int) -> Callable[[], object]:
        ids, states, lengths = _ids(pair, rows, width), torch.randn(rows, width, target.hidden), [cached] * rows
        if isinstance(head, DraftHead):
            return lambda: draft.forward(
                ForwardBatch(head.inputs(ids, states), lengths, return_states=True), drafted, backend
            )
        return lambda: draft.forward(ForwardBatch(ids, lengths), drafted, backend)

    draft_step(max(DRAFT_ROWS), CONTEXT, 0)()
    steps = {rows: draft_step(rows, 1, CONTEXT) for rows in DRAFT_ROWS}
    return [*groups, {(kind, rows, 1): steps[rows] for rows in DRAFT_ROWS for kind in (DRAFT, AGAIN)}]


def _prompt_arms(pair: ModelPair, sizes: list[tuple[int, int]]) -> Arms:
    """Return prefills of random prompts, in chunks as in real decoding."""
    backend, target = choose_backend("auto", pair.device, pair.dtype), pair.target_step

    def prefill(rows: int, width: int) -> Callable[[], object]:
        runner = ModelRunner(target, rows, width, pair.vocab, backend)
        prompts = _ids(pair, rows, width).tolist()

        def run() -> None:
            steps = PrefillSteps(runner, prompts)
            while not steps.done:
                steps.step()

        return run

    return {(PROMPT, *size): prefill(*size) for size in sizes if size[1] <= target.context}


def _ids(pair: ModelPair, rows: int, width: int) -> torch.Tensor:
    return torch.randint(0, pair.vocab, (rows, width))


def _ms(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)

"""`python -m bench precision`: the quality and the step times of each precision of the weights.

float32 writes a greedy answer to every prompt, and every precision then reads these texts. "same choice" is the
share of the answers' tokens that are also the precision's greedy choice. KL is the mean divergence of the
precision's distribution from float32's at these tokens, in thousandths of a nat. Perplexity is over the prompts'
tokens. "tokens a round" is for greedy decoding with DRAFTS drafts per round, with the pair's draft model in this
precision (for example, a head is int8 where our kernels run, model/select.py); it is 1 without a draft model.
Steps are those of regular decoding, for rows with CONTEXT cached tokens. The precisions take turns, except for
float32: it is timed separately, because it uses torch's threads. `--questions FILE` takes the first turns of a
file in the format of Spec-Bench as prompts.

"int8-per-token" is int8 whose vectors have one scale each, instead of one per 32 numbers. No kernel does that, so
it is emulated in torch, and its steps aren't timed.
"""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

from bass_core import ModelPair, generate
from bass_core.decode.request import make_request
from bass_core.model.forward import ForwardBatch
from bass_core.model.loading.catalogue import DTYPES
from bass_core.model.loading.quantized import QUANTISED
from bass_core.model.weights.quantized import QuantizedLinear
from kernels.reference.quantized import in_bytes

from ..prompts import mixed, questions
from ..report.report import Row, at_most, document, load, median, parser, readable, show, table, whole

CONTEXT = 128
ROWS = (1, 4, 8)
DRAFTS = 3
# Longest prompt, in tokens; the rest is cut off.
_MAX_PROMPT = 256
_EXACT = "float32"
_PER_TOKEN = "int8-per-token"


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("precision", __doc__ or "", "pair")
    options.add_argument(
        "--dtypes", nargs="+", choices=[*DTYPES, *QUANTISED, _PER_TOKEN], default=["bfloat16", "int8", "int4"]
    )
    options.add_argument("--questions", type=readable, metavar="FILE", help="prompts in the format of Spec-Bench")
    options.add_argument(
        "--prompts", type=whole(), default=48, help="number of prompts, evenly spread over the file"
    )
    options.add_argument("--max-new-tokens", type=whole(), default=64)
    options.add_argument("--repeats", type=whole(0), default=15, help="0 doesn't time the steps")
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.prompts, arguments.max_new_tokens, arguments.repeats = 2, 8, 1
    prompts = mixed(arguments.prompts)
    if arguments.questions is not None:
        turns = [question.turns[0] for question in questions(arguments.questions)]
        prompts = turns[:: max(1, len(turns) // arguments.prompts)][: arguments.prompts]
    pairs = {dtype: _load(arguments, dtype) for dtype in (_EXACT, *arguments.dtypes)}
    quality = _read(pairs, prompts, arguments.max_new_tokens)
    timed = {dtype: pair for dtype, pair in pairs.items() if dtype != _PER_TOKEN}
    steps = {rows: _steps(timed, rows, arguments.repeats) for rows in ROWS}
    results: list[Row] = [
        {"dtype": dtype, "MB": pair.target_step.cost.weight_bytes / 1e6, **quality[dtype]}
        | {f"batch {rows}, ms": median(ms[dtype]) if ms.get(dtype) else None for rows, ms in steps.items()}
        for dtype, pair in pairs.items()
    ]
    print(table(results))
    claims = [
        at_most(f"{row['dtype']}: {name}", value, bar, not arguments.quick)
        for row in results[1:]
        for name, value, bar in (
            ("perplexity / float32's", row["perplexity"] / results[0]["perplexity"], 1.01),
            ("KL, mnat", row["KL, mnat"], 20),
            ("float32's tokens a round / its own", results[0]["tokens a round"] / row["tokens a round"], 1.05),
        )
    ]
    show(document("precision", arguments, pairs[_EXACT], results, claims), arguments)


def _load(arguments: Namespace, dtype: str) -> ModelPair:
    """Load the pair in a precision; for int8-per-token, the inputs of each product are rounded by hooks."""
    pair = load(arguments, device="cpu", dtype="int8" if dtype == _PER_TOKEN else dtype)
    for module in pair.target.modules() if dtype == _PER_TOKEN else ():
        if isinstance(module, QuantizedLinear):
            module.register_forward_pre_hook(lambda layer, inputs: in_bytes(inputs[0], layer.in_features))
    pair.refresh()
    return pair


def _read(pairs: dict[str, ModelPair], prompts: list[str], new_tokens: int) -> dict[str, Row]:
    """Return the quality figures of each precision over the prompts and float32's answers."""
    sums: dict[str, Any] = {dtype: torch.zeros(7, dtype=torch.float64) for dtype in pairs}
    for prompt in prompts:
        ids = make_request(pairs[_EXACT], prompt).prompts[0][:_MAX_PROMPT]
        answer = generate(pairs[_EXACT], [ids], method="regular", max_new_tokens=new_tokens).sequences[0].token_ids
        text, first = torch.tensor([*ids, *answer]), len(ids)
        exact = _log_probabilities(pairs[_EXACT], text)
        for dtype, pair in pairs.items():
            logprobs = exact if dtype == _EXACT else _log_probabilities(pair, text)
            surprise = -logprobs[: first - 1].gather(1, text[1:first, None]).sum()
            ours, theirs = logprobs[first - 1 :], exact[first - 1 :]
            same = (ours.argmax(1) == text[first:]).sum()
            divergence = (theirs.exp() * (theirs - ours)).sum()
            accepted, rounds = 0, 1
            if pair.draft is not None:
                drafted = generate(
                    pair, [ids], max_new_tokens=new_tokens, drafter="model", draft_length=DRAFTS
                ).metrics  # fmt: skip
                accepted, rounds = drafted.accepted, max(1, drafted.rounds)
            figures = (surprise, first - 1, same, divergence, len(answer), accepted, rounds)
            sums[dtype] += torch.tensor([float(value) for value in figures], dtype=torch.float64)
    return {
        dtype: {
            "perplexity": float((surprise / read).exp()), "same choice": float(same / written),
            "KL, mnat": 1000 * float(divergence / written), "tokens a round": 1 + float(accepted / rounds),
        }
        for dtype, (surprise, read, same, divergence, written, accepted, rounds) in sums.items()
    }  # fmt: skip


def _log_probabilities(pair: ModelPair, text: Tensor) -> Tensor:
    """Return float64 [S - 1, vocab], the log-probabilities of each token of a text [S] after the first."""
    model = pair.target_step
    cache = model.new_cache(1, len(text))
    logits = model.forward(ForwardBatch(text[None, :-1], [0]), cache).logits
    return logits[0].double().log_softmax(-1)


def _steps(pairs: dict[str, ModelPair], rows: int, repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds of steps of `rows` rows, the precisions in turns; the first turn is a warm-up."""
    times: dict[str, list[float]] = {dtype: [] for dtype in pairs}
    caches = {dtype: pair.target_step.new_cache(rows, CONTEXT + 1) for dtype, pair in pairs.items()}
    vocab = pairs[_EXACT].vocab
    ids = torch.randint(0, vocab, (rows, CONTEXT + 1))
    for dtype, pair in pairs.items():
        pair.target_step.forward(ForwardBatch(ids[:, :-1], [0] * rows), caches[dtype])
    for arms in ([_EXACT], [dtype for dtype in pairs if dtype != _EXACT]):
        for turn in range(repeats + 1):
            for dtype in arms:
                start = time.perf_counter()
                pairs[dtype].target_step.forward(ForwardBatch(ids[:, -1:], [CONTEXT] * rows), caches[dtype])
                if turn:
                    times[dtype].append(1000 * (time.perf_counter() - start))
    return times

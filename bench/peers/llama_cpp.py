"""llama.cpp (the wheel xllamacpp) in a process of its own (child.py).

Contract: the process loads the GGUF file into one server, with as many slots as the batch has rows and a given
number of threads; all else is llama.cpp's default. A call sends all rows at once and returns when the last one is
written: greedy, prompts read anew, no early end. Drafts are looked up in the row's own text (`ngram-simple`);
`ngram-mod` keeps what earlier calls wrote, which is the answer when a prompt is repeated.

One server a process: beside two more, which did nothing, a token took a third longer on two cores.
"""

from __future__ import annotations

import secrets
from functools import partial
from importlib.util import find_spec
from typing import Any

from .child import Complete

INSTALL = "llama.cpp is left out: `pip install xllamacpp` adds it."
# (tokens that must match, tokens drafted after the match); the first pair is llama.cpp's default.
SPECULATION = {"plain": None, "n-gram 12/48": (12, 48), "n-gram 3/4": (3, 4)}


def installed() -> bool:
    """Whether the package is there; it is not imported."""
    return find_spec("xllamacpp") is not None


def serve(model: str, way: str, sequences: int, context: int, threads: int) -> tuple[str, Complete]:
    """The CPU instructions that it uses, and what completes.

    way: a name of SPECULATION; sequences: rows of a call; context: the most tokens of a row.
    """
    import xllamacpp

    server = _server(xllamacpp, model, way, sequences, context, threads)
    return xllamacpp.get_system_info().strip(" |"), partial(_complete, server)


def _server(xllamacpp: Any, model: str, way: str, sequences: int, context: int, threads: int) -> Any:
    made = xllamacpp.CommonParams()
    made.model.path, made.verbosity, made.n_gpu_layers = model, 0, 0
    made.n_parallel, made.n_ctx = sequences, sequences * context
    made.cpuparams.n_threads = made.cpuparams_batch.n_threads = threads
    made.cache_ram_mib = 0  # a repeat must not find its prompt in a cache
    made.api_keys = [secrets.token_hex(16)]  # the server also listens on a port of this machine
    if sizes := SPECULATION[way]:
        made.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        made.speculative.ngram_simple.size_n, made.speculative.ngram_simple.size_m = sizes
    return xllamacpp.Server(made)


def _complete(server: Any, rows: list[list[int]], tokens: int) -> list[str]:
    greedy = {"samplers": ["top_k"], "top_k": 1}
    asked = {"prompt": rows, "n_predict": tokens, "ignore_eos": True, "cache_prompt": False, **greedy}
    answer = server.handle_completions(asked)
    if "choices" not in answer:
        raise ValueError(answer)
    ends = {choice["finish_reason"] for choice in answer["choices"]}
    if ends != {"length"} or len(answer["choices"]) != len(rows):
        raise ValueError(f"{len(answer['choices'])} rows of {len(rows)}, ended by {ends}")
    return [choice["text"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]

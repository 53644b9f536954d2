"""llama.cpp (the wheel xllamacpp) in a separate process (child.py).

The process loads the GGUF file into one server with one slot per row and a fixed number of threads; everything
else is llama.cpp's default. A call sends all rows at once and returns when the last row is written. Decoding is
greedy, without an early end (unless a grammar ends), and every call reads the prompts again. Drafts are looked up
in the row's text (`ngram-simple`). We don't use `ngram-mod`: it remembers the texts of earlier calls, so a
repeated prompt would find its answer.

There is one server per process: with two more idle servers, a token took a third longer on two cores.
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
    """Return whether the package is installed; it is not imported."""
    return find_spec("xllamacpp") is not None


def serve(
    model: str, way: str, sequences: int, context: int, threads: int, grammar: dict[str, Any] | None = None
) -> tuple[str, Complete]:
    """Return the CPU instructions that llama.cpp uses, and `complete`.

    Args:
        model: the GGUF file.
        way: a name of SPECULATION.
        sequences: rows per call.
        context: the maximum number of tokens of a row.
        grammar: a JSON schema as `json_schema` or a text in GBNF as `grammar`; None writes free text.
    """
    import xllamacpp

    server = _server(xllamacpp, model, way, sequences, context, threads)
    return xllamacpp.get_system_info().strip(" |"), partial(_complete, server, grammar)


def _server(xllamacpp: Any, model: str, way: str, sequences: int, context: int, threads: int) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path, params.verbosity, params.n_gpu_layers = model, 0, 0
    params.n_parallel, params.n_ctx = sequences, sequences * context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib = 0  # a repeat must not find its prompt in a cache
    params.api_keys = [secrets.token_hex(16)]  # the server also listens on a port of this machine
    if sizes := SPECULATION[way]:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = sizes
    return xllamacpp.Server(params)


def _complete(server: Any, grammar: dict[str, Any] | None, rows: list[list[int]], tokens: int) -> list[str]:
    greedy = {"samplers": ["top_k"], "top_k": 1, "ignore_eos": grammar is None, **(grammar or {})}
    request = {"prompt": rows, "n_predict": tokens, "cache_prompt": False, **greedy}
    answer = server.handle_completions(request)
    if "choices" not in answer:
        raise ValueError(answer)
    ends = {choice["finish_reason"] for choice in answer["choices"]}
    if not ends <= {"length", *(["stop"] if grammar else [])} or len(answer["choices"]) != len(rows):
        raise ValueError(f"{len(answer['choices'])} rows of {len(rows)}, ended by {ends}")
    return [choice["text"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]

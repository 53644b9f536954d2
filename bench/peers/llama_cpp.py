"""llama.cpp (the wheel xllamacpp) in a process of its own.

Contract: `LlamaCpp` starts a child process that loads the GGUF file into one server, with as many slots as the
batch has rows and a given number of threads; all else is llama.cpp's default. A call sends all rows at once and
returns when the last one is written: greedy, prompts read anew, no early end. Drafts are looked up in the row's
own text (`ngram-simple`); `ngram-mod` keeps what earlier calls wrote, which is the answer when a prompt is
repeated.

One server a process: beside two more, which did nothing, a token took a third longer on two cores. This file
imports neither torch nor transformers, so that the child holds llama.cpp alone.
"""

from __future__ import annotations

import multiprocessing
import secrets
import time
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

INSTALL = "llama.cpp is left out: `pip install xllamacpp` adds it."
# (tokens that must match, tokens drafted after the match); the first pair is llama.cpp's default.
SPECULATION = {"plain": None, "n-gram 12/48": (12, 48), "n-gram 3/4": (3, 4)}
START_S, CALL_S = 120, 600  # how long to wait for the child before giving up


def installed() -> bool:
    """Whether the package is there; it is not imported."""
    return find_spec("xllamacpp") is not None


class LlamaCpp:
    """The child process, from `with` until its end. RuntimeError, one sentence, where the child fails or hangs.

    model: the file. way: a name of SPECULATION. sequences: rows of a call. context: the most tokens of a row.
    """

    def __init__(self, model: str, way: str, sequences: int, context: int, threads: int) -> None:
        self.way = way
        start = multiprocessing.get_context("spawn")
        self._pipe, theirs = start.Pipe()
        arguments = (theirs, model, way, sequences, context, threads)
        self._child = start.Process(target=_serve, args=arguments, daemon=True)
        self._child.start()
        theirs.close()

    def __enter__(self) -> LlamaCpp:
        self.instructions: str = self._answer(START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()  # ends the child's loop
        self._child.join(10)
        if self._child.is_alive():
            self._child.kill()

    def complete(self, rows: list[list[int]], tokens: int) -> list[str]:
        """The texts of `tokens` new tokens that follow each row's token ids."""
        self._pipe.send((rows, tokens))
        texts: list[str] = self._answer(CALL_S)
        return texts

    def cpu_s(self) -> float:
        """Seconds of CPU time that all threads of the child have used."""
        self._pipe.send(None)
        return float(self._answer(CALL_S))

    def _answer(self, seconds: float) -> Any:
        try:
            answer = self._pipe.recv() if self._pipe.poll(seconds) else f"no answer within {seconds:g} s"
        except (EOFError, OSError):
            answer = "its process ended"
        if isinstance(answer, tuple):
            return answer[0]
        raise RuntimeError(
            f"llama.cpp failed ({answer}): leave it out with --no-llama-cpp, or install another release."
        )


def _serve(pipe: Connection, *how: Any) -> None:
    """The child: a tuple of one is an answer, a string says what failed."""
    try:
        import xllamacpp

        server = _server(xllamacpp, *how)
        pipe.send((xllamacpp.get_system_info().strip(" |"),))
        while True:
            asked = pipe.recv()
            pipe.send((time.process_time() if asked is None else _complete(server, *asked),))
    except (EOFError, OSError):  # the parent has closed its end
        return
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


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

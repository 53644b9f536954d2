"""OpenVINO GenAI (the wheel openvino-genai) in a separate process (child.py).

One pipeline with continuous batching reads the GGUF file and uses a fixed number of threads; everything else is
its default. A call sends all rows at once and returns when the last row is written. Decoding is greedy and without
an early end, and every call reads the prompts again. "prompt lookup" is set as in the example of its
documentation.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from .child import Complete

INSTALL = "OpenVINO is left out: `pip install openvino-genai` adds it."
# (drafts per round, maximum number of tokens that must match), as in the documentation's example.
WAYS = {"plain": None, "prompt lookup": (5, 3)}
_CACHE_GB = 1


def installed() -> bool:
    """Return whether the package is installed; it is not imported."""
    return find_spec("openvino_genai") is not None


def serve(model: str, way: str, threads: int) -> tuple[str, Complete]:
    """Return the version of OpenVINO GenAI, and `complete`.

    Args:
        model: the GGUF file.
        way: a name of WAYS.
    """
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = _CACHE_GB, False
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    if drafts := WAYS[way]:
        properties["prompt_lookup"] = True
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
    config = genai.GenerationConfig()
    config.do_sample, config.ignore_eos = False, True
    if drafts:
        config.num_assistant_tokens, config.max_ngram_size = drafts

    def complete(rows: list[list[int]], tokens: int) -> list[list[int]]:
        config.max_new_tokens = tokens
        ids = [ov.Tensor(np.array([row], dtype=np.int64)) for row in rows]
        written = [result.m_generation_ids[0] for result in pipeline.generate(ids, [config] * len(rows))]
        if {len(row) for row in written} != {tokens}:
            raise ValueError(f"rows of {[len(row) for row in written]} tokens instead of {tokens}")
        return written

    return str(ov.__version__), complete

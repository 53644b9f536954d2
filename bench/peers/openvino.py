"""OpenVINO GenAI (the wheel openvino-genai) in a process of its own (child.py).

Contract: one pipeline with continuous batching reads the GGUF file, and takes a given number of threads; all else
is its default. A call gives it all rows at once and returns when the last one is written: greedy, prompts read
anew, no early end. With "prompt lookup" it drafts as its documentation's example does.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from .child import Complete

INSTALL = "OpenVINO is left out: `pip install openvino-genai` adds it."
# (drafts a round, tokens that must match at most) of the documentation's example.
WAYS = {"plain": None, "prompt lookup": (5, 3)}
_CACHE_GB = 1


def installed() -> bool:
    """Whether the package is there; it is not imported."""
    return find_spec("openvino_genai") is not None


def serve(model: str, way: str, threads: int) -> tuple[str, Complete]:
    """Its version, and what completes."""
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
        made = [one.m_generation_ids[0] for one in pipeline.generate(ids, [config] * len(rows))]
        if {len(one) for one in made} != {tokens}:
            raise ValueError(f"rows of {[len(one) for one in made]} tokens in place of {tokens}")
        return made

    return str(ov.__version__), complete

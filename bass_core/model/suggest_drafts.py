"""Suggest drafts that fit a target, for when the user's draft has another tokenizer.

The table lists small models by number of ids (a tokenizer's or a model's). Each has the same tokenizer as the
larger models of its family. We have not run these models here.
"""

from __future__ import annotations

_QWEN3, _QWEN2 = "Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-0.5B-Instruct"
_LLAMA3, _GEMMA3 = "meta-llama/Llama-3.2-1B-Instruct", "google/gemma-3-270m-it"
# Number of ids: drafts.
_DRAFTS = {
    32000: ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "JackFram/llama-68m"),
    49152: ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-360M-Instruct"),
    50257: ("distilbert/distilgpt2", "openai-community/gpt2"),
    50265: ("facebook/opt-125m",),
    50272: ("facebook/opt-125m",),
    50277: ("EleutherAI/pythia-70m", "EleutherAI/pythia-160m"),
    128256: (_LLAMA3,),
    151665: (_QWEN2,),
    151669: (_QWEN3,),
    151936: (_QWEN3, _QWEN2),
    152064: (_QWEN2,),
    256000: ("google/gemma-2-2b-it",),
    262144: (_GEMMA3,),
    262145: (_GEMMA3,),
}


def suggest_drafts(ids: int) -> str:
    """Return a suggestion for a target with this number of ids, as the end of a sentence."""
    named = " or ".join(_DRAFTS.get(ids, ())) or "a smaller model of the target's own family"
    return (
        f'choose {named}, if that has the target\'s tokenizer, or drafter="prompt_lookup", which needs no draft.'
    )

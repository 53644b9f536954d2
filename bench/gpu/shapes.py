"""The models that the GPU bench measures: built from configs, with random weights.

Contract: `target` has 7.8B parameters in Llama's architecture; `draft` has 310M, wide and shallow; `small` is for
checks of equal texts in float32. A dry run (no GPU) uses tiny models of the same architecture.
"""

from __future__ import annotations

import copy

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from bass_core.prediction.shapes import MODELS, llama


def target_config(dry: bool) -> LlamaConfig:
    """32 layers x 4096, 32 heads and 8 KV heads of 128, MLP 15360, vocabulary 50304: 7.79B parameters."""
    if dry:
        return llama(96, 64, 128, 2, 4, 2)
    return llama(*MODELS["7.8B"])


def draft_config(dry: bool) -> LlamaConfig:
    """4 layers x 2048, 16 heads and 4 KV heads of 128, MLP 6656, the same vocabulary, tied: 309M parameters."""
    if dry:
        return llama(96, 32, 64, 1, 2, 1, tied=True)
    return llama(*MODELS["310M"])


def small_config(dry: bool) -> LlamaConfig:
    """4 layers x 512, 8 heads and 2 KV heads of 64."""
    return llama(96, 64, 128, 2, 4, 2) if dry else llama(2048, 512, 1024, 4, 8, 2)


def build(
    config: LlamaConfig, device: torch.device, dtype: torch.dtype, seed: int, scale: float = 1.0
) -> PreTrainedModel:
    """A model in eval mode, created on the device; its matrices are `scale` times their usual initial values."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.eval().requires_grad_(False)
    if scale != 1.0:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def perturbed(model: PreTrainedModel, amount: float, seed: int) -> PreTrainedModel:
    """A copy that agrees with the model in part: each matrix gets noise of `amount` times its deviation."""
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    for parameter in other.parameters():
        if parameter.dim() > 1:
            parameter.add_(torch.randn_like(parameter) * parameter.float().std() * amount)
    return other


def prompts(count: int, shortest: int, longest: int, vocab: int, seed: int) -> list[list[int]]:
    """Random ids in rows of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


def number_words(vocab: int) -> PreTrainedTokenizerFast:
    """A tokenizer that spells id i as "t<i>", as random weights write no words."""
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(vocab)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)

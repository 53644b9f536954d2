"""Convert SmolLM2-135M-Instruct from GGUF to safetensors, with config and tokenizer: `convert`.

The result is an ordinary transformers folder. `from_pretrained(folder)` returns a plain LlamaForCausalLM with the
dequantised weights in bfloat16. The tokenizer has the chat template, and the generation config ends a reply at
`<|im_end|>`. Tensors, tokenizer and config equal those that transformers makes of the file. Other GGUF files are
not supported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from .gguf_blocks import read_weights
from .gguf_file import read_gguf

# The type of special tokens in the file's list of token types.
_SPECIAL = 3


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise the file (a few seconds) into a new folder; raises WeightsError if it can't be read."""
    folder.mkdir()
    with tqdm(total=2, desc="Preparing SmolLM2-135M, once: tokenizer", unit="step") as bar:
        fields, _ = read_gguf(gguf)
        _save_config(fields, folder)
        _tokenizer(fields).save_pretrained(folder)
        bar.update()
        bar.set_description("Preparing SmolLM2-135M, once: weights")
        heads, key_heads = (fields[f"llama.attention.head_count{kind}"] for kind in ("", "_kv"))
        weights = read_weights(gguf, heads, key_heads, torch.bfloat16)
        tensors = {f"{name}.weight": weight for name, weight in weights.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        bar.update()


def _save_config(fields: dict[str, Any], folder: Path) -> None:
    """Write config.json and generation_config.json."""
    from transformers import GenerationConfig, LlamaConfig

    ids = {f"{name}_token_id": fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    ids["pad_token_id"] = fields["tokenizer.ggml.padding_token_id"]
    GenerationConfig(**ids).save_pretrained(folder)
    make: Any = LlamaConfig  # its type knows fewer fields than it takes
    make(
        _model_name_or_path=fields["general.name"],
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        unk_token_id=fields["tokenizer.ggml.unknown_token_id"],
        tie_word_embeddings=True,
        **ids,
    ).save_pretrained(folder)


def _tokenizer(fields: dict[str, Any]) -> Any:
    """Return the tokenizer: byte-level BPE."""
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    bpe: Any = models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix="")
    backend: Any = Tokenizer(bpe)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    types = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in types if kind == _SPECIAL]
    )
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields["tokenizer.chat_template"],
        **{name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()},
    )

"""Convert SmolLM2-135M-Instruct from GGUF to safetensors, with config and tokenizer: `convert`.

The result is an ordinary transformers folder. `from_pretrained(folder)` returns a plain LlamaForCausalLM with the
dequantised weights in bfloat16. The tokenizer has the chat template, and the generation config ends a reply at
`<|im_end|>`. Other GGUF files are not supported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ...errors import WeightsError

END_OF_REPLY = "<|im_end|>"


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise the GGUF file (about 30 s) and save it to a new folder.

    Raises:
        WeightsError: if the chat template or the end token is missing.
    """
    from transformers import AutoTokenizer

    with tqdm(total=3, desc="Preparing SmolLM2-135M, once: weights", unit="step") as bar:
        model = dequantise(gguf)
        bar.update()
        bar.set_description("Preparing SmolLM2-135M, once: tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
        end = tokenizer.convert_tokens_to_ids(END_OF_REPLY)
        if tokenizer.eos_token_id != end or model.config.eos_token_id != end or not tokenizer.chat_template:
            raise WeightsError(
                f"The installed transformers reads {gguf.name} without its chat template or its end token: "
                "install the version of transformers that requirements.txt names."
            )
        bar.update()
        bar.set_description("Preparing SmolLM2-135M, once: saving")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        bar.update()


def dequantise(gguf: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Load a plain LlamaForCausalLM on the CPU, with the GGUF file's weights in `dtype`."""
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig

    options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True, "dtype": dtype}
    if hasattr(transformers, "GgufConfig"):  # newer versions would keep some architectures' weights packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # The loaded model counts as quantised and refuses save_pretrained, so a fresh model takes over its weights.
    plain: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return plain

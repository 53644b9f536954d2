"""The page in tests: `save_tiny_pair` writes a tiny random pair, which `hosted` or `serving` serves.

`hosted` serves a page from this process, `serving` runs the real app.py in another.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from bass_core import ModelPair, load_pair
from tests.support import ROOT
from ui.page.events import Snapshot
from ui.page.limits import Limits
from ui.page.page import build, launch_options
from ui.sources.source import RaceSource

# Single tokens of the tiny model, so that the page has to show them. None may run as code or break the page.
HOSTILE = (
    "<img src=x onerror=window.pwned=1>",
    "<script>window.pwned=1</script>",
    "${window.pwned=1}",
    "`+(window.pwned=1)+`",
    "{{value}}",
    "\u05e9\u05dc\u05d5\u05dd",
    "a\u200bb",
    "c\u202ed",
    "\U0001f41f",
)


def _byte_level(text: str) -> str:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer without merges: printable ASCII characters, the hostile strings, and an end token."""
    words = ["</s>", *map(chr, range(32, 127)), "\n", *HOSTILE]
    vocabulary = {words[0]: 0} | {_byte_level(word): i for i, word in enumerate(words) if i}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=False
    )


def save_tiny_pair(folder: Path, with_states: bool = False) -> tuple[Path, Path]:
    """Write a random Llama and a perturbed copy as its draft; return their folders (target, draft).

    `with_states`: Qwen3.5 instead, one of whose two layers keeps a state.
    """
    tokenizer = _tokenizer()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    if with_states:
        sizes |= {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
        model: PreTrainedModel = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    # Set the end token's logit to 0, so that a text of a thousand tokens rarely draws it.
    with torch.no_grad():
        model.lm_head.weight[0] = 0
    model.generation_config.eos_token_id = 0
    paths = folder / "target", folder / "draft"
    for path, noise in zip(paths, (0.0, 0.03), strict=True):
        with torch.no_grad():
            for weight in model.parameters():
                weight += noise * torch.randn_like(weight)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return paths


def load_saved(folders: tuple[Path, Path]) -> ModelPair:
    return load_pair(str(folders[0]), draft=str(folders[1]), device="cpu", dtype="float32")


def pair_options(pair: tuple[Path, Path]) -> tuple[str, ...]:
    return ("--pair", str(pair[0]), "--draft", str(pair[1]), "--device", "cpu", "--dtype", "float32")


@contextmanager
def hosted(source: RaceSource | None, **more: Any) -> Iterator[str]:
    """Serve a page for the races of `source`, or for recordings, from this process; yield its address."""
    page = build(source, **{"limits": Limits(max_batch=8), "about": "here", **more})
    _, url, _ = page.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch_options())
    try:
        yield url.rstrip("/")
    finally:
        page.close()


@contextmanager
def serving(log: Path, *options: str, port: int | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run app.py in another process; yield its address and the process, which a test may kill."""
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k not in ("GRADIO_SERVER_NAME", "SPACE_ID")}
    command = [sys.executable, "app.py", *options, "--port", str(port)]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=errors
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if match := re.search(r"open (http://\S+)", line):
                    yield match[1].rstrip("/"), process
                    break
            else:
                pytest.fail("app.py ended before it served: " + log.read_text())
        finally:
            process.terminate()
            process.wait()
    assert "Traceback" not in log.read_text()


def lane_texts(snapshot: Snapshot) -> dict[str, list[Any]]:
    return {name: [sequence["text"] for sequence in lane["sequences"]] for name, lane in snapshot["lanes"].items()}

"""The real app.py in a separate process: `serve` for any options, `Server` with a tiny random pair on disk."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from gradio_client import Client

from ..report.report import ROOT


def save_tiny_pair(folder: Path) -> tuple[Path, Path]:
    """Save a target and a draft that partly agrees with it, with a tokenizer of one byte per token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.2, bos_token_id=None,
        eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    paths = folder / "target", folder / "draft"
    for path, noise in zip(paths, (0.0, 0.03), strict=True):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(noise * torch.randn_like(weight))
        model.save_pretrained(path)
        fast.save_pretrained(path)
    return paths


@contextmanager
def serve(
    *options: str, environment: Mapping[str, str] | None = None, errors: IO[str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start app.py as a user would, only for this machine; yield its process and its address once it serves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "app.py", "--host", "127.0.0.1", "--port", str(port), *options]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=errors
    )
    try:
        for line in process.stdout or ():
            if match := re.search(r"open (http://\S+)", line):
                yield process, match[1].rstrip("/")
                return
        raise SystemExit("app.py ended before it served.")
    finally:
        process.terminate()
        process.wait()


class Server:
    """app.py with the tiny pair, for use in a `with` statement.

    On entry `url` answers; on exit the process has ended.

    Args:
        *options: further options of its command line.
    """

    def __init__(self, *options: str) -> None:
        self.options = options

    def __enter__(self) -> Server:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bass-serving-")))
            self.target, self.draft = save_tiny_pair(folder)
            environment = {k: v for k, v in os.environ.items() if k not in ("GRADIO_SERVER_NAME", "SPACE_ID")}
            # Without measured costs, draft lengths follow Algorithm 1, as in the texts that we compare with.
            environment["BASS_MEASURE"] = "0"
            self._log = folder / "stderr.txt"
            errors = stack.enter_context(self._log.open("w", encoding="utf-8"))
            arguments = (
                "--pair",
                str(self.target),
                "--draft",
                str(self.draft),
                "--device",
                "cpu",
                "--dtype",
                "float32",
            )
            running = serve(*arguments, *self.options, environment=environment, errors=errors)
            self.process, self.url = stack.enter_context(running)
            self._running = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def log(self) -> str:
        """Return the server's stderr so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def defaults(self) -> dict[str, Any]:
        """Return the arguments of /race with their defaults, in order; a raw POST has to send all of them."""
        api: Any = Client(self.url, verbose=False).view_api(return_format="dict", print_info=False)
        parameters = api["named_endpoints"]["/race"]["parameters"]
        return {each["parameter_name"]: each.get("parameter_default") for each in parameters}

    def memory_mb(self) -> float:
        """Return the resident memory of the server and of its workers, if it has any, in 2**20 bytes."""
        counted = [psutil.Process(self.process.pid), *self.workers()]
        return float(sum(process.memory_info().rss for process in counted) / 2**20)

    def processes(self) -> list[psutil.Process]:
        """Return all processes that the server has started."""
        return list(psutil.Process(self.process.pid).children(recursive=True))

    def workers(self) -> list[psutil.Process]:
        """Return its running Ray workers."""
        return [process for process in self.processes() if process.name().startswith("ray::Worker")]

    @property
    def serving(self) -> bool:
        return self.process.poll() is None

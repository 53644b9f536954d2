"""What every section of the GPU bench is given: the device, the models, and where its figures go.

Contract: a figure leaves a section as soon as it is known. Models are built from configs with random weights, so
nothing is downloaded. On any device but a CUDA one they are tiny, and no time counts.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bass_core import ModelPair
from bass_core.predict.shapes import MODELS, llama
from kernels.support import is_accelerator, runtime

Row = dict[str, Any]
Cases = Iterable[tuple[str, Callable[[], object]]]


@dataclass
class Context:
    """One section. emit: takes each figure at once."""

    section: str
    device: torch.device
    emit: Callable[[Row], None]
    seed: int = 0
    quick: bool = False

    @property
    def tiny(self) -> bool:
        """Whether this is a dry run on tiny models."""
        return self.device.type != "cuda"

    @property
    def short(self) -> bool:
        """Whether grids are cut to a case or two."""
        return self.tiny or self.quick

    @property
    def dtype(self) -> torch.dtype:
        """The large pair's."""
        return torch.float32 if self.tiny else torch.bfloat16

    def row(self, case: str, what: str, value: float | None, unit: str = "") -> None:
        """One figure, or in `what` words in place of one."""
        value = float(f"{value:.5g}") if isinstance(value, float) else value
        self.emit({"section": self.section, "case": case, "what": what, "value": value, "unit": unit})

    def cases(self, cases: Cases) -> None:
        """Run cases that raise where they fail; the others go on, as long as the device answers."""
        count, passed = 0, 0
        try:
            for label, case in cases:
                # Said before it runs: if it ends the process, the report names it.
                print(f"  {label}", flush=True)
                count += 1
                try:
                    case()
                    passed += 1
                except Exception as error:
                    traceback.print_exc()
                    self.row(label, f"{type(error).__name__}: {error}"[:300], None)
                    if is_accelerator(self.device):
                        # After an illegal access every later call raises, this one too: then the section ends.
                        runtime(self.device).synchronize(self.device)
        finally:
            self.row("cases", "passed", passed, f"of {count}")

    def large_pair(self) -> ModelPair:
        """A target of 7.8B parameters and a draft of 310M."""
        target = llama(96, 64, 128, 2, 4, 2) if self.tiny else llama(*MODELS["7.8B"])
        draft = llama(96, 32, 64, 1, 2, 1, tied=True) if self.tiny else llama(*MODELS["310M"])
        # Made on the device: on the host that takes minutes.
        home = torch.device("cpu") if self.tiny else self.device
        return ModelPair(
            *(self._built(LlamaForCausalLM, one, self.dtype, home).to(self.device) for one in (target, draft))
        )

    @property
    def sizes(self) -> dict[str, Any]:
        """A small model's, by their names in a config."""
        vocab, hidden, mlp = (96, 64, 128) if self.tiny else (2048, 512, 1024)
        sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": 4}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
        return sizes | dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))

    def small_pair(
        self, kind: Any = LlamaForCausalLM, config: Any = None, dtype: Any = torch.float32, device: Any = None
    ) -> ModelPair:
        """A small target, and a draft that agrees with it in part; the same numbers on every device."""
        config = config or LlamaConfig(**self.sizes, tie_word_embeddings=False)
        target, draft = (self._built(kind, config, dtype, torch.device("cpu")) for _ in range(2))
        for mine, weight in zip(draft.parameters(), target.parameters(), strict=True):
            if weight.dim() > 1:
                # With larger weights than usual, one token is clearly likelier than others.
                weight.mul_(6.0)
                mine.copy_(weight + torch.randn_like(weight) * weight.float().std().to(weight) * 0.03)
        return ModelPair(target.to(device or self.device), draft.to(device or self.device))

    def _built(self, kind: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
        torch.manual_seed(self.seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                model = kind(config).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(before)
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        return model

    def prompts(self, count: int, shortest: int, longest: int, vocab: int) -> list[list[int]]:
        """Random ids in rows of different lengths; a dry run's are short."""
        shortest, longest = (4, 8) if self.tiny else (shortest, longest)
        dice = torch.Generator().manual_seed(self.seed)
        lengths = torch.randint(shortest, longest + 1, (count,), generator=dice).tolist()
        return [torch.randint(1, vocab, (length,), generator=dice).tolist() for length in lengths]

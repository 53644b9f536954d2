"""The context of a section of the GPU bench: the device, the models, and the receiver of its figures.

A section passes on each figure as soon as it is known. Models are built from configs with random weights, so
nothing is downloaded. On any device except CUDA the models are tiny, and the times mean nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bass_core import ModelPair
from bass_core.model.draft_head import DraftHead, HeadConfig
from bass_core.predict.shapes import MODELS, llama
from kernels.support import is_accelerator, runtime

Row = dict[str, Any]
Cases = Iterable[tuple[str, Callable[[], object]]]


@dataclass(frozen=True)
class LaneCases:
    """Batch sizes, acceptance probabilities and arms (bench/cpu/batch.py) of races; empty for the default ones."""

    batch: tuple[int, ...] = ()
    acceptance: tuple[float, ...] = ()
    arms: tuple[str, ...] = ()


@dataclass
class Context:
    """The context of one section.

    Attributes:
        section: its name.
        device: the device to test.
        emit: receives each figure immediately.
        seed: the seed of weights and prompts.
        quick: whether to run only a case or two of each grid.
        lanes: the cases of the section "lanes", if not all.
    """

    section: str
    device: torch.device
    emit: Callable[[Row], None]
    seed: int = 0
    quick: bool = False
    lanes: LaneCases = field(default_factory=lambda: LaneCases())

    @property
    def tiny(self) -> bool:
        """Whether this is a dry run on tiny models."""
        return self.device.type != "cuda"

    @property
    def short(self) -> bool:
        """Whether to run only a case or two of each grid."""
        return self.tiny or self.quick

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the large pair."""
        return torch.float32 if self.tiny else torch.bfloat16

    def row(self, case: str, what: str, value: float | None, unit: str = "") -> None:
        """Emit one figure, or, if `value` is None, only the words in `what`."""
        value = float(f"{value:.5g}") if isinstance(value, float) else value
        self.emit({"section": self.section, "case": case, "what": what, "value": value, "unit": unit})

    def cases(self, cases: Cases) -> None:
        """Run all cases, even if some of them raise, as long as the device answers."""
        count, passed = 0, 0
        try:
            for label, case in cases:
                # Print the label first: if the case ends the process, the report names it.
                print(f"  {label}", flush=True)
                count += 1
                try:
                    case()
                    passed += 1
                except Exception as error:
                    traceback.print_exc()
                    self.row(label, f"{type(error).__name__}: {error}"[:300], None)
                    if is_accelerator(self.device):
                        # After an illegal memory access every later call raises an error. This call does too,
                        # which ends the section.
                        runtime(self.device).synchronize(self.device)
        finally:
            self.row("cases", "passed", passed, f"of {count}")

    def large_pair(self, one_layer: bool = False) -> ModelPair:
        """Build a target of 7.8B parameters, and a draft of 310M, or of one layer as wide as the target."""
        configs = [llama(96, 64, 128, 2, 4, 2), llama(96, 32, 64, 1, 2, 1, tied=True)]
        if not self.tiny:
            draft = (*MODELS["7.8B"][:3], 1, *MODELS["7.8B"][4:6], True) if one_layer else MODELS["310M"]
            configs = [llama(*MODELS["7.8B"]), llama(*draft)]
        return ModelPair(*(self._large(config) for config in configs))

    def pair_with_head(self) -> ModelPair:
        """Build a target of SmolLM2-135M's shape and a draft head of one layer."""
        target = self._large(llama(96, 64, 128, 2, 4, 2, tied=True) if self.tiny else llama(*MODELS["135M"]))
        head = DraftHead(target, HeadConfig(1, target.config.hidden_size), torch.arange(target.config.vocab_size))
        return ModelPair(target, head.to(target.device, target.dtype).eval().requires_grad_(False))

    def _large(self, config: LlamaConfig) -> Any:
        # Build on the device: on the host it would take minutes.
        home = torch.device("cpu") if self.tiny else self.device
        return self._built(LlamaForCausalLM, config, self.dtype, home).to(self.device)

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of a small model, as arguments of its config."""
        vocab, hidden, mlp = (96, 64, 128) if self.tiny else (2048, 512, 1024)
        sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": 4}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
        return sizes | dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))

    def small_pair(
        self, kind: Any = LlamaForCausalLM, config: Any = None, dtype: Any = torch.float32, device: Any = None
    ) -> ModelPair:
        """Build a small target and a draft that partly agrees with it, with the same weights on every device."""
        config = config or LlamaConfig(**self.sizes, tie_word_embeddings=False)
        target, draft = (self._built(kind, config, dtype, torch.device("cpu")) for _ in range(2))
        for mine, weight in zip(draft.parameters(), target.parameters(), strict=True):
            if weight.dim() > 1:
                # Larger weights than usual make one token clearly likelier than the others.
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
        """Return random ids in rows of different lengths; a dry run's are short."""
        shortest, longest = (4, 8) if self.tiny else (shortest, longest)
        dice = torch.Generator().manual_seed(self.seed)
        lengths = torch.randint(shortest, longest + 1, (count,), generator=dice).tolist()
        return [torch.randint(1, vocab, (length,), generator=dice).tolist() for length in lengths]

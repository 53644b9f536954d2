"""What the sections of the GPU bench share: the device, the models, the deadline, and the results file.

Contract: a row is written to the file at once, so a section that fails loses no earlier figures. A case is
recorded before it runs, so a case that crashes its process is known. In a dry run (no GPU) the same code runs on
tiny models under Triton's interpreter, and no figure counts.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from bass_core import ModelPair
from bass_core.attention.cache import RaggedCache
from bass_core.engine.cuda_graphs import GraphRunner, record_calls
from bass_core.machine.hardware import copy_bandwidth
from bass_core.models.base import CausalModel
from bass_core.models.llama_cuda import LlamaCuda
from kernels.support import is_accelerator, runtime

from . import results, shapes

# Exit status of a process that ended itself because its device stopped answering.
BROKEN = 3


def answers(device: torch.device) -> bool:
    """Whether the device still works: after an illegal memory access every later call of the process fails."""
    if not is_accelerator(device):
        return True
    try:
        runtime(device).synchronize(device)
    except Exception:
        traceback.print_exc()
        return False
    try:
        runtime(device).empty_cache()
    except Exception:  # after a failed capture torch refuses this call, but everything else works
        traceback.print_exc()
    return True


@dataclass
class Context:
    """One process of the bench. After `deadline` (by time.monotonic(), s) sections begin nothing new."""

    device: torch.device
    out: Path
    deadline: float
    seed: int
    quick: bool
    recordings: Path
    section: str = ""
    part: tuple[int, int] = (0, 1)
    after: int = 0

    @property
    def dry(self) -> bool:
        return self.device.type != "cuda"

    @property
    def short(self) -> bool:
        """Whether grids are cut to one or two cases."""
        return self.dry or self.quick

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def emit(self, **fields: Any) -> None:
        """Append one JSON line to the results."""
        results.append(self.out, **fields)

    def row(self, case: str, what: str, value: float | str | None, unit: str = "", note: str = "") -> None:
        """One figure."""
        if isinstance(value, float):
            value = float(f"{value:.5g}")
        self.emit(kind="row", section=self.section, case=case, what=what, value=value, unit=unit, note=note)
        print(f"  {case:40s} {what:28s} {value} {unit} {note}", flush=True)

    def cases(self, cases: Iterable[tuple[str, Hashable, str, Callable[[], object]]]) -> None:
        """Run the cases (group, variant, label, case) that belong to this process, from number `after` on.

        Cases of one variant, such as a compiled kernel, go to the same process. A case that raises is recorded and
        the rest go on; if the device no longer answers, they go on in a new process.
        """
        part, parts = self.part
        variants: dict[Hashable, int] = {}
        own = [one for one in cases if variants.setdefault((one[0], one[1]), len(variants)) % parts == part]
        for index, (group, _, label, case) in list(enumerate(own))[self.after :]:
            if self.late:
                return
            place = {"section": self.section, "part": part, "index": index, "group": group, "label": label}
            self.emit(kind="begun", **place)
            try:
                case()
                self.emit(kind="verdict", error=None, **place)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"[:300]
                print(f"  {group}: {label} failed: {text}", flush=True)
                self.emit(kind="verdict", error=text, **place)
                if not answers(self.device):
                    os._exit(BROKEN)

    @cached_property
    def bandwidth(self) -> float:
        """Copy bandwidth in bytes per second; in a dry run a placeholder, 1 GB/s."""
        return 1e9 if self.dry else copy_bandwidth(self.device)

    @cached_property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16

    @cached_property
    def pair(self) -> ModelPair:
        """The 7.8B target and the 310M draft."""
        target = shapes.build(shapes.target_config(self.dry), self.device, self.dtype, self.seed)
        draft = shapes.build(shapes.draft_config(self.dry), self.device, self.dtype, self.seed + 1)
        return self.as_on_a_gpu(ModelPair(target, draft, shapes.number_words(target.config.vocab_size)))

    def as_on_a_gpu(self, pair: ModelPair) -> ModelPair:
        """In a dry run the pair with the GPU's forward in plain torch; only the checks interpret kernels."""
        if self.dry and isinstance(pair.draft, PreTrainedModel):
            target, draft = LlamaCuda(pair.target), LlamaCuda(pair.draft)
            target.has_kernels = draft.has_kernels = False
            pair.target_step, pair.draft_step = target, draft
        return pair

    def prompts(self, count: int) -> list[list[int]]:
        """Prompts of 384 to 512 tokens."""
        shortest, longest = (4, 8) if self.dry else (384, 512)
        return shapes.prompts(count, shortest, longest, self.pair.vocab, self.seed)

    @property
    def backend(self) -> str:
        return "pad" if self.dry else "fused"

    def runner(self, model: CausalModel, batch: int, length: int) -> GraphRunner:
        """A runner whose cache holds random keys and values: zeros could hide errors."""
        record = record_calls if self.dry else None
        runner = GraphRunner(model, batch, length, model.vocab, self.backend, record=record)
        fill(runner.cache)
        return runner


def fill(cache: RaggedCache) -> None:
    """Fill the whole cache with random keys and values."""
    cache.buffer.normal_()

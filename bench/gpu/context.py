"""What the sections of the GPU bench share: the device, the models, the deadline, and where results go.

Contract: a row is written to the file at once, so that nothing that was measured is lost when a later section
fails. In a dry run (no GPU) the same code runs on tiny models under Triton's interpreter, and no figure counts.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bass_core import ModelPair
from bass_core.cache import RaggedCache
from bass_core.gpu_model import GpuModel
from bass_core.graphs import GraphRunner, record_calls
from bass_core.step_model import StepModel
from bass_core.utilization import copy_bandwidth

from . import shapes


@dataclass
class Context:
    """One process of the bench. `deadline` is a time.monotonic() after which sections begin nothing new."""

    device: torch.device
    out: Path
    deadline: float
    seed: int
    quick: bool
    recordings: Path
    section: str = ""
    part: tuple[int, int] = (0, 1)

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
        with self.out.open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def row(self, case: str, what: str, value: float | str | None, unit: str = "", note: str = "") -> None:
        """One figure."""
        if isinstance(value, float):
            value = float(f"{value:.5g}")
        self.emit(kind="row", section=self.section, case=case, what=what, value=value, unit=unit, note=note)
        print(f"  {case:40s} {what:28s} {value} {unit} {note}", flush=True)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second of a copy; 1 GB/s, a number that means nothing, in a dry run."""
        return 1e9 if self.dry else copy_bandwidth(self.device)

    @cached_property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16

    @cached_property
    def pair(self) -> ModelPair:
        """The 7.8B target and the 310M draft."""
        target = shapes.build(shapes.target_config(self.dry), self.device, self.dtype, self.seed)
        draft = shapes.build(shapes.draft_config(self.dry), self.device, self.dtype, self.seed + 1)
        pair = ModelPair(target, draft, shapes.number_words(target.config.vocab_size))
        if self.dry:
            pair.target_step, pair.draft_step = GpuModel(target), GpuModel(draft)
            for step in (pair.target_step, pair.draft_step):
                # What is interpreted is the kernels section; here it would only take time.
                step.has_kernels = False
        return pair

    def prompts(self, count: int) -> list[list[int]]:
        """Prompts of 384 to 512 tokens."""
        shortest, longest = (4, 8) if self.dry else (384, 512)
        return shapes.prompts(count, shortest, longest, self.pair.vocab, self.seed)

    @property
    def backend(self) -> str:
        return "pad" if self.dry else "fused"

    def runner(self, model: StepModel, batch: int, length: int) -> GraphRunner:
        """A runner whose cache holds random keys and values, as zeros would be too kind."""
        record = record_calls if self.dry else None
        runner = GraphRunner(model, batch, length, model.vocab, self.backend, record=record)
        fill(runner.cache)
        return runner


def fill(cache: RaggedCache) -> None:
    """Random keys and values everywhere."""
    cache.buffer.normal_()

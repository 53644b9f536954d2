"""Whole decoders on the device: their texts, the memory they leave allocated, and the effect of a failed capture.

A case raises if something is wrong. Models are small. In float32, greedy text must equal that of transformers'
`generate`. Sampled text uses the same random numbers on every device, so it must equal the CPU's text, except for
one row in eight, which rounding may change. In bfloat16 rounding changes more rows, so we only report the share of
equal ones.
"""

from __future__ import annotations

import gc
from functools import cached_property, partial
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from bass_core import DEFAULT_LANES, ModelPair, SamplingParams, generate, race
from bass_core.model import graphs as cuda_graphs
from bass_core.model.attention import choose_backend
from bass_core.model.base import CausalModel
from bass_core.model.draft_head import DraftHead, HeadConfig
from bass_core.model.forward import ForwardBatch
from bass_core.model.loading.catalogue import CATALOGUE
from bass_core.model.runner import ModelRunner
from kernels.support import is_accelerator, runtime

from .context import Cases, Context

Texts = list[list[int]]
SCHEDULINGS = ("fair", "in_turn", "overlap")
SAMPLED: tuple[dict[str, Any], ...] = (
    {"verification": "rejection"}, {"verification": "block"}, {"verification": "coupled"},
    {"verification": "coupled", "top_p": 0.9}, {"verification": "block", "top_p": 0.9}, {"tree": (3, 2, 1)},
    {"drafter": "prompt_lookup"}, {"synthetic_acceptance": 0.7},
)  # fmt: skip


class Subject:
    """A pair and prompts for it."""

    def __init__(self, ctx: Context, pair: ModelPair) -> None:
        self.pair, self.count = pair, 6 if ctx.tiny else 48
        self.rows = ctx.prompts(2 if ctx.tiny else 8, 5, 40, pair.vocab)

    @cached_property
    def theirs(self) -> Texts:
        """The text that transformers writes for each prompt at batch 1."""
        ids = [torch.tensor([row], device=self.pair.device) for row in self.rows]
        options: Any = {"do_sample": False, "max_new_tokens": self.count, "pad_token_id": 0}
        model: Any = self.pair.target
        out = [model.generate(row, attention_mask=torch.ones_like(row), **options) for row in ids]
        return [text[0, len(row) :].tolist() for text, row in zip(out, self.rows, strict=True)]

    def ours(self, **options: Any) -> Texts:
        """Return the new tokens of each row."""
        length: dict[str, Any] = {} if "tree" in options else {"draft_length": 3}
        out = generate(self.pair, self.rows, max_new_tokens=self.count, eos_token_id=None, **length | options)
        return [sequence.token_ids for sequence in out.sequences]

    def greedy(self, **options: Any) -> None:
        """Raise AssertionError unless our text is transformers'."""
        require(self.ours(**options), self.theirs)

    def race(self, scheduling: str) -> None:
        """Race the three lanes; raise AssertionError unless each writes transformers' text."""
        options: Any = {"max_new_tokens": self.count, "eos_token_id": None, "draft_length": 3}
        *_, last = race(self.pair, self.rows, scheduling=scheduling, **options)
        for name, lane in last["lanes"].items():
            if lane["error"]:
                raise AssertionError(f"{name}: {lane['error']}")
            require([sequence["token_ids"] for sequence in lane["sequences"]], self.theirs)


def require(ours: Texts, theirs: Texts, but: int = 0) -> None:
    """Raise AssertionError if more than `but` rows differ."""
    unlike = [row for row, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    if len(unlike) > but:
        raise AssertionError(f"rows {unlike} of {len(theirs)} differ")


def texts(ctx: Context) -> None:
    """Compare greedy texts with transformers', and sampled ones with the CPU's."""
    ctx.cases(_text_cases(ctx))


def _text_cases(ctx: Context) -> Cases:
    gemma: dict[str, Any] = {
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    for kind, config in (
        (Gemma3ForCausalLM, Gemma3TextConfig(**ctx.sizes | gemma)), (Qwen2ForCausalLM, Qwen2Config(**ctx.sizes)),
        (LlamaForCausalLM, None),
    ):  # fmt: skip
        subject = Subject(ctx, ctx.small_pair(kind, config))
        name = subject.pair.target_step.name
        for method in DEFAULT_LANES:
            yield f"{name}, {method}", partial(subject.greedy, method=method)
        yield f"{name}, trees", partial(subject.greedy, tree=(3, 2, 1))
        yield f"{name} was captured", partial(_captured, subject.pair.target_step)
    for scheduling in SCHEDULINGS:
        yield f"race, {scheduling}", partial(subject.race, scheduling)
    on_cpu = Subject(ctx, ctx.small_pair(device=torch.device("cpu")))
    for options in SAMPLED:
        yield f"sampled, {options}", partial(_sampled, subject, on_cpu, dict(options))
    target, vocabulary = subject.pair.target, torch.arange(0, subject.pair.vocab, 2, device=ctx.device)
    head: Any = DraftHead(target, HeadConfig(1, target.config.hidden_size), vocabulary)
    headed = Subject(ctx, ModelPair(target, head.to(ctx.device).eval().requires_grad_(False)))
    yield "a head's drafts", partial(headed.greedy, drafter=CATALOGUE["smollm2"].drafter)
    yield "bfloat16", partial(_low_precision, ctx)


def _captured(model: CausalModel) -> None:
    """Check, after the other cases, that no capture failed and left the steps to run eagerly."""
    if is_accelerator(model.device) and not model.capturable:
        raise AssertionError("its steps could not be captured")


def _sampled(on_device: Subject, on_cpu: Subject, options: dict[str, Any]) -> None:
    options["sampling"] = SamplingParams(0.8, top_p=options.pop("top_p", 1.0))
    require(on_device.ours(**options), on_cpu.ours(**options), but=len(on_device.rows) // 8)


def _low_precision(ctx: Context) -> None:
    subject = Subject(ctx, ctx.small_pair(dtype=torch.bfloat16))
    for method in DEFAULT_LANES:
        equal = [a == b for a, b in zip(subject.ours(method=method), subject.theirs, strict=True)]
        ctx.row(f"bfloat16, {method}", "rows equal", sum(equal) / len(equal))


def faults(ctx: Context) -> None:
    """Run the cases that may harm the process, the worst last."""
    cases = {
        "memory comes back": _memory,
        "more captures than streams": _many_captures,
        "a capture that fails": _failed_capture,
    }
    ctx.cases((name, partial(case, ctx)) for name, case in cases.items())


def _memory(ctx: Context) -> None:
    """Check that three more races allocate no more memory, and that releasing idle caches adds none."""
    subject, used = Subject(ctx, ctx.small_pair()), []
    for scheduling in SCHEDULINGS * 2:
        subject.race(scheduling)
        used.append(_allocated(ctx.device))
    for model in (subject.pair.target_step, subject.pair.draft_step):
        assert model is not None
        cuda_graphs.release_idle(model)
    used.append(_allocated(ctx.device))
    for when, size in (("three races", used[2]), ("six races", used[5]), ("without idle caches", used[6])):
        ctx.row("memory", when, size / 2**20, "MB")
    if used[5] > 1.02 * used[2] or used[6] > used[5]:
        raise AssertionError("memory stays allocated")


def _allocated(device: torch.device) -> float:
    gc.collect()
    return float(runtime(device).memory_allocated(device)) if is_accelerator(device) else 0.0


@torch.inference_mode()
def _same_steps(ctx: Context, model: CausalModel, widths: list[int]) -> None:
    """Check that captured steps of two rows over one cache give the same results as eager steps."""
    backend = choose_backend("auto", ctx.device, torch.float32)
    runner = cuda_graphs.make_runner(model, 2, 64, model.vocab, backend)
    eager, at = ModelRunner(model, 2, 64, model.vocab, backend), 0
    for width in widths:
        batch = ForwardBatch(torch.randint(1, model.vocab, (2, width)).to(ctx.device), [at, at])
        torch.testing.assert_close(runner.forward(batch).logits, eager.forward(batch).logits, atol=2e-3, rtol=2e-3)
        at += width


def _many_captures(ctx: Context) -> None:
    """Capture more graphs than torch has streams, and drop most; the others must still give correct results."""
    subject = Subject(ctx, ctx.small_pair())
    before, cuda_graphs.STEP_BYTES = cuda_graphs.STEP_BYTES, 1 << 16
    try:
        for _ in range(1 if ctx.tiny else 7):
            _same_steps(ctx, subject.pair.target_step, [1, 2, 3, 4, 5, 1, 2, 1])
            subject.greedy()
    finally:
        cuda_graphs.STEP_BYTES = before


def _failed_capture(ctx: Context) -> None:
    """Test a forward that waits for the device and can't be captured: it runs eagerly and harms no other pair."""
    model = ctx.small_pair().target_step
    forward = model.forward_captured

    def waits(batch: Any, *rest: Any, **more: Any) -> Any:
        batch.tokens.sum().item()
        return forward(batch, *rest, **more)

    model.forward_captured = waits  # type: ignore[method-assign]
    _same_steps(ctx, model, [1, 3, 1])
    if is_accelerator(ctx.device) and model.capturable:
        raise AssertionError("a step that waits for the device was captured")
    subject = Subject(ctx, ctx.small_pair())
    for scheduling in SCHEDULINGS:
        subject.race(scheduling)

"""A quick smoke test, and features likely to break on an untried machine: each case runs or says why it did not.

Contract: `smoke` runs one captured step, each lane and one overlapped race; `run` covers what no other section
does. These are cases, not claims: a case that crashes its process is named, and the rest run in a new process. All
models are small.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen2Config, Qwen2ForCausalLM

from bass_core import DEFAULT_LANES, ModelPair, RequestError, SamplingParams, generate, race
from bass_core.engine import cuda_graphs as graphs
from bass_core.engine.cuda_graphs import GraphRunner, record_calls, release_idle
from bass_core.engine.runner import ModelRunner
from bass_core.models.base import CausalModel
from bass_core.models.draft_head import DraftHead, HeadConfig
from bass_core.models.forward import CapturedBatch, ForwardBatch
from bass_core.models.weights.quantize import int8_weights, require_torchao
from kernels.support import runtime

from .. import shapes
from ..context import Context

Case = Callable[[], object]


def smoke(ctx: Context) -> None:
    """In seconds: does anything run at all?"""
    pair = _pair(ctx)
    ctx.cases(("smoke", label, label, case) for label, case in _smoke_cases(ctx, pair))


def _smoke_cases(ctx: Context, pair: ModelPair) -> Iterator[tuple[str, Case]]:
    yield "a captured step", lambda: _equals_eager(ctx, pair.target_step, [(2, 1), (2, 1)])
    for method in DEFAULT_LANES:
        yield f"a lane: {method}", partial(_texts, ctx, pair, method)
    yield "an overlapped race", lambda: _race(ctx, pair, "overlap")


def run(ctx: Context) -> None:
    """The cases most likely to crash the process come last."""
    cases: list[tuple[str, Case]] = [
        ("adaptive drafter with a head", lambda: _head(ctx)),
        ("sampled lanes", lambda: _sampled(ctx, SamplingParams(0.8))),
        ("lanes with top_p", lambda: _sampled(ctx, SamplingParams(0.8, top_p=0.9))),
        ("coupled lanes", lambda: _sampled(ctx, SamplingParams(0.8), verification="coupled")),
        ("memory after a race", lambda: _memory(ctx)),
        ("gemma3, captured", lambda: _other(ctx, _gemma3(ctx))),
        ("qwen2, captured", lambda: _other(ctx, _qwen2(ctx))),
        ("AMUSD beside the target", lambda: _amusd(ctx)),
        ("int8 weights", lambda: _int8(ctx)),
        ("more captures than streams", lambda: _many_captures(ctx)),
        ("a capture that fails", lambda: _failed_capture(ctx)),
    ]
    ctx.cases(("faults", label, label, case) for label, case in cases)


def _pair(ctx: Context) -> ModelPair:
    target = shapes.build(shapes.small_config(ctx.dry), ctx.device, ctx.dtype, ctx.seed, scale=6.0)
    return ctx.as_on_a_gpu(ModelPair(target, shapes.perturbed(target, 0.03, ctx.seed)))


def _texts(ctx: Context, pair: ModelPair, method: str, **more: Any) -> list[list[int]]:
    """The new tokens of four short rows (two in a dry run)."""
    rows = shapes.prompts(2 if ctx.dry else 4, 5, 12, pair.vocab, ctx.seed)
    arguments: dict[str, Any] = {"max_new_tokens": 5 if ctx.dry else 32, "eos_token_id": None, "draft_length": 3}
    if not ctx.dry:
        arguments["attention"] = ctx.backend
    out = generate(pair, rows, method=method, **arguments | more)
    ctx.row(f"{pair.target_step.name} {method}", "ms_per_token", out.metrics.ms_per_token, "ms", str(more)[:120])
    texts = [sequence.token_ids for sequence in out.sequences]
    if any(len(text) != arguments["max_new_tokens"] for text in texts):
        raise AssertionError(f"rows of {[len(text) for text in texts]} tokens")
    return texts


def _race(ctx: Context, pair: ModelPair, scheduling: str) -> None:
    rows = shapes.prompts(2, 5, 12, pair.vocab, ctx.seed)
    *_, last = race(pair, rows, scheduling=scheduling, max_new_tokens=6, eos_token_id=None, draft_length=3)
    errors = [f"{name}: {lane['error']}" for name, lane in last["lanes"].items() if lane["error"]]
    if errors:
        raise AssertionError("; ".join(errors))


def _share(ctx: Context, case: str, ours: list[list[int]], theirs: list[list[int]]) -> None:
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
    ctx.row(case, "rows equal to regular", equal, "", f"in {ctx.dtype}")


def _head(ctx: Context) -> None:
    """The shipped pair's adaptive drafter: copies from the text, else an untrained head that stops when unsure."""
    target = shapes.build(shapes.small_config(ctx.dry), ctx.device, ctx.dtype, ctx.seed, scale=6.0)
    vocabulary = torch.arange(0, target.config.vocab_size, 2)
    head = DraftHead(target, HeadConfig(1, target.config.hidden_size), vocabulary.to(ctx.device))
    pair = ModelPair(target, head.to(ctx.device, ctx.dtype).eval().requires_grad_(False))
    regular = _texts(ctx, pair, "regular")
    for drafter in ("adaptive", "model"):
        for method in ("speculative", "bass"):
            _share(ctx, f"head, {drafter}, {method}", _texts(ctx, pair, method, drafter=drafter), regular)
    _texts(ctx, pair, "bass", drafter="adaptive", sampling=SamplingParams(0.8))


def _sampled(ctx: Context, sampling: SamplingParams, **more: Any) -> None:
    pair = _pair(ctx)
    for method in DEFAULT_LANES:
        _texts(ctx, pair, method, sampling=sampling, **more)


def _memory(ctx: Context) -> None:
    """Device MB after a first race, after two overlapped races, and after idle graphs and caches are released."""
    pair = _pair(ctx)
    _race(ctx, pair, "fair")
    before = _megabytes(ctx)
    for _ in range(2):
        _race(ctx, pair, "overlap")
    gc.collect()
    after = _megabytes(ctx)
    for model in (pair.target_step, pair.draft_step):
        if model is not None:
            release_idle(model)
    for what, figures in (("before", before), ("after two races", after), ("given back", _megabytes(ctx))):
        for name, figure in figures.items():
            ctx.row(f"device memory {what}", name, figure, "MB")


def _megabytes(ctx: Context) -> dict[str, float]:
    if ctx.dry:
        return {"allocated": 0.0, "reserved": 0.0, "free": 0.0}
    module = runtime(ctx.device)
    figures = {"allocated": module.memory_allocated(ctx.device), "reserved": module.memory_reserved(ctx.device)}
    return {name: size / 2**20 for name, size in {**figures, "free": module.mem_get_info(ctx.device)[0]}.items()}


_IDS: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}


def _sizes(ctx: Context) -> dict[str, Any]:
    vocab, hidden, mlp = (96, 64, 128) if ctx.dry else (2048, 512, 1024)
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": 2}
    return {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, **_IDS}


def _gemma3(ctx: Context) -> Any:
    layers = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**_sizes(ctx), head_dim=64, sliding_window=16, layer_types=layers)
    return _made(ctx, Gemma3ForCausalLM, config)


def _qwen2(ctx: Context) -> Any:
    return _made(ctx, Qwen2ForCausalLM, Qwen2Config(**_sizes(ctx)))


def _made(ctx: Context, kind: Any, config: Any) -> Any:
    torch.manual_seed(ctx.seed)
    model = kind(config).to(ctx.device, ctx.dtype).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    return model


def _other(ctx: Context, model: Any) -> None:
    """transformers' own forward with our cache, captured."""
    pair = ModelPair(model, shapes.perturbed(model, 0.03, ctx.seed))
    regular = _texts(ctx, pair, "regular")
    _share(ctx, f"{pair.target_step.name} bass", _texts(ctx, pair, "bass"), regular)
    _equals_eager(ctx, pair.target_step, [(2, 1), (2, 3), (2, 1)])


def _amusd(ctx: Context) -> None:
    """AMUSD with the draft on its own CUDA stream."""
    pair = _pair(ctx)
    regular = _texts(ctx, pair, "regular")
    for _ in range(2):
        _share(ctx, "AMUSD, stream", _texts(ctx, pair, "amusd"), regular)


def _int8(ctx: Context) -> None:
    try:
        require_torchao()
    except RequestError as error:
        ctx.row("int8 weights", "not run", str(error))
        return
    target = shapes.build(shapes.small_config(ctx.dry), ctx.device, ctx.dtype, ctx.seed, scale=6.0)
    quantised = copy.deepcopy(target)
    int8_weights(quantised)
    for model, kernels in ((target, "0"), (quantised, "0"), (quantised, "1")):
        os.environ["BASS_INT8_KERNELS"] = kernels
        try:
            pair = ModelPair(model, shapes.perturbed(target, 0.03, ctx.seed))
            texts = _texts(ctx, pair, "bass")
        finally:
            del os.environ["BASS_INT8_KERNELS"]
        _share(ctx, f"int8, {type(pair.target_step).__name__}", texts, _texts(ctx, pair, "regular"))


def _runner(ctx: Context, model: CausalModel, fails: bool | None) -> GraphRunner:
    def refuse(_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    dry = refuse if fails else record_calls
    return GraphRunner(model, 4, 64, model.vocab, ctx.backend, record=dry if ctx.dry else None)


@torch.inference_mode()
def _equals_eager(
    ctx: Context, model: CausalModel, steps: list[tuple[int, int]], fails: bool | None = False
) -> GraphRunner:
    """Steps of (batch, width) over one cache, compared with eager steps.

    fails: whether capturing is expected to fail (None: either will do). Raises AssertionError where the steps
    differ or the expectation is wrong.
    """
    runner = _runner(ctx, model, fails)
    eager = ModelRunner(model, 4, 64, model.vocab, ctx.backend)
    at = 0
    for batch, width in steps:
        ids = torch.randint(1, model.vocab, (batch, width), device=ctx.device)
        mine = runner.forward(ForwardBatch(ids, [at] * batch)).logits.float()
        theirs = eager.forward(ForwardBatch(ids, [at] * batch)).logits.float()
        error = (mine - theirs).abs().max().item() / (1e-9 + theirs.abs().max().item())
        if not error < 0.05:
            raise AssertionError(f"a step of {batch} x {width} differs by {error:.3g} of the largest logit")
        at += width
    if fails is not None and model.capturable == fails:
        raise AssertionError("the step was captured" if fails else "the step could not be captured")
    return runner


def _many_captures(ctx: Context) -> None:
    """Captures more graphs than torch has streams and drops most of them; the rest must still be right."""
    pair, kept = _pair(ctx), graphs.STEP_BYTES
    graphs.STEP_BYTES = 1 << 16
    captured = 0
    try:
        for _ in range(2 if ctx.dry else 7):
            runner = _equals_eager(ctx, pair.target_step, [(2, 1), (2, 2), (2, 3), (2, 4), (2, 5), (4, 1), (2, 1)])
            captured += 6
            del runner
            _texts(ctx, pair, "bass")
    finally:
        graphs.STEP_BYTES = kept
    ctx.row("captures", "at least", captured)


def _failed_capture(ctx: Context) -> None:
    """A forward that synchronises can't be captured: the step must run eagerly, and the process go on."""
    pair = _pair(ctx)
    model = pair.target_step
    forward = model.forward_captured

    def waits(batch: CapturedBatch, *rest: Any, **more: Any) -> Any:
        batch.tokens.sum().item()
        return forward(batch, *rest, **more)

    model.forward_captured = waits  # type: ignore[method-assign]
    _equals_eager(ctx, model, [(2, 1), (2, 3)], fails=True)
    ctx.row("a capture that fails", "runs eagerly", 1)
    other = _pair(ctx)
    _equals_eager(ctx, other.target_step, [(2, 1), (2, 1)], fails=None)
    ctx.row("after a capture that failed", "others are captured", int(other.target_step.capturable))
    _race(ctx, other, "overlap")

"""Memory: a request that does not fit is refused, naming what would; a shortage at run time ends one race only."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import resource
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import Qwen3Config

from bass_core import (
    DEFAULT_LANES,
    METHODS,
    MemoryShortage,
    RequestError,
    SamplingParams,
    generate,
    race,
)
from bass_core.decode import admission as admission_module
from bass_core.decode.admission import estimate_bytes
from bass_core.decode.request import make_request
from bass_core.draft.base import Proposal
from bass_core.machine import container
from bass_core.machine import memory as memory_module
from bass_core.model.cache import RaggedCache
from kernels.triton import attention as fused_attention
from tests.support.models import prompts, slow_but, tiny_pair

PAIR = tiny_pair()
TARGET = PAIR.target
PROMPT = [5, 6, 7]
CPU = torch.device("cpu")


class Hungry:
    """A drafter that asks the allocator for more memory than exists in its third round."""

    calls = 0
    rounds = 0

    def start(self, rows: Any) -> None:
        return None

    def propose(self, rows: Any, max_drafts: list[int], keys: Any) -> Proposal:
        self.rounds += 1
        if self.rounds == 3:
            torch.empty(2**60)
        return Proposal(torch.full((len(rows), max(max_drafts)), 3), max_drafts)

    def on_verified(self, rows: Any, proposal: Any, accepted: Any) -> None:
        pass

    def move_row(self, source: int, target: int) -> None:
        pass


@pytest.mark.parametrize("scheduling", slow_but(["fair"], ["fair", "overlap", "in_turn"]))
def test_a_race_that_runs_out_ends_in_a_sentence_and_frees_everything(
    scheduling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Any]] = []
    real = RaggedCache.__init__

    def remembered(self: RaggedCache, *arguments: Any) -> None:
        real(self, *arguments)
        alive.append(weakref.ref(self))

    monkeypatch.setattr(RaggedCache, "__init__", remembered)
    with pytest.raises(MemoryShortage, match=r"ran out of memory during this race.* smaller batch") as shortage:
        list(race(PAIR, prompts(3), scheduling=scheduling, max_new_tokens=60, drafter=Hungry(), draft_length=3))
    # The test still holds the error, as a server's log might: it must not keep tensors alive.
    assert shortage.value and alive and [ref() for ref in alive if ref() is not None] == []
    *_, last = race(PAIR, prompts(3), scheduling=scheduling, max_new_tokens=8)
    assert last["done"] and all(lane["error"] is None for lane in last["lanes"].values())


def test_generate_says_it_too() -> None:
    with pytest.raises(MemoryShortage, match="smaller batch"):
        generate(PAIR, PROMPT, max_new_tokens=60, drafter=Hungry(), draft_length=3)


def test_other_errors_of_a_step_keep_their_own_words() -> None:
    class Broken(Hungry):
        def propose(self, rows: Any, max_drafts: list[int], keys: Any) -> Proposal:
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        generate(PAIR, PROMPT, max_new_tokens=60, drafter=Broken(), draft_length=3)


@pytest.mark.slow
def test_when_the_system_itself_has_no_more_the_next_race_works() -> None:
    """The process has a limited address space (RLIMIT_AS), of which the admission check does not know."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_with_little_memory, args=(send,))
    child.start()
    told = receive.recv() if receive.poll(120) else "nothing"
    child.join()
    assert "ran out of memory" in told[0] and told[1:] == [0, True]


def _with_little_memory(send: Any) -> None:
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, used + 2**27))
    try:
        list(race(PAIR, PROMPT, n=4000, max_new_tokens=500, lanes=("regular", "bass")))
        told = "no error"
    except MemoryShortage as error:
        told = str(error)
    from .conftest import left_behind

    caches = left_behind()[0]
    *_, last = race(PAIR, PROMPT, n=2, max_new_tokens=8)
    send.send([told, caches, last["done"]])


def _room(monkeypatch: pytest.MonkeyPatch, needed: int) -> None:
    """Make exactly `needed` bytes available to a request."""
    free = needed / admission_module._HEADROOM + 1
    monkeypatch.setattr(admission_module, "available_bytes", lambda _: free)


@pytest.mark.parametrize(("rows", "tokens"), [(40, 400), (11, 500)])
def test_the_refusal_names_the_largest_that_fits(rows: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory for 10 rows: 10 rows or the shorter text named fit, one row or one token more does not."""
    request = make_request(PAIR, PROMPT, n=rows, max_new_tokens=tokens)
    _room(monkeypatch, estimate_bytes(PAIR, request, (METHODS["bass"],), 10))
    with pytest.raises(RequestError, match="a batch of 10 would fit, or") as refusal:
        generate(PAIR, PROMPT, n=rows, max_new_tokens=tokens)
    shorter = int(str(refusal.value).split(" new tokens would fit")[0].split()[-1])
    assert 0 < shorter < tokens
    admission_module.admit(PAIR, make_request(PAIR, PROMPT, n=10, max_new_tokens=tokens), (METHODS["bass"],))
    admission_module.admit(PAIR, make_request(PAIR, PROMPT, n=rows, max_new_tokens=shorter), (METHODS["bass"],))
    for n, more in ((11, tokens), (rows, shorter + 1)):
        with pytest.raises(RequestError):
            admission_module.admit(PAIR, make_request(PAIR, PROMPT, n=n, max_new_tokens=more), (METHODS["bass"],))


def test_where_neither_alone_would_do_one_short_row_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    request = make_request(PAIR, PROMPT, n=64, max_new_tokens=60)
    _room(monkeypatch, estimate_bytes(PAIR, request, (METHODS["bass"],), 1))
    with pytest.raises(RequestError, match=r"free: a batch of 1 with \d+ new tokens would fit\."):
        generate(PAIR, PROMPT, n=400, max_new_tokens=500)


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr(container, "ROOT", tmp_path)
    monkeypatch.setattr(container, "OWN", tmp_path / "own")
    whole = memory_module.available_bytes(CPU)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_module.available_bytes(CPU) == pytest.approx(whole, rel=0.2)
    for name, text in {"max": "3000", "current": "2000", "stat": "anon 1900\ninactive_file 40\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory_module.available_bytes(CPU) == 1040


@pytest.mark.slow
def test_the_estimate_covers_what_a_race_takes(tmp_path: Path) -> None:
    """Compared with the peak of the allocations that torch's profiler recorded, for a prompt of 300 tokens."""
    from torch.profiler import ProfilerActivity, profile

    asked: dict[str, Any] = {"n": 32, "max_new_tokens": 24, "draft_length": 4, "sampling": SamplingParams(1.0)}
    request = make_request(PAIR, PROMPT * 100, **asked)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        generate(PAIR, PROMPT * 100, **asked)
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    held = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    estimate = estimate_bytes(PAIR, request, (METHODS["bass"],), 32)
    assert estimate / 3 < peak <= estimate


def _qwen3(layers: int, **sizes: int) -> tuple[Any, Any]:
    """(model with a Qwen3 config, step that knows the bytes of its bfloat16 cache)."""
    config = Qwen3Config(num_hidden_layers=layers, num_key_value_heads=8, head_dim=128, **sizes)
    per_token = 2 * layers * 8 * 128 * 2
    step = SimpleNamespace(
        cache_bytes=lambda rows, length, prefixes=0, of=0: (rows * length + prefixes * of) * per_token,
        cache_dtype=torch.bfloat16,
        head_dim=128,
        least_saved=16,
        context=40960,
        device=torch.device("cuda"),
        capturable=False,
    )
    return SimpleNamespace(config=config), step


def _on_a_large_gpu(prompts: list[list[int]], new: int, backend: str) -> int:
    """Estimated bytes for three lanes with Qwen3-8B and a 0.6B draft on an H100."""
    target, target_step = _qwen3(36, hidden_size=4096, num_attention_heads=32)
    _, draft_step = _qwen3(28, hidden_size=1024, num_attention_heads=16)
    pair: Any = SimpleNamespace(
        target=target, target_step=target_step, draft_step=draft_step, vocab=151936, device=torch.device("cuda")
    )
    request = make_request(PAIR, [1], max_new_tokens=new)
    request = replace(request, prompts=prompts, backend=backend, drafter="model", context=40960)
    return estimate_bytes(pair, request, [METHODS[name] for name in DEFAULT_LANES], len(prompts))


def test_a_short_prompt_asks_for_little_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused and flash store no scores, and 30 tokens fill no chunk of 8192: tens of MiB, once counted as 6 GiB."""
    one, mib, gib = [[7] * 30], 2**20, 2**30
    for backend in ("fused", "flash"):
        assert 10 * mib < _on_a_large_gpu(one, 1, backend) < 100 * mib
        assert _on_a_large_gpu([[row] * 64 for row in range(4)], 64, backend) < gib
        long = _on_a_large_gpu([list(range(8192))], 64, backend)
        assert 3 * 8192 * 147456 < long < 9 * gib
    # A prompt shared by all rows is prefilled once.
    same, different = ([[row * i] * 2048 for row in range(4)] for i in (0, 1))
    assert _on_a_large_gpu(same, 1, "flash") < _on_a_large_gpu(different, 1, "flash")
    # With torch's softmax (pad), scores of 8192 x 8192 are stored.
    assert _on_a_large_gpu([list(range(8192))], 64, "pad") > 3 * 32 * 8192 * 8192 * 8


def test_the_parts_of_fused_attention_are_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any shape the kernel's parts take at most the estimated bytes, and in the closest case over 90 %."""
    monkeypatch.setattr(fused_attention, "processors", lambda device: 132)
    nearest, device = 0.0, torch.device("cuda")
    for batch, queries, columns in itertools.product((1, 3, 8, 64), (1, 5, 33, 999), (64, 2000, 40960)):
        tile = fused_attention.tiles(128, 4 * queries, 2)[0]
        programs = -(-4 * queries // tile["BLOCK_M"]) * 8 * batch
        segments, heads = -(-columns // fused_attention.SEGMENT), batch * queries * 32
        numbers = segments * heads * 130
        for shares in (False, True):
            parts = fused_attention.in_parts(device, programs, 4 * queries, segments, shares, numbers)
            counted = admission_module._attention_bytes("fused", heads, columns, 128)
            assert 4 * numbers * parts <= counted
            nearest = max(nearest, 4 * numbers * parts / counted)
    assert nearest > 0.9

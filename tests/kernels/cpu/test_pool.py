"""Several threads and processes may call the kernels at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch

from bass_core.model.llama_cpu import LlamaCompiled
from kernels.cpu.calls import pool
from kernels.cpu.packing import pack
from kernels.cpu.products import linear
from tests.support import ROOT
from tests.support.models import slow_but
from tests.support.threads import together

from .shapes import forward_logits, make_model, tokens

_FORK = """
import os
import torch
from bass_core.machine import cpu_kernels
assert cpu_kernels.available()
from kernels.cpu.packing import pack
from kernels.cpu.products import linear
torch.set_num_threads(2)
torch.manual_seed(0)
weight, x = pack(torch.randn(3000, 96).bfloat16()), torch.randn(5, 96)
for _ in range(3):
    here = linear(x, weight)
child = os.fork()
torch.set_num_threads(2)  # after a fork it is one
found = all(torch.equal(linear(x, weight), here) for _ in range(20))
if child == 0:
    os._exit(0 if found else 1)
assert found and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.parametrize("cores", slow_but([2], [1, 2, 3]))
def test_three_threads_at_once_get_the_results_of_one(cores: int) -> None:
    torch.set_num_threads(cores)
    model = LlamaCompiled(make_model("llama, hidden size 36, heads of 12, biases", torch.bfloat16))
    steps = [tokens(1 + i, 3 + i, i) for i in range(3)]

    def texts(ids: torch.Tensor, repeats: int) -> list[torch.Tensor]:
        cache = model.new_cache(len(ids), 80)
        width = ids.shape[1]
        return [forward_logits(model, cache, ids, [at * width] * len(ids)) for at in range(repeats)]

    expected = [texts(ids, 15) for ids in steps]
    results: list[list[torch.Tensor]] = [[], [], []]
    start = threading.Barrier(3)

    def work(index: int) -> None:
        torch.set_num_threads(cores)
        start.wait()
        for _ in range(5):
            results[index].extend(texts(steps[index], 15))

    together(*(partial(work, index) for index in range(3)))
    for mine, reference in zip(results, expected, strict=True):
        assert len(mine) == 75
        assert all(torch.equal(a, b) for a, b in zip(mine, reference * 5, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_starts_its_own_threads() -> None:
    done = subprocess.run([sys.executable, "-c", _FORK], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_call_whose_helpers_cannot_start_finishes_in_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can start, for example, while the interpreter exits or at a container's limit."""

    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    weight, x = pack(torch.randn(300, 96).bfloat16()), torch.randn(5, 96)
    torch.set_num_threads(1)
    expected = linear(x, weight)
    fresh_pool = pool._Pool()
    monkeypatch.setattr(pool, "_pool", fresh_pool)
    monkeypatch.setattr(threading, "Thread", Refused)
    torch.set_num_threads(3)
    assert all(torch.equal(linear(x, weight), expected) for _ in range(3))
    assert fresh_pool.calls.empty()  # no thread would ever take them

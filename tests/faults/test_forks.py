"""A fork of a process that has computed with several threads computes too, and the same."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import ROOT

# The parent computes with two threads, by torch alone and by our kernels. Each door then runs in a fork, which the
# alarm ends if it hangs.
_DOORS = """
import copy, os, pathlib, signal, tempfile
import torch
from bass_core import ModelPair, generate, stream
from tests.support.page import load_saved, save_tiny_pair
from tests.ui.zero_gpu import Spaces
from ui.page.limits import Limits
from ui.page.request import make_request
from ui.sources.local import race_source
from ui.sources.zero_gpu import ZeroGpu

torch.set_num_threads(2)
os.register_at_fork(after_in_child=lambda: signal.alarm(100))
large = torch.randn(1 << 20)  # large enough for two of torch's threads
with tempfile.TemporaryDirectory() as folder:
    pair = load_saved(save_tiny_pair(pathlib.Path(folder)))
halves = [copy.deepcopy(model).bfloat16() for model in (pair.target, pair.draft)]
pairs = [pair, ModelPair(*halves, pair.tokenizer)]
options = {"max_new_tokens": 8, "eos_token_id": None, "draft_length": 2}

def generated(pair):
    return [row.token_ids for row in generate(pair, "Hello", n=2, **options).sequences]

def streamed(pair):
    return [row.tokens for round_ in stream(pair, "Hello", **options) for row in round_.rows]

def raced(source):
    request = make_request({"prompt": "Hello", "draft_length": "2", "max_new_tokens": 8}, Limits())
    *_, last = source(request)
    return {name: lane["sequences"][0]["text"] for name, lane in last["lanes"].items()}

def texts():
    large.exp()
    return [[generated(pair), streamed(pair), raced(race_source(pair))] for pair in pairs]

before = texts()
spaces = [Spaces(), Spaces()]
for pair, package, text in zip(pairs, spaces, before, strict=True):  # ZeroGPU's worker is a fork too
    assert raced(ZeroGpu(package, race_source(pair)).source) == text[2]
    package.close()
if os.fork() == 0:
    assert torch.get_num_threads() == 1
    os._exit(texts() != before)
assert os.wait()[1] == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_every_door_works_in_a_fork() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", _DOORS], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

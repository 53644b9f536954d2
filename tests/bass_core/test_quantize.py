"""int8 weights: refused in a sentence without torchao; with it, every method writes what `generate` writes."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from bass_core import ModelPair, RequestError, generate, load_pair
from bass_core.quantize import int8_weights, is_quantized
from bass_core.step_model import StepModel
from tests.models import prompts, reference, tiny


def test_without_torchao_int8_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(RequestError, match=r"int8.*torchao.*bfloat16"):
        load_pair("no/such-model", dtype="int8")


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is an optional extra")
def test_a_quantised_model_runs_its_own_forward() -> None:
    model = tiny("llama")
    full = sum(parameter.nbytes for parameter in model.parameters())
    int8_weights(model)
    assert is_quantized(model)
    pair = ModelPair(model)
    assert type(pair.target_step) is StepModel and pair.target_step.cost.weight_bytes < full / 2
    rows = prompts(2)
    for method in ("regular", "bass"):
        out = generate(pair, rows, method=method, max_new_tokens=8, eos_token_id=None)
        assert [sequence.token_ids for sequence in out.sequences] == [reference(model, row, 8) for row in rows]

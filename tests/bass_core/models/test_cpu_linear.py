"""Packed linear layers give torch's results, in whichever of torch's layouts the weights take.

Contract: our own kernels (tests/kernels/cpu) are off here. Any CPU tests both kinds by patching the result of
`matmul_dtype`: CPUs that multiply bfloat16 natively and CPUs that would have to emulate it.
"""

import pytest
import torch
from torch import nn

from bass_core import ModelPair, generate
from bass_core.machine import cpu_kernels
from bass_core.models.weights import cpu_linear as packed
from bass_core.models.weights.cpu_linear import PackedLinear, pack_all

from ...models import perturbed, prompts, reference, tiny

HALVES = "fbgemm" in torch.backends.quantized.supported_engines
WIDE = torch.backends.cpu.get_cpu_capability().startswith("AVX512")


@pytest.fixture(autouse=True)
def _without_our_kernels(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "available", lambda: False)


def layer(outs, ins, dtype, bias=False, seed=0):
    torch.manual_seed(seed)
    made = nn.Linear(ins, outs, bias=bias).to(dtype)
    return made.requires_grad_(False)


def exact(layers, x):
    return torch.cat(
        [x @ one.weight.float().T + (0 if one.bias is None else one.bias.float()) for one in layers], -1
    )


@pytest.fixture
def without_bfloat16(monkeypatch):
    """A CPU that would have to emulate bfloat16 products."""
    monkeypatch.setattr(packed, "matmul_dtype", lambda dtype: torch.float32)


@pytest.mark.parametrize("smallest", [0, 10**6])
@pytest.mark.parametrize("rows", [1, 3, 4, 9, 40])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_joined_layers_give_what_each_gives(without_bfloat16, monkeypatch, dtype, bias, rows, smallest):
    monkeypatch.setattr(packed, "PACKED_WEIGHTS", smallest)
    layers = [layer(24, 32, dtype, bias), layer(8, 32, dtype, bias, seed=1)]
    x, residual = torch.randn(2, rows, 32), torch.randn(2, rows, 32)
    linear = PackedLinear(*layers)
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():
        assert (linear.packed is not None) == (smallest == 0)
    torch.testing.assert_close(linear(x), exact(layers, x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(linear(x, residual), exact(layers, x) + residual, atol=1e-5, rtol=1e-5)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["native bfloat16", "emulated bfloat16"])
def native(request, monkeypatch):
    """Either kind of CPU: the dtype in which it multiplies bfloat16 weights."""
    monkeypatch.setattr(
        packed, "matmul_dtype", lambda dtype: request.param if dtype == torch.bfloat16 else torch.float32
    )
    return request.param


@pytest.mark.skipif(not HALVES, reason="this build of torch has no FBGEMM")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_float16_holds_take_its_layout_on_either_kind_of_cpu(native, dtype):
    linear = PackedLinear(layer(24, 32, dtype, True), layer(8, 32, dtype, True, seed=1))
    assert linear.halves is not None and linear.packed is None and linear.compute == torch.float32


@pytest.mark.parametrize("value", [2.0**-30, 2.0**17])
def test_weights_that_float16_cannot_hold_take_what_this_cpu_multiplies(native, monkeypatch, value):
    monkeypatch.setattr(packed, "PACKED_WEIGHTS", 0)
    one, x = layer(16, 16, torch.bfloat16), torch.randn(5, 16)
    one.weight[3, 5] = value
    linear = PackedLinear(one)
    assert linear.halves is None and linear.compute == native
    error = 1e-5 if native == torch.float32 else 2e-2 * exact([one], x).abs().max().item()
    assert (linear(x) - exact([one], x)).abs().max() <= error


@pytest.mark.skipif(not HALVES, reason="this build of torch has no FBGEMM")
@pytest.mark.skipif(not WIDE, reason="without AVX-512, FBGEMM's last bits depend on the number of rows")
def test_a_row_is_the_same_bit_for_bit_however_many_stand_beside_it(native):
    linear = PackedLinear(layer(192, 128, torch.bfloat16))
    assert linear.halves is not None and linear.plain is None
    x = torch.randn(64, 128)
    whole = linear(x)
    for rows in range(1, 64):
        assert torch.equal(linear(x[:rows]), whole[:rows])
        assert torch.equal(linear(x[rows : rows + 1]), whole[rows : rows + 1])


@pytest.mark.skipif(not HALVES, reason="this build of torch has no FBGEMM")
@pytest.mark.parametrize("bias", [False, True])
def test_a_tall_matrix_is_packed_in_pieces_that_give_the_same_bits(without_bfloat16, monkeypatch, bias):
    tall, x, residual = layer(96, 32, torch.bfloat16, bias), torch.randn(3, 32), torch.randn(3, 96)
    whole = PackedLinear(tall)
    monkeypatch.setattr(packed, "HALVES_ROWS", 40)
    pieces = PackedLinear(tall)
    assert [len(whole.halves), len(pieces.halves)] == [1, 3]
    assert torch.equal(pieces(x, residual), whole(x, residual))


def test_float32_weights_stay_float32(native):
    linear = PackedLinear(layer(16, 16, torch.float32))
    assert linear.halves is None and linear.compute == torch.float32


@pytest.mark.parametrize("smallest", [0, 10**6])
def test_texts_are_the_models_own_in_either_layout(monkeypatch, smallest):
    monkeypatch.setattr(packed, "PACKED_WEIGHTS", smallest)
    model = tiny("llama")
    pair, rows = ModelPair(model, perturbed(model, 0.03)), prompts(3)
    out = generate(pair, rows, draft_length=3, max_new_tokens=12)
    assert [one.token_ids for one in out.sequences] == [reference(model, row, 12) for row in rows]


def test_all_layers_are_packed_in_their_order(without_bfloat16):
    groups = [(layer(8 * (i + 1), 16, torch.bfloat16, seed=i),) for i in range(5)]
    x = torch.randn(2, 16)
    for group, linear in zip(groups, pack_all(groups), strict=True):
        torch.testing.assert_close(linear(x), exact(group, x), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not HALVES, reason="this build of torch has no FBGEMM")
def test_a_model_says_whether_its_sums_are_rounded_to_16_bits(native):
    assert not ModelPair(tiny("llama")).target_step.low_precision
    model = tiny("llama").to(torch.bfloat16)
    for weight in model.parameters():
        weight[weight.abs() < 2.0**-14] = 0  # below 2**-14, float16 has fewer bits than bfloat16
    assert not ModelPair(model).target_step.low_precision
    model.lm_head.weight[0, 0] = 2.0**17
    assert ModelPair(model).target_step.low_precision == (native == torch.bfloat16)
    assert ModelPair(tiny("gpt2").to(torch.bfloat16)).target_step.low_precision

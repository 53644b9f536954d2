"""A GGUF file's blocks: read bit for bit, rows back in transformers' order, and what load_pair makes of them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file
from torch import Tensor

from bass_core import WeightsError, load_pair
from bass_core.model.loading import catalogue
from bass_core.model.loading.gguf_blocks import read_blocks
from bass_core.model.loading.weights import smollm2_gguf
from kernels.reference.quantized import dequantise
from tests.bass_core.model.test_catalogue import save
from tests.models import tiny

HEADS, KEY_HEADS = 4, 2
NAMES = {
    "model.embed_tokens": "token_embd", "lm_head": "output", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def in_file_order(weight: Tensor, heads: int) -> Tensor:
    """The rows of each head as GGUF has them: 0, D/2, 1, D/2 + 1, ..."""
    dim = len(weight) // heads
    pairs = [half * dim // 2 + i for i in range(dim // 2) for half in (0, 1)]
    return torch.stack([weight[head * dim + i] for head in range(heads) for i in pairs])


def write(file: Path, model: Any) -> dict[str, Tensor]:
    """The model as GGUF, mostly in Q4_1 and Q8_0; returns what the quantised weights mean, by module."""
    writer, expected = GGUFWriter(file, "llama"), {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or weight.dim() == 1:
            continue
        layer = name.split(".")[2] if ".layers." in name else None
        part = NAMES[name if layer is None else ".".join(name.split(".")[3:])]
        kind = GGMLQuantizationType.Q8_0 if layer is None else GGMLQuantizationType.Q4_1
        kind = GGMLQuantizationType.F16 if name == "model.layers.1.mlp.up_proj" else kind
        heads = {"attn_q": HEADS, "attn_k": KEY_HEADS}.get(part)
        data = quants.quantize((weight if heads is None else in_file_order(weight, heads)).numpy(), kind)
        title = part if layer is None else f"blk.{layer}.{part}"
        writer.add_tensor(f"{title}.weight", data, raw_dtype=kind)
        if kind != GGMLQuantizationType.F16:
            # A row's blocks do not depend on the other rows.
            expected[name] = torch.from_numpy(quants.dequantize(quants.quantize(weight.numpy(), kind), kind))
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_blocks_are_read_as_they_are_under_the_names_of_modules(tmp_path: Path) -> None:
    expected = write(tmp_path / "model.gguf", tiny("llama"))
    found = read_blocks(tmp_path / "model.gguf", HEADS, KEY_HEADS)
    assert found.keys() == expected.keys() and len(found) == 15
    for name, weight in found.items():
        assert weight.kind == ("q4_1" if ".layers." in name else "q8_0"), name
        assert torch.equal(dequantise(weight), expected[name]), name


def test_a_file_that_is_none_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(200))
    with pytest.raises(WeightsError, match=r"^model\.gguf .*start again\.$"):
        read_blocks(tmp_path / "model.gguf", HEADS, KEY_HEADS)


def test_int4_takes_the_blocks_of_an_entrys_file_and_makes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a draft that is such an entry; int8 is made from the weights alone."""
    folder = save(tmp_path / "model")
    expected = write(tmp_path / "model.gguf", tiny("llama"))
    entry = catalogue.CatalogueEntry(
        "mine", target="x", prepare=lambda: folder, gguf=lambda: tmp_path / "model.gguf", dtype="float32"
    )
    monkeypatch.setitem(catalogue.CATALOGUE, "mine", entry)
    pair = load_pair("mine", draft="mine", device="cpu", dtype="int4")
    assert pair.weight_dtype == "int4" and pair.dtype == torch.float32
    for model in (pair.target, pair.draft):
        for name, weight in expected.items():
            assert torch.equal(model.get_submodule(name).weight, weight), name
        assert model.model.layers[1].mlp.up_proj.quantized.kind == "q4_1"
    monkeypatch.setitem(catalogue.CATALOGUE, "mine", entry.__class__("mine", target="x", prepare=lambda: folder))
    for dtype in ("int4", "int8"):
        pair = load_pair("mine", draft="mine", device="cpu", dtype=dtype)
        assert pair.weight_dtype == dtype and pair.dtype == torch.bfloat16
        plain = tiny("llama").bfloat16().float()
        for model in (pair.target, pair.draft):
            own, made = plain.model.layers[0].mlp.down_proj.weight, model.model.layers[0].mlp.down_proj.quantized
            assert made.kind == ("q4_1" if dtype == "int4" else "int8")
            step = 0.51 * (own.amax(1) - own.amin(1)).amax() / 15
            assert (dequantise(made) - own).abs().amax() < step


@pytest.mark.slow
def test_the_real_files_blocks_are_the_converted_models_weights(smollm2_folder: Path) -> None:
    """Every layer, up to the conversion's rounding to bfloat16; and the bytes that int4 and int8 take."""
    saved = load_file(smollm2_folder / "model.safetensors")
    blocks = read_blocks(smollm2_gguf(), 9, 3)
    assert len(blocks) == 7 * 30 + 1
    for name, weight in blocks.items():
        assert torch.equal(dequantise(weight).bfloat16(), saved[f"{name}.weight"]), name
    bytes_ = {}
    for dtype in ("int4", "int8"):
        pair = load_pair("smollm2", device="cpu", dtype=dtype)
        bytes_[dtype] = pair.target_step.cost.weight_bytes
        head: Any = pair.target.get_output_embeddings()
        assert head.quantized is pair.draft.quantized
    assert bytes_ == {"int4": pytest.approx(97e6, rel=0.01), "int8": pytest.approx(135e6, rel=0.01)}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mapped files")
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_the_file_of_the_plain_weights_is_not_kept_mapped(tmp_path: Path, dtype: str) -> None:
    folder = save(tmp_path / "model")
    tiny("llama").bfloat16().save_pretrained(folder)  # of the dtype that is loaded: nothing is converted
    pair = load_pair(str(folder), device="cpu", dtype=dtype)
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text(), pair

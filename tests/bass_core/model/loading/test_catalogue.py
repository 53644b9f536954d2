"""`load_pair` with names, folders, the Hub, draft heads and GGUF files, and its refusals."""

from __future__ import annotations

import gc
import json
import threading
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from bass_core import PairError, RequestError, WeightsError, generate, load_pair
from bass_core.model.draft_head import DraftHead
from bass_core.model.loading import catalogue, quantized, sources
from bass_core.model.loading.gguf_blocks import read_blocks
from bass_core.model.loading.weights import smollm2_gguf
from bass_core.model.weights.quantized import is_quantized
from kernels.reference.quantized import dequantise
from tests.support.models import VOCAB, tiny, tiny_head

HUB_ID = "someone/tiny-llama"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def save(folder: Path, *, shift: int = 0, seed: int = 0) -> Path:
    """Save a tiny Llama with a tokenizer of one token per word; `shift` changes the words' ids."""
    words = {f"w{(i + shift) % VOCAB}": i for i in range(VOCAB)}
    tiny("llama", seed=seed).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the model that a test may damage."""
    return save(tmp_path / "copy")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use a closed port as the Hub's address, and an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def set_hub_answer(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    def model_info(self: object, repo: str, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)


def listing(*files: str) -> Any:
    return SimpleNamespace(sha=COMMIT, siblings=[SimpleNamespace(rfilename=name) for name in files])


def test_target_and_draft_may_be_folders(folder: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "draft", seed=1)
    pair = load_pair(str(folder), draft=str(other), device="cpu", dtype="float32")
    assert pair.target.name_or_path == str(folder) and pair.draft.name_or_path == str(other)
    assert not torch.equal(pair.target.lm_head.weight, pair.draft.lm_head.weight)
    for model in (pair.target, pair.draft):
        assert (model.device.type, model.dtype) == ("cpu", torch.float32)
        assert not model.training and not any(weight.requires_grad for weight in model.parameters())
    assert pair.tokenizer("w7").input_ids == [7] and pair.default_drafter == "auto"
    for dtype, expected in (("auto", torch.bfloat16), ("float16", torch.float16), (torch.float32, torch.float32)):
        assert load_pair(str(folder), device="cpu", dtype=dtype).dtype == expected


def test_an_entry_names_draft_drafter_and_dtype(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft may be inside the repository; `draft=` replaces both draft and drafter."""
    save(tmp_path / "repository" / "drafts" / "mine", seed=1)
    entry = catalogue.CatalogueEntry(
        "mine",
        target="x",
        draft="drafts/mine",
        drafter="prompt_lookup",
        dtype="float32",
        prepare=lambda: folder,
    )
    monkeypatch.setattr(catalogue, "REPOSITORY", tmp_path / "repository")
    monkeypatch.setitem(catalogue.CATALOGUE, "mine", entry)
    pair = load_pair("mine", device="cpu")
    assert pair.name == "mine" and pair.default_drafter == "prompt_lookup" and pair.dtype == torch.float32
    assert pair.draft.name_or_path == str(tmp_path / "repository" / "drafts" / "mine")
    other = load_pair("mine", draft="mine", device="cpu")
    assert other.draft.name_or_path == str(folder) and other.default_drafter == "auto"


def test_an_unknown_name_is_refused_without_asking_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "_ask_hub", lambda repo: pytest.fail("the Hub was asked"))
    for name in ("smollm3", "./gone", "/gone/away", "a/b/c", "drafts/gone", "", "..", "../x"):
        with pytest.raises(PairError) as refusal:
            load_pair(name)
        assert "\n" not in str(refusal.value)
        if name not in ("", ".."):  # "" and ".." are folders without a model
            assert all(known in str(refusal.value) for known in catalogue.CATALOGUE)


def test_device_and_dtype_are_checked_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_source", lambda name: pytest.fail("a model was looked for"))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"device": "tpu"}, "device"),
        ({"device": "mps"}, "device"),
        ({"device": "cuda:99"}, "'cuda:99' can't be used: .*; or choose the device cpu"),
        ({"dtype": "int2"}, "choose auto, .*bfloat16.* int8 or int4"),
        ({"dtype": torch.float64}, "dtype"),
    ]
    for options, message in refused:
        with pytest.raises(RequestError, match=message):
            load_pair("smollm2", **options)
    monkeypatch.setattr(catalogue, "pick_device", lambda device: torch.device("cuda"))
    for dtype in ("int8", "int4"):
        with pytest.raises(
            RequestError, match=rf'^dtype="{dtype}" is for a CPU: choose bfloat16, or device="cpu"'
        ):
            load_pair("smollm2", dtype=dtype)


def test_an_unreachable_hub_is_reported_in_one_sentence() -> None:
    with pytest.raises(WeightsError, match=r"not reachable.*connect to the network.*smollm2-1\.7b") as refusal:
        load_pair("smollm2-hub")
    assert "\n" not in str(refusal.value)


def test_a_hub_that_never_answers_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(sources, "HUB_PATIENCE_S", 0.2)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: release.wait(30))
    with pytest.raises(WeightsError, match=r"no answer within 0\.2 s"):
        load_pair(HUB_ID)
    release.set()


def fill_cache(tmp_path: Path, folder: Path) -> None:
    """Make a folder the Hub's local cache of HUB_ID."""
    repository = tmp_path / "hub" / f"models--{HUB_ID.replace('/', '--')}"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "snapshots" / COMMIT).symlink_to(folder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)


def test_without_network_the_hubs_cache_is_used(folder: Path, tmp_path: Path) -> None:
    fill_cache(tmp_path, folder)
    pair = load_pair(HUB_ID, device="cpu")
    assert pair.target.name_or_path == HUB_ID and pair.tokenizer("w3").input_ids == [3]


@pytest.mark.parametrize("shards", [False, True])
def test_without_network_a_partly_filled_cache_lacks_the_weights(copy: Path, tmp_path: Path, shards: bool) -> None:
    weights = copy / "model.safetensors"
    if shards:  # one of two
        index = {"weight_map": {"a": weights.name, "b": "model-2.safetensors"}}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        weights.unlink()
    fill_cache(tmp_path, copy)
    with pytest.raises(WeightsError, match=r"weights of .* are not downloaded yet.*: connect to the network"):
        load_pair(HUB_ID, device="cpu")


def test_a_reachable_hub_is_asked_for_safetensors_of_one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    set_hub_answer(monkeypatch, listing("config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin"))
    arguments: dict[str, Any] = {}

    def from_pretrained(name: str, **options: Any) -> Any:
        arguments.update(options, name=name)
        raise OSError("enough")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(WeightsError, match="enough"):
        load_pair(HUB_ID, device="cpu")
    assert arguments == {
        "name": HUB_ID, "revision": COMMIT, "local_files_only": False, "use_safetensors": True,
        "trust_remote_code": False, "dtype": torch.bfloat16, "output_loading_info": True,
    }  # fmt: skip


def test_a_repository_that_has_no_safetensors_or_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_hub_answer(monkeypatch, listing("config.json", "pytorch_model.bin"))
    with pytest.raises(PairError, match="no safetensors"):
        load_pair("opt-13b")
    set_hub_answer(monkeypatch, RepositoryNotFoundError("401", response=SimpleNamespace(headers={}, request=None)))
    with pytest.raises(PairError, match="no public model of that name"):
        load_pair(HUB_ID)


def test_folders_without_a_valid_pair_are_refused(copy: Path, folder: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", shift=1)
    with pytest.raises(PairError, match="tokenizer"):
        load_pair(str(folder), draft=str(other), device="cpu")
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"lack 1 tensors.*layers\.1\.mlp\.up_proj\.weight"):
        load_pair(str(copy), device="cpu")
    weights.rename(copy / "pytorch_model.bin")
    with pytest.raises(PairError, match="no safetensors"):  # a pickle is never opened
        load_pair(str(copy))
    with pytest.raises(PairError, match=r"no config\.json"):
        load_pair(str(tmp_path))


def test_a_folder_may_have_no_tokenizer(copy: Path) -> None:
    for path in copy.iterdir():
        if sources.is_tokenizer_file(path.name):
            path.unlink()
    assert load_pair(str(copy), device="cpu").tokenizer is None


def test_a_tokenizer_may_be_a_tekken_file_alone(copy: Path) -> None:
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
    tekken = {
        "config": {"pattern": r"[^\s]+|\s+", "num_vocab_tokens": 263, "default_vocab_size": 263,
                   "default_num_special_tokens": len(names), "version": "v3"},
        "vocab": [
            {"rank": i, "token_bytes": b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)
        ],
        "special_tokens": [
            {"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)
        ],
    }  # fmt: skip
    for path in copy.iterdir():
        if sources.is_tokenizer_file(path.name):
            path.unlink()
    (copy / "tekken.json").write_text(json.dumps(tekken))
    tokenizer = load_pair(str(copy), device="cpu").tokenizer
    assert tokenizer.decode(tokenizer("hi", add_special_tokens=False)["input_ids"]) == "hi"


@pytest.mark.parametrize("name", ["spiece.model", "sentencepiece.bpe.model", "source.spm", "tokenizer.json"])
def test_files_of_other_tokenizers_are_known(name: str) -> None:
    assert sources.is_tokenizer_file(name) and not sources.is_tokenizer_file(name.split(".")[0] + ".safetensors")


def test_a_damaged_tokenizer_is_not_called_a_model(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("[]")
    with pytest.raises((PairError, WeightsError), match="tokenizer of"):
        load_pair(str(copy), device="cpu")


def test_code_next_to_the_weights_is_never_run(copy: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (copy / "modeling.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    config = json.loads((copy / "config.json").read_text())
    code = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "their_own", "auto_map": code}))
    with pytest.raises(PairError, match="can't be loaded"):
        load_pair(str(copy))
    assert not ran.exists()


@pytest.mark.slow
def test_the_real_model_ends_its_reply(smollm2_folder: Path) -> None:
    pair = load_pair("smollm2", device="cpu")
    assert pair.name == "smollm2" and isinstance(pair.draft, DraftHead) and pair.default_drafter == "adaptive"
    assert pair.target.name_or_path == str(smollm2_folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    encoded = pair.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    reply = pair.target.generate(**encoded, max_new_tokens=40, do_sample=False)[0, encoded["input_ids"].shape[1] :]
    assert "Paris" in pair.tokenizer.decode(reply) and reply[-1] == 2


@pytest.mark.parametrize("zero", [False, True])
def test_a_head_copies_its_rows_on_the_host_before_they_are_quantised(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero: bool
) -> None:
    """Later the rows could not be copied: quantised weights have no rows, and ZeroGPU's have no numbers yet.

    The "meta" device stands for ZeroGPU's.
    """
    target = load_pair(str(folder), device="cpu", dtype="float32").target
    tiny_head(target).save(tmp_path / "head")
    steps: list[tuple[str, str]] = []
    load_draft_head = catalogue.load_draft_head

    def load_head(folder: Path, target: Any) -> Any:
        steps.append(("rows", target.device.type))
        return load_draft_head(folder, target)

    monkeypatch.setattr(catalogue, "load_draft_head", load_head)
    monkeypatch.setattr(quantized, "quantise_model", lambda model, *_: steps.append(("int8", model.device.type)))
    if zero:
        monkeypatch.setenv("SPACES_ZERO_GPU", "true")
        monkeypatch.setattr(catalogue, "pick_device", lambda device: torch.device("meta"))
    pair = load_pair(str(folder), draft=str(tmp_path / "head"), device="cpu", dtype="float32" if zero else "int8")
    assert steps == [("rows", "cpu"), ("int8", "cpu")][: 1 if zero else 2]
    parts = [pair.target, pair.draft, pair.draft.body]
    assert {weight.device.type for part in parts for weight in part.parameters()} == {"meta" if zero else "cpu"}
    shared = pair.target.get_input_embeddings().weight
    assert pair.draft.embedding.untyped_storage()._cdata == shared.untyped_storage()._cdata


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_head_keeps_its_rows_and_reads_the_quantised_embedding(folder: Path, tmp_path: Path, dtype: str) -> None:
    plain = load_pair(str(folder), device="cpu").target
    tiny_head(plain).save(tmp_path / "head")
    pair = load_pair(str(folder), draft=str(tmp_path / "head"), device="cpu", dtype=dtype)
    head, table = pair.draft, pair.target.get_input_embeddings()
    assert torch.equal(head.body.lm_head.weight, plain.get_output_embeddings().weight[head.vocabulary])
    assert head.embedding is None and head.quantized is table.quantized and not is_quantized(head)
    output = generate(pair, [[1, 2, 3]], method="bass", drafter="model", max_new_tokens=6, eos_token_id=None)
    assert len(output.sequences[0].token_ids) == 6 and output.metrics.drafted > 0


HEADS, KEY_HEADS = 4, 2
NAMES = {
    "model.embed_tokens": "token_embd", "lm_head": "output", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def in_file_order(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of each head in GGUF's order: 0, D/2, 1, D/2 + 1, ..."""
    dim = len(weight) // heads
    pairs = [half * dim // 2 + i for i in range(dim // 2) for half in (0, 1)]
    return torch.stack([weight[head * dim + i] for head in range(heads) for i in pairs])


def write_gguf(file: Path, model: Any) -> dict[str, Tensor]:
    """Write the model as GGUF, mostly in Q4_1 and Q8_0; return the dequantised weights by module."""
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
            # Each row is quantised by itself, so the order of the rows does not change the values.
            expected[name] = torch.from_numpy(quants.dequantize(quants.quantize(weight.numpy(), kind), kind))
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_blocks_are_read_unchanged_under_the_names_of_their_modules(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "model.gguf", tiny("llama"))
    blocks = read_blocks(tmp_path / "model.gguf", HEADS, KEY_HEADS)
    assert blocks.keys() == expected.keys() and len(blocks) == 15
    for name, weight in blocks.items():
        assert weight.kind == ("q4_1" if ".layers." in name else "q8_0"), name
        assert torch.equal(dequantise(weight), expected[name]), name


def test_a_damaged_gguf_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(200))
    with pytest.raises(WeightsError, match=r"^model\.gguf .*start again\.$"):
        read_blocks(tmp_path / "model.gguf", HEADS, KEY_HEADS)


def test_int4_uses_the_blocks_of_an_entrys_file_and_quantises_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of a draft's entry is used in the same way.

    An int8 model ignores the file and quantises the plain weights.
    """
    folder = save(tmp_path / "model")
    expected = write_gguf(tmp_path / "model.gguf", tiny("llama"))
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
    plain = tiny("llama").bfloat16().float().model.layers[0].mlp.down_proj.weight
    step = 0.51 * (plain.amax(1) - plain.amin(1)).amax() / 15
    for dtype, kind in (("int4", "q4_1"), ("int8", "int8")):
        pair = load_pair("mine", draft="mine", device="cpu", dtype=dtype)
        assert pair.weight_dtype == dtype and pair.dtype == torch.bfloat16
        for model in (pair.target, pair.draft):
            quantised = model.model.layers[0].mlp.down_proj.quantized
            assert quantised.kind == kind and (dequantise(quantised) - plain).abs().amax() < step


@pytest.mark.slow
def test_the_real_files_blocks_are_the_converted_models_weights(smollm2_folder: Path) -> None:
    """The weights of every layer are equal after rounding to bfloat16. The sizes of int4 and int8 are right."""
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
def test_the_file_of_the_plain_weights_does_not_stay_mapped(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    tiny("llama").bfloat16().save_pretrained(folder)  # in the dtype that is loaded, so that nothing is converted
    pair = load_pair(str(folder), device="cpu", dtype="int4")
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text(), pair

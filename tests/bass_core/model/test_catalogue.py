"""The names load_pair accepts, how it loads folders and the Hub, with and without network, and what it refuses."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from bass_core import PairError, RequestError, WeightsError, load_pair
from bass_core.model.draft_head import DraftHead
from bass_core.model.loading import catalogue, sources
from tests.models import VOCAB, tiny

HUB_ID = "someone/tiny-llama"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def save(folder: Path, *, shift: int = 0, seed: int = 0) -> Path:
    """A tiny Llama with a tokenizer of one token per word; `shift` gives the words other token ids."""
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
    """A copy of the model that a test may damage."""
    return save(tmp_path / "copy")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The Hub's address is a closed port, and its cache is empty."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def hub_says(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    def model_info(self: object, repo: str, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)


def listing(*files: str) -> Any:
    return SimpleNamespace(sha=COMMIT, siblings=[SimpleNamespace(rfilename=name) for name in files])


def test_folders_for_target_and_draft(folder: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "draft", seed=1)
    pair = load_pair(str(folder), draft=str(other), device="cpu", dtype="float32")
    assert pair.target.name_or_path == str(folder) and pair.draft.name_or_path == str(other)
    assert not torch.equal(pair.target.lm_head.weight, pair.draft.lm_head.weight)
    assert (pair.device.type, pair.dtype, pair.draft.device.type, pair.draft.dtype) == (
        "cpu", torch.float32, "cpu", torch.float32,
    )  # fmt: skip
    for model in (pair.target, pair.draft):
        assert not model.training and not any(weight.requires_grad for weight in model.parameters())
    assert pair.tokenizer("w7").input_ids == [7] and pair.default_drafter == "auto"


@pytest.mark.parametrize(
    ("asked", "made"),
    [("auto", torch.bfloat16), ("float16", torch.float16), (torch.float32, torch.float32)],
)
def test_dtypes(folder: Path, asked: Any, made: torch.dtype) -> None:
    pair = load_pair(str(folder), draft=str(folder), device="cpu", dtype=asked)
    assert pair.dtype == pair.draft.dtype == made


def test_an_entry_names_draft_drafter_and_dtype(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a draft inside the repository; a draft that the user gives replaces both draft and drafter."""
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


def test_the_catalogue() -> None:
    named = {
        entry.name: (entry.target, entry.draft) for entry in catalogue.CATALOGUE.values() if not entry.prepare
    }
    assert named == {
        "smollm2-hub": ("HuggingFaceTB/SmolLM2-135M-Instruct", None),
        "smollm2-1.7b": ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        "qwen3-8b": ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
        "opt-13b": ("facebook/opt-13b", "facebook/opt-125m"),
    }
    for entry in catalogue.CATALOGUE.values():
        assert entry.tested != ("not run here" in entry.note), entry.name


@pytest.mark.parametrize("name", ["smollm3", "./gone", "/gone/away", "a/b/c", "drafts/gone", "", "..", "../x"])
def test_an_unknown_name_is_refused_without_asking_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "_ask_hub", lambda repo: pytest.fail("the Hub was asked"))
    with pytest.raises(PairError) as refusal:
        load_pair(name)
    assert "\n" not in str(refusal.value)
    if name not in ("", ".."):  # these are folders, but not models
        assert all(known in str(refusal.value) for known in catalogue.CATALOGUE)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "tpu"}, "device"),
        ({"device": "mps"}, "device"),
        ({"device": "cuda:99"}, "sees no device"),
        ({"dtype": "int2"}, "choose auto, .*bfloat16.* int8 or int4"),
        ({"dtype": torch.float64}, "dtype"),
    ],
)
def test_device_and_dtype_are_checked_before_anything_is_loaded(
    options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "_source", lambda name: pytest.fail("a model was looked for"))
    with pytest.raises(RequestError, match=says):
        load_pair("smollm2", **options)


def test_a_hub_out_of_reach_is_one_sentence() -> None:
    with pytest.raises(WeightsError, match=r"not reachable.*connect to the network.*smollm2-1\.7b") as refusal:
        load_pair("smollm2-hub")
    assert "\n" not in str(refusal.value)


def test_a_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(sources, "HUB_PATIENCE_S", 0.2)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: release.wait(30))
    with pytest.raises(WeightsError, match=r"no answer within 0\.2 s"):
        load_pair(HUB_ID)
    release.set()


def test_without_network_the_hubs_cache_is_used(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / f"models--{HUB_ID.replace('/', '--')}"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "snapshots" / COMMIT).symlink_to(folder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    pair = load_pair(HUB_ID, device="cpu")
    assert pair.target.name_or_path == HUB_ID and pair.tokenizer("w3").input_ids == [3]


def test_a_reachable_hub_is_asked_for_safetensors_of_one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    hub_says(monkeypatch, listing("config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin"))
    asked: dict[str, Any] = {}

    def from_pretrained(name: str, **options: Any) -> Any:
        asked.update(options, name=name)
        raise OSError("enough")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(WeightsError, match="enough"):
        load_pair(HUB_ID, device="cpu")
    assert asked == {
        "name": HUB_ID, "revision": COMMIT, "local_files_only": False, "use_safetensors": True,
        "trust_remote_code": False, "dtype": torch.bfloat16, "output_loading_info": True,
    }  # fmt: skip


def test_a_repository_without_safetensors_or_of_no_such_name_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub_says(monkeypatch, listing("config.json", "pytorch_model.bin"))
    with pytest.raises(PairError, match="no safetensors"):
        load_pair("opt-13b")
    hub_says(monkeypatch, RepositoryNotFoundError("401", response=SimpleNamespace(headers={}, request=None)))
    with pytest.raises(PairError, match="no public model of that name"):
        load_pair(HUB_ID)


def test_a_pickle_is_never_opened(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(PairError, match="no safetensors"):
        load_pair(str(copy))


def test_code_beside_the_weights_is_never_run(copy: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (copy / "modeling.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    config = json.loads((copy / "config.json").read_text())
    code = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "their_own", "auto_map": code}))
    with pytest.raises(PairError, match="can't be loaded"):
        load_pair(str(copy))
    assert not ran.exists()


def test_weights_that_lack_a_tensor_are_refused(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"lack 1 tensors.*layers\.1\.mlp\.up_proj\.weight"):
        load_pair(str(copy), device="cpu")


def test_a_truncated_file_is_one_sentence(copy: Path) -> None:
    with open(copy / "model.safetensors", "rb+") as file:
        file.truncate(5000)
    with pytest.raises(WeightsError, match="can't be read") as refusal:
        load_pair(str(copy), device="cpu")
    assert "\n" not in str(refusal.value)


def test_no_model_in_the_folder(tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"no config\.json"):
        load_pair(str(tmp_path))


def test_a_draft_with_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", shift=1)
    with pytest.raises(PairError, match="tokenizer"):
        load_pair(str(folder), draft=str(other), device="cpu")


def test_a_folder_without_a_tokenizer(copy: Path) -> None:
    for name in sources.TOKENIZER_FILES:
        (copy / name).unlink(missing_ok=True)
    assert load_pair(str(copy), device="cpu").tokenizer is None


def test_the_real_model_ends_its_reply(smollm2_folder: Path) -> None:
    pair = load_pair("smollm2", device="cpu")
    assert pair.name == "smollm2" and isinstance(pair.draft, DraftHead) and pair.default_drafter == "adaptive"
    assert pair.target.name_or_path == str(smollm2_folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked = pair.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = pair.target.generate(**asked, max_new_tokens=40, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert "Paris" in pair.tokenizer.decode(out) and out[-1] == 2

"""The pair "auto": the largest one that is downloaded and fits the GPU, else smollm2. Nothing is fetched."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from bass_core import PairError, generate, load_pair
from bass_core.model.eagle import EagleHead
from bass_core.model.loading import catalogue, choose, sources
from bass_core.model.loading.eagle import load_eagle
from bench.simulation.pairs import SHAPES, shapes_of
from tests.bass_core.model.loading.test_catalogue import save as save_target
from tests.bass_core.model.loading.test_eagle import ORIGINAL, SPECULATOR
from tests.bass_core.model.loading.test_eagle import save as save_head
from tests.support.models import prompts, texts_of, tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GPU, CPU = torch.device("cuda"), torch.device("cpu")
# Qwen3-8B's config but for its sizes: 8 layers, which a head reads after 2, 4 and 5 by default.
TARGET_LAYERS, DEFAULT_READS = 8, (2, 4, 5)
FETCH_8B = (
    "qwen3-8b-eagle3 suits this GPU better than smollm2: python app.py --pair qwen3-8b-eagle3 fetches it "
    "(18.4 GB) and races it."
)


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of an empty Hub's cache. Asking the Hub fails the test."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(sources, "_ask_hub", lambda repo: pytest.fail(f"the Hub was asked for {repo}"))
    return tmp_path / "hub"


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny("qwen3", layers=TARGET_LAYERS)


def gpu_with(free_gb: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU pass for a GPU with that much free memory."""
    monkeypatch.setattr(choose, "is_accelerator", lambda device: True)
    monkeypatch.setattr(choose, "available_bytes", lambda device: int(free_gb * 1e9))


def put(hub: Path, repo: str) -> Path:
    """Return the folder of a repository's only commit in the Hub's cache."""
    repository = hub / f"models--{repo.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    return snapshot


def fill(hub: Path, name: str, target: Any, head: dict[str, Any]) -> tuple[Path, Path]:
    """Put a catalogue pair's target and head into the Hub's cache, with tiny sizes."""
    entry = catalogue.CATALOGUE[name]
    assert entry.draft is not None
    folders = put(hub, entry.target), put(hub, entry.draft)
    save_target(folders[0])  # for its tokenizer
    target.save_pretrained(folders[0])
    reads = head.get("eagle_aux_hidden_state_layer_ids") or DEFAULT_READS
    save_head(folders[1], target, head, reads=tuple(reads))
    return folders


@pytest.mark.parametrize(
    "head", [SPECULATOR | {"eagle_aux_hidden_state_layer_ids": None}, ORIGINAL], ids=["speculators", "SpecForge"]
)
def test_a_pair_in_the_hubs_cache_is_loaded_and_drafts(
    hub: Path, target: Any, head: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(hub, "qwen3-8b-eagle3", target, head)
    gpu_with(24, monkeypatch)
    monkeypatch.setattr(catalogue, "pick_device", lambda device: CPU)
    pair = load_pair("auto", dtype="float32")
    assert (pair.name, pair.advice, pair.default_drafter) == ("qwen3-8b-eagle3", None, "auto")
    assert pair.target.config.model_type == "qwen3" and pair.tokenizer is not None
    assert isinstance(pair.draft, EagleHead) and pair.draft.shape.reads_layers == DEFAULT_READS
    request: dict[str, Any] = {"max_new_tokens": 12, "draft_length": 3, "eos_token_id": None}
    drafted, regular = (generate(pair, prompts(2), method=method, **request) for method in ("bass", "regular"))
    assert texts_of(drafted) == texts_of(regular) and drafted.metrics.drafted > 0


def test_the_choice_depends_on_the_cache_and_on_the_free_memory(
    hub: Path, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(free_gb: float) -> choose.Choice:
        gpu_with(free_gb, monkeypatch)
        return choose.choose(catalogue._ENTRIES, GPU, torch.bfloat16)

    fetch_4b = FETCH_8B.replace("8b", "4b").replace("18.4", "8.5")
    assert chosen(24) == chosen(80) == ("smollm2", FETCH_8B)
    assert chosen(16) == ("smollm2", fetch_4b)
    assert chosen(11) == ("smollm2", None)
    fill(hub, "qwen3-4b-eagle3", target, SPECULATOR)
    head = fill(hub, "qwen3-14b-eagle3", target, SPECULATOR)[1]
    monkeypatch.setattr(choose, "weight_bytes", lambda source: 15e9 if "14B" in source.where else 4e9)
    assert [chosen(free).name for free in (34, 32, 10)] == ["qwen3-14b-eagle3", "qwen3-4b-eagle3", "smollm2"]
    (head / "model.safetensors").rename(head / "model-00001-of-00002.safetensors")
    assert chosen(34).name == "qwen3-4b-eagle3", "the other file and the index are missing"


def test_only_gpus_that_run_these_pairs_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = catalogue._ENTRIES
    assert choose.choose(entries, CPU, torch.bfloat16) == ("smollm2", None)
    gpu_with(80, monkeypatch)
    assert choose.choose(entries, GPU, torch.float16) == ("smollm2", None)
    assert choose.choose(entries, GPU, torch.float32).advice == FETCH_8B
    gpu_with(30, monkeypatch)
    assert choose.choose(entries, GPU, torch.float32).advice == FETCH_8B.replace("8b", "4b").replace("18.4", "8.5")
    monkeypatch.setattr(choose, "on_zero_gpu", lambda: True)
    assert choose.choose(entries, GPU, torch.bfloat16) == ("smollm2", None)


def test_smollm2_is_loaded_if_nothing_is_cached_or_the_cached_pair_is_damaged(
    hub: Path, target: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded, load = [], catalogue._load

    def instead(name: str, *arguments: Any) -> Any:
        loaded.append(name)
        return SimpleNamespace() if name == "smollm2" else load(name, *arguments)

    monkeypatch.setattr(catalogue, "_load", instead)
    monkeypatch.setattr(catalogue, "pick_device", lambda device: CPU)
    gpu_with(24, monkeypatch)
    pair = load_pair("auto")
    assert loaded == ["smollm2"] and pair.advice == FETCH_8B and FETCH_8B in caplog.text
    assert load_pair("auto", draft="drafts/smollm2").advice is None, "the user's draft is for smollm2"
    folder, _ = fill(hub, "qwen3-8b-eagle3", target, SPECULATOR)
    (folder / "model.safetensors").write_bytes(b"damaged")
    loaded.clear()
    pair = load_pair("auto")
    assert loaded == ["qwen3-8b-eagle3", "smollm2"] and pair.advice is None
    assert "qwen3-8b-eagle3 can't be used, so smollm2 is loaded instead: The files of" in caplog.text


@pytest.mark.parametrize("config", [SPECULATOR, ORIGINAL], ids=["speculators", "SpecForge"])
def test_a_head_that_states_its_targets_layers_is_refused(tmp_path: Path, target: Any, config: Any) -> None:
    fields = {**config, "num_hidden_layers": TARGET_LAYERS}
    if "transformer_layer_config" in config:
        fields = {**config, "transformer_layer_config": {**ORIGINAL, "num_hidden_layers": TARGET_LAYERS}}
    head = save_head(tmp_path, target, fields, reads=DEFAULT_READS)
    with pytest.raises(
        PairError, match="sets num_hidden_layers to its target's 8, but the weights have 1 layer: "
    ):
        load_eagle(sources.locate(str(head)), target)


def test_a_head_that_is_only_a_pickle_is_refused_and_never_chosen(
    hub: Path, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, head = fill(hub, "qwen3-8b-eagle3", target, SPECULATOR)
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(PairError, match=r"only pytorch_model\.bin, which we never open because .* can run code: "):
        sources.locate(str(head))
    gpu_with(24, monkeypatch)
    assert choose.choose(catalogue._ENTRIES, GPU, torch.bfloat16) == ("smollm2", FETCH_8B)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert sources.locate(str(tmp_path)), "a pickle next to safetensors does no harm"


def test_the_catalogues_sizes_are_those_of_the_published_shapes() -> None:
    listed = {entry.name: entry.gigabytes for entry in catalogue._ENTRIES if entry.gigabytes}
    assert listed.keys() == SHAPES.keys()
    for name, gigabytes in listed.items():
        assert sum(shape.held_bytes for shape in shapes_of(name)) / 1e9 == pytest.approx(gigabytes, abs=0.1)

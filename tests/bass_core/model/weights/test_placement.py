"""`load_pair(device_map=...)` spreads a target with accelerate, here over memory and disk.

tests/devices/test_split.py splits a target over two devices that both compute.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from bass_core import PairError, RequestError, generate, load_pair, race
from bass_core.model.base import CausalModel
from bass_core.model.loading import catalogue
from tests.support.models import prompts, texts_of, tiny, tiny_head

ROWS = prompts(2)
TEXT: dict[str, Any] = {"max_new_tokens": 6, "draft_length": 2, "eos_token_id": None}
MAP = {
    "model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu",
    "model.layers.1": "disk", "model.norm": "cpu", "lm_head": "disk",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("split")
    tiny("llama").save_pretrained(root / "target")
    tiny("llama", seed=1, layers=1).save_pretrained(root / "draft")
    return str(root)


def weights_on_disk(model: PreTrainedModel) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]


def test_a_target_partly_on_disk_writes_the_same_text(folder: str) -> None:
    options: dict[str, Any] = {"draft": f"{folder}/draft", "dtype": "float32"}
    whole = load_pair(f"{folder}/target", device="cpu", **options)
    split = load_pair(f"{folder}/target", device_map=MAP, **options)
    assert split.places == ("cpu", "disk") and str(split.device) == "cpu" and whole.places == ("cpu",)
    assert type(split.target_step) is CausalModel and not split.target_step.capturable
    for method in ("regular", "speculative", "bass"):
        whole_texts, split_texts = (
            texts_of(generate(pair, ROWS, method=method, **TEXT)) for pair in (whole, split)
        )
        assert whole_texts == split_texts
    # Neither the model nor its copies have kept the weights read from disk.
    assert {name.split(".")[0] for name in weights_on_disk(split.target)} == {"model", "lm_head"}


def test_overlapping_lanes_do_not_drop_each_others_weights(folder: str) -> None:
    """A forward reads each layer from disk and then drops it, while another lane's forward may need it."""
    pair = load_pair(f"{folder}/target", draft=f"{folder}/draft", device_map=MAP, dtype="float32")
    *_, fair = race(pair, ROWS, **TEXT)
    for _ in range(2):
        *_, last = race(pair, ROWS, scheduling="overlap", **TEXT)
        for name, lane in last["lanes"].items():
            assert lane["error"] is None
            rows = zip(lane["sequences"], fair["lanes"][name]["sequences"], strict=True)
            assert all(sequence["token_ids"] == other["token_ids"] for sequence, other in rows)


def test_a_target_entirely_on_disk_is_split(folder: str) -> None:
    pair = load_pair(f"{folder}/target", device_map={"": "disk"}, dtype="float32")
    plain = load_pair(f"{folder}/target", device="cpu", dtype="float32")
    assert pair.places == ("disk",) and str(pair.device) == "cpu"
    split_texts, plain_texts = (texts_of(generate(each, ROWS, **TEXT)) for each in (pair, plain))
    assert split_texts == plain_texts


def test_invalid_device_maps_are_refused_in_one_sentence(folder: str) -> None:
    nowhere = [(PairError, {"device_map": {"": place}}, "") for place in (None, "nowhere", "cuda:99")]
    refused: list[tuple[type[Exception], dict[str, Any], str]] = [
        *nowhere,
        (RequestError, {"device_map": "everywhere"}, "The device map 'everywhere' is not known: choose auto, "),
        (
            RequestError,
            {"device_map": "auto", "device": "cpu"},
            "The device_map already places the target: leave",
        ),
        (RequestError, {"device_map": "auto", "dtype": "int8"}, "int8 weights can't be spread over devices: "),
    ]
    for kind, options, message in refused:
        with pytest.raises(kind) as refusal:
            load_pair(f"{folder}/target", **options)
        assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


def test_a_target_that_fits_one_device_is_not_split(folder: str) -> None:
    pair = load_pair(f"{folder}/target", device_map="auto", dtype="float32")
    assert len(pair.places) == 1 and not weights_on_disk(pair.target)


def test_a_head_given_for_a_split_target_is_refused_and_an_entrys_is_left_out(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_head(tiny("llama")).save(tmp_path)
    with pytest.raises(PairError, match="A draft head can't follow"):
        load_pair(f"{folder}/target", draft=str(tmp_path), device_map=MAP, dtype="float32")
    entry = catalogue.CatalogueEntry("mine", target=f"{folder}/target", draft=str(tmp_path))
    monkeypatch.setitem(catalogue.CATALOGUE, "mine", entry)
    with caplog.at_level(logging.WARNING):
        pair = load_pair("mine", device_map=MAP, dtype="float32")
    assert pair.draft is None and pair.default_drafter == "prompt_lookup"
    assert "A draft head can't follow" in caplog.text

"""Contract: `load_pair(device_map=...)` spreads a target by accelerate, here over the host and its disk.

Layers that wait on the disk are the CPU's kind of a split target; tests/devices/test_split.py has two devices that
compute.
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
    made = tmp_path_factory.mktemp("split")
    tiny("llama").save_pretrained(made / "target")
    tiny("llama", seed=1, layers=1).save_pretrained(made / "draft")
    return str(made)


def waiting(model: PreTrainedModel) -> list[str]:
    return [name for name, one in model.named_parameters() if one.device.type == "meta"]


def test_layers_that_wait_on_the_disk_write_the_same_text(folder: str) -> None:
    given: dict[str, Any] = {"draft": f"{folder}/draft", "dtype": "float32"}
    whole = load_pair(f"{folder}/target", device="cpu", **given)
    split = load_pair(f"{folder}/target", device_map=MAP, **given)
    assert split.places == ("cpu", "disk") and str(split.device) == "cpu" and whole.places == ("cpu",)
    assert type(split.target_step) is CausalModel and not split.target_step.capturable
    for method in ("regular", "speculative", "bass"):
        one, other = (texts_of(generate(pair, ROWS, method=method, **TEXT)) for pair in (whole, split))
        assert one == other
    # Neither the model nor its copies have kept what they read.
    assert {name.split(".")[0] for name in waiting(split.target)} == {"model", "lm_head"}


def test_lanes_that_overlap_do_not_take_each_others_weights(folder: str) -> None:
    """Layers are fetched for one forward and let go behind it."""
    pair = load_pair(f"{folder}/target", draft=f"{folder}/draft", device_map=MAP, dtype="float32")
    *_, fair = race(pair, ROWS, **TEXT)
    for _ in range(2):
        *_, last = race(pair, ROWS, scheduling="overlap", **TEXT)
        for name, lane in last["lanes"].items():
            assert lane["error"] is None
            rows = zip(lane["sequences"], fair["lanes"][name]["sequences"], strict=True)
            assert all(one["token_ids"] == other["token_ids"] for one, other in rows)


def test_a_target_that_is_on_disk_alone_is_split(folder: str) -> None:
    pair = load_pair(f"{folder}/target", device_map={"": "disk"}, dtype="float32")
    plain = load_pair(f"{folder}/target", device="cpu", dtype="float32")
    assert pair.places == ("disk",) and str(pair.device) == "cpu"
    one, other = (texts_of(generate(two, ROWS, **TEXT)) for two in (pair, plain))
    assert one == other


def test_what_can_not_be_spread_is_one_sentence(folder: str) -> None:
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
    for kind, asked, says in refused:
        with pytest.raises(kind) as refusal:
            load_pair(f"{folder}/target", **asked)
        assert str(refusal.value).startswith(says) and "\n" not in str(refusal.value)


def test_a_target_that_fits_one_device_is_not_split(folder: str) -> None:
    pair = load_pair(f"{folder}/target", device_map="auto", dtype="float32")
    assert len(pair.places) == 1 and not waiting(pair.target)


def test_a_head_is_refused_and_a_pairs_own_one_left_out(
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

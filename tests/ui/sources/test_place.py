"""Where app.py's options let races run, as far as that needs no Ray, and what it is called."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import app
from bass_core import BassError, RequestError
from ui.page.limits import Limits
from ui.sources.cluster.start import MISSING, actor_options
from ui.sources.local import Local
from ui.sources.service import open_service
from ui.sources.source import Ask

SPLIT = {
    "model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers": "cpu",
    "model.norm": "cpu", "lm_head": "disk",
}  # fmt: skip


def refused(*options: str) -> str:
    """The sentence with which these options are refused, before any model is loaded."""
    chosen = app.parse([*options, "--pair", "/nothing-here"])
    ask = Ask(chosen.pair, device=chosen.device, device_map=chosen.device_map)
    with pytest.raises(BassError) as error:
        open_service(ask, chosen, Limits(), lambda: 1, 1)
    return str(error.value)


def test_options_that_do_not_go_together_are_one_sentence() -> None:
    assert refused("--worker-resources", "CPU=1").startswith("--worker-resources says what a worker takes")
    assert refused("--workers", "2", "--device-map", "auto").startswith("With --workers each worker has one GPU")
    assert refused("--workers", "2", "--device", "cuda:1").startswith("With --workers each worker has a GPU")


def test_without_ray_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert refused("--workers", "2") == refused("--ray", "127.0.0.1:1") == MISSING


def test_a_split_pair_names_its_places(tiny_pair: tuple[Path, Path]) -> None:
    target, draft = map(str, tiny_pair)
    facts = Local(Ask(target, draft, dtype="float32", device_map=SPLIT)).facts(1)
    assert facts.about.startswith(f"{Path(target).name} on cpu and disk, float32")
    assert "device" not in facts.pair and facts.pair["device_map"] == SPLIT
    assert Local(Ask(target, draft, device="cpu")).facts(1).pair["device"] == "cpu"


def test_a_visitors_pair_is_spread_as_well(tiny_pair: tuple[Path, Path]) -> None:
    target, draft = map(str, tiny_pair)
    local = Local(Ask(target, draft, dtype="float32", any_model=True, device_map=SPLIT))
    assert local.models.get(target).places == ("cpu", "disk")
    with pytest.raises(RequestError):
        Local(Ask(target, device="cpu", device_map="auto"))


@pytest.mark.parametrize("text", ["", "CPU", "CPU=0", "GPU=1.5", "CPU=0.00001", "CPU=1,=2", "CPU=1;GPU=1"])
def test_resources_that_ray_would_refuse_are_one_sentence(text: str) -> None:
    with pytest.raises(RequestError, match=r"^--worker-resources must be names with amounts above 0"):
        actor_options(text)


def test_resources_are_an_actors_options() -> None:
    assert actor_options("GPU=0.5, CPU=4") == {"num_gpus": 0.5, "num_cpus": 4}
    assert actor_options("fast=2") == {"resources": {"fast": 2}}

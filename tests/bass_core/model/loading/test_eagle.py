"""EAGLE-3 heads load from both formats, and heads that do not fit or are of other kinds are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bass_core import ModelPair, PairError, generate, load_pair
from bass_core.errors import WeightsError
from bass_core.model.draft_head import DraftHead, load_draft_head
from bass_core.model.eagle import EagleHead
from bass_core.model.loading.eagle import load_eagle
from bass_core.model.loading.sources import locate
from tests.support.models import eagle_parts, prompts, texts_of, tiny, tiny_head

READS = (1, 3, 5)
LAYER = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 1, "vocab_size": 96, "max_position_embeddings": 32, "model_type": "llama",
}  # fmt: skip
SPECULATOR = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3"},
    "transformer_layer_config": LAYER,
    "draft_vocab_size": 40,
    "eagle_aux_hidden_state_layer_ids": list(READS),
}
# The default layers of this format are 2, half of the target's and the third last: (2, 3) in a target of 6.
ORIGINAL = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40}
INDICES = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny("llama", layers=6)


def save(
    folder: Path, target: Any, config: dict[str, Any], reads: tuple[int, ...] = READS, **options: Any
) -> Path:
    """Save a head in the format of its config."""
    _, vocabulary, weights = eagle_parts(target, reads, **options)
    t2d = torch.zeros(96, dtype=torch.bool)
    t2d[vocabulary] = True
    weights |= {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": t2d}
    if "transformer_layer_config" not in config:
        weights = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("config", [SPECULATOR, ORIGINAL | INDICES], ids=["speculators", "original"])
@pytest.mark.parametrize("own_table", [False, True])
def test_both_formats_draft_as_the_head_that_was_saved(
    tmp_path: Path, target: Any, config: dict[str, Any], own_table: bool
) -> None:
    saved = save(tmp_path / "head", target, config, own_table=own_table)
    target.save_pretrained(tmp_path / "target")
    pair = load_pair(tmp_path / "target", draft=saved, device="cpu", dtype="float32")
    expected = ModelPair(target, EagleHead(target, *eagle_parts(target, READS, own_table=own_table)))
    request: dict[str, Any] = {"max_new_tokens": 16, "draft_length": 3, "eos_token_id": None}
    outputs = [generate(each, prompts(3), **request) for each in (pair, expected)]
    assert outputs[0].metrics.accepted == outputs[1].metrics.accepted
    assert texts_of(outputs[0]) == texts_of(outputs[1])
    head: Any = pair.draft
    assert isinstance(head, EagleHead) and head.shape.reads_layers == READS
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), expected.draft.parameters(), strict=True))
    assert torch.equal(head.vocabulary, expected.draft.vocabulary)
    assert pair.draft_step.context == pair.target_step.context, "the config's context is shorter"


@pytest.mark.parametrize("drafter", ["auto", "adaptive"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_head_drafts_for_a_target_of_few_bits(tmp_path: Path, target: Any, drafter: str, dtype: str) -> None:
    saved = save(tmp_path / "head", target, SPECULATOR)
    target.save_pretrained(tmp_path / "target")
    pair = load_pair(tmp_path / "target", draft=saved, device="cpu", dtype=dtype)
    drafted = generate(
        pair, prompts(3), drafter=drafter, draft_length="bass", max_new_tokens=12, eos_token_id=None
    )
    regular = generate(pair, prompts(3), method="regular", max_new_tokens=12, eos_token_id=None)
    assert texts_of(drafted) == texts_of(regular) and drafted.metrics.drafted > 0


def test_default_layers(tmp_path: Path) -> None:
    target = tiny("llama", layers=8)
    head = load_eagle(locate(str(save(tmp_path, target, ORIGINAL))), target)
    assert head.shape.reads_layers == (2, 4, 5)


def test_flags_may_be_in_eagle_config_and_the_draft_vocabulary_may_be_left_out(
    tmp_path: Path, target: Any
) -> None:
    config = {name: value for name, value in ORIGINAL.items() if name != "draft_vocab_size"}
    flags = {"norm_before_fc": 1, "use_aux_hidden_state": True}
    part = {"eagle_config": INDICES["eagle_config"] | flags, "norm_before_fc": None}
    saved = save(tmp_path / "head", target, config | part, norm_before_fc=True)
    target.save_pretrained(tmp_path / "target")
    head: Any = load_pair(tmp_path / "target", draft=saved, device="cpu", dtype="float32").draft
    expected = EagleHead(target, *eagle_parts(target, READS, norm_before_fc=True))
    streams = torch.randn(2, 3, 3 * 64)
    assert head.shape.norm_before_fc and len(head.vocabulary) == 40
    assert torch.equal(head._read(streams), expected._read(streams))


def without(name: str) -> Callable[[dict[str, Any], dict[str, Tensor]], object]:
    return lambda config, weights: weights.pop(name)


def layer(**fields: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], object]:
    return lambda config, weights: config.update(transformer_layer_config=LAYER | fields)


def top(**fields: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], object]:
    return lambda config, weights: config.update(fields)


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any], dict[str, Tensor]], object]:
    return lambda config, weights: weights.update({name: change(weights[name])})


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        (layer(hidden_size=32), PairError, "is for targets of hidden size 32, and LlamaForCausalLM has 64"),
        (top(target_hidden_size=128), PairError, "is for targets of hidden size 128"),
        (layer(vocab_size=100), PairError, "with a vocabulary of 100 ids, and LlamaForCausalLM has 96"),
        (layer(model_type="gemma3_text"), PairError, "layers of type 'gemma3_text', not of llama or qwen3"),
        (
            layer(model_type="qwen3", layer_types=["sliding_attention"], use_sliding_window=True),
            PairError,
            "layers of type 'sliding_attention'",
        ),
        (layer(hidden_act="gelu"), PairError, "the activation 'gelu'"),
        (layer(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), PairError, "rotary embeddings of a type"),
        (layer(num_attention_heads="four"), PairError, "config of .* can't be used"),
        (layer(rope_parameters="x"), PairError, "can't be .*: correct"),
        (top(eagle_aux_hidden_state_layer_ids="1,3,5"), PairError, "'1,3,5', which is not a list"),
        (top(eagle_aux_hidden_state_layer_ids=3), PairError, "layer_ids to 3, which is not a list"),
        (top(eagle_aux_hidden_state_layer_ids=[None, 3, 5]), PairError, r"an entry of .* to None, which"),
        (top(eagle_aux_hidden_state_layer_ids=[True, 3, 5]), PairError, r"an entry of .* to True, which"),
        (top(eagle_config="x"), PairError, "sets eagle_config to 'x', which is not an object"),
        (top(draft_vocab_size="40"), PairError, "sets draft_vocab_size to '40', which is not a whole number"),
        (top(norm_before_fc="no"), PairError, "sets norm_before_fc to 'no', which is not true or false"),
        (top(norm_before_fc=2), PairError, "sets norm_before_fc to 2, which is not true or false"),
        (top(eagle_config={"use_aux_hidden_state": False}), PairError, "reads only the target's last state"),
        (top(use_aux_hidden_state=0), PairError, "reads only the target's last state"),
        (top(eagle_aux_hidden_state_layer_ids=[1, 3, 6]), PairError, r"after layers \[1, 3, 6\], .* less than 6"),
        (top(eagle_aux_hidden_state_layer_ids=[3, 1, 5]), PairError, r"after layers \[3, 1, 5\]"),
        (top(eagle_aux_hidden_state_layer_ids=[1, 5]), WeightsError, r"fc.weight .* \[64, 192\].* \[64, 128\]"),
        (top(eagle_aux_hidden_state_layer_ids=None), PairError, r"after layers \[2, 3, 3\]"),
        (top(draft_vocab_size=41), WeightsError, "maps d2t and t2d .* do not match 41"),
        (without("d2t"), WeightsError, "lacks d2t, which maps its 40 outputs to the target's 96 ids"),
        (tensor("d2t", lambda d2t: d2t + 90), WeightsError, "maps d2t and t2d"),
        (tensor("t2d", lambda t2d: ~t2d), WeightsError, "maps d2t and t2d"),
        (without("lm_head.weight"), WeightsError, "lacks lm_head.weight"),
        (without("layers.0.hidden_norm.weight"), WeightsError, "lacks layers.0.hidden_norm.weight"),
        (tensor("embed_tokens.weight", lambda table: table[:50].clone()), WeightsError, r"table of \[50, 64\]"),
        (
            lambda config, weights: weights.update({"layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
            PairError,
            r"weights that we don't know \(layers.0.self_attn.q_proj.bias\)",
        ),
        (top(speculators_model_type="eagle"), PairError, "is a head of EAGLE-1 or EAGLE-2"),
        (top(speculators_model_type="dflash"), PairError, "is a speculator of type 'dflash'"),
        (
            top(speculators_model_type=None, architectures=["DFlashDraftModel"], model_type="qwen3"),
            PairError,
            "is a head of DFlash, not of EAGLE-3",
        ),
    ],
)  # fmt: skip
def test_heads_that_do_not_fit_are_refused(
    tmp_path: Path, target: Any, change: Callable[..., object], error: type[Exception], reason: str
) -> None:
    saved = save(tmp_path / "head", target, SPECULATOR, own_table=True)
    target.save_pretrained(tmp_path / "target")
    config, weights = dict(SPECULATOR), load_file(saved / "model.safetensors")
    change(config, weights)
    save_file(weights, saved / "model.safetensors")
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=reason) as refusal:
        load_pair(tmp_path / "target", draft=saved, device="cpu", dtype="float32")
    assert str(saved) in str(refusal.value) and str(refusal.value).endswith(".")


def test_a_head_of_eagle_1_is_recognised_by_its_weights(tmp_path: Path, target: Any) -> None:
    """Its config is that of a plain Llama of one layer."""
    target.save_pretrained(tmp_path / "target")
    (tmp_path / "config.json").write_text(json.dumps(LAYER | {"architectures": ["LlamaForCausalLM"]}))
    save_file({"fc.weight": torch.zeros(64, 128)}, tmp_path / "model.safetensors")
    with pytest.raises(PairError, match="is a head of EAGLE-1 or EAGLE-2, not of EAGLE-3"):
        load_pair(tmp_path / "target", draft=tmp_path, device="cpu", dtype="float32")


def test_a_head_for_which_there_is_no_memory_is_named(
    tmp_path: Path, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    saved, head = save(tmp_path / "eagle", target, SPECULATOR), tiny_head(target)
    head.save(tmp_path / "ours")
    monkeypatch.setattr(EagleHead, "__init__", fail)
    monkeypatch.setattr(DraftHead, "__init__", fail)
    for load in (
        lambda: load_eagle(locate(str(saved)), target),
        lambda: load_draft_head(tmp_path / "ours", target),
    ):
        with pytest.raises(PairError, match="does not fit into the device's memory: choose a smaller draft"):
            load()


def test_a_damaged_file_is_refused(tmp_path: Path, target: Any) -> None:
    saved = save(tmp_path / "head", target, SPECULATOR)
    (saved / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(WeightsError, match="fetch or save it again"):
        load_eagle(locate(str(saved)), target)

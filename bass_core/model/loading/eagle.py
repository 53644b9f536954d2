"""Load an EAGLE-3 head from its files: `is_eagle`, then `load_eagle`.

Two formats are read: that of the speculators library, and that of the EAGLE authors, which SpecForge also writes.
A setting may be in the config or in its part `eagle_config`. All other heads are refused by name.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, PreTrainedModel

from ...errors import BassError, PairError, WeightsError
from ..eagle import EagleConfig, EagleHead
from ..weights.quantized import outputs_of
from ..weights.shape import config_value, context_of, rope_depends_on_length
from .sources import Source, fetch, in_one_line

# Decoder layers that EagleStep can run.
_LAYERS = ("llama", "qwen3")
# Tensors that training code stores and drafting doesn't need.
_UNUSED = ("verifier_", "rotary_emb.", "layers.0.self_attn.rotary_emb.")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_aux_hidden_state")
_OTHERS = "give an EAGLE-3 head, a draft model, or no draft"
# Other kinds of heads, by a word in the names of their class or of their config's parts.
_OTHER_HEADS = {"dflash": "DFlash", "medusa": "Medusa", "mlp_speculator": "MLP speculators"}


def is_eagle(source: Source) -> bool:
    """Return whether the source is an EAGLE-3 head; raises PairError if it is a head of another kind."""
    config = _read_config(source)
    kind = config.get("speculators_model_type")
    names = f"{config.get('architectures')} {config.get('model_type')}".lower()
    for word, head in _OTHER_HEADS.items():
        if kind is None and (word in names or f"{word}_config" in config):
            raise PairError(f"{source.where} is a head of {head}, not of EAGLE-3: {_OTHERS}.")
    if kind == "eagle3" or (kind is None and ("eagle3" in names or "draft_vocab_size" in config)):
        return True
    if kind not in (None, "eagle"):
        raise PairError(f"{source.where} is a speculator of type {kind!r}, not of type 'eagle3': {_OTHERS}.")
    if kind == "eagle" or "eagle" in names or _fuses(source, config):
        raise PairError(f"{source.where} is a head of EAGLE-1 or EAGLE-2, not of EAGLE-3: {_OTHERS}.")
    return False


def _read_config(source: Source) -> dict[str, Any]:
    """Return the source's config, or {} if it can't be read, which loading it as a model then explains."""
    try:
        config = json.loads(fetch(source, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, BassError):
        return {}
    return config if isinstance(config, dict) else {}


def _fuses(source: Source, config: dict[str, Any]) -> bool:
    """Return whether a model of one layer has a top-level `fc`, as heads of EAGLE-1 and EAGLE-2 have."""
    if config.get("num_hidden_layers") != 1 or "model.safetensors" not in source.files:
        return False
    with safe_open(fetch(source, "model.safetensors"), framework="pt") as file:
        return "fc.weight" in file.keys()  # noqa: SIM118 (not a dict)


def load_eagle(source: Source, target: PreTrainedModel) -> EagleHead:
    """Load an EAGLE-3 head on the target's device and in its dtype.

    Raises:
        PairError: if the head does not fit the target, or we can't run its layers.
        WeightsError: if its files are incomplete or can't be read.
    """
    try:
        return _load(source, target)
    except BassError:
        raise
    except torch.OutOfMemoryError as error:
        raise PairError(
            f"{source.where} does not fit into the device's memory: choose a smaller draft."
        ) from error
    except Exception as error:  # the config's values may be of any type
        raise PairError(
            f"The head in {source.where} can't be loaded ({in_one_line(error)}): correct its config or choose "
            "another draft."
        ) from error


def _load(source: Source, target: PreTrainedModel) -> EagleHead:
    where, fields = source.where, _settings(source.where, _read_config(source))
    weights = _read_weights(source)
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    if fields.get("draft_vocab_size") is None and d2t is not None:
        fields["draft_vocab_size"] = len(d2t)
    _check_layers(where, fields, weights, target)
    config = _config(where, fields, target, "layers.0.self_attn.q_norm.weight" in weights)
    size = outputs_of(target)
    vocabulary = _vocabulary(where, config.layers.vocab_size, size, d2t, t2d)
    _check_embedding(where, config, weights, size)
    if config.norm_before_fc:
        weights.setdefault("input_norm.weight", torch.ones(len(config.reads_layers) * config.target_hidden))
    return EagleHead(target, config, vocabulary, weights)


def _settings(where: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the config, with the flags of its part `eagle_config`; refuse values of other types."""
    _check_type(where, "eagle_config", fields.get("eagle_config"), dict, "an object")
    part = fields.get("eagle_config") or {}
    flags = {name: part.get(name) if (value := fields.get(name)) is None else value for name in _FLAGS}
    for name in ("draft_vocab_size", "target_hidden_size"):
        _check_type(where, name, fields.get(name), int, "a whole number")
    for name, value in flags.items():
        _check_type(where, name, bool(value) if value in (0, 1) else value, bool, "true or false")
    for ids in (fields.get(_LAYER_IDS), part.get(_LAYER_IDS)):
        _check_type(where, _LAYER_IDS, ids, list, "a list of whole numbers")
        for layer in ids or ():
            _check_type(where, f"an entry of {_LAYER_IDS}", layer, int, "a whole number", optional=False)
    if flags["use_aux_hidden_state"] not in (None, True):
        raise PairError(
            f"{where} reads only the target's last state (use_aux_hidden_state is false), as EAGLE-1 and EAGLE-2 "
            f"do: {_OTHERS}."
        )
    return fields | flags


def _check_type(where: str, name: str, value: object, kind: type, words: str, optional: bool = True) -> None:
    if type(value) is not kind and not (value is None and optional):
        raise PairError(
            f"The config of {where} sets {name} to {value!r:.80}, which is not {words}: correct it or choose "
            "another draft."
        )


def _layer_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the decoder layers: a part of a speculator's config, else the whole config."""
    layers = fields.get("transformer_layer_config", fields)
    return layers if isinstance(layers, dict) else {}


def _read_weights(source: Source) -> dict[str, Tensor]:
    """Return all weights on the CPU, with the names that speculators uses."""
    weights: dict[str, Tensor] = {}
    for name in sorted(source.files):
        if name.endswith(".safetensors"):
            path = fetch(source, name)
            try:
                weights |= load_file(path)
            except Exception as error:
                raise WeightsError(
                    f"The head in {source.where} can't be read ({error}): fetch or save it again."
                ) from error
    plain = {name.removeprefix("model."): weight for name, weight in weights.items()}
    named = {
        f"layers.0.{name[len('midlayer.') :]}" if name.startswith("midlayer.") else name: weight
        for name, weight in plain.items()
    }
    return {name: weight for name, weight in named.items() if not name.startswith(_UNUSED)}


def _config(where: str, fields: dict[str, Any], target: Any, head_norms: bool) -> EagleConfig:
    layer_fields = _layer_fields(fields)
    kind = layer_fields.get("model_type", "qwen3" if layer_fields is not fields else "llama")
    if kind not in _LAYERS:
        raise PairError(f"{where} has layers of type {kind!r}, not of {' or '.join(_LAYERS)}: {_OTHERS}.")
    try:
        layers: Any = AutoConfig.for_model(kind, **{k: v for k, v in layer_fields.items() if k != "model_type"})
    except Exception as error:  # a strict config may raise anything
        raise PairError(
            f"The config of {where} can't be used ({in_one_line(error)}): correct it or choose another draft."
        ) from error
    unknown = set(config_value(layers, "layer_types") or ()) - {"full_attention"}
    if unknown:
        raise PairError(f"{where} has layers of type {sorted(unknown)[0]!r}, which can't be run: {_OTHERS}.")
    rotary = config_value(layers, "rope_parameters") or {}
    if rope_depends_on_length(layers) or rotary.get("partial_rotary_factor", 1.0) != 1.0:
        raise PairError(f"{where} has rotary embeddings of a type that can't be run: {_OTHERS}.")
    if layers.hidden_act != "silu":
        raise PairError(f"{where} has layers with the activation {layers.hidden_act!r}, not 'silu': {_OTHERS}.")
    model = target.config.get_text_config()
    hidden = fields.get("target_hidden_size") or layers.hidden_size
    if hidden != model.hidden_size:
        raise PairError(
            f"{where} is for targets of hidden size {hidden}, and {type(target).__name__} has "
            f"{model.hidden_size}: choose a head for this target."
        )
    if layers.vocab_size != outputs_of(target):
        raise PairError(
            f"{where} is for targets with a vocabulary of {layers.vocab_size} ids, and {type(target).__name__} "
            f"has {outputs_of(target)}: choose a head for this target."
        )
    return EagleConfig(
        where,
        _plain_layers(layers, context_of(model), fields.get("draft_vocab_size") or layers.vocab_size),
        _reads_layers(where, fields, type(target).__name__, model.num_hidden_layers),
        hidden,
        head_norms,
        **{name: bool(fields.get(name)) for name in _FLAGS[:-1]},
    )


def _check_layers(where: str, fields: dict[str, Any], weights: dict[str, Tensor], target: PreTrainedModel) -> None:
    """Raise PairError if the config states another number of decoder layers than the weights have."""
    stated = _layer_fields(fields).get("num_hidden_layers")
    count = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
    if stated is None or not count or stated == count:
        return
    its = " its target's" if stated == target.config.get_text_config().num_hidden_layers else ""
    raise PairError(
        f"The config of {where} sets num_hidden_layers to{its} {stated!r:.80}, but the weights have {count} "
        f"layer{'s' * (count > 1)}: correct it or choose another draft."
    )


def _plain_layers(layers: Any, context: int, outputs: int) -> LlamaConfig:
    """Return the layers' shape as a LlamaConfig. EAGLE's configs often have a shorter context than the target."""
    left_out = (
        "model_type", "architectures", "layer_types", "quantization_config", "dtype", "torch_dtype", "auto_map",
    )  # fmt: skip
    fields = {name: value for name, value in layers.to_dict().items() if name not in left_out}
    fields |= {"max_position_embeddings": max(layers.max_position_embeddings, context)}
    fields |= {"vocab_size": outputs, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}
    return LlamaConfig(**fields | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")))


def _reads_layers(where: str, fields: dict[str, Any], target: str, count: int) -> tuple[int, ...]:
    """Return after how many layers the head reads the stream; `eagle_config` has the layers' own indices."""
    ids = fields.get(_LAYER_IDS)
    if not ids:
        indices = (fields.get("eagle_config") or {}).get(_LAYER_IDS) or ()
        ids = [index + 1 for index in indices] or [2, count // 2, count - 3]
    if list(ids) != sorted({int(layer) for layer in ids}) or ids[0] < 0 or ids[-1] >= count:
        raise PairError(
            f"{where} reads its target after layers {list(ids)}, which must be ascending and less than "
            f"{count} for {target}: choose a head for this target."
        )
    return tuple(ids)


def _vocabulary(where: str, count: int, size: int, d2t: Tensor | None, t2d: Tensor | None) -> Tensor:
    """Return the target's id of each output, int64 [V']: output i stands for id i + d2t[i]."""
    if d2t is None:
        if count != size:
            raise WeightsError(
                f"The head in {where} lacks d2t, which maps its {count} outputs to the target's {size} ids: fetch "
                "it again."
            )
        return torch.arange(size)
    vocabulary = torch.arange(len(d2t)) + d2t.long()
    known = torch.zeros(size, dtype=torch.bool)
    if len(d2t) == count and int(vocabulary.min()) >= 0 and int(vocabulary.max()) < size:
        known[vocabulary] = True
    if int(known.sum()) != count or (t2d is not None and not torch.equal(t2d.bool(), known)):
        raise WeightsError(
            f"The maps d2t and t2d of {where} do not match {count} of the target's {size} ids: fetch it again."
        )
    return vocabulary


def _check_embedding(where: str, config: EagleConfig, weights: dict[str, Tensor], size: int) -> None:
    """Raise WeightsError if the head has no embedding table of the right size, nor can read the target's."""
    table, hidden = weights.get("embed_tokens.weight"), config.layers.hidden_size
    if table is None and hidden == config.target_hidden:
        return
    if table is None or tuple(table.shape) != (size, hidden):
        found = "no embedding table" if table is None else f"an embedding table of {list(table.shape)}"
        raise WeightsError(f"The head in {where} has {found} instead of one of {[size, hidden]}: fetch it again.")

"""Find out where a model's weights are: on one device, or spread over several by accelerate.

A model is split if its `hf_device_map` names more than one place. accelerate's hooks then move each layer's input
to the layer's device, and fetch weights that are offloaded to the host or to disk when they are needed. The cache,
attention and sampling are on `home_device`, which is where the model's inputs and outputs are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

# Places in a device map where weights are only stored.
_STORAGE = ("cpu", "disk")


def places(model: PreTrainedModel) -> list[str]:
    """Return the places in the model's device map, without duplicates and in layer order; [] without a map."""
    named = (getattr(model, "hf_device_map", None) or {}).values()
    return list(dict.fromkeys(f"cuda:{place}" if isinstance(place, int) else str(place) for place in named))


def device_map(model: PreTrainedModel) -> list[tuple[str, str]]:
    """Return a split model's (module, place) pairs, sorted; [] for any other model."""
    mapping = getattr(model, "hf_device_map", None) or {}
    return sorted((name, str(place)) for name, place in mapping.items()) if is_split(model) else []


def is_split(model: PreTrainedModel) -> bool:
    """Return whether the weights are in more than one place, or on disk and fetched from there."""
    if not getattr(model, "hf_device_map", None):
        return False
    return len(places(model)) > 1 or "disk" in places(model)


def has_offloaded(model: PreTrainedModel) -> bool:
    """Return whether some of the weights are fetched for each forward."""
    return is_split(model) and not set(_STORAGE).isdisjoint(places(model))


def home_device(model: PreTrainedModel) -> torch.device:
    """Return the model's device, or the first device of a split model that computes."""
    if not is_split(model):
        return model.device
    return torch.device(next((place for place in places(model) if place not in _STORAGE), "cpu"))


def offloaded_weights(model: PreTrainedModel) -> Iterator[Any]:
    """Yield the maps in which accelerate's hooks keep offloaded weights; copies of a model must share them."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):
            for name in ("weights_map", "tied_params_map"):
                if (weights := getattr(part, name, None)) is not None:
                    yield weights

"""Where a model's weights are: on one device, or spread over several by accelerate.

Contract: a split model's `hf_device_map` names more than one place. accelerate's hooks bring each layer's input to
the layer's device, and weights that wait on the host or on disk to where they are used. `home_device` is where the
model's inputs come from and its outputs go to: there the cache, the attention and the sampling are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

# Places of a device map where weights only wait.
_WAITING = ("cpu", "disk")


def places(model: PreTrainedModel) -> list[str]:
    """The places of the model's device map, each once, in the layers' order; [] for a model without a map."""
    found = (getattr(model, "hf_device_map", None) or {}).values()
    return list(dict.fromkeys(f"cuda:{place}" if isinstance(place, int) else str(place) for place in found))


def device_map(model: PreTrainedModel) -> list[tuple[str, str]]:
    """(module, place) of a split model, in order; [] for another one."""
    found = getattr(model, "hf_device_map", None) or {}
    return sorted((name, str(place)) for name, place in found.items()) if is_split(model) else []


def is_split(model: PreTrainedModel) -> bool:
    """Whether the weights are in more than one place, or on disk, from where they are brought to another."""
    return len(places(model)) > 1 or "disk" in places(model)


def has_waiting(model: PreTrainedModel) -> bool:
    """Whether some of the weights are fetched for each forward."""
    return is_split(model) and not set(_WAITING).isdisjoint(places(model))


def home_device(model: PreTrainedModel) -> torch.device:
    """The model's device; of a split one, the first that computes."""
    if not is_split(model):
        return model.device
    return torch.device(next((place for place in places(model) if place not in _WAITING), "cpu"))


def waiting_weights(model: PreTrainedModel) -> Iterator[Any]:
    """What accelerate's hooks hold of weights that wait: maps that a copy of the model must share."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            for name in ("weights_map", "tied_params_map"):
                if (held := getattr(one, name, None)) is not None:
                    yield held

"""Contract: `load_pair` makes a ModelPair from a catalogue name, a local folder or a Hub id.

`CATALOGUE` is the table of the names. Both models are put on the same device in the same dtype, in eval mode,
without gradients; a draft whose tokenizer differs from the target's is refused. On ZeroGPU both are prepared on
the host and then moved, because the GPU is not attached yet and spaces would compute on the host's copies instead
(according to the source of spaces 0.51.3; not run on a Space).
Non-goals: fetching and reading files (model/loading/weights.py, model/loading/sources.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.support import on_zero_gpu

from ...errors import PairError, RequestError, WeightsError
from ...machine import cpu_kernels
from ...machine.cpu import native_bfloat16
from ...machine.torch_state import ours
from ..draft_head import DraftHead, is_draft_head, load_draft_head
from ..pair import HEAD_ON_SPLIT, ModelPair, check_same_tokens
from ..weights.placement import home_device, is_split
from .quantized import QUANTISED, check_quantised, quantise
from .sources import Source, load_model, load_tokenizer, local_folder, locate
from .weights import ensure_smollm2, smollm2_gguf
from .wheel import WHEEL

_log = logging.getLogger(__name__)
# What drafts/ lies in: an installed bass_core has it inside (setup.py), a tree of the sources beside it.
_ROOMS, _TREE = Path(__file__).resolve().parents[2:4]
REPOSITORY = _ROOMS if (_ROOMS / "drafts").is_dir() else _TREE
# The maps that accelerate works out itself.
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class CatalogueEntry:
    """A pair that can be loaded by name.

    `target`, `draft`: Hub ids or folders; `drafts/NAME` is a folder in this repository. `prepare`: returns the
    target's folder, and makes it first if needed; only for a target that we convert ourselves. `gguf`: returns the
    GGUF file that it was converted from, whose blocks int4 keeps. `tested`: whether the pair has been run by this
    project.
    """

    name: str
    target: str
    draft: str | None = None
    drafter: str = "auto"
    dtype: str = "auto"
    note: str = ""
    tested: bool = False
    prepare: Callable[[], Path] | None = None
    gguf: Callable[[], Path] | None = None


_ENTRIES = (
    CatalogueEntry(
        "smollm2",
        target=WHEEL,
        draft="drafts/smollm2",
        drafter="adaptive",
        note="SmolLM2-135M-Instruct, Q4_1 weights from PyPI; needs no Hub; drafts with a head trained for it",
        tested=True,
        prepare=ensure_smollm2,
        gguf=smollm2_gguf,
    ),
    CatalogueEntry(
        "smollm2-hub",
        target="HuggingFaceTB/SmolLM2-135M-Instruct",
        drafter="prompt_lookup",
        note="the original of smollm2 on the Hub; not run here",
    ),
    CatalogueEntry(
        "smollm2-1.7b",
        target="HuggingFaceTB/SmolLM2-1.7B-Instruct",
        draft="HuggingFaceTB/SmolLM2-135M-Instruct",
        note="for a GPU with 8 GB; not run here",
    ),
    CatalogueEntry(
        "qwen3-8b", target="Qwen/Qwen3-8B", draft="Qwen/Qwen3-0.6B", note="for a GPU with 24 GB; not run here"
    ),
    CatalogueEntry(
        "opt-13b",
        target="facebook/opt-13b",
        draft="facebook/opt-125m",
        note="the paper's pair, for a GPU with 40 GB; loads only if the Hub has safetensors; not run here",
    ),
)
CATALOGUE = {entry.name: entry for entry in _ENTRIES}


@ours()
def load_pair(
    name_or_path: str | os.PathLike[str],
    *,
    draft: str | os.PathLike[str] | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    device_map: str | dict[str, Any] | None = None,
) -> ModelPair:
    """Load target and draft, each given as a catalogue name (meaning its target), a folder or a Hub id.

    draft: replaces the entry's own draft. device: "auto" (CUDA if available), "cpu", "cuda" or "cuda:N". dtype:
    "auto", "float32", "bfloat16", "float16" or a torch dtype; or on a CPU quantised weights, "int8" or "int4"
    (model/weights/quantized.py): a draft head stays in 16 bits, a draft model is quantised alike. device_map:
    for a target larger than one GPU, how accelerate spreads its layers: "auto", "balanced", "balanced_low_0",
    "sequential", or {module: device}; the draft goes where the target begins. A target in several places runs by
    transformers' own code, without graphs, own kernels, quantised weights, draft heads, AMUSD or the outside lane.
    Raises RequestError for a bad device, dtype or map, PairError for models that can't be used, WeightsError for
    weights that can't be reached or read. If the entry's own draft can't be loaded, prompt lookup replaces it,
    with a warning.
    """
    name_or_path, draft = _as_text(name_or_path, "pair"), None if draft is None else _as_text(draft, "draft")
    entry = CATALOGUE.get(name_or_path) or CatalogueEntry(name_or_path, target=name_or_path)
    where = pick_device(device)
    check_quantised(dtype, where)
    if device_map is not None:
        _check_map(device_map, device, dtype)
    number = pick_dtype(entry.dtype if dtype in ("auto", *QUANTISED) else dtype, where)
    # A draft that isn't there is refused before the target is fetched.
    found = None if draft is None else _draft_source(draft)
    target = _source(name_or_path)
    draft_name = entry.draft if draft is None else draft
    tokenizer = load_tokenizer(target)
    home = torch.device("cpu") if on_zero_gpu() else where
    model = load_model(target, home, number, device_map)
    if device_map is not None:
        home = where = home_device(model)
    default_drafter = entry.drafter if draft is None else "auto"
    try:
        if found is None and draft_name is not None:
            found = _draft_source(draft_name)
        made = None if found is None else _load_draft(found, model, tokenizer, home, number)
    except (PairError, WeightsError) as error:
        if draft is not None:
            raise
        # The entry's own draft failed: the user did not ask for it by name, and the target works without it.
        _log.warning("The draft of %s can't be used, so drafts are copied from the text: %s", name_or_path, error)
        made, default_drafter = None, "prompt_lookup"
    if isinstance(dtype, str) and dtype in QUANTISED:
        # Only after loading the draft: a draft head copies rows of the target's unquantised output layer.
        quantise(model, dtype, entry.gguf)
        _quantise_draft(made, draft_name or "", model, dtype)
    if home != where:
        _move(model, made, where)
    return ModelPair(model, made, tokenizer, name=entry.name, default_drafter=default_drafter)


def _as_text(name: object, what: str) -> str:
    """A name, or a path as text. Raises RequestError for anything else."""
    path = os.fspath(name) if isinstance(name, os.PathLike) else name
    if not isinstance(path, str):
        raise RequestError(f"The {what} must be a name, a Hub id or a folder, as text or a Path; got {name!r}.")
    return path


def _check_map(device_map: object, device: object, dtype: object) -> None:
    """Raises RequestError for a device map that is unknown, or beside what can't follow it."""
    if not isinstance(device_map, dict) and device_map not in MAPS:
        raise RequestError(
            f"The device map {device_map!r} is not known: choose {', '.join(MAPS)}, or give {{module: device}}."
        )
    if device != "auto":
        raise RequestError("A device_map says where the target goes: leave the device out.")
    if dtype in QUANTISED:
        raise RequestError(
            f'{dtype} weights can\'t be spread over devices: load them without a device_map, or choose "bfloat16".'
        )
    if on_zero_gpu():
        raise RequestError("ZeroGPU lends one device at a time: leave the device_map out.")


def _quantise_draft(draft: Any, name: str, target: Any, dtype: str) -> None:
    """A draft head only reads the target's new embedding; a draft model is quantised too."""
    if isinstance(draft, DraftHead):
        draft.share_embedding(target)
    elif draft is not None:
        entry = CATALOGUE.get(name)
        quantise(draft, dtype, None if entry is None else entry.gguf)


def _move(target: Any, draft: Any, device: torch.device) -> None:
    target.to(device)
    if draft is not None:
        draft.to(device)
    if isinstance(draft, DraftHead):
        draft.share_embedding(target)


def _draft_source(name: str) -> Path | Source:
    """The folder of a draft head if it holds one, else where a draft model is."""
    folder = REPOSITORY / name if name.startswith("drafts/") else local_folder(name)
    return folder if folder is not None and is_draft_head(folder) else _source(name)


def _load_draft(
    source: Path | Source, target: Any, tokenizer: Any, device: torch.device, dtype: torch.dtype
) -> Any:
    """Load a draft head, or a causal LM, whose tokenizer must be the target's."""
    if isinstance(source, Path):
        if is_split(target):
            raise PairError(HEAD_ON_SPLIT)
        return load_draft_head(source, target)
    other = load_tokenizer(source)
    if tokenizer is not None and other is not None:
        check_same_tokens(tokenizer, other)
    return load_model(source, device, dtype)


def pick_device(device: str | torch.device) -> torch.device:
    """The requested device; RequestError if this machine lacks it or this project does not support it."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise RequestError(f"There is no device {device!r}: choose auto, cpu, cuda or cuda:N.") from error
    if chosen.type not in ("cpu", "cuda"):
        raise RequestError(f"The device {device!r} is not supported: choose auto, cpu, cuda or cuda:N.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise RequestError(f"PyTorch sees no device {str(device)!r} on this machine: choose auto or cpu.")
    return chosen


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The requested dtype; "auto" stands for `default_dtype`. RequestError for a dtype not in DTYPES."""
    if dtype == "auto":
        return default_dtype(device)
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        names = ", ".join((*DTYPES, *QUANTISED[:-1]))
        raise RequestError(f"The dtype {dtype!r} is not supported: choose auto, {names} or {QUANTISED[-1]}.")
    return chosen


def default_dtype(device: torch.device) -> torch.dtype:
    """What "auto" means on a device: bfloat16, or float16 on a CUDA device whose tensor cores lack bfloat16.

    These are devices below compute capability 8.0, such as a T4. A model whose activations exceed float16's
    maximum of 65504 needs float32 there. On a CPU it is float32 where neither our kernels nor the CPU itself
    multiply bfloat16: emulated, it is much slower.
    """
    if device.type == "cpu" and not cpu_kernels.available() and not native_bfloat16():
        return torch.float32
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if old else torch.bfloat16


def _source(name: str) -> Source:
    entry = CATALOGUE.get(name)
    if entry is not None and entry.prepare is not None:
        return locate(str(entry.prepare()))
    name = entry.target if entry is not None else name
    if name.startswith("drafts/"):  # never looked up on the Hub, where anybody could own that name
        name = str(REPOSITORY / name)
    return locate(name, known=tuple(CATALOGUE))

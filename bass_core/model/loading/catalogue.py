"""Load a ModelPair from a catalogue name, a local folder or a Hub id: `load_pair`.

`CATALOGUE` lists the names. Both models end up on one device and in one dtype, in eval mode and without gradients;
a draft with another tokenizer than the target's is refused. sources.py and weights.py fetch and read the files.

On ZeroGPU both models are prepared on the host and then moved: the GPU is not attached yet, and spaces would
compute on the host's copies (according to the source of spaces 0.51.3; not run on a Space).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.support import on_zero_gpu

from ...errors import BassError, PairError, RequestError, WeightsError
from ...machine import cpu_kernels
from ...machine.cpu import native_bfloat16
from ...machine.cuda import gpu_expected, why_unusable
from ...machine.torch_state import torch_defaults
from ..draft_head import DraftHead, is_draft_head, load_draft_head
from ..pair import HEAD_ON_SPLIT, ModelPair, check_same_tokens
from ..weights.placement import home_device, is_split
from ..weights.shape import SIXTEEN_BIT
from .choose import AUTO, DEFAULT, Choice, choose
from .eagle import is_eagle, load_eagle
from .entry import CatalogueEntry
from .quantized import QUANTISED, check_quantised, quantise
from .sources import Source, cached, load_model, load_tokenizer, local_folder, locate
from .weights import ensure_smollm2, smollm2_gguf
from .wheel import WHEEL

_log = logging.getLogger(__name__)
# The parent of drafts/: bass_core itself if installed (setup.py), else the source tree.
_PACKAGE, _TREE = Path(__file__).resolve().parents[2:4]
REPOSITORY = _PACKAGE if (_PACKAGE / "drafts").is_dir() else _TREE
# Device maps that accelerate computes itself.
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    # EAGLE-3 heads. What was read about them is in docs/usage.md; no weights were fetched.
    CatalogueEntry(
        "qwen3-8b-eagle3",
        target="Qwen/Qwen3-8B",
        draft="RedHatAI/Qwen3-8B-speculator.eagle3",
        note="for a GPU with 24 GB; not run here",
        gigabytes=18.4,
    ),
    CatalogueEntry(
        "qwen3-4b-eagle3",
        target="Qwen/Qwen3-4B",
        draft="AngelSlim/Qwen3-4B_eagle3",
        note="for a GPU with 16 GB; not run here",
        gigabytes=8.5,
    ),
    CatalogueEntry(
        "llama-3.1-8b-eagle3",
        target="meta-llama/Llama-3.1-8B-Instruct",
        draft="RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
        note="for a GPU with 24 GB; the Hub asks you to accept Meta's licence first; not run here",
        gigabytes=18.0,
    ),
    CatalogueEntry(
        "qwen3-14b-eagle3",
        target="Qwen/Qwen3-14B",
        draft="RedHatAI/Qwen3-14B-speculator.eagle3",
        note="for a GPU with 48 GB; not run here",
        gigabytes=32.3,
    ),
    CatalogueEntry(
        "qwen3-32b-eagle3",
        target="Qwen/Qwen3-32B",
        draft="RedHatAI/Qwen3-32B-speculator.eagle3",
        note="for a GPU with 80 GB; not run here",
        gigabytes=68.6,
    ),
    CatalogueEntry(
        "opt-13b",
        target="facebook/opt-13b",
        draft="facebook/opt-125m",
        note="the paper's pair, for a GPU with 40 GB; loads only if the Hub has safetensors; not run here",
    ),
)
CATALOGUE = {entry.name: entry for entry in _ENTRIES}


@torch_defaults()
def load_pair(
    name_or_path: str | os.PathLike[str],
    *,
    draft: str | os.PathLike[str] | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    device_map: str | dict[str, Any] | None = None,
) -> ModelPair:
    """Load target and draft, each a catalogue name (which means its target), a folder or a Hub id.

    If a catalogue entry's own draft can't be loaded, prompt lookup replaces it, with a warning.

    Args:
        name_or_path: the target, or "auto": on a GPU the largest pair of the catalogue that is downloaded and fits
            (choose.py), else smollm2.
        draft: replaces the catalogue entry's own draft.
        device: "auto" (CUDA if it works), "cpu", "cuda" or "cuda:N".
        dtype: "auto", "float32", "bfloat16", "float16" or a torch dtype. On a CPU also "int8" or "int4" for
            quantised weights (model/weights/quantized.py): a draft model is quantised in the same way, and a draft
            head stays in 16 bits.
        device_map: for a target that is larger than one GPU, how accelerate spreads its layers: "auto",
            "balanced", "balanced_low_0", "sequential" or {module: device}. The draft goes to the target's first
            device. A target in several places runs transformers' own code, without graphs, own kernels, quantised
            weights, draft heads, AMUSD or the outside lane.

    Returns:
        The pair.

    Raises:
        RequestError: for an unusable device, dtype or map.
        PairError: for models that can't be used.
        WeightsError: for weights that can't be reached or read.
    """
    name_or_path, draft = _as_text(name_or_path, "pair"), None if draft is None else _as_text(draft, "draft")
    if name_or_path != AUTO:
        return _load(name_or_path, draft, device, dtype, device_map)
    choice = Choice(DEFAULT)
    if draft is None and device_map is None:
        device = pick_device(device)
        choice = choose(_ENTRIES, device, pick_dtype("auto" if dtype in QUANTISED else dtype, device))
    if choice.advice is not None:
        _log.warning("%s", choice.advice)
    pair = None if choice.name == DEFAULT else _load_cached(choice.name, device, dtype)
    if pair is None:
        pair = _load(DEFAULT, draft, device, dtype, device_map)
    pair.advice = choice.advice
    return pair


def _load_cached(name: str, device: str | torch.device, dtype: str | torch.dtype) -> ModelPair | None:
    """Load a pair from the Hub's cache, even if the Hub has newer files; return None if it can't be loaded."""
    try:
        return _load(name, None, device, dtype, None, _cached_source)
    except BassError as error:
        _log.warning("%s can't be used, so %s is loaded instead: %s", name, DEFAULT, error)
        return None


def _load(
    name_or_path: str,
    draft: str | None,
    device: str | torch.device,
    dtype: str | torch.dtype,
    device_map: str | dict[str, Any] | None,
    find: Callable[[str], Source] | None = None,
) -> ModelPair:
    """Load the pair; `find` returns the source of a name, by default `_source`."""
    find = find or _source
    entry = CATALOGUE.get(name_or_path) or CatalogueEntry(name_or_path, target=name_or_path)
    target_device = pick_device(device)
    check_quantised(dtype, target_device)
    if device_map is not None:
        _check_map(device_map, device, dtype)
    weight_dtype = pick_dtype(entry.dtype if dtype in ("auto", *QUANTISED) else dtype, target_device)
    # Find the draft before fetching the target, so that a missing draft is refused at once.
    draft_source = None if draft is None else _draft_source(draft, find)
    # Whether our kernels run another model, only its config says.
    if target_device.type == "cpu" and weight_dtype in SIXTEEN_BIT and name_or_path in CATALOGUE:
        cpu_kernels.compile_ahead(str(dtype if dtype in QUANTISED else weight_dtype).removeprefix("torch."))
    target = find(name_or_path)
    draft_name = entry.draft if draft is None else draft
    tokenizer = load_tokenizer(target)
    load_device = torch.device("cpu") if on_zero_gpu() else target_device
    model = load_model(target, load_device, weight_dtype, device_map)
    if device_map is not None:
        load_device = target_device = home_device(model)
    default_drafter = entry.drafter if draft is None else "auto"
    try:
        if draft_source is None and draft_name is not None:
            draft_source = _draft_source(draft_name, find)
        loaded_draft = (
            None
            if draft_source is None
            else _load_draft(draft_source, model, tokenizer, load_device, weight_dtype)
        )
    except (PairError, WeightsError) as error:
        if draft is not None:
            raise
        # Only an entry's own draft may fail: the user did not ask for it, and the target works without it.
        _log.warning("The draft of %s can't be used, so drafts are copied from the text: %s", name_or_path, error)
        loaded_draft, default_drafter = None, "prompt_lookup"
    if isinstance(dtype, str) and dtype in QUANTISED:
        # Quantise after loading the draft, because a draft head copies rows of the unquantised output layer.
        quantise(model, dtype, entry.gguf)
        _quantise_draft(loaded_draft, draft_name or "", model, dtype)
    if load_device != target_device:
        _move(model, loaded_draft, target_device)
    return ModelPair(model, loaded_draft, tokenizer, name=entry.name, default_drafter=default_drafter)


def _as_text(name: object, role: str) -> str:
    """Return a name or path as text, or raise RequestError for anything else."""
    path = os.fspath(name) if isinstance(name, os.PathLike) else name
    if not isinstance(path, str):
        raise RequestError(f"The {role} must be a name, a Hub id or a folder, as text or a Path; got {name!r}.")
    return path


def _check_map(device_map: object, device: object, dtype: object) -> None:
    """Raise RequestError for an unknown device map, or one that doesn't fit device, dtype or ZeroGPU."""
    if not isinstance(device_map, dict) and device_map not in MAPS:
        raise RequestError(
            f"The device map {device_map!r} is not known: choose {', '.join(MAPS)}, or give {{module: device}}."
        )
    if device != "auto":
        raise RequestError("The device_map already places the target: leave the device out.")
    if dtype in QUANTISED:
        raise RequestError(
            f'{dtype} weights can\'t be spread over devices: load them without a device_map, or choose "bfloat16".'
        )
    if on_zero_gpu():
        raise RequestError("ZeroGPU lends one device at a time: leave the device_map out.")


def _quantise_draft(draft: Any, name: str, target: Any, dtype: str) -> None:
    """Quantise a draft model; let a draft head read the target's new embedding."""
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


def _draft_source(name: str, find: Callable[[str], Source]) -> Path | Source:
    """Return the folder of a draft head, else the source of a draft model."""
    folder = REPOSITORY / name if name.startswith("drafts/") else local_folder(name)
    return folder if folder is not None and is_draft_head(folder) else find(name)


def _load_draft(
    source: Path | Source, target: Any, tokenizer: Any, device: torch.device, dtype: torch.dtype
) -> Any:
    """Load a draft head, an EAGLE-3 head, or a causal LM whose tokenizer must be the target's."""
    if isinstance(source, Path):
        if is_split(target):
            raise PairError(HEAD_ON_SPLIT)
        return load_draft_head(source, target)
    if is_eagle(source):
        if is_split(target):
            raise PairError(HEAD_ON_SPLIT)
        if on_zero_gpu():
            raise PairError("An EAGLE-3 head can't run on ZeroGPU: give a draft model, or none.")
        return load_eagle(source, target)
    draft_tokenizer = load_tokenizer(source)
    if tokenizer is not None and draft_tokenizer is not None:
        check_same_tokens(tokenizer, draft_tokenizer)
    return load_model(source, device, dtype)


def pick_device(device: str | torch.device) -> torch.device:
    """Return the requested device, or raise RequestError if this machine lacks it or we don't support it.

    "auto" is CUDA if it works, else the CPU; a warning says why a GPU is not used.
    """
    if device == "auto":
        return _pick_automatically()
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise RequestError(f"There is no device {device!r}: choose auto, cpu, cuda or cuda:N.") from error
    if chosen.type not in ("cpu", "cuda"):
        raise RequestError(f"The device {device!r} is not supported: choose auto, cpu, cuda or cuda:N.")
    if chosen.type == "cuda" and not on_zero_gpu() and (reason := why_unusable(chosen)) is not None:
        raise RequestError(f"The device {str(chosen)!r} can't be used: {reason}; or choose the device cpu.")
    return chosen


def _pick_automatically() -> torch.device:
    if on_zero_gpu():  # no kernel can be tried before the first request
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reason = why_unusable(torch.device("cuda"))
    if reason is None:
        return torch.device("cuda")
    if gpu_expected():
        _log.warning("The models run on the CPU: %s.", reason)
    return torch.device("cpu")


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the requested dtype ("auto" means `default_dtype`), or raise RequestError if it is not in DTYPES."""
    if dtype == "auto":
        return default_dtype(device)
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        names = ", ".join((*DTYPES, *QUANTISED[:-1]))
        raise RequestError(f"The dtype {dtype!r} is not supported: choose auto, {names} or {QUANTISED[-1]}.")
    return chosen


def default_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for "auto": bfloat16, float16 on old CUDA devices, float32 on some CPUs.

    CUDA devices below compute capability 8.0, e.g. a T4, have no tensor cores for bfloat16. A model whose
    activations exceed float16's maximum of 65504 needs float32 there. A CPU gets float32 if neither our kernels
    nor the CPU itself multiply bfloat16: emulated, it is much slower.
    """
    if device.type == "cpu" and not cpu_kernels.available() and not native_bfloat16():
        return torch.float32
    lacks_bfloat16 = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if lacks_bfloat16 else torch.bfloat16


def _source(name: str) -> Source:
    entry = CATALOGUE.get(name)
    if entry is not None and entry.prepare is not None:
        return locate(str(entry.prepare()))
    name = entry.target if entry is not None else name
    if name.startswith("drafts/"):  # never looked up on the Hub, where anybody could own that name
        name = str(REPOSITORY / name)
    return locate(name, known=tuple(CATALOGUE))


def _cached_source(name: str) -> Source:
    """Return the source in the Hub's cache, or that of `_source` if it has gone since it was chosen."""
    entry = CATALOGUE.get(name)
    return cached(name if entry is None else entry.target) or _source(name)

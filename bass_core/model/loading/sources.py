"""Find a model (a local folder or a Hub id) and load it with transformers, from safetensors only.

Call `locate`, then `load_model` and `load_tokenizer`. Code that comes with a model's weights is never run. If the
Hub does not answer within HUB_PATIENCE_S seconds, its local cache is used. A model that can't be used is refused
in one sentence. catalogue.py resolves catalogue names; pair.py checks that two models fit each other.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import BassError, PairError, WeightsError
from ..weights.placement import is_split

HUB_PATIENCE_S = 5.0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Source:
    """The folder or Hub id of a model, and its files.

    Attributes:
        where: its folder or Hub id.
        revision: the commit on the Hub.
        local: whether it is a folder or in the Hub's local cache.
    """

    where: str
    files: frozenset[str]
    revision: str = "main"
    local: bool = True

    def __post_init__(self) -> None:
        if "config.json" not in self.files:
            raise PairError(f"{self.where} has no config.json: give a transformers model.")
        if not any(name.endswith(".safetensors") for name in self.files):
            pickles = sorted(name for name in self.files if name.endswith(".bin"))
            if pickles:
                raise PairError(
                    f"{self.where} has no safetensors file, only {pickles[0]}, which we never open because such a "
                    "file can run code: choose another, or convert it if you trust it (docs/usage.md, Pairs)."
                )
            raise PairError(
                f"{self.where} has no safetensors file, and other formats are not read: "
                "save the model with save_pretrained and give that folder."
            )


def locate(name: str, known: Sequence[str] = ()) -> Source:
    """Find a model.

    Args:
        name: a folder, or a Hub id of the form owner/name.
        known: catalogue names to suggest in the error message.

    Raises:
        PairError: if the name is neither a folder nor the id of a model on the Hub.
        WeightsError: if the model can't be reached.
    """
    folder = local_folder(name)
    if folder is not None:
        return Source(str(folder), _names(folder))
    owner, _, repo = name.partition("/")
    if not (re.search(r"\w", owner) and re.fullmatch(r"[\w.-]+", owner) and re.fullmatch(r"[\w.-]+", repo)):
        if _is_file(name):
            raise PairError(
                f"{name} is a file, and models are read from folders: give a folder with a transformers model and "
                "its weights as safetensors."
            )
        others = f"one of {', '.join(known)}, " if known else ""
        raise PairError(
            f"There is no pair and no folder called {name!r}: choose {others}a folder with a transformers "
            "model, or a Hub id of the form owner/name."
        )
    return _on_hub(name, f"choose the pair smollm2 or a local folder (known pairs: {', '.join(known)})")


def local_folder(name: str) -> Path | None:
    """Return the folder of that name, or None if there is none."""
    try:
        folder = Path(name).expanduser()
        return folder if name.strip() and folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # too long, the home of an unknown user, or with a zero byte
        return None


def _is_file(name: str) -> bool:
    try:
        return Path(name).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        return False


def _names(folder: Path) -> frozenset[str]:
    try:
        return frozenset(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise WeightsError(f"The folder {folder} can't be read ({error.strerror}): choose another.") from error


def _on_hub(repo: str, instead: str) -> Source:
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    answer = _ask_hub(repo)
    if isinstance(answer, (HFValidationError, RepositoryNotFoundError)):
        raise PairError(
            f"There is no folder {repo!r}, and the Hub has no public model of that name: check the spelling, "
            f"log in with `hf auth login` if it is private, or {instead}."
        ) from answer
    if not isinstance(answer, Exception):
        files = frozenset(file.rfilename for file in answer.siblings or [])
        # Pass the commit: for "main", transformers may take safetensors from a pull request.
        return Source(repo, files, revision=answer.sha, local=False)
    snapshot = _snapshot(repo)
    if snapshot is not None:
        if not _has_weights(snapshot):
            raise WeightsError(
                f"The weights of {repo} are not downloaded yet, and the Hugging Face Hub is not reachable "
                f"({_first_line(answer)}): connect to the network, or {instead}."
            ) from answer
        return Source(repo, _names(snapshot), revision=snapshot.name)
    raise WeightsError(
        f"{repo} is not a local folder and can't be fetched, because the Hugging Face Hub is not reachable "
        f"({_first_line(answer)}): connect to the network, or {instead}."
    ) from answer


def cached(repo: str) -> Source | None:
    """Return a Hub id as a Source of the local cache, or None if its weights are not all there. Asks no Hub."""
    snapshot = _snapshot(repo)
    if snapshot is None or not _has_weights(snapshot):
        return None
    try:
        return Source(repo, _names(snapshot), revision=snapshot.name)
    except PairError:  # it has no safetensors
        return None


def weight_bytes(source: Source) -> int:
    """Return the size of a local source's safetensors files."""
    return sum(fetch(source, name).stat().st_size for name in source.files if name.endswith(".safetensors"))


def _snapshot(repo: str) -> Path | None:
    """Return the folder of the Hub's local cache with the repository's newest files, or None."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def _has_weights(snapshot: Path) -> bool:
    """Return whether a folder of the Hub's cache has all files of the weights, in any format."""
    for index in snapshot.glob("*.safetensors.index.json"):
        with suppress(OSError, ValueError, AttributeError):  # a damaged index is reported when it is loaded
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return all((snapshot / file).exists() for file in files)
    if any(re.search(r"-of-\d+\.", name) for name in _names(snapshot)):
        return False  # the index is one of the files that are still missing
    return any(name.endswith((".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5")) for name in _names(snapshot))


def _ask_hub(repo: str) -> Any:
    """Return the Hub's ModelInfo, or the exception raised instead, within HUB_PATIENCE_S seconds."""
    from huggingface_hub import HfApi

    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(HfApi().model_info(repo, timeout=HUB_PATIENCE_S))
        except Exception as error:
            answers.append(error)

    # In a thread, because the DNS look-up has no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_PATIENCE_S)
    return answers[0] if answers else TimeoutError(f"no answer within {HUB_PATIENCE_S:g} s")


def load_model(
    source: Source, device: torch.device, dtype: torch.dtype, device_map: str | dict[str, Any] | None = None
) -> Any:
    """Load the source's causal LM, ready for inference, on `device` or spread by accelerate as `device_map` lists.

    Raises:
        WeightsError: if files are missing or can't be read.
        PairError: if the model can't be used.
    """
    from transformers import AutoModelForCausalLM

    with _explain_errors(source.where):
        auto: Any = AutoModelForCausalLM
        model, report = auto.from_pretrained(
            source.where,
            revision=source.revision,
            local_files_only=source.local,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=dtype,
            output_loading_info=True,
            **({} if device_map is None else {"device_map": device_map}),
        )
        missing = sorted(report["missing_keys"])
        if missing:  # transformers would initialise these with random numbers
            raise WeightsError(
                f"The weights of {source.where} lack {len(missing)} tensors that its config asks for "
                f"({missing[0]} is one): the model is incomplete, so fetch or save it again."
            )
        complete = model.to(device) if device_map is None else _require_complete(model)
        return complete.eval().requires_grad_(False)


def _require_complete(model: Any) -> Any:
    """Return the model, or raise PairError if its device map leaves out a part."""
    if not is_split(model) and any(parameter.device != model.device for parameter in model.parameters()):
        raise PairError('The device_map leaves out parts of the model: name every module, or give {"": device}.')
    return model


def load_tokenizer(source: Source) -> Any | None:
    """Load the source's tokenizer; None if it has none."""
    from transformers import AutoConfig, AutoTokenizer

    if not any(map(is_tokenizer_file, source.files)):
        return None  # transformers would make some kinds of tokenizers without a vocabulary
    options: dict[str, Any] = {"revision": source.revision, "local_files_only": source.local}
    with _explain_errors(source.where):  # the tokenizer needs the model's config
        AutoConfig.from_pretrained(source.where, trust_remote_code=False, **options)
    with _explain_errors(f"The tokenizer of {source.where}", ""):
        return AutoTokenizer.from_pretrained(source.where, trust_remote_code=False, **options)


def is_tokenizer_file(name: str) -> bool:
    """Return whether a file of this name holds a tokenizer: of transformers, SentencePiece or Mistral (tekken)."""
    tekken = "tekken" in name and name.endswith(".json")
    return name in TOKENIZER_FILES or name.endswith((".model", ".spm")) or tekken


def fetch(source: Source, name: str) -> Path:
    """Return the path of one of the source's files; from the Hub it is fetched first.

    Raises:
        WeightsError: if the file can't be fetched.
    """
    if source.local and (folder := local_folder(source.where)) is not None:
        return folder / name
    from huggingface_hub import hf_hub_download

    with _explain_errors(source.where):
        return Path(hf_hub_download(source.where, name, revision=source.revision, local_files_only=source.local))


@contextmanager
def _explain_errors(where: str, role: str = " as a causal language model") -> Iterator[None]:
    """Turn errors of transformers and its libraries into one sentence that names the model."""
    from safetensors import SafetensorError

    try:
        yield
    except BassError:
        raise
    except torch.OutOfMemoryError as error:
        raise PairError(f"{where} does not fit into the device's memory: choose a smaller model.") from error
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"The files of {where} can't be read ({_first_line(error)}): fetch or save the model again."
        ) from error
    except Exception as error:  # libraries raise anything, e.g. exceptions of strict configs
        raise PairError(
            f"{where} can't be loaded{role} ({in_one_line(error)}): correct it or choose another."
        ) from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200].rstrip(".: ")


def in_one_line(error: BaseException) -> str:
    """Return an error's message in one line, or only its first line if it is long."""
    text = " ".join(str(error).split()).rstrip(".: ")
    return text if 0 < len(text) <= 300 else _first_line(error)

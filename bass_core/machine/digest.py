"""SHA-256 of files, to verify downloads and stored weights."""

from __future__ import annotations

import hashlib
from pathlib import Path


def sha256(file: Path) -> str:
    """Return the file's SHA-256 digest in hexadecimal, or raise OSError if the file can't be read."""
    digest = hashlib.sha256()
    with open(file, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

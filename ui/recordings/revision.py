"""The revision of this tree. Recordings, saved pages and reports name it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def revision() -> str | None:
    """Return the git revision of the tree, with a plus sign if it has changes.

    Outside a checkout, it is the environment variable BASS_REVISION, or None.
    """
    # In a folder without .git, git would describe a repository that contains the folder.
    if not (ROOT / ".git").exists():
        return os.environ.get("BASS_REVISION")
    try:
        head, changes = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head[:12] + ("+" if changes else "")

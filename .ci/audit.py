"""Reports what pip-audit found: `pip-audit --format json ... | python .ci/audit.py`.

Contract: names every known vulnerability, and how many packages could be looked up; if none could, it says that
there is no result. Exit status 0 if every package was looked up and none has a known vulnerability, else 1.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def report(document: dict[str, Any]) -> tuple[list[str], bool]:
    """(lines to print, whether every package was looked up and has no known vulnerability)."""
    packages = document["dependencies"]
    skipped = [package for package in packages if "skip_reason" in package]
    lines = [
        f"{package['name']} {package['version']}: {hole['id']}, mended in "
        f"{', '.join(hole['fix_versions']) or 'no version yet'}"
        for package in packages
        for hole in package.get("vulns", [])
    ]
    holes = len(lines)
    lines += [f"{package['name']}: not looked up: {package['skip_reason']}" for package in skipped]
    checked = len(packages) - len(skipped)
    if not checked:
        return [
            *lines,
            f"None of the {len(packages)} packages could be looked up: that is no result.",
        ], False
    lines.append(f"{checked} of {len(packages)} packages were looked up; known holes in them: {holes}.")
    return lines, not holes and not skipped


def main() -> int:
    """Read the document from standard input."""
    try:
        lines, well = report(json.load(sys.stdin))
    except (ValueError, KeyError, TypeError):
        lines, well = ["pip-audit gave no report (no network, or its database did not answer): no result."], False
    print("\n".join(lines))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())

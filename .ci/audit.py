"""Says what pip-audit found: `pip-audit --format json ... | python .ci/audit.py`.

Contract: names every known hole, and how many packages could be looked up; where that is none, it says that there
is no result. The exit status is 0 where each package was looked up and none has a known hole, else 1.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def report(document: dict[str, Any]) -> tuple[list[str], bool]:
    """The lines to print, and whether all is known to be well."""
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

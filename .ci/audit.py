"""Summarise a report of pip-audit: `pip-audit --format json ... | python .ci/audit.py`.

Prints every known vulnerability, and how many packages were looked up. The exit status is 0 if every package was
looked up and none has a known vulnerability, else 1.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def report(document: dict[str, Any]) -> tuple[list[str], bool]:
    """Return the lines to print, and whether every package was looked up and has no known vulnerability."""
    packages = document["dependencies"]
    skipped = [package for package in packages if "skip_reason" in package]
    lines = [
        f"{package['name']} {package['version']}: {vulnerability['id']}, mended in "
        f"{', '.join(vulnerability['fix_versions']) or 'no version yet'}"
        for package in packages
        for vulnerability in package.get("vulns", [])
    ]
    vulnerabilities = len(lines)
    lines += [f"{package['name']}: not looked up: {package['skip_reason']}" for package in skipped]
    checked = len(packages) - len(skipped)
    if not checked:
        return [
            *lines,
            f"None of the {len(packages)} packages could be looked up: that is no result.",
        ], False
    lines.append(f"{checked} of {len(packages)} packages were looked up; known holes in them: {vulnerabilities}.")
    return lines, not vulnerabilities and not skipped


def main() -> int:
    """Print the summary of the report on standard input; return the exit status."""
    try:
        lines, clean = report(json.load(sys.stdin))
    except (ValueError, KeyError, TypeError):
        lines, clean = ["pip-audit gave no report (no network, or its database did not answer): no result."], False
    print("\n".join(lines))
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())

"""What a container's control groups leave to this process, which the machine's own figures do not show.

Contract: `groups` gives the folders in which a limit may stand, for both versions of control groups; without
control groups (macOS, Windows) there are none. A limit of any of them binds. Reads files alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def groups(controller: str) -> Iterator[Path]:
    """Folders of the groups of this process that have the controller ("cpu", "memory"), and of those above."""
    try:
        lines = OWN.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # Version 2 has no names of controllers, and all of them in one tree.
        if controllers and controller not in controllers.split(","):
            continue
        mount = ROOT / controllers if controllers else ROOT
        # A container sees its own group as the root, whatever path it is told.
        own = PurePosixPath(path.lstrip("/"))
        yield from (mount / group for group in (own, *own.parents))


def cpu_quota() -> float | None:
    """Cores' worth of time that this process may use; None without a limit."""
    found = [quota for folder in groups("cpu") if (quota := _quota(folder)) is not None]
    return min(found, default=None)


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            allowed, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            allowed, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8") for name in ("quota", "period")
            )
        quota = int(allowed) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such group, or no limit: "max"
        return None
    return quota if quota > 0 else None  # no limit: -1


def memory_left() -> int | None:
    """Bytes that this process may still take; None without a limit."""
    found = [left for folder in groups("memory") if (left := _memory(folder)) is not None]
    return min(found, default=None)


def _memory(folder: Path) -> int | None:
    new = (folder / "memory.max").exists()
    names = ("memory.max", "memory.current") if new else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        limit, used = (int((folder / name).read_text(encoding="utf-8")) for name in names)
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        statistics = dict(line.split() for line in lines)
        # Inactive file pages count as free: the kernel reclaims them on demand.
        return limit - used + int(statistics.get("inactive_file" if new else "total_inactive_file", 0))
    except (OSError, ValueError):  # no such group, or no limit: "max"
        return None

"""Read the limits that a container's control groups (cgroups) set for this process.

The machine's own figures don't show these limits. The limits of the process's group and of all groups above it
apply. Both versions of cgroups are supported. On systems without cgroups (macOS, Windows) there are no limits.
The limits are read once per process; the memory in use is read at each call.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path("/sys/fs/cgroup")
PROCESS_GROUPS = Path("/proc/self/cgroup")
# Version 1 writes about 2**63 bytes if there is no limit.
_NO_LIMIT = 2**62


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups that have the controller ("cpu", "memory"), and their parents."""
    try:
        lines = PROCESS_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # Version 2 has no controller names and only one tree.
        if controllers and controller not in controllers.split(","):
            continue
        mount = ROOT / controllers if controllers else ROOT
        # A container sees its own group as the root, whatever path is listed.
        group_path = PurePosixPath(path.lstrip("/"))
        yield from (mount / group for group in (group_path, *group_path.parents))


@cache
def cpu_quota() -> float | None:
    """Return the number of cores whose time this process may use; None without a limit."""
    quotas = [quota for folder in _groups("cpu") if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


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
    """Return how many more bytes this process may take; None without a limit."""
    left = [limit - used for folder, limit in _memory_limits() if (used := _memory_used(folder)) is not None]
    return min(left, default=None)


@cache
def _memory_limits() -> list[tuple[Path, int]]:
    """Return the groups with a memory limit, and their limits in bytes."""
    limits = [(folder, _bytes_in(folder, "memory.max", "memory.limit_in_bytes")) for folder in _groups("memory")]
    return [(folder, limit) for folder, limit in limits if limit is not None and limit < _NO_LIMIT]


def _memory_used(folder: Path) -> int | None:
    """Return a group's bytes in use, without inactive file pages: the kernel reclaims them on demand."""
    used = _bytes_in(folder, "memory.current", "memory.usage_in_bytes")
    try:
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        statistics = {name: int(value) for name, value in map(str.split, lines)}
    except (OSError, ValueError):
        return None
    inactive = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
    return None if used is None else used - inactive


def _bytes_in(folder: Path, name: str, old_name: str) -> int | None:
    """Return the number in a group's file of version 2, or else of version 1; None for no file and for "max"."""
    try:
        file = folder / name
        return int((file if file.exists() else folder / old_name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None

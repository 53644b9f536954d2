"""Read the limits that a container's control groups (cgroups) set for this process.

The machine's own figures don't show these limits. The limits of the process's group and of all groups above it
apply. Both versions of cgroups are supported. On systems without cgroups (macOS, Windows) there are no limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/sys/fs/cgroup")
PROCESS_GROUPS = Path("/proc/self/cgroup")


def groups(controller: str) -> Iterator[Path]:
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


def cpu_quota() -> float | None:
    """Return the number of cores whose time this process may use; None without a limit."""
    quotas = [quota for folder in groups("cpu") if (quota := _quota(folder)) is not None]
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
    limits = [left for folder in groups("memory") if (left := _memory_left_in(folder)) is not None]
    return min(limits, default=None)


def _memory_left_in(folder: Path) -> int | None:
    unified = (folder / "memory.max").exists()
    names = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        limit, used = (int((folder / name).read_text(encoding="utf-8")) for name in names)
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        statistics = dict(line.split() for line in lines)
        # Inactive file pages count as free: the kernel reclaims them on demand.
        return limit - used + int(statistics.get("inactive_file" if unified else "total_inactive_file", 0))
    except (OSError, ValueError):  # no such group, or no limit: "max"
        return None

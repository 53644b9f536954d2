"""A container's CPU and memory limits are respected, in both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import app
from bass_core.machine import container, cpu
from bass_core.machine.memory import available_bytes


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Simulate a machine with 16 cores and without control groups."""
    for limits in (container.cpu_quota, container._memory_limits):
        limits.cache_clear()
        request.addfinalizer(limits.cache_clear)
    monkeypatch.setattr(container, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(container, "PROCESS_GROUPS", tmp_path / "own")
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def write_files(tmp_path: Path, group: str, files: dict[str, str]) -> None:
    """Write the files of the process's groups, and forget the limits read so far."""
    container.cpu_quota.cache_clear()
    container._memory_limits.cache_clear()
    (tmp_path / "own").write_text(group)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
        ("0::/\n", {"cpu.max": "350000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "6400000 100000\n"}, 16),
        ("0::/\n", {"cpu.max": "nonsense"}, 16),
        ("0::/\n", {}, 16),
        # The parent's limit is lower than the group's own.
        ("0::/pod/main\n", {"pod/main/cpu.max": "800000 100000", "pod/cpu.max": "400000 100000"}, 4),
        # Version 1, with two controllers in one tree. The path exists only on the host.
        (
            "12:memory:/docker/7\n4:cpu,cpuacct:/docker/7\n1:name=systemd:/\n0::/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "200000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            2,
        ),
        ("9:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
        ("9:cpu:/\n", {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "0\n"}, 16),
        ("9:cpuset:/\n", {"cpuset/cpu.cfs_quota_us": "100000\n", "cpuset/cpu.cfs_period_us": "100000\n"}, 16),
    ],
)
def test_cores_are_the_smaller_of_affinity_and_quota(
    tmp_path: Path, group: str, files: dict[str, str], cores: int
) -> None:
    write_files(tmp_path, group, files)
    assert cpu.cores() == cores


def test_without_control_groups_only_the_affinity_counts() -> None:
    assert container.cpu_quota() is None and container.memory_left() is None and cpu.cores() == 16


def test_the_page_limits_torchs_threads_to_the_quota(tmp_path: Path) -> None:
    write_files(tmp_path, "0::/\n", {"cpu.max": "300000 100000"})
    before = torch.get_num_threads()
    try:
        for environment, there, expected in (({}, 16, 3), ({}, 2, 2), ({"OMP_NUM_THREADS": "5"}, 5, 5)):
            torch.set_num_threads(there)
            app.keep_to_quota(environment)
            assert torch.get_num_threads() == expected
        torch.set_num_threads(16)
        # On a Space, no core is reserved for a browser.
        app.keep_to_quota({"SPACE_ID": "me/bass"})
        assert app.set_threads(app.parse([]), {"SPACE_ID": "me/bass"}) == 3
        assert app.set_threads(app.parse([]), {}) == 2
    finally:
        torch.set_num_threads(before)


OLD = ("memory.limit_in_bytes", "memory.usage_in_bytes")


@pytest.mark.parametrize(
    ("group", "folder", "names", "inactive"),
    [
        ("0::/pod\n", "pod", ("memory.max", "memory.current"), "inactive_file"),
        ("5:memory:/pod\n", "memory/pod", OLD, "total_inactive_file"),
    ],
)
def test_memory_left_is_the_containers_limit_less_its_use(
    tmp_path: Path, group: str, folder: str, names: tuple[str, str], inactive: str
) -> None:
    write_files(tmp_path, group, {f"{folder}/{names[0]}": "5000\n", f"{folder}/{names[1]}": "3000\n"})
    assert container.memory_left() is None  # unknown without statistics
    write_files(tmp_path, group, {f"{folder}/memory.stat": f"anon 1\n{inactive} 500\n"})
    assert container.memory_left() == available_bytes(torch.device("cpu")) == 2500
    (tmp_path / "cgroup" / folder / names[1]).write_text("3400\n")
    assert container.memory_left() == 2100  # the use is read at each call
    write_files(tmp_path, group, {f"{folder}/{names[0]}": "max\n"})
    assert container.memory_left() is None and available_bytes(torch.device("cpu")) > 10**6

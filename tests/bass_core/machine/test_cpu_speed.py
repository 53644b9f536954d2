"""The measurement of a CPU's bandwidth and FLOPs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bass_core.machine import cpu_speed

MB = 1 << 20


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Return a function that sets each core's caches, as (folder of the level, size, cores that share it)."""

    def describe(cores: dict[int, list[tuple[str, str, str]]], allowed: set[int] | None = None) -> None:
        monkeypatch.setattr(cpu_speed, "CPUS", tmp_path)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed or set(cores), raising=False)
        for core, levels in cores.items():
            for name, size, shared in levels:
                folder = tmp_path / f"cpu{core}" / "cache" / name
                folder.mkdir(parents=True)
                (folder / "size").write_text(f"{size}\n")
                (folder / "shared_cpu_list").write_text(f"{shared}\n")

    return describe


def test_each_last_level_cache_of_our_cores_counts_once(caches: Callable[..., None]) -> None:
    """Cores 0 and 1 share a cache, core 2 has another, and core 3 is not ours. Caches of level 1 are ignored."""
    small = ("index0", "32K", "0")
    caches(
        {
            0: [small, ("index3", "32768K", "0-1")],
            1: [small, ("index3", "32768K", "0-1")],
            2: [small, ("index3", "16384K", "2")],
            3: [small, ("index3", "65536K", "3")],
        },
        allowed={0, 1, 2},
    )
    assert cpu_speed.last_cache() == 48 * MB


def test_a_cache_of_unknown_size_is_assumed(caches: Callable[..., None]) -> None:
    caches({0: [("index3", "lots", "0")]}, allowed={0, 1})
    assert cpu_speed.last_cache() == cpu_speed.LAST_CACHE


def test_the_read_size_fits_the_caches_and_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for cache, free, most, size in (
        (32, 4096, 512, 320),  # ten caches
        (100, 4096, 512, 512),  # as many as fit the largest size
        (32, 300, 512, 150),  # half of the free memory
        (480, 4096, 256, 960),  # at least two caches; a virtual machine may report its host's large one
        (480, 1900, 256, 0),
        (32, 100, 512, 0),  # less than two caches: the second pass would read the cache
    ):
        monkeypatch.setattr(cpu_speed, "last_cache", lambda cache=cache: cache * MB)
        monkeypatch.setattr(cpu_speed, "available_bytes", lambda device, free=free: free * MB)
        assert cpu_speed.bandwidth_array_bytes(most * MB) == size * MB
    monkeypatch.setattr(cpu_speed, "filled_array", None)
    assert cpu_speed.read_bandwidth() is None, "there is no room"


def script_seconds(monkeypatch: pytest.MonkeyPatch, seconds: Iterator[float]) -> None:
    def next_seconds(run: Callable[[], object]) -> float:
        run()
        return next(seconds)

    monkeypatch.setattr(cpu_speed, "_seconds", next_seconds)


def test_the_best_pass_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ways to read 800 bytes take turns.

    The passes of the first take 1.0, 0.5 and 0.8 s; those of the second 0.4, 0.9 and 0.7 s.
    """
    script_seconds(monkeypatch, iter((1.0, 0.4, 0.5, 0.9, 0.8, 0.7)))
    array = cpu_speed.filled_array(800)
    assert array.nbytes == 800
    assert list(cpu_speed.read_speeds(array, passes=3).values()) == [1600.0, 2000.0]
    script_seconds(monkeypatch, iter((1.0, 0.4)))
    assert cpu_speed.read_speeds(array, passes=3, seconds=-1.0) == dict(
        zip(cpu_speed.READS, (800, 2000), strict=True)
    )


def test_every_way_reads_the_whole_array() -> None:
    """With each way to read the array, a change of its first or last element changes the result."""
    for name, read in cpu_speed.READS.items():
        before = read(cpu_speed.filled_array(4096))
        for place in (0, -1):
            array = cpu_speed.filled_array(4096)
            array[place] = 7.0
            assert read(array) != before, name


def test_a_dtype_slower_than_float32_counts_as_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 product takes 1 ms at any size, so the largest product gives the speed.

    A float16 one takes 5 s and is tried once.
    """
    sizes: list[tuple[torch.dtype, int]] = []

    def mm(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        sizes.append((left.dtype, len(left)))

    def seconds(run: Callable[[], object]) -> float:
        run()
        return 0.001 if sizes[-1][0] == torch.float32 else 5.0

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(cpu_speed, "_seconds", seconds)
    assert cpu_speed.product_flops(torch.float16) == 2 * max(cpu_speed.SIZES) ** 3 / 0.001
    assert {size for dtype, size in sizes if dtype == torch.float16} == {min(cpu_speed.SIZES)}
    assert {size for dtype, size in sizes if dtype == torch.float32} == set(cpu_speed.SIZES)


def test_the_figures_of_this_machine_are_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real measurement, with an assumed cache of 8 MB to save memory."""
    monkeypatch.setattr(cpu_speed, "last_cache", lambda: 8 * MB)
    bandwidth = cpu_speed.read_bandwidth()
    assert bandwidth is not None and 1e8 < bandwidth < 1e13
    assert 1e8 < cpu_speed.product_flops(torch.float32) < 1e15

"""Starts and ends of services on Ray: refusals, a lost node, the front process. Each test starts its own Ray."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from gradio_client import Client
from playwright.sync_api import BrowserContext, expect

from bass_core import BassError, RequestError
from tests.support.page import pair_options, serving
from ui.page.limits import Limits
from ui.sources.cluster import pool
from ui.sources.cluster.pool import DIES
from ui.sources.cluster.races import LOST
from ui.sources.service import on_cluster, on_this_machine
from ui.sources.source import PairOptions

from ..ui.browser import fill, open_page
from .conftest import finishes, until, workers

pytestmark = pytest.mark.slow


def test_a_model_that_cannot_be_loaded_is_refused_at_the_start(ask: PairOptions) -> None:
    import ray

    with pytest.raises(BassError, match="nothing-here"):
        on_this_machine(replace(ask, pair="/nothing-here"), Limits(), workers=2, threads=1)
    assert not ray.is_initialized() and workers() == []


def test_workers_that_die_while_loading_are_an_error_at_the_start(
    ask: PairOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are killed while they connect to the Hub, as the system does when memory is short."""
    import ray

    monkeypatch.setattr(pool, "BACK_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")

        def kill() -> None:
            with suppress(OSError, psutil.NoSuchProcess):
                while True:
                    hub.accept()
                    for worker in workers():
                        worker.kill()

        threading.Thread(target=kill, daemon=True).start()
        with pytest.raises(BassError) as refusal:
            on_this_machine(replace(ask, pair="owner/model"), Limits(), workers=1, threads=1)
        hub.shutdown(socket.SHUT_RDWR)
    assert str(refusal.value) == DIES and "\n" not in DIES
    assert not ray.is_initialized() and workers() == []


@pytest.mark.parametrize("address", ["local", "ray://here:10001", "127.0.0.1:1"])
def test_a_cluster_that_does_not_answer_gives_a_one_sentence_error(ask: PairOptions, address: str) -> None:
    with pytest.raises(BassError) as refusal:
        on_cluster(ask, Limits(), address=address, resources="CPU=1", workers=1, threads=1)
    assert "\n" not in str(refusal.value)


def test_a_cluster_that_loses_a_node_keeps_working(ask: PairOptions) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        cluster.wait_for_nodes()
        with pytest.raises(RequestError, match="No node of the cluster has"):
            on_cluster(ask, Limits(), address=cluster.address, resources="CPU=9", workers=None, threads=1)
        with pytest.raises(RequestError, match="has no GPU"):
            on_cluster(ask, Limits(), address=cluster.address, resources=None, workers=None, threads=1)
        service = on_cluster(ask, Limits(), address=cluster.address, resources="CPU=1", workers=None, threads=1)
        try:
            assert service.facts.about.endswith("2 workers on Ray")
            assert finishes(service)
            cluster.remove_node(nodes.pop())
            assert finishes(service)
            nodes.append(cluster.add_node(num_cpus=1))
            assert finishes(service)
        finally:
            service.close()
    finally:
        cluster.shutdown()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["terminated", "killed"])
def test_the_front_leaves_no_processes_and_no_shared_memory(
    pair_folders: tuple[Path, Path], tmp_path: Path, end: signal.Signals
) -> None:
    options = pair_options(pair_folders)
    shared = shared_memory()
    with serving(tmp_path / "log.txt", *options, "--workers", "2") as (address, process):
        job = Client(address, verbose=False).submit("Hello", 2, 1000, 0.8, 0, api_name="/race")
        until(job.outputs, "a snapshot")
        children = psutil.Process(process.pid).children(recursive=True)
        assert len([child for child in children if "ray::Worker" in "".join(child.cmdline())]) >= 1
        process.send_signal(end)
        process.wait()
        until(lambda: not [child for child in children if alive(child)], "the end of every process")
    assert shared_memory() <= shared


def shared_memory() -> set[str]:
    """Return the names of shared memory that is not the browsers' of other tests."""
    return {name for name in os.listdir("/dev/shm") if "chromium" not in name.lower()}


def alive(process: psutil.Process) -> bool:
    """Return whether the process runs and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_page_shows_a_lost_worker_and_can_run_again(
    context: BrowserContext, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    options = pair_options(pair_folders)
    page = context.new_page()
    with serving(tmp_path / "log.txt", *options, "--workers", "1") as (address, process):
        open_page(page, address)
        fill(page, tokens=1000)
        page.click("#run")
        page.wait_for_function("() => document.querySelector('#lane-regular .sequence')?.textContent.length > 5")
        expect(page.locator("[data-reading=name]")).to_contain_text(", worker 1 on ")
        for worker in workers(process.pid):
            worker.kill()
        expect(page.locator("#status-line .message")).to_have_text(LOST)
        expect(page.locator("#run")).to_be_enabled()
        fill(page, tokens=8)
        page.click("#run")
        expect(page.locator("#status-line .message")).to_have_attribute("data-phase", "done", timeout=300_000)
    page.close()

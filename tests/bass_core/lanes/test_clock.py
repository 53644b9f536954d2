"""A lane's clock counts the device's time on the lane's work, without one-time work such as compilation.

The tests set the times of host and stream; `Host` imitates the part of torch.cuda that a clock uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bass_core.lanes import clock
from bass_core.lanes.clock import LaneClock
from bass_core.machine import setup_time
from bass_core.machine.setup_time import setting_up, setup_ms
from kernels import support

DEVICE = torch.device("cuda", 0)


class Host:
    """The host's time is `now` ms; the stream's work ends at `busy_until`."""

    def __init__(self) -> None:
        self.now = self.busy_until = 0.0
        self.capturing = False

    def queue(self, ms: float) -> None:
        """Launch work that takes `ms`; it begins when all earlier work is done."""
        self.busy_until = max(self.busy_until, self.now) + ms

    def synchronize(self) -> None:
        assert not self.capturing, "a stream that is being captured can't be waited for"
        self.now = max(self.now, self.busy_until)

    def Event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(synchronize=self.synchronize)

        def record() -> None:
            event.at = max(self.now, self.busy_until)

        event.record, event.elapsed_time = record, lambda end: end.at - event.at
        return event

    def current_stream(self, device: torch.device) -> Host:
        return self

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    fake = Host()
    for module in (clock, setup_time, support):
        monkeypatch.setattr(module, "runtime", lambda device: fake)
    monkeypatch.setattr(setup_time, "time", SimpleNamespace(perf_counter=lambda: fake.now / 1000))
    return fake


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Triton's hooks with ours installed; `seen` lists the calls of the hooks installed before ours."""
    seen: list[str] = []
    loaded: list[Callable[..., None]] = []
    knobs = SimpleNamespace(
        jit_cache_hook=lambda **facts: seen.append("cache"),
        jit_post_compile_hook=lambda **facts: seen.append("compiled"),
        kernel_load_end_hook=SimpleNamespace(add=loaded.append),
        seen=seen,
        loaded=loaded,
    )
    monkeypatch.setattr(setup_time, "import_module", lambda name: SimpleNamespace(runtime=knobs))
    setup_time.watch_compiler.__wrapped__()
    return knobs


def launch(host: Host, knobs: Any, compile_ms: float = 0.0, load_ms: float = 0.0, run_ms: float = 0.0) -> None:
    """Launch a kernel for the first time: the hooks run in the order of Triton's JITFunction.run."""
    facts = {"compile": {"device": 0}, "is_manual_warmup": False}
    knobs.jit_cache_hook(**facts)
    host.now += compile_ms
    knobs.jit_post_compile_hook(**facts)
    host.now += load_ms
    for hook in knobs.loaded:
        hook(None, None, "kernel", {}, "")
    host.queue(run_ms)


def test_queued_work_counts_until_it_is_done(host: Host) -> None:
    clock = LaneClock(DEVICE)
    host.queue(7)
    host.synchronize()
    with clock.running():
        host.queue(30)
        host.now += 2
        host.queue(5)
    assert clock.ms == pytest.approx(35) and host.now == 42


def test_setup_is_excluded_but_not_work_queued_before_it(host: Host) -> None:
    clock = LaneClock(DEVICE)
    with clock.running():
        host.queue(30)
        with setting_up(DEVICE):
            host.now += 100
            with setting_up(DEVICE):
                host.now += 50
        host.queue(5)
    assert clock.ms == pytest.approx(35)
    with clock.running():
        host.queue(5)
    assert clock.ms == pytest.approx(40)


def test_compile_time_is_excluded(host: Host, compiler: Any) -> None:
    clock = LaneClock(DEVICE)
    with clock.running():
        host.queue(30)
        launch(host, compiler, compile_ms=2000, load_ms=300, run_ms=3)
        launch(host, compiler, compile_ms=500, run_ms=4)
        host.now += 1
    assert clock.ms == pytest.approx(37)
    assert compiler.seen == ["cache", "compiled"] * 2


def test_compiling_during_setup_counts_once(host: Host, compiler: Any) -> None:
    before = setup_ms()
    with setting_up(DEVICE):
        launch(host, compiler, compile_ms=2000, load_ms=300)
        host.now += 10
    assert setup_ms() - before == pytest.approx(2310)


def test_a_failed_compilation_is_forgotten(host: Host, compiler: Any) -> None:
    """After a failure Triton never calls the second hook. The time until a later kernel loads isn't setup time."""
    before = setup_ms()
    compiler.jit_cache_hook(compile={"device": 0})
    host.now += 1000
    launch(host, compiler, compile_ms=20)
    host.now += 1000
    for hook in compiler.loaded:
        hook()
    assert setup_ms() - before == pytest.approx(20)


def test_setup_does_not_wait_for_a_stream_under_capture(host: Host, compiler: Any) -> None:
    host.capturing = True
    launch(host, compiler, compile_ms=20)


def test_triton_and_its_hooks_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    for imported in (missing, lambda name: SimpleNamespace(runtime=SimpleNamespace())):
        monkeypatch.setattr(setup_time, "import_module", imported)
        setup_time.watch_compiler.__wrapped__()


def test_the_installed_triton_has_these_hooks() -> None:
    knobs = pytest.importorskip("triton.knobs").runtime
    assert hasattr(knobs, "jit_cache_hook") and hasattr(knobs, "jit_post_compile_hook")
    assert hasattr(knobs.kernel_load_end_hook, "add")

"""If a kernel kills the compiler, the start leaves that kernel out and the page runs.

The processes are real and really die, and the compiler is Triton's, for a card that is not installed. On a CPU no
pair launches the kernels, so their use is not tested here.
"""

from __future__ import annotations

import json
import logging
import urllib.request
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from subprocess import CalledProcessError

import pytest
import triton

from bass_core import load_pair
from bass_core.machine import gpu_kernels
from kernels.shapes import Card, Shape
from kernels.support import CompileFailed
from kernels.triton import ahead, launch
from tests.kernels.compilation import dying
from tests.kernels.compilation.test_compilation import PINNED
from tests.support.page import save_tiny_pair
from ui.page.limits import Limits
from ui.page.page import build, launch_options
from ui.page.request import make_request
from ui.sources.local import race_source

CARD, SHAPE = Card.of_capability(90), Shape("bfloat16", 9, 3, 64, 49152, 49152)
DYING = "tests.kernels.compilation.dying:launches"


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test separate caches and an empty list of left-out kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(launch, "left_out", set())


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile in one process at a time: each takes three seconds of CPU to start."""
    monkeypatch.setattr(gpu_kernels, "MAX_PROCESSES", 1)


def compiled(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("triton/*/*.cubin"))


@pytest.mark.slow
def test_the_page_runs_although_the_compiler_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As at a start on a GPU, four kernels are compiled first.

    One of the four ends the compiler, and another does not compile.
    """
    monkeypatch.setattr(
        gpu_kernels, "prepare", lambda device, shapes: gpu_kernels.leave_out(CARD, shapes(), DYING)
    )
    with caplog.at_level(logging.WARNING):
        pair = load_pair(*map(str, save_tiny_pair(tmp_path)[:1]), device="cpu", dtype="float32")
    assert compiled(tmp_path) == ["compiles", "compiles"]
    assert sum("signal 6 ended the compiler" in line and " aborts " in line for line in caplog.messages) == 1
    assert sum("on purpose" in line and " raises " in line for line in caplog.messages) == 1
    source = race_source(pair)
    page = build(source, limits=Limits(), about="tiny")
    _, url, _ = page.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch_options())
    try:
        with urllib.request.urlopen(url) as answer:
            assert answer.status == 200
        *_, last = source(make_request({"prompt": "abc", "lanes": ["regular"], "max_new_tokens": 4}, Limits()))
        assert last["done"] and not last["lanes"]["regular"]["error"]
    finally:
        page.close()


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_a_second_start_leaves_out_the_same_kernels_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_kernels.leave_out(CARD, [SHAPE], DYING)
    left_out, launch.left_out = launch.left_out, set()
    assert [name.split()[0] for name in sorted(left_out)] == ["aborts", "raises"]
    monkeypatch.setattr(gpu_kernels, "compile_all", lambda *_: pytest.fail("compiled again"))
    gpu_kernels.leave_out(CARD, [SHAPE], DYING)
    assert launch.left_out == left_out
    good, bad, *_ = dying.launches(SHAPE, CARD)
    assert good.name not in left_out
    with pytest.raises(CompileFailed):
        launch.launch(bad.kernel, (1,), *bad.arguments, **bad.options)


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
@pytest.mark.skipif(not PINNED, reason="BASS_PINNED_TRITON is not set")
def test_wide_tiles_of_trees_kill_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.7.1, unpatched, dies of tiles that this project used before."""
    monkeypatch.setenv("PYTHONPATH", PINNED)
    failed = gpu_kernels.compile_all(CARD, [SHAPE], "tests.kernels.compilation.dying:wide_trees")
    assert failed and set(failed.values()) == {"signal 6 ended the compiler"}
    assert all("BLOCK_M=64" in name and "BLOCK_N=64" in name for name in failed)


@pytest.mark.slow
def test_a_compiler_that_cannot_start_leaves_no_kernel_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        gpu_kernels.leave_out(CARD, [SHAPE], "tests.no_such_module:launches")
    assert "can't be compiled ahead: the compiler ended with status 1" in caplog.text
    assert not launch.left_out and gpu_kernels._read(gpu_kernels._file(CARD, [SHAPE], DYING)) is None


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_a_hanging_compiler_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """If only Triton were ended, ptxas would keep the pipe open, and the start would wait for it."""
    monkeypatch.setattr(gpu_kernels, "PATIENCE_S", 20.0)
    failed = gpu_kernels.compile_all(CARD, [SHAPE], "tests.kernels.compilation.dying:hanging")
    assert failed is not None
    assert [name.split()[0] for name in failed] == ["hangs"]
    assert list(failed.values()) == ["the compiler printed nothing for 20 s"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_temporary_failures_are_left_out_once_and_not_saved(tmp_path: Path) -> None:
    gpu_kernels.leave_out(CARD, [SHAPE], "tests.kernels.compilation.dying:passing")
    assert sorted(name.split()[0] for name in launch.left_out) == ["fills", "is_killed"]
    assert not list((tmp_path / "triton").glob("bass-*"))


@pytest.mark.parametrize(
    ("cause", "passes"),
    [(CalledProcessError(-9, "ptxas"), True), (CalledProcessError(-6, "ptxas"), False), (MemoryError(), True)],
)
def test_the_cause_decides_whether_a_failure_is_temporary(cause: Exception, passes: bool) -> None:
    """The cause is the error of ptxas. Triton then raises another error from it."""
    try:
        try:
            raise cause
        except Exception:
            raise RuntimeError("PTXAS error")  # noqa: B904
    except RuntimeError as error:
        assert ahead.passing(error) is passes


def test_the_result_is_saved_in_tritons_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's cache, the result and the kernels are deleted together.

    The name of Triton's package does not matter.
    """
    monkeypatch.setattr(metadata, "version", lambda name: pytest.fail(f"asked for {name}"))
    assert gpu_kernels._file(CARD, [SHAPE], DYING).parent == tmp_path / "triton"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setattr(triton.knobs.cache, "home_dir", str(tmp_path))
    assert gpu_kernels._file(CARD, [SHAPE], DYING).parent == tmp_path / ".triton" / "cache"


def test_every_card_and_set_of_kernels_has_another_result(tmp_path: Path) -> None:
    files = {
        gpu_kernels._file(card, [shape], kernels)
        for card, shape, kernels in (
            (CARD, SHAPE, DYING), (Card.of_capability(80), SHAPE, DYING),
            (CARD, replace(SHAPE, heads=8), DYING), (CARD, SHAPE, gpu_kernels.LAUNCHES),
        )
    }  # fmt: skip
    assert len(files) == 4
    path = tmp_path / "damaged.json"
    path.write_text("[")
    assert gpu_kernels._read(path) is None
    gpu_kernels._write(path, {"a": "b"})
    assert gpu_kernels._read(path) == {"a": "b"} == json.loads(path.read_text())

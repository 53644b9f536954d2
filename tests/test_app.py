"""How app.py starts: where it listens, and what it refuses with one sentence and exit status 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import app
from bass_core.machine.cpu import cores
from ui.sources.local import shown_name

ROOT = Path(app.__file__).resolve().parent


def test_host() -> None:
    space = {"SPACE_ID": "me/bass"}
    for option, environment, expected in (
        (None, {}, "127.0.0.1"),
        (None, space, "0.0.0.0"),
        (None, space | {"GRADIO_SERVER_NAME": "10.0.0.1"}, "10.0.0.1"),
        (None, {"GRADIO_SERVER_NAME": ""}, "127.0.0.1"),
        ("192.168.1.2", space | {"GRADIO_SERVER_NAME": "10.0.0.1"}, "192.168.1.2"),
    ):
        assert app.host(option, environment) == expected


def test_a_core_is_left_to_a_browser_on_this_machine() -> None:
    for arguments, environment, expected in (
        ([], {}, True),
        (["--host", "localhost"], {}, True),
        (["--host", "0.0.0.0"], {}, False),
        (["--share"], {}, False),
        (["--threads", "2"], {}, False),
        ([], {"OMP_NUM_THREADS": "2"}, False),
        ([], {"SPACE_ID": "me/bass"}, False),
    ):
        assert app.leaves_a_core(app.parse(arguments), environment) is expected
    before = torch.get_num_threads()
    try:
        for arguments, expected in ((["--threads", "3"], 3), ([], max(1, cores() - 1))):
            torch.set_num_threads(cores())
            assert app.set_threads(app.parse(arguments), {}) == torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_defaults_and_a_password_from_the_environment_alone() -> None:
    options = app.parse([])
    assert (options.pair, options.draft, options.max_batch) == ("smollm2", None, 32)
    assert (options.device, options.dtype, options.port) == ("auto", "auto", None)
    assert options.allow_any_model is False
    assert app.credentials({}) is None and app.credentials({"BASS_PASSWORD": ""}) is None
    assert app.credentials({"BASS_PASSWORD": "secret"}) == ("bass", "secret")


@pytest.mark.parametrize("arguments", [["--max-batch", "0"], ["--max-batch", "many"], ["--port", "x"], ["--what"]])
def test_bad_options_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        app.parse(arguments)
    assert refusal.value.code == 2


def test_a_folder_is_shown_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert shown_name(f"{tmp_path}/mine/") == "mine"
    assert shown_name("owner/model") == "owner/model"


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run app.py as a user would, until it exits."""
    return subprocess.run(
        [sys.executable, str(ROOT / "app.py"), *arguments],
        cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_refuses_to_start_beside_the_package_called_kernels(tmp_path: Path) -> None:
    info = tmp_path / "kernels-0.10.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.10.0\n")
    ended = start(PYTHONPATH=str(tmp_path))
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.strip() == app.CONFLICT


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app.main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    for option in (
        "--pair", "--draft", "--device", "--dtype", "--threads", "--host", "--port", "--max-batch", "--share",
        "--replay",
        "--max-new-tokens", "--max-prompt", "--max-seconds", "--allow-any-model", "--draft-length",
        "--workers", "--ray", "--worker-resources", "--device-map",
        "BASS_PASSWORD",
    ):  # fmt: skip
        assert option in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--threads", "1", "--pair"], "nothing-here"), (["--replay"], "Cannot read the recording nothing-here")],
)
def test_what_is_not_there_is_one_sentence_and_status_2(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main([*arguments, str(tmp_path / "nothing-here")]) == 2
    said = capsys.readouterr()
    first, *_, last = said.err.strip().splitlines()
    assert said.out == "" and first == app.LOADING and says in last and "Traceback" not in said.err

"""The upload to a Space, with a fake Hub, and the Dockerfile of the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

import app
from bench import space
from bench.report.report import ROOT
from bench.space import THEIRS, configuration, main, readme, sent
from tests.support.page import hosted
from ui.sources.source import waiting


class Hub:
    """A fake Hub.

    Its Space contains THEIRS, which the Hub writes, and gone.py, which is no longer in this tree.
    """

    def __init__(self) -> None:
        Hub.created, Hub.committed = [], []

    def create_repo(self, name: str, **options: Any) -> None:
        Hub.created.append((name, options))

    def list_repo_files(self, name: str, **options: Any) -> list[str]:
        return ["app.py", "gone.py", THEIRS]

    def create_commit(self, name: str, operations: Any, **options: Any) -> Any:
        Hub.committed = list(operations)
        return SimpleNamespace(commit_url="the commit")

    created: list[Any]
    committed: list[Any]


def test_a_dry_run_lists_every_file_and_sends_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: pytest.fail("the Hub was asked"))
    main([])
    *listed, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    assert [claim["holds"] for claim in document["claims"]] == [True] * 3
    assert sum(row["files"] for row in document["results"]) == len(sent())
    assert all(any(line.endswith(f"  {name}") for line in listed) for name in sent())
    assert not [name for name in sent() if name.startswith(("tests/", ".ci/"))]


def test_a_static_space_is_written_and_the_readme_links_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(space, "README", readme)
    for name in ("me/bass", "you/bass"):
        main(["--static", str(tmp_path / "static"), "--name", name])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [claim["holds"] for claim in document["claims"]] == [True]
    link = "<!-- space --> [Watch it in your browser](https://huggingface.co/spaces/you/bass), with nothing"
    text = readme.read_text(encoding="utf-8")
    assert link in text and "me/bass" not in text
    with pytest.raises(SystemExit):
        main(["--static", str(tmp_path), "--name", "bass"])
    assert "a Space is named USER/NAME" in capsys.readouterr().err


def test_a_missing_file_and_a_long_description_are_claims_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "configuration", lambda: {"short_description": "x" * 61, "sdk_version": "1.2.3"})
    assert [claim["holds"] for claim in space.claims(["app.py"])] == [False, False, False]


def test_one_commit_gives_the_space_the_files_of_this_tree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    main(["--to", "me/bass"])
    assert "the commit" in capsys.readouterr().err
    assert Hub.created == [("me/bass", {"repo_type": "space", "space_sdk": "gradio", "exist_ok": True})]
    added = {
        operation.path_in_repo
        for operation in Hub.committed
        if isinstance(operation, huggingface_hub.CommitOperationAdd)
    }
    deleted = [
        operation.path_in_repo
        for operation in Hub.committed
        if isinstance(operation, huggingface_hub.CommitOperationDelete)
    ]
    assert added == set(sent()) and deleted == ["gone.py"]
    assert THEIRS not in added and f'--exclude "{THEIRS}"' in (ROOT / "docs/usage.md").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["--to", "bass"])
    assert "--to takes USER/NAME" in capsys.readouterr().err


def test_the_configuration_depends_on_the_kind_of_space() -> None:
    gradio, docker = configuration(), configuration(docker=True)
    assert (gradio["sdk"], gradio["app_file"]) == ("gradio", "app.py")
    assert (docker["sdk"], docker["app_port"]) == ("docker", "7860") and "app_file" not in docker
    assert gradio["title"] == docker["title"]
    assert readme(True).split("---\n", 2)[2] == readme(False).split("---\n", 2)[2]
    assert metadata.version("gradio").startswith(gradio["sdk_version"].split(".")[0])


DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_container_is_healthy_only_while_the_page_is_served() -> None:
    _, command = re.findall(r"^(?:HEALTHCHECK .* )?CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[::-1]
    python, *arguments = json.loads(command)
    assert python == "python"

    def healthy(port: str) -> bool:
        health_check = [sys.executable, *(argument.replace("7860", port) for argument in arguments)]
        return subprocess.run(health_check, capture_output=True).returncode == 0

    def source(request: Any) -> Any:
        yield waiting(1, None)

    with hosted(source) as address:
        port = address.rsplit(":", 1)[1]
        assert healthy(port)
    assert not healthy(port)


def test_the_container_has_the_files_that_it_runs() -> None:
    *_, last = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    _, program, *options = json.loads(last)
    assert (ROOT / program).is_file() and app.parse(options).port == space.PORT
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for needed in ("app.py", "requirements.txt", "bass_core", "kernels", "ui", "drafts", "docs"):
        assert (ROOT / needed).exists() and needed not in ignored
    assert "USER 1000" in DOCKERFILE and "VOLUME /cache" in DOCKERFILE
    assert "\nSTOPSIGNAL SIGINT\n" in DOCKERFILE  # Python, as process 1, ends on this signal
    # Triton stores kernels in this folder, and needs a C compiler to build its launcher.
    assert "TRITON_CACHE_DIR=/cache/" in DOCKERFILE and " gcc libc6-dev " in DOCKERFILE

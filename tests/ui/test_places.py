"""The page works in a folder of any name, behind a reverse proxy, and despite a broken proxy.

The slow tests start app.py as a user does, with a recording instead of a model.
"""

from __future__ import annotations

import mimetypes
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import BrowserContext, expect

from tests.support import ROOT
from tests.support.page import serving
from ui.page import assets

from .conftest import watched

# Linux allows this name; Windows does not allow ?, ", < and >.
NAME = "C# 100%25 ü a?b\"c'd&<x>"
PARTS = ("app.py", "bass_core", "kernels", "ui", "docs")
NGINX = """
daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
    uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
    server {{
        listen 127.0.0.1:{port};
        location /bass/ {{ proxy_pass {server}/; }}
        location = /favicon.ico {{ return 204; }}  # a browser requests it outside of the page's path
    }}
}}
"""


def test_scripts_get_their_type_despite_a_wrong_registry() -> None:
    mimetypes.add_type("text/plain", ".js")
    assets.serve()
    assert mimetypes.guess_type("page.js")[0] == "text/javascript"


def test_a_files_url_is_quoted(tmp_path: Path) -> None:
    file = tmp_path / NAME / "page.js"
    file.parent.mkdir()
    file.write_text("1")
    address = assets.url(file)
    assert re.fullmatch(r"gradio_api/file=[\w/.:~%-]+/page\.js\?[0-9a-f]{12}", address)
    assert httpx.URL(f"http://host/{address}").path == f"/gradio_api/file={file.as_posix()}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def silent_proxy() -> Iterator[str]:
    """The address of a proxy that never answers. At the end, check that nothing has connected to it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.slow
def test_every_file_is_served_from_a_folder_of_any_name_and_without_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        (tmp_path / NAME).mkdir(exist_ok=True)
        copy(ROOT / part, tmp_path / NAME / part)
    monkeypatch.setattr("tests.support.page.ROOT", tmp_path / NAME)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with silent_proxy() as proxy:
        for name, kind in (("HTTP_PROXY", "http"), ("https_proxy", "http"), ("all_proxy", "socks5")):
            monkeypatch.setenv(name, f"{kind}://{proxy}")
        with serving(tmp_path / "log", "--replay", "win") as (server, _), httpx.Client(trust_env=False) as client:
            document = client.get(server).text
            files = sorted(set(re.findall(r'gradio_api/file=[^\\" ]+', document)))
            assert len(files) == len(assets.MODES) + 3, "the sheets, all scripts as one, Plotly, the page to save"
            for file in files:
                answer = client.get(f"{server}/{file}")
                assert answer.status_code == 200, file
                assert answer.headers["content-type"].split(";")[0] in (
                    "text/javascript",
                    "application/javascript",
                    "text/css",
                    "text/html",
                )


@contextmanager
def behind_nginx(folder: Path, server: str) -> Iterator[str]:
    """The page's address under /bass/ of a real nginx."""
    folder.mkdir()
    port = free_port()
    file = folder / "nginx.conf"
    file.write_text(NGINX.format(folder=folder, port=port, server=server))
    process = subprocess.Popen(["nginx", "-c", str(file), "-p", str(folder)], stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/bass/"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
@pytest.mark.parametrize("setting", ["option", "variable"])
def test_the_page_works_behind_nginx_under_a_path(
    setting: str, context: BrowserContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: tuple[str, ...] = ("--replay", "win")
    if setting == "option":
        options += ("--root-path", "/bass")
    else:
        monkeypatch.setenv("GRADIO_ROOT_PATH", "/bass")
    with (
        serving(tmp_path / "log", *options) as (server, _),
        behind_nginx(tmp_path / "nginx", server) as address,
        watched(context, address) as page,
    ):
        page.click("#run")
        expect(page.locator("#lane-bass .sequence").first).not_to_be_empty()
        assert httpx.get(f"{address}theme.css", trust_env=False).status_code == 200

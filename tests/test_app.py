"""How app.py starts: where it listens, and what it refuses in one sentence, with exit status 2."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import app
from bass_core import BassError
from bass_core.machine.cpu import cores
from tests.support import ROOT
from ui.page.server import bind
from ui.sources.local import shown_name


def test_the_host_is_the_option_or_the_environment_or_this_machine() -> None:
    space = {"SPACE_ID": "me/bass"}
    for option, environment, expected in (
        (None, {}, "127.0.0.1"),
        (None, space, "0.0.0.0"),
        (None, space | {"GRADIO_SERVER_NAME": "10.0.0.1"}, "10.0.0.1"),
        (None, {"GRADIO_SERVER_NAME": ""}, "127.0.0.1"),
        ("192.168.1.2", space | {"GRADIO_SERVER_NAME": "10.0.0.1"}, "192.168.1.2"),
    ):
        assert app.host(option, environment) == expected


def test_one_core_is_left_to_a_browser_on_this_machine() -> None:
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


def test_requests_to_this_machine_use_no_proxy() -> None:
    for before, after in (
        ({}, "localhost,127.0.0.1,::1,10.0.0.1"),
        ({"NO_PROXY": "example.org, localhost"}, "example.org,localhost,127.0.0.1,::1,10.0.0.1"),
        ({"NO_PROXY": "other", "no_proxy": "one"}, "one,localhost,127.0.0.1,::1,10.0.0.1"),
    ):
        app.exempt("10.0.0.1", before)
        assert before == {"NO_PROXY": after, "no_proxy": after}
    nothing = {"NO_PROXY": "*"}
    app.exempt("10.0.0.1", nothing)
    assert nothing == {"NO_PROXY": "*"}


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "https://127.0.0.1:9", "socks5://127.0.0.1:9"])
def test_httpx_reaches_only_other_machines_by_the_proxy(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy)
    app.exempt("127.0.0.1", os.environ)
    assert app.unusable_proxy() is None
    with httpx.Client(verify=False) as client:
        for host, exempt in (("127.0.0.1", True), ("localhost", True), ("[::1]", True), ("example.org", False)):
            direct = client._transport_for_url(httpx.URL(f"http://{host}/")) is client._transport
            assert direct is exempt, host


@pytest.mark.parametrize("proxy", ["socks4://127.0.0.1:9", "http://[::1", "nonsense://x"])
def test_an_unusable_proxy_is_refused_in_one_sentence(
    proxy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    assert app.main([]) == 2
    assert capsys.readouterr().err.startswith("The proxy that ALL_PROXY names can't be used: ")


def test_the_refusal_names_the_variable_or_system_setting_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy", *app.PROXIES, *map(str.upper, app.PROXIES)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org:port")
    assert str(app.unusable_proxy()).startswith("The hosts that NO_PROXY names can't be used: ")
    assert os.environ["NO_PROXY"] == "example.org:port"
    # Without these variables, the system's proxy settings (Windows, macOS) apply.
    for name in ("NO_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("httpx._utils.getproxies", lambda: {"all": "socks4://127.0.0.1:9"})
    assert str(app.unusable_proxy()).startswith("The system's proxy can't be used: ")


def test_a_socks_proxy_without_its_package_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "socksio", None)
    assert "socksio" in str(app.unusable_proxy())


def test_a_host_name_needs_one_usable_address_and_none_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))
            free = reserved.getsockname()[1]
        here = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))
        nowhere = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", 0))
        for addresses, ports, found in (
            ([nowhere, here, here], [port, free], free),
            ([here], [port], None),
            ([nowhere], [free], None),
        ):
            monkeypatch.setattr(socket, "getaddrinfo", lambda *args, addresses=addresses, **kwargs: addresses)
            sockets = bind("name", ports)
            assert [one.getsockname()[1] for one in sockets] == ([] if found is None else [found])
            for one in sockets:
                one.close()


def test_the_ports_to_try_are_the_options_or_gradios() -> None:
    assert app.ports(80, {"GRADIO_SERVER_PORT": "9000"}) == range(80, 81)
    assert app.ports(None, {}) == range(7860, 7960)
    assert app.ports(None, {"GRADIO_SERVER_PORT": "65535", "GRADIO_NUM_PORTS": "3"}) == range(65535, 65536)
    assert "GRADIO_SERVER_PORT must be" in str(app.unusable_number({"GRADIO_SERVER_PORT": "x"}))
    assert app.unusable_number({}) is None


def test_a_port_in_use_is_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert app.main(["--port", str(port), "--host", "127.0.0.1"]) == 2
    assert capsys.readouterr().err.startswith(f"Cannot listen on 127.0.0.1, port {port}: it is in use")


@pytest.mark.parametrize("place", ["compile_ahead", "serve", "PageServer.__enter__"])
def test_ctrl_c_ends_the_start_without_a_traceback(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "compile_ahead", lambda _: None)
    monkeypatch.setattr(app, "serve", lambda *_: None)
    monkeypatch.setattr(f"{'ui.page.server' if '.' in place else 'app'}.{place}", interrupted)
    assert app.main(["--host", "127.0.0.1"]) == app.INTERRUPTED
    assert gc.isenabled()


def test_the_garbage_of_the_start_is_freed_and_threads_switch_soon() -> None:
    class Ring:
        def __init__(self) -> None:
            self.me = self

    gc.disable()
    garbage, interval = weakref.ref(Ring()), sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        app.announce("a pair", ("here", None))
        assert garbage() is None and gc.isenabled() and sys.getswitchinterval() < 0.001
    finally:
        sys.setswitchinterval(interval)
        gc.unfreeze()
        gc.enable()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (httpx.ConnectError("[Errno 111]\nConnection refused"), "on 127.0.0.1: [Errno 111] Connection refused."),
        (RuntimeError(), "could not be opened on 127.0.0.1: RuntimeError."),
    ],
)
def test_any_error_of_the_launch_becomes_one_sentence(error: Exception, message: str) -> None:
    class Broken:
        address = "127.0.0.1"

        def open(self, page: Any, **options: Any) -> None:
            raise error

    server: Any = Broken()
    page: Any = None
    with pytest.raises(BassError) as refused:
        app.opened_at(server, page, app.parse([]))
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_defaults_and_a_password_only_from_the_environment() -> None:
    options = app.parse([])
    assert (options.pair, options.draft, options.max_batch) == ("auto", None, 32)
    assert (options.device, options.dtype, options.port) == ("auto", "auto", None)
    assert options.allow_any_model is False
    assert app.credentials({}) is None and app.credentials({"BASS_PASSWORD": ""}) is None
    assert app.credentials({"BASS_PASSWORD": "secret"}) == ("bass", "secret")


def test_a_folder_is_shown_without_its_path(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert shown_name(f"{tmp_path}/mine/") == "mine"
    assert shown_name("owner/model") == "owner/model"


def test_the_early_page_names_a_pair_that_is_known_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    for gpu in (False, True):
        monkeypatch.setattr(app, "GPU_DRIVERS", (str(tmp_path),) if gpu else ())
        for arguments, expected in (
            ([], "" if gpu else "smollm2"),
            (["--device", "cpu"], "smollm2"),
            (["--ray", "auto"], ""),
            (["--pair", "qwen3-8b"], "qwen3-8b"),
            (["--pair", f"{tmp_path}/mine"], "mine"),
        ):
            assert app.pair_name(app.parse(arguments)) == expected


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "app.py"), *arguments],
        cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_it_refuses_to_start_next_to_the_package_called_kernels(tmp_path: Path) -> None:
    info = tmp_path / "kernels-0.10.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.10.0\n")
    ended = start(PYTHONPATH=str(tmp_path))
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.strip() == app.CONFLICT


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app.main(["--help"])
    output = capsys.readouterr().out
    assert ended.value.code == 0
    for option in (
        "--pair", "--draft", "--device", "--dtype", "--threads", "--host", "--port", "--max-batch", "--share",
        "--replay",
        "--max-new-tokens", "--max-prompt", "--max-seconds", "--allow-any-model", "--draft-length",
        "--workers", "--ray", "--worker-resources", "--device-map",
        "--root-path", "BASS_PASSWORD",
    ):  # fmt: skip
        assert option in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--threads", "1", "--pair"], "nothing-here"), (["--replay"], "Cannot read the recording nothing-here")],
)
def test_a_missing_model_or_recording_is_refused_in_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main([*arguments, str(tmp_path / "nothing-here")]) == 2
    output = capsys.readouterr()
    first, *_, last = output.err.strip().splitlines()
    assert (
        output.out == ""
        and first.startswith("Loading; open http://127.0.0.1:")
        and message in last
        and "Traceback" not in output.err
    )

"""After each fault of the served page, the next visitor gets the right answer.

The Gradio server and the clients are real, and drafters and models really fail. No cache and no thread of a race
may be left behind.
"""

from __future__ import annotations

import copy
import gc
import json
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import islice, product
from typing import Any

import httpx
import pytest
import torch
from gradio import Blocks
from gradio.state_holder import SessionState
from gradio_client import Client
from gradio_client.exceptions import AppError
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from bass_core import ModelPair, Monitor, race
from tests.support.drafters import FailingDrafter
from tests.support.memory import left_behind
from tests.support.models import slow_but, tiny_pair
from tests.support.nvml import FakeNvml, plug_in
from ui.page.closed import NO_EVENT, NO_FILES, NO_NAME, Closed
from ui.page.events import Snapshot
from ui.page.limits import Limits
from ui.page.page import build, launch_options
from ui.page.request import RaceRequest, defaults

PAIR = tiny_pair()
TARGET = PAIR.target
BROKEN = copy.deepcopy(TARGET)
BROKEN.get_input_embeddings().weight.fill_(float("nan"))
PROMPT = [5, 6, 7]
# A POST without Gradio's client has to send every argument.
DEFAULTS = list(defaults().values())


def posted(*values: Any) -> dict[str, Any]:
    return {"data": [*values, *DEFAULTS[len(values) :]]}


def source(request: RaceRequest) -> Generator[Snapshot, None, None]:
    """Run a race on token ids. The prompt names the fault; any other prompt is a race without a fault."""
    pair, ids = PAIR, PROMPT
    arguments: dict[str, Any] = {"n": request.batch_size, "max_new_tokens": request.max_new_tokens}
    if request.prompt in ("step", "memory"):
        error = KeyError("a detail that is nobody's business") if request.prompt == "step" else None
        arguments["drafter"] = FailingDrafter(2, error)
    if request.prompt == "nan":
        pair = ModelPair(BROKEN, PAIR.target)
    if request.prompt == "server":
        raise OSError("/secret/path is gone")
    if request.prompt == "long prompt":
        ids = PROMPT * 100
    yield from race(pair, ids, **arguments)


@pytest.fixture(scope="module")
def page() -> Iterator[Blocks]:
    page = build(source, limits=Limits(max_new_tokens=400), about="a test")
    page.launch(prevent_thread_lock=True, quiet=True, **launch_options())
    yield page
    page.close()


@pytest.fixture(scope="module")
def url(page: Blocks) -> str:
    return str(page.local_url).rstrip("/")


@pytest.fixture(scope="module")
def client(url: str) -> Client:
    return Client(url, verbose=False)


def ask(client: Client, prompt: str, tokens: int = 8) -> Any:
    return client.submit(prompt, 2, tokens, 0, 0, api_name="/race").result(120)


@pytest.fixture(scope="module")
def answer(client: Client) -> Any:
    return texts(ask(client, "fine"))


def texts(snapshot: dict[str, Any]) -> Any:
    return {
        name: [sequence["token_ids"] for sequence in lane["sequences"]] for name, lane in snapshot["lanes"].items()
    }


@pytest.fixture
def serving(client: Client, answer: Any) -> Iterator[None]:
    """Check after the test that the next visitor gets the right answer and that nothing is left behind."""
    before = left_behind()
    yield
    assert texts(ask(client, "fine")) == answer
    for _ in range(20):
        if left_behind() == before:
            return
        time.sleep(0.1)
    assert left_behind() == before


@pytest.mark.parametrize(
    ("fault", "sentence", "lanes"),
    [
        ("step", "internal error (KeyError)", ["speculative", "bass"]),
        ("nan", "NaN", ["regular", "speculative", "bass"]),
        ("memory", "ran out of memory", []),
        ("server", "An internal error stopped the race", []),
    ],
)
def test_a_fault_becomes_one_sentence(
    serving: None, client: Client, answer: Any, fault: str, sentence: str, lanes: list[str]
) -> None:
    """The fault ends these lanes, or the whole race if there are none. The sentence names no internals."""
    if lanes:
        last = ask(client, fault)
        errors = {name: lane["error"] for name, lane in last["lanes"].items()}
        assert last["done"] and [name for name, error in errors.items() if error] == lanes
        assert all(sentence in errors[name] for name in lanes) and "nobody's business" not in str(last)
        assert all(errors[name] or text == answer[name] for name, text in texts(last).items())
    else:
        with pytest.raises(AppError, match=sentence) as refusal:
            ask(client, fault)
        assert "secret" not in str(refusal.value)


@contextmanager
def answer_lines(url: str, prompt: str, tokens: int) -> Iterator[Iterator[str]]:
    """Yield the lines of the API's answer, and drop the connection at the end of the block."""
    with httpx.Client(base_url=f"{url}/gradio_api", timeout=120) as connection:
        joined = connection.post("/call/race", json=posted(prompt, 4, tokens, 0, 0))
        with connection.stream("GET", f"/call/race/{joined.json()['event_id']}") as lines:
            yield lines.iter_lines()


@pytest.mark.parametrize(
    ("prompt", "lines"), slow_but([("fine", 6)], [("long prompt", 0), ("fine", 1), ("fine", 6)])
)
def test_a_client_may_vanish_during_a_race(serving: None, url: str, prompt: str, lines: int) -> None:
    with answer_lines(url, prompt, 400) as answer:
        list(islice(answer, lines))


@pytest.mark.slow
def test_clients_may_vanish_before_a_race_or_never_read(serving: None, url: str) -> None:
    with answer_lines(url, "fine", 400) as first:
        next(first)
        with answer_lines(url, "fine", 400):
            pass
    for _ in range(3):
        httpx.post(f"{url}/gradio_api/call/race", json=posted("fine", 2, 8, 0, 0)).raise_for_status()
    with answer_lines(url, "fine", 8) as answer:
        assert '"done": true' in list(answer)[-2]


@pytest.mark.slow
def test_sessions_of_visitors_who_left_are_deleted(page: Blocks, url: str) -> None:
    """Each request of a script opens a new session, for which Gradio keeps 90 kB."""
    for _ in range(80):
        with answer_lines(url, "", 8) as answer:
            assert "event: error" in list(answer)
    gc.collect()
    sessions = (thing for thing in gc.get_objects() if isinstance(thing, SessionState))
    # Other tests of this process have their own pages.
    assert 1 <= sum(session.blocks_config.root_block is page for session in sessions) <= 70


@pytest.mark.parametrize("route", ["upload", "upload/", "process_recording", "component_server", "call/race"])
@pytest.mark.parametrize("content", [b"", b"1", b"some bytes"])
def test_nothing_can_be_uploaded(url: str, route: str, content: bytes) -> None:
    fields = {"component_id": "1", "session_hash": "a", "fn_name": "missed"}
    refused = httpx.post(f"{url}/gradio_api/{route}", files={"files": ("x.txt", content)}, data=fields)
    assert (refused.status_code, refused.text) == (403, NO_FILES)


CLOSED = [
    "gradio_api/upload", "gradio_api/upload/", "gradio_api/upload_progress?upload_id=a",
    "gradio_api/process_recording", "gradio_api/file=https://example.org/", "gradio_api/file/http://example.org/",
    "gradio_api/proxy=https://example.org/", "gradio_api/proxy=http://example.org/",
    "gradio_api/custom_component/a/b/c/d", "gradio_api/deep_link?session_hash=a",
    "gradio_api/stream/a/b/1/playlist.m3u8", "gradio_api/runs", "gradio_api/run-history/records",
    "gradio_api/vibe-edit/", "gradio_api/vibe-code", "gradio_api/undo-vibe-edit", "gradio_api/dev/reload",
    "monitoring", "monitoring/summary",
]  # fmt: skip


def test_the_routes_that_the_page_does_not_need_are_closed(url: str) -> None:
    """No request has a form, which would be refused anyway."""
    # A proxy may keep the prefix under which it serves the page, or remove it.
    prefixed = TestClient(Closed(PlainTextResponse("open")), root_path="/bass")
    with httpx.Client(base_url=url) as client:
        for method, route in product(("GET", "POST"), CLOSED):
            answers = [client.request(method, f"/{route}")]
            answers += [prefixed.request(method, f"{prefix}/{route}") for prefix in ("/bass", "")]
            for refused in answers:
                assert (refused.status_code, refused.text) == (403, NO_FILES), (method, route)
    assert prefixed.get("/bass/gradio_api/info").text == "open"


@pytest.mark.slow
def test_variables_turn_no_further_parts_of_gradio_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_NUM_WORKERS", "1")
    monkeypatch.setenv("GRADIO_MCP_SERVER", "True")
    page = build(source, limits=Limits(), about="a test")
    page.launch(prevent_thread_lock=True, quiet=True, **launch_options())
    try:
        assert getattr(page, "_static_worker_pool", None) is None
        assert not page.mcp_server and page.mcp_error is None
    finally:
        page.close()


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("call/nothing", {"data": []}), ("call/v2/nothing", {}), ("call/v2/race", {"nothing": 1}),
        ("run/nothing", {"data": []}), ("api/nothing", {"data": []}), ("run/race", {"data": [], "fn_index": 999}),
        ("queue/join", {"data": [], "fn_index": 999, "session_hash": "a"}),
        ("component_server", {"data": 1, "component_id": 10**6, "session_hash": "a", "fn_name": "missed"}),
        ("call/race/nobody", None), ("call/v2/race/nobody", None),
    ],
)  # fmt: skip
def test_an_unknown_name_is_one_sentence_and_one_line_of_the_log(
    url: str, route: str, body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"{url}/gradio_api/{route}"
    answer = httpx.get(address) if body is None else httpx.post(address, json=body)
    assert answer.status_code == 404 and answer.json()["detail"] == (NO_EVENT if body is None else NO_NAME)
    assert len(caplog.records) == 1 and "\n" not in caplog.text.strip() and not caplog.records[0].exc_info


def test_a_lost_session_is_told_so_in_gradios_own_words(url: str) -> None:
    answer = httpx.get(f"{url}/gradio_api/queue/data?session_hash=nobody")
    message = json.loads(answer.text.removeprefix("data: "))
    assert message["session_not_found"] and message["message"] == NO_EVENT


@pytest.mark.slow
def test_nvml_that_vanishes_during_a_race_costs_only_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the driver, NVML's symbols are missing, so its calls raise AttributeError and not an NVML error."""
    plug_in(monkeypatch)
    cuda = torch.device("cuda", 0)
    race_module = import_module("bass_core.lanes.race")
    monkeypatch.setattr(race_module, "Monitor", lambda device: Monitor(cuda, interval_s=0.005))
    monkeypatch.setattr(race_module, "SNAPSHOT_SECONDS", 0.02)
    seen = []
    for snapshot in race(PAIR, PROMPT, n=4, max_new_tokens=200):
        seen.append(snapshot["device"]["gpu_power_w"])
        if len(seen) == 1:
            monkeypatch.setattr(FakeNvml, "_call", lambda *_: (_ for _ in ()).throw(AttributeError("gone")))
    assert seen[0] == 250.5 and seen[-1] is None
    assert snapshot["done"] and all(lane["error"] is None for lane in snapshot["lanes"].values())


@pytest.mark.slow
def test_page_and_api_ask_for_the_password() -> None:
    page = build(source, limits=Limits(), about="a test")
    _, address, _ = page.launch(prevent_thread_lock=True, quiet=True, auth=("bass", "secret"), **launch_options())
    try:
        url = f"{address.rstrip('/')}/gradio_api/call/race"
        assert httpx.post(url, json=posted("fine", 2, 8, 0, 0)).status_code == 401
        assert "fine" not in httpx.get(f"{address.rstrip('/')}/config").text
        inside = Client(address, auth=("bass", "secret"), verbose=False)
        assert ask(inside, "fine")["done"]
    finally:
        page.close()

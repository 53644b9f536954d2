"""Common slips of callers work or are refused in one sentence, and the command behaves like a Unix command."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import app
from bass_core import ModelPair, PairError, RequestError, __version__, generate, load_pair, race, stream
from bass_core.__main__ import checked_options, main, parser
from bass_core.decode.prompts import Chat, encode_prompts
from bass_core.lanes import schedule
from bass_core.model.loading.sources import locate
from tests.support import ROOT
from tests.support.models import byte_tokenizer, prompts, tiny

from .test_bad_values import refusal


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def edited(folder: Path, to: Path, name: str, **fields: Any) -> Path:
    """Copy the model with other values in one of its JSON files; return its folder."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).symlink_to(file)
    path = to / name
    old = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(old | fields))
    return to


@pytest.mark.parametrize("field", [{"rms_norm_eps": 0}, {"use_cache": None}, {"hidden_size": 33}], ids=str)
def test_a_config_that_transformers_refuses_is_one_sentence(
    field: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    wrong = edited(folder, tmp_path / "wrong", "config.json", **field)
    with pytest.raises(PairError, match="can't be loaded as a causal language model") as refusal:
        load_pair(str(wrong), dtype="float32")
    message = str(refusal.value)
    assert "\n" not in message and next(iter(field)).replace("_", " ") in message.replace("_", " ")


def test_paths_are_accepted_as_names(folder: Path) -> None:
    pair = load_pair(folder, draft=folder, dtype="float32")
    assert pair.draft is not None
    with pytest.raises(RequestError, match="as text or a Path; got 3"):
        load_pair(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [generate, stream, race])
def test_a_name_or_a_model_instead_of_a_pair_is_refused(call: Any) -> None:
    for value, advice in (("smollm2", 'load_pair("smollm2")'), (tiny("llama"), "ModelPair(target=...)")):
        with pytest.raises(RequestError, match="The first argument must be a pair") as refusal:
            call(value, "hi")
        assert advice in str(refusal.value) and "  " not in str(refusal.value)


LLAMA: Any = tiny("llama")
NO_MODEL = "must be a model of transformers; got "


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt2",), f"The target {NO_MODEL}'gpt2': load_pair"),
        ((None,), f"The target {NO_MODEL}None"),
        ((LLAMA.config,), f"The target {NO_MODEL}a LlamaConfig"),
        ((type(LLAMA),), f"The target {NO_MODEL}<class 'transformers."),
        ((torch.nn.DataParallel(LLAMA),), f"The target {NO_MODEL}a DataParallel"),
        ((LLAMA, "gpt2"), f"The draft {NO_MODEL}'gpt2'"),
        ((LLAMA, [LLAMA]), f"The draft {NO_MODEL}a list"),
        ((LLAMA, None, "gpt2"), "The tokenizer must be one of transformers; got 'gpt2'"),
    ],
)
def test_a_pair_of_other_things_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(PairError, match=re.escape(message)):
        ModelPair(*arguments)


def test_messages_have_one_line_and_a_limited_length() -> None:
    with pytest.raises(RequestError, match="The draft must be a name, a Hub id or a folder") as refusal:
        load_pair("smollm2", draft=LLAMA)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 600


def test_a_token_that_the_model_does_not_know_is_refused_by_name() -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(
        RequestError, match=r"The tokenizer made token \d+ of this prompt, and the model knows 0 to 95"
    ):
        generate(ModelPair(LLAMA, None, tokenizer), "hi ~~~ \xff\xfe")
    with pytest.raises(RequestError, match="Token ids must be from 0 to 95; got 5 to 96"):
        generate(ModelPair(LLAMA), [5, 96])
    with pytest.raises(RequestError, match='eos_token_id must be "auto", None, a token id'):
        generate(ModelPair(LLAMA), [5], eos_token_id=True)


@pytest.mark.slow  # importing torch's compiler takes seconds
def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(PairError, match=r"The target is a result of torch\.compile"):
        ModelPair(torch.compile(LLAMA, backend="eager"))  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [2.0, [[2]], "2", [True]])
def test_an_end_token_that_is_no_token_id_is_refused(ids: Any) -> None:
    model: Any = tiny("llama")
    # transformers does not check this field when it reads it from a file.
    vars(model.generation_config)["eos_token_id"] = ids
    with pytest.raises(PairError, match="which is not a token id or a list of them"):
        generate(ModelPair(model), prompts(1)[0])


def test_files_and_impossible_names_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(PairError, match="is a file, and models are read from folders"):
        locate(str(file))
    for name in ("a" * 100_000, "-" * 100_000 + "/!", "a\0b"):
        with pytest.raises(PairError, match="no pair and no folder") as refusal:
            locate(name)
        assert len(str(refusal.value)) < 600


TEMPLATE = "{% for m in messages %}[{{ CONTENT }}]{% endfor %}"


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("m['content'][:20]", "[Write a haiku about ]"),
        ("m['content'] | upper", "[WRITE A HAIKU ABOUT THE SEA.]"),
        ("m['content'][0]['text']", "[Write a haiku about the sea.]"),
    ],
)
def test_a_chat_template_may_change_the_text(content: str, shown: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("CONTENT", content)
    pair = ModelPair(tiny("llama"), None, tokenizer)
    vars(pair)["vocab"] = len(tokenizer)
    assert tokenizer.decode(encode_prompts(pair, "Write a haiku about the sea.", 1, Chat())[0]) == shown


def test_ctrl_c_at_the_start_of_overlapping_lanes_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def interrupted(self: threading.Thread) -> None:
        if self._target.__name__ == "work":  # type: ignore[attr-defined]
            if started:
                raise KeyboardInterrupt
            started.append(self)
        start(self)

    snapshots = race(ModelPair(tiny("llama")), prompts(1)[0], lanes=("regular", "bass"), scheduling="overlap")
    monkeypatch.setattr(schedule.threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(snapshots)
    assert len(started) == 1 and not started[0].is_alive()


def bass(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell command in which $BASS is the program and $PAIR a model."""
    program = f"{sys.executable} -m bass_core"
    names = {"PAIR": str(folder), "BASS": program, "BASS_MEASURE": "0", "BASS_CPU_KERNELS": "0"}
    command = f"set -o pipefail; {command}"
    return subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **names}
    )


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"bass {__version__}\n"


def test_a_prompt_on_stdin_is_utf_8(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is read as UTF-8 on any system, with or without the byte order mark that Windows writes."""

    def write_stdin(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="cp1252"))

    options = parser().parse_args(["generate", "-"])
    for mark in ("", "\ufeff"):
        write_stdin(f"{mark}Grüße".encode())
        assert checked_options(options)[0] == "Grüße"
    for content, message in ((b"Gr\xfc\xdfe", "not UTF-8"), (b" ", "empty")):
        write_stdin(content)
        assert message in refusal(capsys, main, "generate", "-")


def test_ctrl_c_shows_no_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bass_core.__main__._pair", interrupted)
    monkeypatch.setattr(app, "serve", interrupted)
    assert main(["generate", "Hello"]) == main(["serve"]) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Loading;")


def test_a_broken_connection_while_loading_is_not_taken_for_a_closed_stdout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("bass_core.__main__._pair", broken)
    with pytest.raises(BrokenPipeError):
        main(["generate", "Hello"])


GENERATE = "$BASS generate --pair $PAIR --dtype float32 --max-new-tokens 4"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        (f"{GENERATE} hello | true", 141, ""),
        (f"{GENERATE} hello > /dev/full", 2, "The answer can't be written (No space left on device)"),
        (f"{GENERATE} - <&-", 2, "There is no stdin to read the prompt from"),
    ],
    ids=["| true", "> /dev/full", "<&-"],
)
def test_closed_or_full_streams_show_no_traceback(command: str, status: int, message: str, folder: Path) -> None:
    done = bass(command, folder)
    assert done.returncode == status, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr and "Exception" not in done.stderr

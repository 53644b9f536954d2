"""The figures of the slider "How many readers at once?" follow from the stored measurements."""

from __future__ import annotations

import json

import pytest

from bench.report import readers
from bench.report.tables import load
from ui.sweep.readers import FILE, figures


def test_the_pages_file_is_what_the_command_writes() -> None:
    again, stored = json.loads(json.dumps(readers.predicted([1, 4]))), figures()
    assert {name: again[name] for name in ("pair", "drafts", "texts")} == {
        name: stored[name] for name in ("pair", "drafts", "texts")
    }
    places = [stored["readers"].index(count) for count in (1, 4)]
    for name, machine in stored["machines"].items():
        new = again["machines"][name]
        assert new["source"] == machine["source"] and new.get("measured") == machine.get("measured")
        assert new["regular"] == pytest.approx([machine["regular"][at] for at in places])
        for text, steps in machine["bass"].items():
            for at, step in zip(places, new["bass"][text], strict=True):
                assert step == pytest.approx(steps[at])


@pytest.mark.slow
def test_the_command_writes_the_whole_file(tmp_path, capsys) -> None:
    readers.main(["--out", str(tmp_path / "readers.json")])
    assert (tmp_path / "readers.json").read_text() == FILE.read_text()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["claims"] == readers.claims(figures())


def test_the_predictions_are_close_to_the_measured_speedups() -> None:
    verdicts = readers.claims(figures())
    assert len(verdicts) == 4 and all(verdict["holds"] for verdict in verdicts)
    moved = json.loads(FILE.read_text())
    moved["machines"]["amx"]["measured"]["questions"]["4"] *= 2
    assert [verdict["holds"] for verdict in readers.claims(moved)] == [True, True, False, True]


def test_the_machines_differ_as_measured() -> None:
    """More readers never make a step shorter. At 8 readers BASS still pays with AMX, and no longer without it."""
    stored = figures()
    for machine in stored["machines"].values():
        for steps in machine["bass"].values():
            assert [ms for _, ms in steps] == sorted(ms for _, ms in steps)
        assert machine["regular"] == sorted(machine["regular"])
    at = stored["readers"].index(8)
    with_amx, without = (
        readers.speedup(stored["machines"][name], "questions", at, 8) for name in ("amx", "no-amx")
    )
    assert without < 1 < with_amx
    for name, file in (("amx", "floor-native-bf16"), ("no-amx", "floor-without-amx")):
        document, source = load(file), stored["machines"][name]["source"]
        assert all(fact in source for fact in (document["device"], document["date"], document["revision"]))

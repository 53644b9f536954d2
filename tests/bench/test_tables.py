"""The tables in the documents match the stored result files."""

import json

from bench.report import tables


def test_the_tables_of_all_documents_are_up_to_date():
    assert tables.main(["--check"]) == 0


def test_an_old_table_is_noticed_and_rewritten(tmp_path, monkeypatch, capsys):
    rows = [{"arm": "regular", "ms/token": 34.96}, {"arm": "bass", "ms/token": None}]
    document = {
        "command": "python -m bench x", "device": "a machine", "date": "2026-11-21", "revision": "abc",
        "versions": {"torch": "2", "transformers": "5"}, "results": rows, "claims": [],
    }  # fmt: skip
    (tmp_path / "x.json").write_text(json.dumps(document))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: x -->\nold\n<!-- end -->\nbehind\n")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PAGES", (page,))
    monkeypatch.setitem(tables.TABLES, "x", tables._table("x", "arm = decoder | ms/token"))
    assert tables.main(["--check"]) == 1
    assert "old" in page.read_text()
    assert tables.main([]) == 0
    text = page.read_text()
    assert "| decoder | ms/token |\n| --- | ---: |\n| regular | 35.0 |\n| bass | n/a |" in text
    assert "`python -m bench x`, a machine, 2026-11-21" in text
    assert text.startswith("before\n") and text.endswith("behind\n")
    assert tables.main(["--check"]) == 0


def test_exactness_has_one_table_per_kind_of_cpu(tmp_path, monkeypatch):
    shared = {
        "command": "python -m bench exactness", "device": "a machine", "date": "2026-11-21", "revision": "abc",
        "versions": {"torch": "2", "transformers": "5"}, "claims": [],
    }  # fmt: skip
    equal_row = {"batch": 1, "arm": "speculative", "rows": 16, "identical": 1.0}
    difference = {
        "prompt": 3, "at": 26, "ours": 5, "theirs": 7, "ours text": " a", "theirs text": " the",
        "p_ours": 0.3, "p_theirs": 0.31, "tie": 0.968,
    }  # fmt: skip
    differing_row = {
        "batch": 4,
        "arm": "bass",
        "rows": 16,
        "identical": 15 / 16,
        "text": "coupled",
        "differences": [difference],
    }
    old = shared | {"results": [equal_row]}
    new = shared | {
        "results": [equal_row | {"text": "greedy"}, differing_row],
        "cpu": {"multiplies bfloat16 natively": True},
    }
    for name, document in (("exactness-cpu-bf16", old), ("exactness-native-bf16", new)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    first, second = tables.TABLES["exactness"]().split("#### exactness-native-bf16.json")
    assert first.startswith("#### exactness-cpu-bf16.json: kind of CPU not noted\n")
    assert "| text | decoder | batch 1 |" in first and "| greedy | speculative | 16 of 16 |" in first
    assert second.startswith(": multiplies bfloat16 natively\n")
    assert "| greedy | speculative | 16 of 16 |  |" in second and "| coupled | bass |  | 15 of 16 |" in second
    assert "- coupled, bass, batch 4: prompt 3 at 26, ' a' for ' the': 0.3000 against 0.3100, tie 0.9680" in second

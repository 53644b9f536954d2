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

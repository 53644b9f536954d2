"""The documents: links resolve, the files that they name exist, and their code runs.

Every Python block of README.md, docs/usage.md and docs/extending.md runs as written on a tiny pair, the blocks of
a section one after another. Entries that a block adds to a table of the project are removed afterwards.
"""

from __future__ import annotations

import copy
import re
import sys
from itertools import groupby
from pathlib import Path
from types import ModuleType

import pytest

import bass_core
import bench.report.report as report  # noqa: F401  imported before a test replaces load_pair, or it would keep that
from bass_core.draft.registry import DRAFTERS
from bass_core.length.options import POLICIES
from bass_core.model.attention import BACKENDS
from bass_core.model.loading.catalogue import CATALOGUE
from tests.support import ROOT
from tests.support.page import load_saved, save_tiny_pair

DOCUMENTS = sorted(
    path
    for folder in ("", "docs/", "bench/", "bench/results/", "distill/", "drafts/*/")
    for path in ROOT.glob(f"{folder}*.md")
)
# Folders that a path in a document may be relative to.
ROOTS = (ROOT, ROOT / "bass_core", ROOT / "bench")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"(?<![\w/.-])(?:[\w-]+/)+[\w-]+\.(?:py|js|css|toml|txt|svg|png)\b")
# Blocks with these words are not run: they need a running page.
NEEDS_MORE = ("gradio_client",)


def text_of(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the page's headings."""
    heads = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page):
    for link in LINK.findall(text_of(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link

    if page.name == "CHANGELOG.md":
        return  # a history, which may name removed files
    for name in FILE.findall(LINK.sub("", text_of(page))):
        exists = any((root / name).exists() for root in (*ROOTS, page.parent))
        assert exists or "vllm" in name or "sglang" in name, name


def test_the_readme_configures_a_space_and_all_files_name_one_version():
    head = (ROOT / "README.md").read_text(encoding="utf-8").split("---\n")[1]
    assert "sdk: gradio\n" in head and "app_file: app.py\n" in head
    version = bass_core.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## (\d\S*)", changes, re.MULTILINE)[1] == version


def sections() -> list[tuple[str, str]]:
    """Return (page and heading, the section's Python blocks as one program) for each section."""
    programs = []
    for page in (ROOT / "README.md", ROOT / "docs" / "usage.md", ROOT / "docs" / "extending.md"):
        heading = ""
        blocks = []
        for part in re.finditer(rf"^## ([^\n]+)$|{FENCE.pattern}", page.read_text(encoding="utf-8"), FENCE.flags):
            if part[1]:
                heading = part[1]
            elif part[2] == "python" and not any(word in part[3] for word in NEEDS_MORE):
                blocks.append((f"{page.name}: {heading}", part[3]))
        for name, group in groupby(blocks, key=lambda block: block[0]):
            programs.append((name, "\n".join(code for _, code in group)))
    return programs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    pair = load_saved(save_tiny_pair(tmp_path_factory.mktemp("pair")))
    assert pair.tokenizer is not None
    pair.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    return pair


@pytest.fixture
def tables(monkeypatch):
    """Restore the tables that a recipe adds to, after the test."""
    from ui.page.setting import SETTINGS
    from ui.race import feed, parts
    from ui.race.formulas import FORMULAS

    monkeypatch.setattr(feed, "CHARTED_METRICS", feed.CHARTED_METRICS)
    pages = (SETTINGS, parts.CHARTS, parts.LANE_CHARTS, FORMULAS)
    known = (bass_core.METHODS, DRAFTERS, POLICIES, BACKENDS, CATALOGUE, bass_core.VERIFICATIONS, *pages)
    before = [copy.copy(table) for table in known]
    yield
    for table, old in zip(known, before, strict=True):
        table.clear()
        table.update(old)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), sections(), ids=[name for name, _ in sections()])
def test_code_blocks_run_as_written(name, code, tiny, tables, monkeypatch, tmp_path):
    monkeypatch.setattr(bass_core, "load_pair", lambda *arguments, **options: tiny)
    monkeypatch.chdir(tmp_path)
    recipe = ModuleType("recipe")
    monkeypatch.setitem(sys.modules, "recipe", recipe)
    exec(compile(code, name, "exec"), vars(recipe))


def test_the_script_of_the_recipe_for_a_chart_is_like_that_of_another_chart():
    (line,) = re.findall(
        r"^```js\n(.*)\n```$", (ROOT / "docs/extending.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    charts = (ROOT / "ui/static/race/charts.js").read_text(encoding="utf-8")
    assert line.replace("throughput:", "race:").replace('"throughput_tps"', '"new_tokens"') in charts

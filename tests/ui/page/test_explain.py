"""What the page says about a finished race agrees with the API: tips, inspector, charts, summary, exports."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gradio_client import Client
from playwright.sync_api import BrowserContext, Page, expect

from ..browser import LANES, fill, open_page, run_to_the_end, shown
from ..conftest import ROOT, watched

pytestmark = pytest.mark.slow
SETTINGS = {"prompt": "Hello", "batch": 3, "tokens": 40, "temperature": 0.9, "seed": 11}


@pytest.fixture(scope="module")
def page(context: BrowserContext, server: str) -> Iterator[Page]:
    """A page with one finished race, shared by all tests here."""
    with watched(context, server) as page:
        fill(page, **SETTINGS)  # type: ignore[arg-type]
        run_to_the_end(page)
        yield page


@pytest.fixture(scope="module")
def final(server: str) -> dict[str, Any]:
    """The last snapshot of the same race through the API."""
    snapshot: dict[str, Any] = (
        Client(server, verbose=False).submit("Hello", 3, 40, 0.9, 11, api_name="/race").result()
    )
    return snapshot


def a_round(final: dict[str, Any], accepts: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first round of the bass lane with a row for which `accepts` is true, and that row."""
    for record in final["lanes"]["bass"]["rounds"]:
        for row in record["rows"]:
            if row["drafted"] and row["written"] > row["accepted"] and accepts(row):
                return record, row
    raise AssertionError("no such round: choose another seed")


def test_a_tip_gives_round_position_p_q_and_verdict(page: Page, final: dict[str, Any]) -> None:
    record, row = a_round(final, lambda row: 0 < row["accepted"] < len(row["drafted"]))
    spans = page.locator("#lane-bass .sequence").nth(row["sequence"]).locator(".token")
    spans.nth(row["start"]).hover()
    tip = page.locator(".token-tip")
    expect(tip).to_contain_text(f"round {record['round']}, position 1 ({len(row['drafted'])} drafted)")
    expect(tip).to_contain_text(f"p(x) {row['p'][0]:.3f}, q(x) {row['q'][0]:.3f}")
    expect(tip).to_contain_text("accepted:")
    spans.nth(row["start"] + row["accepted"]).hover()
    expect(tip).to_contain_text("recovered")
    expect(tip).to_contain_text(f"position {row['accepted'] + 1} ")
    expect(tip).to_contain_text("is not below h")
    page.locator("h1").hover()
    expect(tip).to_be_hidden()


def test_arrow_keys_explain_tokens_and_enter_opens_the_inspector(page: Page, final: dict[str, Any]) -> None:
    window = page.locator("#lane-bass .window").first
    window.focus()
    page.keyboard.press("Home")
    expect(page.locator(".token-tip")).to_contain_text("token 1,")
    expect(page.locator(".board-spoken")).to_contain_text("prefill")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    last = max(r["round"] for r in final["lanes"]["bass"]["rounds"] if any(w["sequence"] == 0 for w in r["rows"]))
    expect(page.locator(".round-line")).to_contain_text(f"Lane round {last},")
    page.keyboard.press("Escape")
    expect(page.locator(".token-tip")).to_be_hidden()


def test_seven_charts_have_data_or_say_n_a(page: Page) -> None:
    drawn = {}
    for name in ("latency", "race", "acceptance", "lengths", "device", "memory"):
        page.locator(f"[data-chart={name}]").scroll_into_view_if_needed()
        page.wait_for_function(
            "name => document.querySelector(`[data-chart=${name}] .plot`).data?.length", arg=name, timeout=60_000
        )
        drawn[name] = page.eval_on_selector(f"[data-chart={name}] .plot", "plot => plot.data.map(t => t.name)")
    assert drawn["latency"] == drawn["race"] == ["Regular", "Speculative", "BASS"]
    assert drawn["acceptance"] == drawn["lengths"] == ["Speculative", "BASS"]
    assert (drawn["device"], drawn["memory"]) == (["CPU share"], ["Memory"])
    flops = page.locator("[data-chart=flops]")
    flops.scroll_into_view_if_needed()
    expect(flops.locator(".annotation")).to_have_text("n/a")
    readings = {key: page.inner_text(f"[data-reading={key}]") for key in ("gpu_power_w", "flops_utilization")}
    assert set(readings.values()) == {"n/a"}
    kinds = page.eval_on_selector(".summary-figure .plot", "plot => plot.data.map(t => [t.type, t.x.length])")
    assert kinds[:3] == [["bar", 3]] * 3 and [kind for kind, _ in kinds[3:]] == ["scatter"] * 2


def saved(page: Page, what: str) -> str:
    """The text that a button downloads."""
    with page.expect_download() as download:
        page.click(f"[data-take={what}]")
    return download.value.path().read_text(encoding="utf-8")


def test_json_and_csv_hold_the_run(page: Page, final: dict[str, Any]) -> None:
    run = json.loads(saved(page, "json"))
    assert run["settings"]["seed"] == 11 and run["settings"]["prompt"] == "Hello"
    table = list(csv.DictReader(saved(page, "csv").splitlines()))
    for lane in LANES:
        ours, theirs = run["lanes"][lane], final["lanes"][lane]
        assert ours["metrics"]["accepted"] == theirs["metrics"]["accepted"]
        for index, (own, other) in enumerate(zip(ours["sequences"], theirs["sequences"], strict=True)):
            assert {key: own[key] for key in ("text", "token_ids", "origins", "finish_reason")} == {
                key: other[key] for key in ("text", "token_ids", "origins", "finish_reason")
            }
            rows = [row for row in table if (row["lane"], row["sequence"]) == (lane, str(index))]
            assert [int(row["token_id"]) for row in rows] == other["token_ids"]
            assert "".join(json.loads(row["text"]) for row in rows) == other["text"]
            assert [row["origin"] for row in rows] == other["origins"]


def test_the_snippet_repeats_the_run(page: Page, tiny_pair: tuple[Path, Path]) -> None:
    code = page.locator(".snippet code").text_content() or ""
    assert "RecordedLengths" in code
    # The snippet names folders without their parent folder: run it there.
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tiny_pair[0].parent, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}, encoding="utf-8",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    texts = re.split(r"--- \w+, sequence \d+\n", ended.stdout)[1:]
    assert [text.removesuffix("\n") for text in texts] == [text for lane in LANES for text in shown(page, lane)]


def test_a_link_restores_the_settings(page: Page, context: BrowserContext) -> None:
    page.click("[data-take=link]")
    address = page.url
    assert "#race?" in address and "seed=11" in address
    other = context.new_page()
    open_page(
        other, address.replace("draft_length=auto", "draft_length=4").replace("scheduling=fair", "scheduling=x")
    )
    expect(other.locator("#seed input")).to_have_value("11")
    expect(other.locator("#prompt textarea")).to_have_value("Hello")
    expect(other.locator("#batch-size input")).to_have_value("3")
    other.click("text=More settings")
    expect(other.locator("#draft-length input")).to_have_value("fixed, 4")
    expect(other.locator("#scheduling input")).to_have_value(re.compile("fair"))
    # Another link in the same tab, then back.
    other.evaluate("location.hash = '#race?seed=12&lanes=nonsense'")
    expect(other.locator("#seed input")).to_have_value("12", timeout=60_000)
    other.click("text=More settings")
    expect(other.get_by_role("checkbox", name="BASS")).to_be_checked()
    other.go_back()
    expect(other.locator("#seed input")).to_have_value("11", timeout=60_000)
    other.close()


def test_how_it_works_draws_and_has_the_measured_points(page: Page) -> None:
    page.get_by_role("tab", name="How it works").click()
    expect(page.locator(".drawing")).to_have_count(1)
    names = "(document.querySelector('.what-if .plot').data?.map(t => t.name) ?? [])"
    page.locator(".what-if .plot").scroll_into_view_if_needed()
    page.wait_for_function(f"() => {names}.length === 5")
    assert page.evaluate(names)[3:] == ["Speculative, measured", "BASS, measured"]
    page.locator(".what-if [data-slider=a]").fill("0.5")
    page.locator(".what-if [data-slider=l]").fill("3")
    page.locator(".what-if [data-slider=c]").fill("0.25")
    page.locator(".what-if [data-slider=b]").fill("2")
    # (1 - 0.5^4) / 0.5 = 1.875 tokens; / (3 x 0.25 + 1) = 1.07; with a^2 = 0.25: 1.328 / 1.75 = 0.76.
    line = page.locator(".what-if-line")
    expect(line).to_contain_text("1.88 tokens a round, 1.07×")
    expect(line).to_contain_text("0.76× with one common stop for the batch of 2")
    page.get_by_role("tab", name="Race").click()

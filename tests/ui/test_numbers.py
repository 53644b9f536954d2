"""Every number on the page of three races (greedy, sampled, coupled), computed again from the export.

TABLE lists the numbers, their places on the page and their formulas (formulas.py), as docs/formulas.md does in
words. p and q are also computed with the models. The step-by-step view is compared with the same numbers, and the
page's snippet repeats the sampled race.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Locator, Page, expect
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import ROOT

from . import formulas as f
from .browser import (
    LANES,
    assert_accessible,
    choose_option,
    compared,
    exported,
    fill,
    loaded,
    open_settings,
    run_to_the_end,
    shown,
)

RACES = {"greedy": (0.0, "greedy"), "sampled": (0.9, "block"), "coupled": (0.9, "coupled")}
PROMPT = "Hello"
SEEN_LANES = """() => Object.fromEntries([...document.querySelectorAll('.lane')]
  .filter((e) => e.offsetParent).map((e) => [
  e.dataset.lane, {
    label: e.querySelector('h2').textContent,
    figures: Object.fromEntries([...e.querySelectorAll('[data-figure]')]
      .map((f) => [f.dataset.figure, f.textContent])),
    means: document.querySelector(`[data-axis=${e.dataset.lane}] .axis-means`).textContent,
    flag: document.querySelector(`[data-axis=${e.dataset.lane}] .axis-flag`).textContent,
    read: document.querySelector(`[data-axis=${e.dataset.lane}] .axis-read`).textContent,
  }]))"""
SEEN_TABLE = """() => [...document.querySelectorAll('.figures-table tr')]
  .map((row) => [...row.children].map((c) => c.textContent))"""
SEEN_VERDICT = """() => [document.querySelector('.verdict-head').textContent,
  [...document.querySelectorAll('.verdict li')].map((line) => line.textContent)]"""
# Chooses lanes, sequences and rounds with the inspector's controls, as a reader would.
SEEN_INSPECTOR = """() => {
  const box = document.querySelector('.bass-inspector'), pick = (name) => box.querySelector(`[data-pick=${name}]`);
  const set = (name, value) => { pick(name).value = value; pick(name).dispatchEvent(new Event('change')); };
  const found = [];
  for (const lane of [...pick('lane').options].map((o) => o.value)) {
    set('lane', lane);
    for (const sequence of [...pick('sequence').options].map((o) => o.value)) {
      set('sequence', sequence);
      const count = Number(box.querySelector('[data-rounds]').textContent.slice(3));
      for (let at = 1; at <= count; at += 1) {
        set('round', at);
        // By variable, or else by its words. Values at temperature 1 stand below those of the round.
        const rows = [...box.querySelectorAll('.round-scroll tr')].reverse();
        found.push({
          lane, sequence: Number(sequence), at: at - 1, line: box.querySelector('.round-line').textContent,
          note: box.querySelector('.round-note').textContent,
          rows: Object.fromEntries(rows.map((row) =>
            [row.cells[0].querySelector('code').textContent || row.cells[0].innerText.trim(),
              [...row.cells].slice(1).map((c) => c.textContent)])),
        });
      }
    }
  }
  return found;
}"""


class Run:
    """The export of a race, and the texts that the page shows at its end."""

    def __init__(self, page: Page) -> None:
        self.lanes = {name: f.Lane(data, name) for name, data in exported(page)["lanes"].items()}
        self.regular = self.lanes["regular"]
        # At the end, all lanes have their flags on the axis.
        expect(page.locator(".axis-flag:visible")).to_have_count(len(self.lanes))
        self.seen = page.evaluate(SEEN_LANES)
        self.head, self.lines = page.evaluate(SEEN_VERDICT)
        self.why = page.locator(".why li").all_text_contents()
        columns, *rows = page.evaluate(SEEN_TABLE)
        self.table = {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in rows}
        self.inspector = page.evaluate(SEEN_INSPECTOR)

    def label(self, name: str) -> str:
        return str(self.seen[name]["label"])


def same(text: str, value: float | str | None, share: float = 1e-3) -> bool:
    """Whether the text shows the value.

    A number may differ from the text by half a unit of the text's last digit, plus `share` of its size, because
    times are rounded. The text of None is "n/a" or a dash.
    """
    if isinstance(value, str):
        return text == value
    match = re.search(r"-?\d[\d,]*\.?(\d*)(?:e-?\d+)?", text.replace("\u2212", "-"))
    if match is None or value is None:
        return match is None and value is None
    digits = re.search(r"\d[\d,]*\.?(\d*)", text)
    tolerance = 0.5001 * 10 ** -len(digits[1] if digits else "")
    return abs(float(match[0].replace(",", "")) - value) <= tolerance + share * abs(value)


def head(key: str) -> Callable[[Run, str], str]:
    """A function that reads a figure in a lane's head."""
    return lambda run, name: str(run.seen[name]["figures"][key])


def cell(label: str) -> Callable[[Run, str], str]:
    """A function that reads a cell of the table "Afterwards": "n/a" if the race has no such row."""
    return lambda run, name: str(run.table.get(label, {}).get(run.label(name), "n/a"))


def of_lane(formula: Callable[[f.Lane], Any]) -> Callable[[Run, str], Any]:
    return lambda run, name: formula(run.lanes[name])


def against_regular(formula: Callable[[f.Lane, f.Lane], float]) -> Callable[[Run, str], float]:
    return lambda run, name: formula(run.lanes[name], run.regular)


# (name of the number, function that reads its text on the page, its formula).
TABLE: list[tuple[str, Callable[[Run, str], str], Callable[[Run, str], Any]]] = [
    ("ms per token", head("ms_per_token"), of_lane(f.ms_per_token)),
    ("speed-up", head("speedup"), against_regular(f.speedup)),
    ("acceptance", head("acceptance_rate"), of_lane(f.acceptance)),
    ("ms per token", cell("ms per token of one sequence"), of_lane(f.ms_per_token)),
    ("speed-up", cell("speed-up over regular"), against_regular(f.speedup)),
    ("cost of a round", cell("cost of a round, plain steps"), against_regular(f.cost)),
    ("tokens/s", cell("throughput, tokens/s"), of_lane(f.throughput)),
    ("per-token latency, First", cell("per-token latency, First, ms"), of_lane(f.ptl_first)),
    ("per-token latency, Last", cell("per-token latency, Last, ms"), of_lane(f.ptl_last)),
    ("per-token latency, All", cell("per-token latency, All, ms"), of_lane(f.ptl_all)),
    ("time to first token", cell("time to first token, ms"), of_lane(f.first_token)),
    ("acceptance", cell("draft acceptance rate"), of_lane(f.acceptance)),
    ("token acceptance", cell("token acceptance"), of_lane(f.token_acceptance)),
    ("mean acceptance length", cell("mean acceptance length"), of_lane(f.mean_acceptance)),
    ("rounds", cell("rounds"), of_lane(f.rounds)),
    ("target forwards", cell("target forwards"), of_lane(f.forwards)),
    ("new tokens", cell("new tokens"), of_lane(f.new_tokens)),
    ("lane time", cell("lane time, s"), of_lane(f.lane_seconds)),
]  # fmt: skip


@pytest.mark.slow
def test_every_number_of_three_races_follows_from_the_export(page: Page, pair_folders: tuple[Path, Path]) -> None:
    loaded(page)
    for race, (temperature, rule) in RACES.items():
        if race == "coupled":
            choose_option(page, "verification", re.compile("coupled"))
        fill(page, prompt=PROMPT, batch=2, tokens=24, temperature=temperature)
        if race == "greedy":
            page.locator("#prompt textarea").press("Control+Enter")
            expect(page.locator("#run")).to_be_disabled()
            run_to_the_end(page, running=True)
        else:
            run_to_the_end(page)
        run = Run(page)
        _figures(run, race)
        _verdict(run)
        _axis(run)
        _inspector(run, race)
        _models(run, race, pair_folders)
        residuals = _steps(page, rule)
        assert (residuals > 0) == (race == "sampled")
        _comparison(page, race)
        if race == "sampled":
            open_settings(page)
            page.click(".snippet summary")
            page.click("[data-switch=stepping]")
            page.keyboard.press("End")
            expect(page.locator(".step-top")).to_be_visible()
            assert_accessible(page)
            page.click("[data-close]")
            _snippet(page, pair_folders)
    # In a race of one row, no row is marked as first or last.
    fill(page, batch=1, tokens=12, temperature=0)
    run_to_the_end(page)
    labels = page.locator(".figures-table tbody th").all_text_contents()
    assert [label for label in labels if label.startswith("per-token")] == ["per-token latency, All, ms"]
    assert all(x == ["All"] for _, x, _ in _bars(page))


def _figures(run: Run, race: str) -> None:
    """Each figure follows from its formula, and so do the counts next to percentages."""
    wrong = [
        f"{name} of {lane}: the page shows {shown(run, lane)!r}, the formula gives {formula(run, lane)}"
        for name, shown, formula in TABLE
        for lane in run.lanes
        if not same(shown(run, lane), formula(run, lane))
    ]
    assert wrong == []
    for name, lane in run.lanes.items():
        if f.drafted(lane):
            counts = f"{f.accepted(lane)} of {f.drafted(lane)}"
            assert cell("drafts accepted, of all")(run, name) == counts
        ended = [one["finish_reason"] for one in lane.sequences].count("eos")
        assert cell("ended by the model (EOS)")(run, name) == f"{ended} of {len(lane.sequences)}"
        label = "token acceptance by rejection sampling, estimated"
        assert same(cell(label)(run, name), f.by_rejection(lane) if race == "coupled" else None)


def _verdict(run: Run) -> None:
    """The verdict has the right equation for each lane, and names the fastest lane."""
    words = re.compile(
        r"([\d.]+)×: a round.*? writes as much as ([\d.]+) plain steps, (?:and|but) costs as much as (\d+\.\d+)"
    )

    def speed(lane: f.Lane) -> float:
        return f.speedup(lane, run.regular)

    assert len(run.lines) == len(run.lanes) - 1
    drafting_lanes = sorted(list(run.lanes.values())[1:], key=speed, reverse=True)
    for lane, line in zip(drafting_lanes, run.lines, strict=True):
        match = words.search(line)
        assert line.startswith(run.label(lane.name)) and match
        cost = f.cost(lane, run.regular)
        expected = speed(lane), speed(lane) * cost, cost
        assert all(same(text, value) for text, value in zip(match.groups(), expected, strict=True)), line
        # The list "Why" shows the same cost.
        assert match[3] in next(why for why in run.why if why.startswith(run.label(lane.name)))
    first, second = sorted(run.lanes.values(), key=speed, reverse=True)[:2]
    ratio, level = speed(first) / speed(second), f.level(first, second, run.regular)
    assert run.head.startswith(run.label(first.name)) and ("level" in run.head) == level
    if level:
        assert run.label(second.name) in run.head
        assert same(run.head.split("the ")[1], 100 * (ratio - 1), 2e-3)
    else:
        times = re.findall(r"([\d.]+)×", run.head)
        of_two = second is run.regular or first is run.regular
        figures = [ratio] if of_two else [speed(first), ratio]
        assert all(same(text, value) for text, value in zip(times, figures, strict=True)), run.head


def _axis(run: Run) -> None:
    """The mean step, the time for prompts and the end of each lane follow from the rounds."""
    for name, lane in run.lanes.items():
        tokens, ms = f.mean_step(lane)
        words = re.fullmatch(r"([\d.]+) tokens? in ([\d.]+) ms", run.seen[name]["means"])
        assert words and same(words[1], tokens) and same(words[2], ms), run.seen[name]["means"]
        assert same(run.seen[name]["flag"], ms * len(lane.rounds) / 1000)
        assert same(run.seen[name]["read"], sum(one["time_ms"] - one["begin"] for one in lane.prefills))


def _inspector(run: Run, race: str) -> None:
    """The inspector shows p, q, the chance in the block, the random number and the verdicts."""
    judged = 0
    for seen in run.inspector:
        lane = run.lanes[seen["lane"]]
        steps = [one for one in lane.sequences[seen["sequence"]]["steps"] if one["kind"] != "prefill"]
        step, rows = steps[seen["at"]], seen["rows"]
        assert f"The lane's round {step['round']}, " in seen["line"] and same(
            seen["line"].split("at ")[1], step["time_ms"]
        )
        if not step["drafts"]:
            assert race == "greedy" or same(seen["line"].split("p(x) ")[1], step["next_p"])
            continue
        count, accepted = len(step["drafts"]), step["accepted"]
        assert f"draft length {step['length']}, {count} drafted, {accepted} accepted" in seen["line"]
        assert [("accepted" in word) for word in rows["verdict"]] == [i < accepted for i in range(count)]
        texts = zip(rows["x"], [draft["text"] for draft in step["drafts"]], strict=False)
        assert all(json.loads(f'"{shown}"') == text for shown, text in texts if text)
        if race == "greedy":
            assert "Temperature 0: p and q are 1 for the most likely word" in seen["note"]
            assert not rows.keys() & {"r", "h"}
            continue
        for i, draft in enumerate(step["drafts"]):
            # Coupled verification makes no use of q.
            assert same(rows["p"][i], draft["p"]) and same(rows["q"][i], None if race == "coupled" else draft["q"])
        if race == "coupled":
            assert not rows.keys() & {"r", "h"}, "no draft was tested against a number"
            continue
        for i, draft in enumerate(step["drafts"]):
            assert same(rows["r"][i], draft["u"]) and same(rows["h"][i], draft["chance"])
        below = [i for i, draft in enumerate(step["drafts"]) if draft["u"] < draft["chance"]]
        assert accepted == (max(below) + 1 if below else 0), (
            "the last draft with u < h is accepted, and all before it"
        )
        # The last draft's chance in the block is the running product w.
        if step["written"] > accepted:
            assert same(rows["h"][count - 1], f.running_chance(step, count))
        one_by_one = next((i for i, one in enumerate(step["drafts"]) if one["u"] * one["q"] >= one["p"]), count)
        assert ("as many would" if one_by_one == accepted else f"{one_by_one} of them would") in seen["note"]
        judged += 1
    assert judged or race != "sampled"


def _models(run: Run, race: str, pair_folders: tuple[Path, Path]) -> None:
    """p, q and the residual follow from the models' logits at the race's temperature (1 for a greedy race)."""
    target, draft = (AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval() for path in pair_folders)
    tokenizer, residuals = AutoTokenizer.from_pretrained(pair_folders[0]), 0
    ids = {tokenizer.decode([i]): i for i in range(len(tokenizer))}

    def chances(model: Any, text: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.softmax(model(torch.tensor([text])).logits[0, -1] / (RACES[race][0] or 1.0), -1)

    row = run.lanes["bass"].sequences[0]
    for step in [step for step in row["steps"] if step["drafts"]][:6]:
        text, detail = tokenizer(PROMPT)["input_ids"] + row["token_ids"][: step["start"]], step["detail"]
        drafts = [ids[one["text"]] for one in step["drafts"]]
        for i, one in enumerate(step["drafts"]):
            p, q = (float(chances(model, text + drafts[:i])[drafts[i]]) for model in (target, draft))
            shown = (detail["own_p"][i], detail["own_q"][i]) if race == "greedy" else (one["p"], one["q"])
            assert shown == pytest.approx((p, q), rel=5e-3, abs=1e-5)
        if (ending := detail["ending"]) is None:
            continue
        before = text + drafts[: ending["after"]]
        p_all, q_all = chances(target, before), chances(draft, before)
        for one in ending["top"]:
            assert one["p"] == pytest.approx(float(p_all[one["token"]]), rel=5e-3, abs=1e-5)
        if ending["mass"]:
            residuals += 1
            left = (ending["reach"] * p_all - q_all).clamp(min=0)
            assert ending["mass"] == pytest.approx(float(left.sum()), rel=5e-3, abs=1e-4)
    assert residuals or race != "sampled"


def _steps(page: Page, rule: str) -> int:
    """Walk step by step through the drafting rounds of BASS's first row. Returns how many had a residual."""
    row = exported(page)["lanes"]["bass"]["sequences"][0]
    steps, residuals, panel = [entry for entry in row["steps"] if entry["drafts"]], 0, page.locator(".step-part")
    page.click("[data-switch=stepping]")
    expect(panel.locator("[data-walk=lane]")).to_have_value("bass")
    for at, step in enumerate(steps):
        count = len(step["drafts"])
        expect(panel.locator(".step-line")).to_contain_text(f"{count} draft")
        assert step["detail"]["rule"] == rule
        page.keyboard.press("End")  # the values after the round's last line
        assert panel.locator(".step-values tr").first.locator("td").count() == count
        assert panel.locator(".step-values tr:last-child .is-accepted").count() == step["accepted"]
        assert panel.locator(".step-context del").count() == count - step["accepted"]
        assert page.locator("#lane-bass .token.stepped").count() >= step["written"]
        _values(panel, step)
        residuals += _ending(panel, step, row["token_ids"][step["start"] + step["written"] - 1])
        if at + 1 < len(steps):
            page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(panel.locator(".step-line")).to_contain_text("there is no later round")
    page.click("[data-close]")
    expect(panel).to_be_hidden()
    assert page.locator(".token.stepped").count() == 0
    return residuals


def shows(text: str | None, value: float | None) -> bool:
    """Whether a text shows this number, with three decimals, or six for a small one."""
    if value is None:
        return text == "n/a"
    return abs(float(text or "nan") - value) <= (0.00051 if value >= 0.001 or value == 0 else 6e-7)


def _values(panel: Locator, step: dict[str, Any]) -> None:
    """The table has the drafts' sources, the numbers of the rule, and the verdicts."""
    drafts, detail = step["drafts"], step["detail"]
    rows: dict[str, list[str]] = {}
    for row in panel.locator(".step-values tr").all():
        rows[row.locator("th").text_content() or ""] = row.locator("td").all_text_contents()
    assert rows["from"] == detail["sources"] == ["model"] * len(drafts)
    numbers = {"pmodel says": "p", "qdraft says": "q", "runiform": "u", "hits chance": "chance"}
    if detail["rule"] == "greedy":
        numbers = {"pmodel says": "p", "qdraft says": "q"}
        for label, name in (("qtemperature 1", "own_q"), ("ptemperature 1", "own_p")):
            assert all(shows(*both) for both in zip(rows[label], detail[name], strict=True))
    for label, name in numbers.items():
        if label in rows and not (name == "q" and detail["rule"] == "coupled"):
            values = [draft[name] for draft in drafts]
            assert all(shows(*both) for both in zip(rows[label], values, strict=True))
    assert ("hits chance" in rows) == (detail["rule"] == "block")
    assert [text.startswith("✓") for text in rows["verdict"]] == [i < step["accepted"] for i in range(len(drafts))]


def _ending(panel: Locator, step: dict[str, Any], last: int) -> bool:
    """The table for the round's last token shows the exported numbers. Returns whether there is a residual."""
    ending = step["detail"]["ending"]
    rows = panel.locator(".step-top tr:has(td)")
    assert rows.count() == (len(ending["top"]) if ending else 0)
    if not ending:
        return False
    for row, candidate in zip(rows.all(), ending["top"], strict=True):
        numbers = [cell.text_content() for cell in row.locator(".step-share").all()]
        expected = [candidate["p"], *([candidate["q"], candidate["residual"]] if ending["mass"] else [])]
        assert all(shows(*both) for both in zip(numbers, expected, strict=True))
        assert ("← t" in (row.text_content() or "")) == (candidate["token"] == last)
        if ending["mass"]:
            left = max(0.0, ending["reach"] * candidate["p"] - candidate["q"]) / ending["mass"]
            assert candidate["residual"] == pytest.approx(left, abs=1e-4)
    if ending["mass"]:
        assert ending["reach"] == pytest.approx(f.running_chance(step, ending["after"]), rel=1e-3)
        residual = panel.locator(".step-top tr").first.locator("th").last
        assert same((residual.text_content() or "").rsplit("/", 1)[1], ending["mass"])
    return bool(ending["mass"])


def _comparison(page: Page, race: str) -> None:
    """No row is marked, because all that must equal Regular's do. Medals mark the first and last."""
    if race == "sampled":
        assert [compared(page, lane) for lane in LANES] == [[None] * 2] * 3
        assert exported(page)["comparison"] is None
        expect(page.locator(".race-note")).to_have_text("")
        return
    assert [compared(page, lane) for lane in LANES] == [[None] * 2] * 3
    assert exported(page)["comparison"] == {"speculative": [None] * 2, "bass": [None] * 2}
    if race == "greedy":
        expect(page.locator(".race-note")).to_contain_text("the 2 rows of a lane are the same")
        assert all(len(set(shown(page, lane))) == 1 for lane in LANES)
        # Rows of regular decoding end together; speculative rows, which take turns, do not.
        for lane, medals in (("regular", ["", ""]), ("speculative", ["First", "Last"])):
            expect(page.locator(f"#lane-{lane} .medal")).to_have_count(2)
            assert sorted(page.locator(f"#lane-{lane} .medal").all_text_contents()) == medals
        assert _bars(page)[0] == ["Regular", ["First", "Last", "All"], [True, True, False]]


def _bars(page: Page) -> Any:
    """The summary's bars: for each lane its name, its places, and whether each value is missing."""
    bars = "plot => plot.data.filter(t => t.type === 'bar').map(t => [t.name, t.x, t.y.map(v => v === null)])"
    return page.eval_on_selector(".summary-figure .plot", bars)


def _snippet(page: Page, pair_folders: tuple[Path, Path]) -> None:
    """The snippet repeats the run. It has only the models' folder names, so run it in their parent folder."""
    code = page.locator(".snippet code").text_content() or ""
    assert "RecordedLengths" in code
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=pair_folders[0].parent, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}, encoding="utf-8",
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    texts = re.split(r"--- \w+, sequence \d+\n", process.stdout)[1:]
    assert [text.removesuffix("\n") for text in texts] == [text for lane in LANES for text in shown(page, lane)]


def test_the_formulas_document_has_every_number() -> None:
    text = (ROOT / "docs/formulas.md").read_text(encoding="utf-8")
    assert [name for name, *_ in TABLE if f"| {name.split(',')[0]}" not in text] == []

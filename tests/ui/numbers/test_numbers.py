"""Every number of three races on the page (greedy, sampled, coupled), computed again from its export.

Contract: TABLE is the list: the number, where it is shown, and its formula (formulas.py). docs/formulas.md has
the same list in words. p and q are computed by the models themselves as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import BrowserContext
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..browser import fill, run_to_the_end
from ..conftest import ROOT, watched
from . import formulas as f
from .reading import displayed, same

pytestmark = pytest.mark.slow
RACES = ("greedy", "sampled", "coupled")
TEMPERATURES = {"greedy": 0.0, "sampled": 0.9, "coupled": 0.9}
PROMPT = "Hello"


class Run:
    """What the page exported and what it displayed."""

    def __init__(self, exported: dict[str, Any], seen: dict[str, Any]) -> None:
        self.seen = seen
        self.lanes = {name: f.Lane(data, name) for name, data in exported["lanes"].items()}
        self.regular = self.lanes["regular"]

    def label(self, name: str) -> str:
        return str(self.seen["lanes"][name]["label"])


@pytest.fixture(scope="module")
def runs(context: BrowserContext, server: str) -> Iterator[dict[str, Run]]:
    """The three races, in one page."""
    made: dict[str, Run] = {}
    with watched(context, server) as page:
        page.emulate_media(reduced_motion="reduce")
        for race in RACES:
            if race == "coupled":
                page.click("text=More settings")
                page.click("#verification input")
                page.get_by_role("option", name=re.compile("coupled")).click()
            fill(page, prompt=PROMPT, batch=2, tokens=24, temperature=TEMPERATURES[race])
            run_to_the_end(page)
            with page.expect_download() as download:
                page.click("[data-take=json]")
            made[race] = Run(json.loads(Path(download.value.path()).read_text()), displayed(page))
    yield made


def head(key: str) -> Callable[[Run, str], str]:
    """A figure of a lane's head."""
    return lambda run, name: str(run.seen["lanes"][name]["figures"][key])


def cell(label: str) -> Callable[[Run, str], str]:
    """A cell of the table "Afterwards"; "n/a" where the race has no such row."""
    return lambda run, name: str(run.seen["table"].get(label, {}).get(run.label(name), "n/a"))


def own(formula: Callable[[f.Lane], float | None]) -> Callable[[Run, str], float | None]:
    return lambda run, name: formula(run.lanes[name])


def versus(formula: Callable[[f.Lane, f.Lane], float]) -> Callable[[Run, str], float]:
    return lambda run, name: formula(run.lanes[name], run.regular)


# Number, where it is shown, what is shown, its formula.
TABLE: list[tuple[str, str, Callable[[Run, str], str], Callable[[Run, str], float | None]]] = [
    ("ms per token", "head", head("ms_per_token"), own(f.ms_per_token)),
    ("speed-up", "head", head("speedup"), versus(f.speedup)),
    ("tokens/s", "head", head("throughput_tps"), own(f.throughput)),
    ("acceptance", "head", head("acceptance_rate"), own(f.acceptance)),
    ("new tokens", "head", head("new_tokens"), own(f.new_tokens)),
    ("lane time", "state", lambda run, name: run.seen["lanes"][name]["state"], own(f.lane_seconds)),
    ("ms per token", "table", cell("ms per token of one sequence"), own(f.ms_per_token)),
    ("speed-up", "table", cell("speed-up over regular"), versus(f.speedup)),
    ("tokens/s", "table", cell("throughput, tokens/s"), own(f.throughput)),
    ("per-token latency, First", "table", cell("per-token latency, First, ms"), own(f.ptl_first)),
    ("per-token latency, Last", "table", cell("per-token latency, Last, ms"), own(f.ptl_last)),
    ("per-token latency, All", "table", cell("per-token latency, All, ms"), own(f.ptl_all)),
    ("time to first token", "table", cell("time to first token, ms"), own(f.first_token)),
    ("acceptance", "table", cell("draft acceptance rate"), own(f.acceptance)),
    ("token acceptance", "table", cell("token acceptance"), own(f.token_acceptance)),
    ("mean acceptance length", "table", cell("mean acceptance length"), own(f.mean_acceptance)),
    ("rounds", "table", cell("rounds"), own(f.rounds)),
    ("target forwards", "table", cell("target forwards"), own(f.forwards)),
    ("new tokens", "table", cell("new tokens"), own(f.new_tokens)),
    ("lane time", "table", cell("lane time, s"), own(f.lane_seconds)),
]  # fmt: skip


@pytest.mark.parametrize("race", RACES)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}, {row[1]}".replace(" ", "_"))
def test_each_figure_is_what_its_formula_says(runs: dict[str, Run], race: str, row: Any) -> None:
    name, _, shown, formula = row
    for lane in runs[race].lanes:
        text, value = shown(runs[race], lane), formula(runs[race], lane)
        assert same(text, value), f"{name} of {lane}: the page shows {text!r}, the formula gives {value}"


@pytest.mark.parametrize("race", RACES)
def test_counts_beside_the_shares(runs: dict[str, Run], race: str) -> None:
    run = runs[race]
    for name, lane in run.lanes.items():
        if f.drafted(lane):
            counts = f"{f.accepted(lane)} of {f.drafted(lane)}"
            assert head("acceptance_rate")(run, name).endswith(f", {counts}")
            assert cell("drafts accepted, of all")(run, name) == counts
        ended = [one["finish_reason"] for one in lane.sequences].count("eos")
        assert cell("ended by the model (EOS)")(run, name) == f"{ended} of {len(lane.sequences)}"
        label = "token acceptance by rejection sampling, estimated"
        assert same(cell(label)(run, name), f.by_rejection(lane) if race == "coupled" else None)


@pytest.mark.parametrize("race", RACES)
def test_the_verdicts_equation(runs: dict[str, Run], race: str) -> None:
    run = runs[race]
    words = re.compile(
        r"([\d.]+)×: ([\d.]+) tokens a row-round, (?:and|but) a row-round costs ([\d.]+) plain ones"
    )
    assert len(run.seen["lines"]) == len(run.lanes) - 1
    for name, line in zip(list(run.lanes)[1:], run.seen["lines"], strict=True):
        lane, found = run.lanes[name], words.search(line)
        assert line.startswith(run.label(name)) and found
        expected = f.speedup(lane, run.regular), f.tokens_a_row_round(lane), f.cost(lane, run.regular)
        assert all(same(text, value) for text, value in zip(found.groups(), expected, strict=True)), (
            line,
            expected,
        )
        assert expected[0] == pytest.approx(expected[1] / expected[2])


@pytest.mark.parametrize("race", RACES)
def test_the_verdicts_head(runs: dict[str, Run], race: str) -> None:
    run, said = runs[race], runs[race].seen["head"]
    first, second = sorted(run.lanes.values(), key=f.ms_per_token)[:2]
    ratio = f.ms_per_token(second) / f.ms_per_token(first)
    assert said.startswith(run.label(first.name)) and ("level" in said) == f.level(first, second)
    if f.level(first, second):
        assert run.label(second.name) in said
        assert same(said.split("their ")[1], 100 * (ratio - 1), 2e-3)
    else:
        times = re.findall(r"([\d.]+)×", said)
        expected = (
            [ratio] if second is run.regular or first is run.regular else [f.speedup(first, run.regular), ratio]
        )
        assert all(same(text, value) for text, value in zip(times, expected, strict=True)), (said, expected)


@pytest.mark.parametrize("race", RACES)
def test_a_timelines_shares_are_times(runs: dict[str, Run], race: str) -> None:
    run = runs[race]
    for name, lane in run.lanes.items():
        seen = run.seen["lanes"][name]
        parts = {"drafts": "draft", "verification": "verify", "plain steps": "plain", "host": "host"}
        spent = {kind: sum(e - b for _, one, b, e in f.blocks(lane) if one == kind) for kind in parts.values()}
        for words, kind in parts.items():
            share = re.search(rf"{words} (\d+)\s%", seen["caption"])
            if share:
                assert same(share[1], 100 * spent[kind] / sum(spent.values()), 5e-3), (seen["caption"], spent)


@pytest.mark.parametrize("race", RACES)
def test_the_inspectors_numbers_and_verdicts(runs: dict[str, Run], race: str) -> None:
    """min(1, p/q), the chance in the block, u, and what follows from them; at temperature 0 there is no u."""
    run, judged = runs[race], 0
    for seen in run.seen["inspector"]:
        lane = run.lanes[seen["lane"]]
        steps = [one for one in lane.sequences[seen["sequence"]]["rounds"] if one["kind"] != "prefill"]
        step, rows = steps[seen["at"]], seen["rows"]
        assert f"Lane round {step['round']}, " in seen["line"] and same(seen["line"].split("at ")[1], step["ms"])
        if not step["drafts"]:
            assert race == "greedy" or same(seen["line"].split("p(x) ")[1], step["nextP"])
            continue
        count, stood = len(step["drafts"]), step["accepted"]
        assert f"draft length {step['length']}, {count} drafted, {stood} accepted" in seen["line"]
        assert all(
            ("accepted" in word or "saved" in word) == (i < stood)
            for i, word in enumerate(rows["verdict"][:count])
        )
        texts = zip(rows["token"], [draft["text"] for draft in step["drafts"]], strict=False)
        assert all(json.loads(f'"{shown}"') == text for shown, text in texts if text)
        if race == "greedy":
            assert "Temperature 0: a draft is accepted if it is the target's" in seen["note"]
            assert not rows.keys() & {"p", "q", "u", "ratio", "chance"}
            continue
        for i, draft in enumerate(step["drafts"]):
            assert same(rows["p"][i], draft["p"]) and same(rows["q"][i], draft["q"])
        if race == "coupled":
            assert not rows.keys() & {"u", "ratio", "chance"}, "no draft was tested against a number"
            continue
        for i, draft in enumerate(step["drafts"]):
            assert same(rows["ratio"][i], min(1.0, draft["p"] / draft["q"])) and same(rows["u"][i], draft["u"])
        below = [i for i, draft in enumerate(step["drafts"]) if draft["u"] < number_of(rows["chance"][i], draft)]
        assert stood == (max(below) + 1 if below else 0), "the last draft with u < h stands, and all before it"
        # Behind a row's last draft the block's chance is the running product itself.
        if step["written"] > stood:
            assert same(rows["chance"][count - 1], f.running_chance(step, count))
        alone = next((i for i, one in enumerate(step["drafts"]) if one["u"] * one["q"] >= one["p"]), count)
        assert ("as many would" if alone == stood else f"{alone} of them would") in seen["note"]
        words = ["accepted"] * min(alone, stood) + ["saved"] * (stood - alone) + ["rejected"] * (count - stood)
        assert rows["verdict"][:count] == words
        judged += 1
    assert judged or race != "sampled"


def number_of(text: str, draft: dict[str, Any]) -> float:
    """The chance that is shown, with the digits that the export has."""
    assert same(text, draft["chance"])
    return float(draft["chance"])


@pytest.mark.parametrize("race", RACES)
def test_p_and_q_are_the_models_own(runs: dict[str, Run], race: str, tiny_pair: tuple[Path, Path]) -> None:
    """Softmax of the models' logits at the race's temperature (at 0: at 1); and the residual's mass."""
    target, draft = (AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval() for path in tiny_pair)
    tokenizer, residuals = AutoTokenizer.from_pretrained(tiny_pair[0]), 0
    ids = {tokenizer.decode([i]): i for i in range(len(tokenizer))}

    def chances(model: Any, text: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.softmax(model(torch.tensor([text])).logits[0, -1] / (TEMPERATURES[race] or 1.0), -1)

    row = runs[race].lanes["bass"].sequences[0]
    for step in [step for step in row["rounds"] if step["drafts"]][:6]:
        text, detail = tokenizer(PROMPT)["input_ids"] + row["token_ids"][: step["start"]], step["detail"]
        for i, one in enumerate(step["drafts"]):
            before = text + [ids[other["text"]] for other in step["drafts"][:i]]
            p, q = (float(chances(model, before)[ids[one["text"]]]) for model in (target, draft))
            shown = (detail["ownP"][i], detail["ownQ"][i]) if race == "greedy" else (one["p"], one["q"])
            assert shown == pytest.approx((p, q), rel=5e-3, abs=1e-5)
        if (ending := detail["ending"]) is None:
            continue
        before = text + [ids[other["text"]] for other in step["drafts"][: ending["after"]]]
        p_all, q_all = chances(target, before), chances(draft, before)
        for one in ending["top"]:
            assert one["p"] == pytest.approx(float(p_all[one["id"]]), rel=5e-3, abs=1e-5)
        if ending["mass"]:
            residuals += 1
            left = (ending["reach"] * p_all - q_all).clamp(min=0)
            assert ending["mass"] == pytest.approx(float(left.sum()), rel=5e-3, abs=1e-4)
    assert residuals or race != "sampled"


def test_the_document_has_every_row() -> None:
    text = (ROOT / "docs/formulas.md").read_text(encoding="utf-8")
    assert [name for name, *_ in TABLE if f"| {name.split(',')[0]}" not in text] == []

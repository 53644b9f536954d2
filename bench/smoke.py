"""`python -m bench smoke`: does the whole program work on this machine and under this Python?

It uses a temporary cache folder with only the weights. The weights are linked from the usual cache; if that does
not have them yet, they are first stored there. The bench measures costs with the shipped draft head and races all
lanes with every drafter for 16 tokens, greedy and sampled. Then it starts the page without measured costs and
requests one race. A claim is missed if a lane ends with an error or without all its tokens, if a greedy lane's
text differs from regular decoding's, or if the page does not answer. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bass_core import DEFAULT_LANES, ModelPair, RequestError, SamplingParams, load_pair, race
from bass_core.decode.measuring import measure_ahead
from bass_core.draft.registry import DRAFTERS

from .cpu.page import PROMPT, app
from .fresh_cache import fresh_cache
from .report.report import alike, claim, finish, parser

ROWS, TOKENS = 2, 16
TEMPERATURES = (0.0, 0.7)


def main(argv: list[str]) -> None:
    """Run every case, print, and write."""
    cli = parser("smoke", __doc__ or "")
    cli.set_defaults(pair="smollm2", draft=None)
    options = cli.parse_args(argv)
    drafters = ["adaptive"] if options.quick else list(DRAFTERS)
    with fresh_cache() as root:
        pair = load_pair(options.pair)
        for _ in measure_ahead(pair, ROWS):
            pass
        tables = len(list((root / "costs").glob("*.json")))
        races = [(drafter, temperature) for drafter in drafters for temperature in TEMPERATURES]
        results = [row for race_ in races for row in lanes(pair, *race_)]
        for path in (root / "costs").iterdir():
            path.unlink()
        with app(options, draft_length="auto") as address:
            answer = ask(address)
        results += judge("the page", answer, TEMPERATURES[1], whole=False)
    failed = sum(row["error"] is not None for row in results)
    greedy = [row["same"] for row in results if row["same"] is not None]
    claims = [
        claim("cost tables measured with the draft head", tables, "2", tables == 2),
        claim("lanes that failed", failed, f"0 of {len(results)}", failed == 0 and len(results) > len(races)),
        claim("greedy lanes with regular's text", sum(greedy), f"all {len(greedy)}", bool(greedy) and all(greedy)),
        alike("the page answered with whole lanes", float(done(answer))),
    ]
    finish("smoke", options, pair, results, claims)


def lanes(pair: ModelPair, drafter: str, temperature: float) -> list[dict[str, Any]]:
    """Race every lane that can use the drafter; return one row per lane."""
    with_amusd = DRAFTERS[drafter].runs_model and not DRAFTERS[drafter].windows
    methods = (*DEFAULT_LANES, "amusd") if with_amusd else DEFAULT_LANES
    name = f"{drafter}, temperature {temperature}"
    try:
        *_, last = race(
            pair, PROMPT, n=ROWS, max_new_tokens=TOKENS, sampling=SamplingParams(temperature),
            draft_length="cost-aware", drafter=drafter, lanes=methods, eos_token_id=None,
        )  # fmt: skip
    except RequestError as error:
        return [{"case": name, "lane": "all", "tokens": 0, "same": None, "error": str(error)}]
    return judge(name, last, temperature)


def judge(case: str, snapshot: Mapping[str, Any], temperature: float, whole: bool = True) -> list[dict[str, Any]]:
    """Return a row for each lane of a finished race: its tokens, whether greedy text equals regular's, its error.

    Args:
        snapshot: its last snapshot.
        temperature: its sampling temperature; texts are compared only at 0.
        whole: whether every row must have TOKENS tokens.
    """
    texts = {name: [row["token_ids"] for row in lane["sequences"]] for name, lane in snapshot["lanes"].items()}
    return [
        {
            "case": case,
            "lane": name,
            "tokens": sum(map(len, texts[name])),
            "same": texts[name] == texts["regular"] if temperature == 0 and name != "regular" else None,
            "error": lane["error"] or lost_draft(lane) or missing(texts[name], whole),
        }
        for name, lane in snapshot["lanes"].items()
    ]


def missing(rows: list[list[int]], whole: bool) -> str | None:
    """Return the complaint about a lane with too few rows or tokens, or None."""
    least = TOKENS if whole else 1
    short = len(rows) != ROWS or min(map(len, rows)) < least
    return f"not {ROWS} rows of {least} tokens" if short else None


def lost_draft(lane: dict[str, Any]) -> str | None:
    """Return AMUSD's note about a lost draft, or None."""
    note: str | None = lane.get("timeline", {}).get("note")
    return note


def ask(address: str) -> dict[str, Any]:
    """Run one race through the page's API, with its defaults except for the number of tokens."""
    from gradio_client import Client

    arguments = (PROMPT, ROWS, TOKENS, TEMPERATURES[1], 0, 0, 1.0, "auto")
    *_, last = Client(address, verbose=False).submit(*arguments, api_name="/race")
    answer: dict[str, Any] = last
    return answer


def done(snapshot: dict[str, Any]) -> bool:
    """Return whether every lane finished all its rows."""
    rows = [row for lane in snapshot["lanes"].values() for row in lane["sequences"]]
    whole = all(row["finish_reason"] in ("eos", "length") and row["text"] for row in rows)
    return bool(snapshot["done"]) and len(rows) == ROWS * len(DEFAULT_LANES) and whole

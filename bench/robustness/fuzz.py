"""`python -m bench fuzz`: arguments of all types, ranges, sizes and alphabets for /race of the real app.py.

Every request must end in a finished race or in one documented sentence (a BassError's), never in a traceback, an
internal error or a file name of the server. Afterwards the server must answer as before. Its memory may grow by at
most 5 % after the first fifth of the cases. During that first fifth, every part of the program runs for the first
time, and Gradio's stores fill up (they keep the last 2,000 visitors). The table shows the memory after each tenth.
Valid arguments run a race, which the server's limits keep short.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ..report.report import CPU, ROOT, Row, alike, at_most, claim, finish, parser, whole
from .serving import Server

LIMITS = ("--max-batch", "3", "--max-new-tokens", "6", "--max-prompt", "300")
# Lone surrogates (JSON can carry them), direction marks, zero-width and combining characters, and 1 MB.
TEXTS = st.one_of(
    st.text(max_size=40),
    st.text(st.characters(codec=None), max_size=20),
    st.sampled_from(["", " ", "\0", "\ud800", "\u202e\u200b\u0301", "a" * 2**20, "{{value}}", "../../etc/passwd"]),
)
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), TEXTS, st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


# Nearly valid values for each parameter, because pure junk would never pass the first check.
NEAR: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.one_of(st.just("Hello"), TEXTS),
    "batch_size": st.integers(-1, 5),
    "max_new_tokens": st.integers(-1, 8),
    "temperature": st.one_of(st.floats(-1, 5), st.sampled_from([0, 1e-30, 1e30])),
    "seed": st.integers(-1, 2**33),
    "pair": st.sampled_from(["", "", "", "/etc/passwd", "..", "owner/model", "smollm2-1.7b"]),
    "top_k": st.integers(-1, 300),
    "top_p": st.floats(-0.5, 1.5),
    "min_p": st.floats(-0.5, 1.5),
    "repetition_penalty": st.one_of(st.floats(-1, 3), st.sampled_from([1e-40, 1e39])),
    "stop": st.one_of(st.just(["\n\n"]), st.just("a"), st.lists(TEXTS, max_size=3)),
    "system": st.one_of(st.just("Answer briefly."), TEXTS),
    "chat_template_kwargs": st.sampled_from(
        [{}, {"enable_thinking": False}, {"chat_template": "{{ 1 }}"}, {"a": []}]
    ),
    "clock": st.sampled_from(["measured", "a100", "h100", "laptop", "own", "h1000"]),
    "clock_models": st.sampled_from(["7.8b", "1.7b", "70b", "own", "8b"]),
    "clock_bandwidth": st.sampled_from([1000.0, 0, -1, None, 1e300]),
    "clock_tflops": st.sampled_from([100.0, 0, -1, None, 1e300]),
    "clock_target": st.sampled_from([7.8, 0, -1, None, 1e300]),
    "clock_draft": st.sampled_from([0.31, 0, -1, None, 1e300]),
    "clock_bytes": st.sampled_from([2.0, 0.5, 0, None, 1e300]),
    "acceptance": st.sampled_from([None, 0, 0.8, 1, 1.1, -0.1]),
    "draft_length": st.sampled_from(["auto", "bass", 1, "3", 16, 17, "long"]),
    "drafter": st.sampled_from(["auto", "model", "prompt_lookup", "adaptive", "oracle"]),
    "attention": st.sampled_from(["auto", "pad", "split", "sdpa", "flash", "no"]),
    "scheduling": st.sampled_from(["fair", "in_turn", "overlap", "slowly"]),
    "verification": st.sampled_from(["auto", "block", "rejection", "chen", "coupled", "hope"]),
    "time_budget_ms": st.sampled_from([None, 1, 50, -1, 0]),
    "lanes": st.lists(st.sampled_from(["regular", "speculative", "bass", "guess"]), max_size=3),
    "prompts": st.sampled_from(["one", "lines", "many"]),
}


VALID = {"prompt": "Hello", "batch_size": 2, "max_new_tokens": 5}


@st.composite
def arguments_of(draw: st.DrawFn, defaults: dict[str, Any]) -> tuple[Any, ...]:
    """Draw values for the parameters of /race, in order: up to three of them strange, the others valid."""
    strange = draw(st.sets(st.sampled_from(list(defaults)), max_size=3))
    valid = defaults | VALID
    return tuple(
        draw(st.one_of(NEAR.get(name, JUNK), JUNK)) if name in strange else valid[name] for name in defaults
    )


def verdict(outcome: Any) -> str:
    """Classify the outcome of a request, which is its last snapshot or the text of its error.

    Returns:
        "done", "refused", or a description of the fault.
    """
    if isinstance(outcome, dict):
        failed = [lane["error"] for lane in outcome["lanes"].values() if lane["error"]]
        return "done" if outcome["done"] and not failed else f"unfinished: {failed}"
    text = str(outcome)
    if "internal error" in text or re.search(r"Traceback|File \"", text):
        return f"undocumented: {text}"
    if "\n" in text.strip() or len(text) > 2000 or str(ROOT) in text or "site-packages" in text:
        return f"no clear sentence: {text[:200]}"
    return "refused"


def main(argv: list[str]) -> None:
    """Serve, fuzz, print and write."""
    options = parser("fuzz", __doc__ or "")
    options.add_argument("--cases", type=whole(10), default=10_000)
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.cases = 120
    seen: Counter[str] = Counter()
    with Server(*LIMITS) as server:
        defaults = server.defaults()
        plain = tuple((defaults | VALID).values())
        before = _ask(server.url, plain)
        memory = [server.memory_mb()]

        @settings(
            max_examples=arguments.cases, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(arguments_of(defaults))
        def run_case(values: tuple[Any, ...]) -> None:
            seen[verdict(_ask(server.url, values))] += 1
            if sum(seen.values()) % (arguments.cases // 10) == 0:
                memory.append(server.memory_mb())

        run_case()
        after = _ask(server.url, plain)
        healthy = server.serving and "Traceback" not in server.log()
    wrong = sum(n for name, n in seen.items() if name not in ("done", "refused"))
    same = isinstance(before, dict) and isinstance(after, dict) and _texts(before) == _texts(after)
    claims = [
        claim("cases", sum(seen.values()), f"{arguments.cases}", sum(seen.values()) >= arguments.cases),
        claim("cases that ended otherwise than done or refused", wrong, "0", wrong == 0),
        claim("cases that ran a race", seen["done"], "above 0", seen["done"] > 0),
        alike("the same request has the same answer afterwards", float(same)),
        alike("the server is up and wrote no traceback", float(healthy)),
        at_most("growth of memory after the first fifth", memory[-1] / memory[2] - 1, 0.05, not arguments.quick),
    ]
    results: list[Row] = [
        {"outcome": name[:120], "cases": n, "memory MB": None} for name, n in seen.most_common(20)
    ]
    results += [
        {"outcome": "so far", "cases": tenth * (arguments.cases // 10), "memory MB": round(mb, 1)}
        for tenth, mb in enumerate(memory)
    ]
    finish("fuzz", arguments, CPU, results, claims)


_clients: dict[str, Any] = {}


def _ask(url: str, values: tuple[Any, ...]) -> Any:
    """Return the last snapshot, or the error's text."""
    client = _clients.setdefault(url, httpx.Client(base_url=f"{url}/gradio_api", timeout=120))
    # Use json.dumps: unlike httpx it writes NaN, infinities and lone surrogates, as a hostile client would.
    body = json.dumps({"data": list(values)}).encode()
    joined = client.post("/call/race", content=body, headers={"content-type": "application/json"})
    if joined.status_code != 200:
        return f"{joined.status_code}: {joined.text}"
    event, last = "", ""
    with client.stream("GET", f"/call/race/{joined.json()['event_id']}") as answer:
        for line in answer.iter_lines():
            if line.startswith("event: "):
                event = line[7:]
            elif line.startswith("data: ") and event != "heartbeat":
                last = line[6:]
    value = json.loads(last or "null")
    return value[0] if isinstance(value, list) else value.get("error", value) if isinstance(value, dict) else value


def _texts(snapshot: dict[str, Any]) -> list[str]:
    return [row["text"] for lane in snapshot["lanes"].values() for row in lane["sequences"]]

"""`python -m bench.report.tables`: write the tables of the documents (PAGES) from the files in bench/results.

It replaces the text between `<!-- table: NAME -->` and `<!-- end -->` by the table NAME of TABLES, which contains
only figures of a result file. `--check` changes nothing and exits with 1 if a table differs from its file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from typing import Any

from .report import ROOT, Row

RESULTS = ROOT / "bench" / "results"
PAGES = tuple(ROOT / f"{name}.md" for name in ("README", "docs/figures", "docs/lecture", "bench/results/README"))

BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(argv: list[str]) -> int:
    """Rewrite the pages, or with --check compare them."""
    options = argparse.ArgumentParser(prog="python -m bench.report.tables", description=__doc__)
    options.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if a table is out of date"
    )
    arguments = options.parse_args(argv)
    outdated = 0
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = BLOCK.sub(_filled, before)
        if before != after:
            outdated = 1
            print(f"{page.relative_to(ROOT)} differs from the result files: run python -m bench.report.tables")
            if not arguments.check:
                page.write_text(after, encoding="utf-8")
    return outdated if arguments.check else 0


def _filled(block: re.Match[str]) -> str:
    return f"{block[1]}{TABLES[block[2]]()}\n{block[3]}"


def load(name: str) -> dict[str, Any]:
    """Return a stored document."""
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return document


def markdown(rows: list[Row], columns: dict[str, str]) -> str:
    """Return a table with these columns (key to heading); numbers are right-aligned, None is n/a."""
    lines = [list(columns.values()), ["---:" if _number(rows, key) else "---" for key in columns]]
    lines += [[cell(row.get(key)) for key in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(rows: list[Row], key: str) -> bool:
    return any(isinstance(row.get(key), int | float) for row in rows)


def cell(value: Any) -> str:
    """Return a value as text: two decimals below 10, one below 1000."""
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def made_by(document: dict[str, Any]) -> str:
    """Return the line below a table that names the source of its numbers."""
    versions = ", ".join(f"{name} {document['versions'][name]}" for name in ("torch", "transformers"))
    return (
        f"`{document['command']}`, {document['device']}, {document['date']}, {versions}, "
        f"revision {document['revision']}."
    )


def _columns(words: str) -> dict[str, str]:
    """Parse "key | key = heading | ..." into key to heading; a key without one is its own heading."""
    pairs = (part.partition(" = ") for part in words.split(" | "))
    return {key: heading or key for key, _, heading in pairs}


def _table(name: str, columns: str, keep: Callable[[Row], bool] = bool) -> Callable[[], str]:
    def fill() -> str:
        document = load(name)
        rows = [row for row in document["results"] if keep(row)]
        return f"{markdown(rows, _columns(columns))}\n\n{made_by(document)}"

    return fill


_WINS = {
    "regular": "regular", "speculative": "speculative", "bass": "BASS, Algorithm 1",
    "bass, cost-aware": "BASS, cost-aware",
}  # fmt: skip


def _wins() -> str:
    """Return ms per token of each decoder at growing batch sizes, and the fastest decoder."""
    document = load("batch-cpu")
    cases: dict[int, dict[str, float]] = {}
    for row in document["results"]:
        if row["arm"] in _WINS:
            cases.setdefault(row["batch"], {})[row["arm"]] = row["ms/token"]
    rows = [{"batch": n} | arms | {"fastest": _WINS[min(arms, key=arms.__getitem__)]} for n, arms in cases.items()]
    return f"{markdown(rows, {'batch': 'batch', **_WINS, 'fastest': 'fastest'})}\n\n{made_by(document)}"


def _compiles() -> str:
    """Return the kernels compiled without a GPU, by Triton's version and capability, from every stored run."""
    documents = [load(path.stem) for path in sorted(RESULTS.glob("compile-*.json"))]
    columns = _columns(
        "triton = Triton | launches | capability | listed | tried | compiled | died = the compiler died of | "
        "spill = spill in loops | most registers"
    )
    rows = [row for document in documents for row in document["results"]]
    return "\n\n".join([markdown(rows, columns), *map(made_by, documents)])


def _avx2() -> str:
    """Return the medians of steps and prompts on a CPU with AVX2 alone, by kind of weights."""
    kinds = {"bfloat16": "bf16", "int8": "int8", "int4": "int4"}
    documents = {kind: load(f"floor-avx2-{file}") for kind, file in kinds.items()}
    rows: dict[tuple[Any, ...], Row] = {}
    for kind, document in documents.items():
        for row in document["results"]:
            key = {name: row[name] for name in ("what", "rows", "tokens a row")}
            rows.setdefault(tuple(key.values()), key)[kind] = row["median ms"]
    shown = [
        row
        for row in rows.values()
        if row["what"] == "prompt" or (row["what"] == "step" and row["tokens a row"] == 1)
    ]
    columns = _columns("what | rows | tokens a row | bfloat16 = bfloat16, ms | int8 = int8, ms | int4 = int4, ms")
    return "\n\n".join([markdown(shown, columns), *map(made_by, documents.values())])


def _presets() -> str:
    """Return the page's presets, predicted and raced, on a CPU with AMX and on one with AVX2 alone."""
    rows: dict[tuple[Any, ...], Row] = {}
    sources = []
    for cpu in ("AMX", "AVX2"):
        document = load(f"presets-{cpu.lower()}")
        sources.append(f"{cpu}: {made_by(document)}")
        for row in document["results"]:
            key = {"cpu": cpu, "race": row["race"], "batch": row["batch"]}
            shown = rows.setdefault(tuple(key.values()), key | {"predicted": row["predicted"], "runs": 0})
            shown["runs"] += 1
            for name, choose in (("lowest", min), ("highest", max)):
                shown[name] = choose(row["raced"], shown.get(name, row["raced"]))
    columns = _columns(
        "cpu = CPU | race | batch | predicted | runs | lowest = lowest raced | highest = highest raced"
    )
    return "\n\n".join([markdown(list(rows.values()), columns), *sources])


def _claims() -> str:
    """Return every claim of every stored document."""
    verdicts = {True: "holds", False: "**missed**", None: "open"}
    parts = []
    for path in sorted(RESULTS.glob("*.json")):
        document = load(path.stem)
        rows = [
            {
                "claim": claim["name"],
                "value": claim["value"],
                "bar": claim["bar"],
                "verdict": verdicts[claim["holds"]],
            }
            for claim in document["claims"]
        ]
        columns = _columns("claim | value | bar | verdict")
        parts.append(f"### {path.name}\n{made_by(document)}\n\n{markdown(rows, columns)}")
    return "\n\n".join(parts)


def _page() -> str:
    """Return the cost of a watching browser: ms per token with the browser / ms per token of only the library."""
    document = load("page-cpu")
    lanes = [row for row in document["results"] if "lane" in row]
    rows = [row | {"cost": row["browser ms/token"] / row["library ms/token"]} for row in lanes]
    columns = _columns(
        "lane | library ms/token = library alone | client ms/token = gradio_client | "
        "browser ms/token = browser | cost = browser / library (bar: 1.10)"
    )
    return f"{markdown(rows, columns)}\n\n{made_by(document)}"


def _simulated() -> str:
    """Return predicted speed-ups of Algorithm 1 / the cost-aware policy, one row per GPU, one column per batch."""
    document = load("simulate-window")
    results: list[Row] = document["results"]
    rows, ends = ([row for row in results if row["section"] == name] for name in ("batch", "crossover"))
    last_batch = {row["hardware"]: row["Algorithm 1"] for row in ends}
    lines: dict[str, Row] = {}
    for row in rows:
        line = lines.setdefault(row["hardware"], {"GPU": row["hardware"]})
        line[f"batch {row['batch']}"] = f"{row['Algorithm 1']:.2f} / {row['cost-aware']:.2f}"
    for name, line in lines.items():
        line["Algorithm 1 pays up to batch"] = "n/a" if last_batch[name] is None else f"{last_batch[name]:.0f}"
    table_rows = list(lines.values())
    return f"{markdown(table_rows, {head: head for head in table_rows[0]})}\n\n{made_by(document)}"


def _gpu_rounds() -> str:
    """Return the time, launches and copies of a round of the shipped pair on a GPU, by mode, batch and decoder."""
    document = load("gpu-nvidia-h200-2026-11-27")
    lines: dict[str, Row] = {}
    for row in document["results"]:
        mode, *case = row["case"].split()
        if row["section"] == "shipped" and mode in ("greedy", "sampled", "top-p") and len(case) == 2:
            named = {"mode": mode, "batch": int(case[0][1:]), "decoder": case[1]}
            lines.setdefault(row["case"], named)[row["what"]] = row["value"]
    kept = [line for line in lines.values() if line["batch"] in (1, 8, 32)]
    columns = _columns(
        "mode | batch | decoder | round = ms per step of the lane | kernels = ms of its kernels | "
        "launches | copies"
    )
    return f"{markdown(kept, columns)}\n\n{made_by(document)}"


def _passk() -> str:
    """Return how many sequences finished within the middle budget and within the longest."""
    document = load("passk-cpu")
    budgets = sorted({row["budget ms"] for row in document["results"]})
    rows = [row for row in document["results"] if row["budget ms"] in (budgets[len(budgets) // 2], budgets[-1])]
    columns = _columns(
        "budget ms = budget, ms | n = sequences a problem | method = decoder | finished | "
        "finished share = share finished | problems with one | Pass@All | 95 % all = 95 %"
    )
    return f"{markdown(rows, columns)}\n\n{made_by(document)}"


_SPEC = (
    "temperature | batch | calls | tokens a round | a | at 1 | at 2 | at 3 | regular ms/token = regular, ms | "
    "speculative ms/token = speculative, ms | bass ms/token = BASS, ms | "
    "speculative = speculative / regular | speculative +-% = ± % | bass = BASS / regular | bass +-% = ± %"
)

TABLES: dict[str, Callable[[], str]] = {
    "gpu-rounds": _gpu_rounds,
    "opening": _table(
        "page-cpu",
        "network | loads | first token ms = first token, ms | first token, least = least | "
        "first token, most = most | longest task ms = longest task, ms | tasks over 100 ms | layout shift | "
        "KB | requests",
        lambda row: "network" in row,
    ),
    "batch": _table(
        "batch-cpu",
        "batch | arm = decoder | ms/token | speed-up | PTL First | PTL Last | PTL All | tokens/s | "
        "acceptance | accepted length = tokens a row-round | wall vs regular = whole calls | spread",
    ),
    "default": _table(
        "default-native-bf16",
        "text | temperature | threads | batch | regular ms/token = regular, ms/token | auto | fixed 1 | "
        "fixed 2 | fixed 4 | Algorithm 1 | spread",
    ),
    "floor": _table(
        "floor-native-bf16",
        "what | rows | tokens a row | reading ms = reading, ms | lowest ms = lowest, ms | "
        "median ms = median, ms | lowest / reading",
    ),
    "precision": _table(
        "precision-cpu",
        "dtype = weights | MB | perplexity | same choice | KL, mnat | tokens a round | "
        "batch 1, ms | batch 4, ms | batch 8, ms",
    ),
    "precision-per-token": _table(
        "precision-per-token-cpu",
        "dtype = weights | perplexity | same choice | KL, mnat | tokens a round",
    ),
    "larger": _table(
        "larger-cpu",
        "shape | batch | regular ms/token | auto | fixed 1 | fixed 2 | fixed 3 | fixed 4 | spread",
    ),
    "families": _table(
        "families-cpu",
        "size | family | weights | transformers, batch 1 | ours, batch 1 | ratio, batch 1 | "
        "transformers, batch 4 | ours, batch 4 | ratio, batch 4",
    ),
    "structured": _table(
        "structured-cpu",
        "grammar | batch | regular = regular, ms | bass = BASS, ms | masked regular = with grammar: regular, ms | "
        "masked bass = BASS with grammar, ms | speed-up | speed-up without | acceptance | acceptance without | "
        "certain | masks = masks a round, ms | share = of a round",
    ),
    "states": _table(
        "states-cpu", "rows | way | ms a round = ms per round | MB of states a row = MB of states per row"
    ),
    "host": _table("host-cpu", "arm | batch 1 | batch 8 | batch 32 | us | us per row"),
    "start": _table(
        "start-cpu",
        "phase | starts | median s = median, s | fastest s = fastest, s | slowest s = slowest, s",
    ),
    "peers": _table(
        "peers-native-bf16",
        "who | method | batch | weights | bits | ms/token | least | tokens/s | prompt ms = prompt, ms",
    ),
    "peers-plain": _table(
        "peers-native-bf16",
        "who | method | batch | weights | bits | ms/token | tokens/s | prompt ms = prompt, ms",
        lambda row: row["batch"] in (1, 8) and row["method"] in ("regular", "bass", "plain", "generate"),
    ),
    "spec": _table("spec-native-bf16", _SPEC, lambda row: row["category"] == "all"),
    "spec-categories": _table(
        "spec-native-bf16",
        "category | temperature | batch | calls | tokens a round | a | at 1 | at 2 | at 3 | "
        "regular ms/token = regular, ms | speculative = speculative / regular | bass = BASS / regular | "
        "bass +-% = ± %",
        lambda row: row["category"] != "all",
    ),
    "spec-alone": _table(
        "spec-alone-native-bf16",
        "category | temperature | calls | tokens a round | a | at 1 | at 2 | at 3 | bass = BASS / regular | "
        "bass +-% = ± %",
    ),
    "simulate-window": _table(
        "simulate-window",
        "hardware = GPU | batch | context = cached tokens a row | window = windowed target | "
        "window l = its best length | 310M = 310M draft | 310M l = its best length | "
        "window / 310M = windowed / 310M | break-even = acceptance at which windowed drafts break even",
        lambda row: row["section"] == "window",
    ),
    "simulate-h200": _table(
        "simulate-window",
        "batch | what | measured ms = ms, measured | predicted ms = ms, predicted | error, %",
        lambda row: row["section"] == "h200",
    ),
    "pairs": _table(
        "simulate-window",
        "hardware = GPU | memory GB = its GB | pair | needs GB | regular tokens/s, batch 1 | "
        "batch 1, a 0.6 | batch 1, a 0.8 | batch 8, a 0.6 | batch 8, a 0.8",
        lambda row: row["section"] == "pairs",
    ),
    "simulate-validation": _table(
        "simulate-native-bf16",
        "batch | arm = decoder | held out | measured ms/token | spread | predicted ms/token | off | "
        "measured rounds | predicted rounds",
        lambda row: row["section"] == "validation",
    ),
    "lecture": _table(
        "lecture-cpu",
        "preset | lane | times | ms per token | over regular | accepted | drafted | "
        "mean acceptance length | rounds | first token, ms",
        lambda row: row["preset"] != "Sweep",
    ),
    "simulate": _simulated,
    "wins": _wins,
    "page": _page,
    "passk": _passk,
    "compiles": _compiles,
    "floor-avx2": _avx2,
    "presets": _presets,
    "claims": _claims,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

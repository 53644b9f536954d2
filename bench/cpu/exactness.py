"""`python -m bench exactness`: how often a decoder's text differs from regular decoding of the row at batch 1.

With greedy and coupled sampling, every decoder should write the same text for a row as regular decoding of only
its prompt, with the same sequence id and seed. The bench runs in the pair's dtype. For every arm and batch size it
reports the share of identical rows, and for each different row its prompt, the first differing position, both
tokens and their probabilities under the target (bass_core/lanes/comparison.py). The field "cpu" records whether
this CPU multiplies bfloat16 natively and whether the model's sums were rounded to 16 bits. Nothing is timed.

Regular decoding at batch 1 is the reference, so it is an arm only at larger batches. Speculative decoding runs one
sequence at a time, so it is an arm only at the first batch size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from bass_core import ModelPair, SamplingParams, generate
from bass_core.decode.request import make_request
from bass_core.lanes.comparison import first_difference, next_logits, weigh
from bass_core.lanes.snapshot import Weighed
from bass_core.machine.cpu import native_bfloat16

from ..prompts import mixed
from ..report.report import Row, alike, document, load, parser, show, table, whole
from ..report.tables import described

GREEDY = {"sampling": SamplingParams(), "verification": "auto"}
COUPLED = {"sampling": SamplingParams(temperature=0.7), "verification": "coupled"}
TEXTS = {"greedy": GREEDY, "coupled": COUPLED}
FIXED = 4


def main(argv: list[str]) -> None:
    """Compare, print, and write."""
    options = parser("exactness", __doc__ or "", "pair", "device", "dtype")
    options.add_argument("--batch", type=whole(), nargs="+", default=[1, 4, 16])
    options.add_argument("--prompts", type=whole(), default=16)
    options.add_argument("--max-new-tokens", type=whole(), default=96)
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.batch, arguments.prompts, arguments.max_new_tokens = [1, 2], 2, 12
    pair = load(arguments)
    results = list(compare(pair, mixed(arguments.prompts), arguments))
    print(table([{key: value for key, value in row.items() if key != "differences"} for row in results]))
    for row in results:
        for difference in row["differences"]:
            print(f"{row['text']}, {row['arm']}, batch {row['batch']}: {described(difference)}")
    report = document("exactness", arguments, pair, results, [_claim(row) for row in results])
    if pair.device.type == "cpu":
        report["cpu"] = {
            "multiplies bfloat16 natively": native_bfloat16(),
            "sums rounded to 16 bits": pair.target_step.low_precision,
        }
    show(report, arguments)


@dataclass(frozen=True)
class _Job:
    """The prompts and common arguments of one kind of text (greedy or coupled), the same for all arms."""

    pair: ModelPair
    prompts: list[str]
    options: dict[str, Any]

    def texts(self, rows: list[int], **arm: Any) -> list[list[int]]:
        """Return the token ids that an arm writes for these prompts as one batch."""
        prompts = [self.prompts[row] for row in rows]
        out = generate(self.pair, prompts, sequence_ids=rows, **self.options, **arm)
        return [sequence.token_ids for sequence in out.sequences]


def compare(pair: ModelPair, prompts: list[str], arguments: Any) -> Iterator[Row]:
    """Yield a row for every kind of text, batch size and arm."""
    rows = list(range(len(prompts)))
    for text, options in TEXTS.items():
        shared = {"max_new_tokens": arguments.max_new_tokens, "seed": arguments.seed, **options}
        job = _Job(pair, prompts, shared)
        reference = [job.texts([row], method="regular")[0] for row in rows]
        for batch in arguments.batch:
            for name, arm in arms(pair, batch, first=batch == min(arguments.batch)).items():
                written: list[list[int]] = []
                for start in range(0, len(rows), batch):
                    written += job.texts(rows[start : start + batch], **arm)
                yield {"text": text, "batch": batch, "arm": name, **_judge(job, written, reference)}


def arms(pair: ModelPair, batch: int, first: bool) -> dict[str, Row]:
    """Return the arguments of `generate` by the names of the arms.

    Args:
        first: whether this is the first batch size, the only one at which speculative decoding is an arm.
    """
    by_name: dict[str, Row] = {}
    if batch > 1:
        by_name["regular"] = {"method": "regular"}
    if first:
        by_name["speculative"] = {"method": "speculative", "draft_length": "bass"}
    drafters = {"auto": "bass", "model": "bass, model", "prompt_lookup": "bass, prompt lookup"}
    for drafter, name in drafters.items():
        if drafter != "model" or pair.draft is not None:
            by_name[name] = {"method": "bass", "drafter": drafter, "draft_length": "bass"}
            by_name[f"{name}, fixed {FIXED}"] = {"method": "bass", "drafter": drafter, "draft_length": FIXED}
    if pair.draft is not None:
        by_name["amusd"] = {"method": "amusd"}
    return by_name


def _judge(job: _Job, written: list[list[int]], reference: list[list[int]]) -> Row:
    differences = [
        _difference(job, row, ours, theirs)
        for row, (ours, theirs) in enumerate(zip(written, reference, strict=True))
        if ours != theirs
    ]
    ties = [difference["tie"] for difference in differences if difference["tie"] is not None]
    return {
        "rows": len(reference),
        "identical": 1 - len(differences) / len(reference),
        "first difference at": median(difference["at"] for difference in differences) if differences else None,
        "farthest tie": min(ties) if ties else None,
        "differences": differences,
    }


def _difference(job: _Job, row: int, ours: list[int], theirs: list[int]) -> Row:
    """Describe the first difference of a row; if a text has already ended there, its token is None."""
    pair, request = job.pair, make_request(job.pair, job.prompts[row], **job.options)
    at = first_difference(ours, theirs)
    position = min(len(ours), len(theirs)) if at is None else at
    tokens = [text[position] if position < len(text) else None for text in (ours, theirs)]
    weighed: Weighed = {"p_ours": None, "p_theirs": None, "tie": None}
    if at is not None:
        text = [*request.prompts[0], *theirs[:at]]
        logits = next_logits(pair, text, request.backend)
        weighed = weigh(logits, request.sampling, request.seed, row, len(text), (ours[at], theirs[at]))
    return {
        "prompt": row, "at": position, "ours": tokens[0], "theirs": tokens[1],
        "ours text": _spelled(pair, tokens[0]), "theirs text": _spelled(pair, tokens[1]), **weighed,
    }  # fmt: skip


def _spelled(pair: ModelPair, token: int | None) -> str | None:
    return None if token is None or pair.tokenizer is None else str(pair.tokenizer.decode([token]))


def _claim(row: Row) -> Row:
    name = f"{row['text']}, {row['arm']}, batch {row['batch']}: identical rows"
    return alike(name, row["identical"])

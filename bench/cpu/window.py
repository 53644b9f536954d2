"""`python -m bench window`: the target as its own draft, with only the first and last tokens of a long text.

Part "acceptance": answers to long prompts of different kinds, built from this repository's files, greedy and
sampled. We include sampled text because a small model's greedy text soon repeats itself, and then the drafts of
every window, even of the smallest, are accepted. In each round every window drafts from the same position, and we
compare its drafts with the target's text. Nothing is timed.

Part "whole": whole sampled answers with and without windowed drafts, timed in turns, without their prompts.
"""

from __future__ import annotations

from typing import Any

from bass_core import ModelPair, SamplingParams, generate
from bass_core.decode.prompts import Chat, encode_prompts
from bass_core.draft.base import Drafter, Proposal
from bass_core.draft.registry import DRAFTERS, DrafterInputs, DrafterKind
from bass_core.draft.window import WINDOW, WindowDrafter
from bass_core.sample.noise import NoiseKeys
from bass_core.sequence import Sequence

from ..report.report import ROOT, Row, claim, document, load, median, parser, show, table, whole

WINDOWS = (64, 128, 256, 512, 1024)
# Drafts per round in the first part, and in the second.
LENGTH, WHOLE_LENGTH = 4, 3
# Prompts: number of tokens, the files that they are cut from, and the question after them ("": continue the text).
PROMPTS = (
    (1000, "README.md", ""),
    (2000, "docs/extending.md", "\n\nExplain in a few paragraphs how a drafter of one's own is written."),
    (3500, "CHANGELOG.md docs/usage.md", "\n\nSummarise the text above."),
    (5000, "bass_core/decode/*.py", ""),
    (6000, "docs/architecture.md docs/amusd.md docs/usage.md", "\n\nWhat does the text above say about AMUSD?"),
)

# Sampled texts are coupled, so that each draft is compared with the token that the target draws.
SAMPLED = "temperature 0.8"
TEXTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    SAMPLED: {"sampling": SamplingParams(0.8), "verification": "coupled"},
}


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("window", __doc__ or "", "pair", "device", "dtype")
    options.add_argument("--max-new-tokens", type=whole(), default=96)
    options.add_argument("--repeats", type=whole(), default=3, help="of the whole answers")
    arguments = options.parse_args(argv)
    prompts: tuple[tuple[int, str, str], ...] = PROMPTS
    windows: tuple[int, ...] = WINDOWS
    if arguments.quick:
        arguments.repeats, arguments.max_new_tokens = 1, 8
        prompts, windows = ((500, "README.md", ""),), (WINDOW,)
    pair = load(arguments)
    texts = [(text, prompt) for text in TEXTS for prompt in prompts]
    accepted = [row for text, prompt in texts for row in _acceptance(pair, text, prompt, windows, arguments)]
    print(table(accepted))
    answers = [_whole(pair, list(prompts)[-rows:], arguments) for rows in (1, 4) if rows <= len(prompts)]
    print(table(answers))
    least = min(row["acceptance"] for row in accepted if row["window"] == WINDOW)
    claims = [claim(f"least acceptance of the window of {WINDOW}", least, "above 0", least > 0)]
    show(document("window", arguments, pair, accepted + answers, claims), arguments)


class Probe(Drafter):
    """A drafter that lets every window draft from the same positions.

    Attributes:
        drafts: a tuple (length of the text, window, draft tokens) for each round and window.
    """

    def __init__(self, drafters: list[WindowDrafter]) -> None:
        self.drafters = drafters
        self.drafts: list[tuple[int, int, list[int]]] = []

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: NoiseKeys) -> Proposal:
        for drafter in self.drafters:
            proposal = drafter.propose(rows, max_drafts, keys)
            drafts = proposal.tokens[0, : proposal.num_drafted[0]].tolist()
            self.drafts.append((len(rows[0].tokens), drafter.window, drafts))
        return proposal


def _ids(pair: ModelPair, prompt: tuple[int, str, str]) -> list[int]:
    tokens, files, question = prompt
    paths = [path for pattern in files.split() for path in sorted(ROOT.glob(pattern))]
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in paths)
    cut = pair.tokenizer.decode(pair.tokenizer.encode(text)[:tokens])
    return encode_prompts(pair, cut + question, 1, Chat(raw=not question))[0]


def _acceptance(
    pair: ModelPair, text: str, prompt: tuple[int, str, str], windows: tuple[int, ...], arguments: Any
) -> list[Row]:
    """Return one prompt's rows: how many drafts of each window are accepted."""
    ids, (_, files, question) = _ids(pair, prompt), prompt
    probes: list[Probe] = []

    def make(parts: DrafterInputs) -> Drafter:
        probes.append(Probe([parts.window(window) for window in windows]))
        return probes[-1]

    DRAFTERS["every window"] = DrafterKind("every window", make, windows=True)
    try:
        out = generate(
            pair, [ids], method="bass", drafter="every window", draft_length=LENGTH, eos_token_id=None,
            max_new_tokens=arguments.max_new_tokens, seed=arguments.seed, **TEXTS[text],
        )  # fmt: skip
    finally:
        del DRAFTERS["every window"]
    name, rows = f"{files}{', a question' if question else ''}", []
    for window in windows:
        tries = [(at - len(ids), drafts) for at, other, drafts in probes[0].drafts if other == window and drafts]
        accepted = [_agreeing(drafts, out.sequences[0].token_ids[at:]) for at, drafts in tries]
        drafted = sum(len(drafts) for _, drafts in tries)
        rows.append({
            "part": "acceptance", "text": text, "prompt": name, "cached": len(ids), "window": window,
            "rounds": len(accepted), "acceptance": sum(accepted) / max(1, drafted),
            "tokens a round": 1 + sum(accepted) / max(1, len(accepted)),
        })  # fmt: skip
    return rows


def _agreeing(drafts: list[int], text: list[int]) -> int:
    """Return the number of leading drafts that equal the text's tokens."""
    same = [draft == token for draft, token in zip(drafts, text, strict=False)]
    return (same + [False]).index(False)


def _whole(pair: ModelPair, prompts: list[tuple[int, str, str]], arguments: Any) -> Row:
    """Return the median ms per token of whole answers, with and without drafts, and the drafts' acceptance."""
    ids = [_ids(pair, prompt) for prompt in prompts]
    common = {"max_new_tokens": arguments.max_new_tokens, "eos_token_id": None, "seed": arguments.seed}
    arms: dict[str, dict[str, Any]] = {
        "regular": {"method": "regular"},
        "windowed": {"method": "bass", "drafter": "window", "draft_length": WHOLE_LENGTH},
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(arguments.repeats):
        for name, arm in arms.items():
            out = generate(pair, ids, **common, **arm, **TEXTS[SAMPLED])
            times[name].append(out.metrics.ms_per_token or 0.0)
    regular, windowed = (median(times[name]) for name in arms)
    return {
        "part": "whole", "kind": "measured", "rows": len(ids), "cached": max(map(len, ids)),
        "draft length": WHOLE_LENGTH, "acceptance": out.metrics.acceptance_rate, "regular ms/token": regular,
        "windowed ms/token": windowed, "speed-up": regular / windowed,
    }  # fmt: skip

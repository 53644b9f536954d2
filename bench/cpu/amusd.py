"""`python -m bench amusd`: AMUSD beside regular decoding and synchronous speculation, on the same cores.

Contract: greedy, one sequence, the same prompts and the same number of new tokens for every arm, arms interleaved
prompt by prompt; ms/token is lane time without the prefill. "1 core" and "2 cores" are the threads of the arm's
target. AMUSD's target has one thread and its draft another; on a one-core machine they share the core. `formula`
is target steps per token, from the measured a (token acceptance), c (draft step / target step) and l (drafts fed
per round): synchronous (1 + l c) / E, AMUSD (max(l c, 1) + (1 - a^(l+1)) c) / E, where E = 1 + a + ... + a^l. The
AMUSD term (1 - a^(l+1)) c is the refill: after a roll-back the target waits for one draft. The formula takes a
verification to cost as much as a plain step. `coin P` arms accept each draft with probability P instead of testing
it, which shows at what acceptance the overlap pays.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from bass_core import Generation, ModelPair, generate, load_pair
from bass_core.machine.cpu import cores

from ..prompts import MIXED
from ..report.report import claim, finish, median, parser

BAR = 1.15
COINS = (0.6, 0.8, 0.95)


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("amusd", __doc__ or "")
    options.add_argument("--pair", default="smollm2")
    options.add_argument("--draft", default=None)
    options.add_argument("--dtype", default="auto")
    options.add_argument("--prompts", type=int, default=6)
    options.add_argument("--max-new-tokens", type=int, default=48)
    arguments = options.parse_args(argv)
    if arguments.quick:
        arguments.prompts, arguments.max_new_tokens = 1, 4
    pair = load_pair(arguments.pair, draft=arguments.draft, device="cpu", dtype=arguments.dtype)
    before = torch.get_num_threads()
    outs = _measure(pair, arguments)
    torch.set_num_threads(before)
    results = [_row(name, arm, outs[name], outs) for name, arm in _arms(arguments.quick).items()]
    weights = Path(str(pair.target.name_or_path)) / "model.safetensors"
    finish("amusd", arguments, pair.device, results, _claims(outs, arguments.quick), weights)


def _arms(quick: bool) -> dict[str, dict[str, Any]]:
    """By arm name: the target's thread count, and the arguments of generate."""
    model = {"drafter": "model"}
    arms: dict[str, dict[str, Any]] = {
        "regular, 1 core": {"threads": 1, "method": "regular"},
        "regular, 2 cores": {"threads": 2, "method": "regular"},
        "synchronous, 1 core": {"threads": 1, "method": "speculative", "draft_length": "bass", **model},
        "synchronous, 2 cores": {"threads": 2, "method": "speculative", "draft_length": "bass", **model},
        "synchronous l=2, 1 core": {"threads": 1, "method": "speculative", "draft_length": 2, **model},
        "synchronous l=4, 1 core": {"threads": 1, "method": "speculative", "draft_length": 4, **model},
        "amusd": {"threads": 1, "method": "amusd", **model},
        "amusd lead 2": {"threads": 1, "method": "amusd", "draft_length": 2, **model},
        "default drafter, 1 core": {"threads": 1, "method": "speculative", "draft_length": "bass"},
        "default drafter, 2 cores": {"threads": 2, "method": "speculative", "draft_length": "bass"},
        "amusd, default drafter": {"threads": 1, "method": "amusd"},
    }
    for coin in () if quick else COINS:
        same = {"threads": 1, "synthetic_acceptance": coin, "draft_length": 4, **model}
        arms[f"coin {coin}: synchronous l=4, 1 core"] = {"method": "speculative", **same}
        arms[f"coin {coin}: amusd lead 4"] = {"method": "amusd", **same}
    return arms


def _measure(pair: ModelPair, arguments: argparse.Namespace) -> dict[str, list[Generation]]:
    outs: dict[str, list[Generation]] = {}
    arms = _arms(arguments.quick)
    # One unmeasured pass first: the first forward of each width allocates memory.
    for prompt in [*([] if arguments.quick else [MIXED[-1]]), *MIXED[: arguments.prompts]]:
        for name, arm in arms.items():
            keywords = {key: value for key, value in arm.items() if key != "threads"}
            torch.set_num_threads(min(arm["threads"], cores()))
            tokens = 8 if prompt is MIXED[-1] else arguments.max_new_tokens
            out = generate(pair, prompt, max_new_tokens=tokens, eos_token_id=None, **keywords)
            if prompt is not MIXED[-1]:
                outs.setdefault(name, []).append(out)
    return outs


def _ms(outs: list[Generation]) -> float:
    return median([out.metrics.ms_per_token or 0.0 for out in outs])


def _row(
    name: str, arm: dict[str, Any], outs: list[Generation], all_: dict[str, list[Generation]]
) -> dict[str, Any]:
    lines = [out.timeline for out in outs if out.timeline is not None]
    accepted = sum(out.metrics.accepted for out in outs)
    drafted = sum(out.metrics.drafted for out in outs)
    rounds = sum(out.metrics.rounds for out in outs)
    lane_ms = sum(out.sequences[0].times_ms[-1] for out in outs)
    fed = drafted / rounds
    if arm["method"] == "amusd":
        fed = max(0.0, fed - accepted / max(drafted, 1))  # about one late draft per accepted round is not fed
    return {
        "arm": name,
        "ms/token": _ms(outs),
        "vs regular": _ms(all_[f"regular, {min(arm['threads'], 2)} core{'s' * (arm['threads'] > 1)}"]) / _ms(outs),
        "a": _mean([out.metrics.token_acceptance for out in outs]),
        "drafts/round": fed,
        "formula": _formula(arm["method"], fed, _mean([o.metrics.token_acceptance for o in outs]), _cost(all_)),
        "in target steps": _ms(outs) / _ms(all_["regular, 1 core"]),
        "target busy": sum(line["target_busy_ms"] for line in lines) / lane_ms if lines else None,
        "draft busy": sum(line["draft_busy_ms"] for line in lines) / lane_ms if lines else None,
        "looked at": drafted,
        "thrown away": sum(line["thrown_away"] for line in lines) if lines else None,
        "rolled back": sum(line["rolled_back"] for line in lines) if lines else None,
    }


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _cost(outs: dict[str, list[Generation]]) -> float:
    """c: the time of a draft step over that of a plain target step, one core each."""
    lines = [out.timeline for out in outs["amusd"] if out.timeline is not None]
    step = sum(line["draft_busy_ms"] for line in lines) / max(1, sum(line["drafted"] for line in lines))
    return step / _ms(outs["regular, 1 core"])


def _formula(method: str, length: float, a: float | None, c: float) -> float | None:
    if method == "regular" or a is None:
        return None
    emitted = (1 - a ** (length + 1)) / (1 - a) if a < 1 else length + 1
    if method == "speculative":
        return (1 + length * c) / emitted
    return (max(length * c, 1) + (1 - a ** (length + 1)) * c) / emitted


def _claims(outs: dict[str, list[Generation]], quick: bool) -> list[dict[str, Any]]:
    real = [name for name in outs if not name.startswith("coin")]
    texts = {name: [out.sequences[0].token_ids for out in outs[name]] for name in real}
    same = sum(text == texts["regular, 1 core"] for text in texts.values()) / len(texts)
    best = min(_ms(outs[name]) for name in real if name.startswith("synchronous") and name.endswith("1 core"))
    claims = [claim("arms that write regular's text", same, "1.0", same == 1.0)]
    for name, value in (
        ("amusd / synchronous, one core for the target", _ms(outs["synchronous, 1 core"]) / _ms(outs["amusd"])),
        ("amusd / the best synchronous length, one core", best / _ms(outs["amusd"])),
    ):
        claims.append(claim(name, value, f"at least {BAR}", None if quick else value >= BAR))
    for coin in () if quick else COINS:
        ratio = _ms(outs[f"coin {coin}: synchronous l=4, 1 core"]) / _ms(outs[f"coin {coin}: amusd lead 4"])
        claims.append(claim(f"the same were {coin} accepted, length 4", ratio, f"at least {BAR}", ratio >= BAR))
    claims.append(claim("c, draft step / target step", _cost(outs), "none", True))
    return claims

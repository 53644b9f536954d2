"""Known ways to break block verification, in torch and in its kernels.

Contract: as in mutations.py.
"""

from __future__ import annotations

from .mutations import Mutant

_ENUMERATED = ["tests/bass_core/verify/test_block.py::test_the_text_is_distributed_as_the_targets[1-3-fixed]"]
_WHOLE_ROUNDS = "tests/conformance/test_enumeration.py::test_"
_TRITON = ["tests/kernels/test_accept.py::test_recovered_tokens_of_a_block_are_the_references"]

_UNSOUND = "tests/bass_core/verify/test_unsound.py::test_"
_FIRST = _UNSOUND + "whole_verifications_write_the_targets_first_token"

VERIFICATION_MUTANTS = [
    Mutant(
        "chains: a q that is NaN judged as any other",
        "bass_core/verify/acceptance.py",
        "fit = fit & draft_probs.sum(-1).isfinite()",
        "pass",
        [_FIRST + "[1-block-False]"],
    ),
    Mutant(
        "chains: a block goes on over logits that are NaN",
        "bass_core/verify/acceptance.py",
        "    fit = sound[:, :-1]\n",
        "    fit = torch.ones_like(sound[:, :-1])\n",
        [_UNSOUND + "the_law_is_the_targets_whichever_place_is_broken"],
    ),
    Mutant(
        "chains: only the newest token's logits can be unsound",
        "bass_core/verify/rejection.py",
        "used = sound.gather(1, outcome.accepted[:, None])[:, 0]",
        "used = sound[:, 0]",
        [_UNSOUND + "logits_end_a_row_only_where_it_used_them[greedy]"],
    ),
    Mutant(
        "chains: unused logits end a row",
        "bass_core/verify/rejection.py",
        "used = sound.gather(1, outcome.accepted[:, None])[:, 0]",
        "used = sound.all(-1)",
        [_UNSOUND + "logits_end_a_row_only_where_it_used_them"],
    ),
    Mutant(
        "chains: the residual unchanged",
        "bass_core/verify/rejection.py",
        "left = residual(at_end, draft_probs[rows, index], reach[rows, accepted])",
        "left = at_end",
        [_FIRST + "[-1-rejection-False]"],
    ),
    Mutant(
        "sampling: top-k behind the temperature",
        "bass_core/sample/distribution.py",
        "threshold = scaled.topk(params.top_k, dim=-1)",
        "scaled = scaled / params.divisor\n        threshold = scaled.topk(params.top_k, dim=-1)",
        [_UNSOUND + "no_temperature_gives_nan"],
    ),
    Mutant(
        "block: the residual of the rejection rule",
        "bass_core/verify/block.py",
        "return (reach[:, None] * p - q).clamp_(min=0)",
        "return (p - q).clamp_(min=0)",
        _ENUMERATED,
    ),
    Mutant(
        "block: the recovered token without the reach",
        "bass_core/verify/rejection.py",
        "residual(at_end, draft_probs[rows, index], reach[rows, accepted])",
        "residual(at_end, draft_probs[rows, index], reach[rows, 0 * accepted])",
        ["tests/bass_core/verify/test_block.py::test_the_recovered_token_comes_from_what_is_left"],
    ),
    Mutant(
        "block: the first failure ends it",
        "bass_core/verify/rejection.py",
        "accepted = last_passed((u < chance) & drafted)",
        "accepted = accepted_prefix((u < chance) & drafted)",
        [_WHOLE_ROUNDS + "drafters[model-block]"],
    ),
    Mutant(
        "block: the key without the round",
        "bass_core/sample/noise.py",
        "_STREAMS * begins + int(role)",
        "torch.full_like(begins, int(role))",
        [_WHOLE_ROUNDS + "lengths_that_a_head_decides_by_where_it_stops[block]"],
    ),
    Mutant(
        "block: the last draft judged as the others",
        "bass_core/verify/block.py",
        "behind = torch.arange(2, width + 1, device=p.device) <= num_drafted[:, None]",
        "behind = torch.arange(1, width, device=p.device) <= num_drafted[:, None]",
        _ENUMERATED,
    ),
    Mutant(
        "block: padding accepted",
        "bass_core/verify/rejection.py",
        "accepted = last_passed((u < chance) & drafted)",
        "accepted = last_passed(u < chance)",
        ["tests/bass_core/verify/test_block.py::test_the_tests_tell_what_was_decided[True-True]"],
    ),
    Mutant(
        "CPU kernels: the excess behind a draft with the reach before it",
        "kernels/cpu/sampling/excess.py",
        "factor = reach[row * (width + 1) + i]",
        "factor = reach[row * (width + 1) + i - 1]",
        ["tests/bass_core/verify/test_block.py::test_the_tests_tell_what_was_decided[True-True]"],
    ),
    Mutant(
        "Triton: the residual of the rejection rule",
        "kernels/triton/accept.py",
        "tl.maximum(factor * weight - taken, 0.0)",
        "tl.maximum(weight - taken, 0.0)",
        _TRITON,
    ),
    Mutant(
        "Triton: the first failure ends a block",
        "kernels/triton/accept.py",
        "accepted = tl.max(tl.where(inside & passed & (i < count), i + 1, 0), 1)",
        "accepted = tl.min(tl.where(inside & ~(passed & (i < count)), i, width), 1)",
        _TRITON,
    ),
    Mutant(
        "Triton: the excess of other places",
        "kernels/triton/block.py",
        "here = last + 1\n",
        "here = last\n",
        ["tests/kernels/test_accept.py::test_chances_are_the_references"],
    ),
]

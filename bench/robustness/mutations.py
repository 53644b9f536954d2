"""The known ways to break the decoder: mistakes that real projects have shipped, each as one edit.

Contract: `old` occurs exactly once in the file. If the sources change and it no longer does, `apply` raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """An edit that replaces `old` in a file; `cases` are the smallest tests meant to catch it."""

    name: str
    file: str
    old: str
    new: str
    cases: list[str]

    def apply(self, root: Path) -> None:
        """Edit the file under `root`. Raises ValueError unless `old` occurs exactly once."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"the mutant {self.name!r} does not fit {self.file} any more")
        path.write_text(text.replace(self.old, self.new))


_ACCEPT = "accepted = accepted_prefix((u * q_drafts < p_drafts) & drafted)"
_WEIGHTS = "weights = torch.where(usable[:, None], left, at_end)"
_CONFORMANCE = "tests/conformance/test_"
_SAMPLED = [_CONFORMANCE + "distribution.py::test_quick[bass-other-1.0-0-1.0-rejection]"]
_REDUCED = [_CONFORMANCE + "distribution.py::test_quick[bass-reduced-1.0-3-1.0]"]
_GREEDY = [_CONFORMANCE + "greedy.py::test_rows_that_diverge[llama-bass]"]
_WINDOW = [_CONFORMANCE + "greedy.py::test_rows_that_diverge[gemma3-bass]"]
_LATE = [
    "tests/bass_core/overlapped/test_decoder.py::test_a_late_draft_that_is_right_stands_and_is_fed_next",
    "tests/bass_core/overlapped/test_decoder.py::test_a_late_draft_that_is_wrong_falls",
]
_PERFECT = [_CONFORMANCE + "counts.py::test_perfect_draft_takes_the_fewest_verifications"]
_ENDS = [_CONFORMANCE + "ends.py::test_an_end_at_any_place_of_a_round"]
_NEVER_REFUSED = [_CONFORMANCE + "counts.py::test_a_perfect_draft_is_never_refused"]
_AMUSD_SAMPLED = [_CONFORMANCE + "distribution.py::test_quick[amusd-other-1.0-0-1.0]"]
_DRAW = "return draw(probs, keys.seed, keys.sequence_ids, keys.positions + step, keys.stream(role)), probs"

MUTANTS = [
    Mutant(
        "every draft accepted",
        "bass_core/verify/rejection.py",
        _ACCEPT,
        "accepted = accepted_prefix((u < 2) & drafted)",
        _SAMPLED,
    ),
    Mutant(
        "q ignored in the test",
        "bass_core/verify/rejection.py",
        _ACCEPT,
        "accepted = accepted_prefix((u < p_drafts) & drafted)",
        _NEVER_REFUSED,
    ),
    Mutant(
        "q is not what was sampled from",
        "bass_core/draft/model.py",
        _DRAW,
        _DRAW.replace(")), probs", ")), probs.sqrt() / probs.sqrt().sum(-1, keepdim=True)"),
        _SAMPLED,
    ),
    Mutant(
        "argmax drafts with a soft q",
        "bass_core/draft/model.py",
        _DRAW,
        "return probs.argmax(-1), probs",
        _SAMPLED,
    ),
    Mutant(
        "one noise stream for draft and test",
        "bass_core/verify/rejection.py",
        "u = uniform(keys.seed, *keys.at(width), keys.stream(Role.ACCEPT)[:, None])",
        "from ..sample.noise import token_uniforms\n"
        "        streams = keys.stream(Role.DRAFT)[:, None]\n"
        "        u = token_uniforms(keys.seed, *keys.at(width), streams, p.shape[-1])\n"
        "        u = u.gather(2, drafts[..., None])[..., 0]",
        _SAMPLED,
    ),
    Mutant(
        "the key without the round",
        "bass_core/sample/noise.py",
        "_STREAMS * begins + int(role)",
        "torch.full_like(begins, int(role))",
        [_CONFORMANCE + "enumeration.py::test_lengths_that_a_head_decides_by_where_it_stops[rejection]"],
    ),
    Mutant(
        "recovered token drawn from p",
        "bass_core/verify/rejection.py",
        _WEIGHTS,
        "weights = at_end",
        _SAMPLED,
    ),
    Mutant(
        "top-p on the residual",
        "bass_core/verify/rejection.py",
        _WEIGHTS,
        _WEIGHTS + "\n        from ..sample.distribution import _nucleus\n"
        "        weights = _nucleus(weights / weights.sum(-1, keepdim=True), 0.8)",
        _SAMPLED,
    ),
    Mutant(
        "residual not normalised, the rest to the last token",
        "bass_core/verify/rejection.py",
        _WEIGHTS,
        "rest = torch.zeros_like(left)\n"
        "        rest[:, -1] = 1 - left.sum(-1)\n"
        "        weights = torch.where(usable[:, None], left + rest, at_end)",
        _SAMPLED,
    ),
    Mutant(
        "no bonus token",
        "bass_core/verify/rejection.py",
        "accepted = accepted_prefix((agrees > 0) & drafted)",
        "accepted = accepted_prefix((agrees > 0) & drafted).clamp(max=max(width - 1, 0))",
        _PERFECT,
    ),
    Mutant(
        "padding of shorter rows accepted",
        "bass_core/verify/rejection.py",
        "accepted = accepted_prefix((agrees > 0) & drafted)",
        "accepted = accepted_prefix(agrees > 0)",
        [_CONFORMANCE + "ends.py::test_the_context_ends_a_text"],
    ),
    Mutant(
        "draft cache lacks the last accepted draft",
        "bass_core/draft/model.py",
        "before + min(accepted[r], width - 1)",
        "before + accepted[r]",
        _PERFECT,
    ),
    Mutant(
        "stale lengths in the draft loop",
        "bass_core/draft/model.py",
        "[end + step for end in ends]",
        "list(ends)",
        _PERFECT,
    ),
    Mutant(
        "positions off by one in one row",
        "bass_core/model/base.py",
        "positions = plan.positions\n",
        "positions = plan.positions + (torch.arange(len(plan.positions))[:, None] == 1)\n",
        _GREEDY,
    ),
    Mutant(
        "stale tail attended",
        "kernels/plan.py",
        "hidden = columns > last\n",
        "hidden = columns > last + 1\n",
        _GREEDY,
    ),
    Mutant("window ignored", "kernels/plan.py", "hidden | (columns <= last - window)", "hidden", _WINDOW),
    Mutant(
        "a row's cache left behind when it moves",
        "bass_core/decode/batch.py",
        "                self.target.move_row(last, r)\n",
        "                pass\n",
        _ENDS,
    ),
    Mutant(
        "coupled draft with a noise of its own",
        "bass_core/verify/rules.py",
        "return Role.TARGET if self.coupled else Role.DRAFT",
        "return Role.DRAFT",
        _NEVER_REFUSED,
    ),
    Mutant(
        "the head reads an older state than the target's newest",
        "bass_core/draft/head_states.py",
        "read[r, at : at + len(piece)] = next(found)",
        "read[r, at : at + len(piece)] = next(found).roll(1, 0)",
        ["tests/bass_core/draft/test_head.py::test_proposals_are_what_the_head_says_of_the_whole_text"],
    ),
    Mutant(
        "copied drafts judged by the model's q",
        "bass_core/draft/lookup.py",
        "torch.where(copies[..., None], points, probs)",
        "probs",
        ["tests/bass_core/draft/test_lookup.py::test_a_cascade_spares_the_model_where_every_row_copies"],
    ),
    Mutant(
        "text goes on behind its end",
        "bass_core/sequence.py",
        "            if self.finish_reason:\n                return count",
        '            if self.finish_reason == "length":\n                return count',
        _ENDS,
    ),
    Mutant(
        "one end-of-text id of several",
        "bass_core/decode/checks.py",
        "    return frozenset(ids)",
        "    return frozenset(sorted(ids)[:1])",
        _ENDS,
    ),
    Mutant(
        "drafts for which there is no room",
        "bass_core/decode/batch.py",
        "min(most, row.remaining - 1)",
        "min(most, row.remaining)",
        [_CONFORMANCE + "counts.py::test_drafts_that_are_right_so_far"],
    ),
    Mutant(
        "a draft that skips what rounds without drafts wrote",
        "bass_core/draft/model.py",
        "rows[r].tokens[start:] if",
        "rows[r].tokens[max(start, len(rows[r].tokens) - 2) :] if",
        [_CONFORMANCE + "counts.py::test_rounds_without_drafts_leave_the_draft_in_step"],
    ),
    Mutant(
        "q of a reduced vocabulary at other ids",
        "bass_core/draft/head.py",
        ".index_copy_(1, self.head.vocabulary, q)",
        ".index_copy_(1, torch.arange(q.shape[1], device=q.device), q)",
        _REDUCED,
    ),
    Mutant(
        "all rows share their noise",
        "bass_core/sample/noise.py",
        "broadcast_tensors(sequence_ids,",
        "broadcast_tensors(0 * sequence_ids,",
        [_CONFORMANCE + "independence.py::test_seeds_and_ids_matter"],
    ),
    Mutant(
        "AMUSD: a draft counts that came too late",
        "bass_core/decode/overlapped/session.py",
        "if told[: len(now)] == now:",
        "if len(now) <= len(told):",
        ["tests/bass_core/overlapped/test_session.py::test_a_draft_that_comes_too_late_is_dropped"],
    ),
    Mutant(
        "AMUSD: the draft's cache keeps a refused token",
        "bass_core/draft/model.py",
        "self.runner.commit(row, min(self.runner.lengths[row], length))",
        "self.runner.commit(row, min(self.runner.lengths[row], length + 1))",
        ["tests/bass_core/overlapped/test_session.py::test_after_a_refusal_the_drafts_are_those_of_the_new_text"],
    ),
    Mutant(
        "AMUSD: a draft comes with another row's q",
        "bass_core/decode/overlapped/session.py",
        "q = dict(zip(drawn,",
        "q = dict(zip(drawn[::-1],",
        _AMUSD_SAMPLED,
    ),
    Mutant(
        "AMUSD: a late draft counts as fed to the target",
        "bass_core/decode/overlapped/decoder.py",
        "settled = min(stand, counts[r]) + 1",
        "settled = stand + 1",
        _LATE,
    ),
    Mutant(
        "AMUSD: a late draft stands untested",
        "bass_core/decode/overlapped/decoder.py",
        "same = stand == tested[r] > counts[r]",
        "same = tested[r] > counts[r] <= stand",
        _LATE,
    ),
    Mutant(
        "a token drawn from NaN",
        "bass_core/verify/acceptance.py",
        "    if UNSOUND in tokens:",
        "    if False:",
        ["tests/faults/test_broken_models.py::test_a_target_that_breaks_is_an_error_and_no_text"],
    ),
]

"""Known ways to break the decoder: mistakes that real projects have shipped, each as one edit.

`old` must occur exactly once in the file; otherwise `apply` raises. kernel_mutations.py has the mutants of the
kernels and the caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """An edit of a file.

    Attributes:
        name: the mutant's name in results.
        file: the file to edit, relative to the root.
        old: the text to replace.
        new: its replacement.
        cases: the smallest tests meant to catch it.
    """

    name: str
    file: str
    old: str
    new: str
    cases: list[str]

    def apply(self, root: Path) -> None:
        """Edit the file under `root`.

        Raises:
            ValueError: if `old` does not occur exactly once.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"the mutant {self.name!r} does not fit {self.file} any more")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


_CONFORMANCE = "tests/conformance/test_"
_ENUMERATED = "tests/conformance/test_enumeration.py::test_"
_UNSOUND = "tests/bass_core/verify/test_unsound.py::test_"
_BLOCK = "tests/bass_core/verify/test_block.py::test_"
_FED = "tests/bass_core/draft/test_tree.py::test_"
_AMUSD = "tests/bass_core/decode/amusd/test_"
_CORE = "tests/bass_core/"
# Test cases in which torch verifies the drafts, not the CPU kernels.
_REFERENCE = ["tests/kernels/cpu/test_verification.py::test_decisions_equal_the_reference"]
_GREEDY = ["tests/kernels/cpu/test_verification.py::test_greedy_decisions_equal_the_reference"]
_SAMPLED = [_CONFORMANCE + "distribution.py::test_texts_have_the_distribution[bass-other-1.0-0-1.0-rejection]"]
_NEVER_REFUSED = [_CONFORMANCE + "counts.py::test_a_perfect_draft_is_never_rejected"]
_PERFECT = [_CONFORMANCE + "counts.py::test_perfect_draft_takes_the_fewest_verifications"]
_ENDS = [_CONFORMANCE + "ends.py::test_a_text_ends_at_any_place_of_a_round"]
_AHEAD = "tests/devices/test_launched_ahead.py::test_texts_and_records_are_those_of_the_plain_loop"
_LATE = [
    _AMUSD + "decoder.py::test_a_late_draft_that_is_right_is_accepted_and_fed_next",
    _AMUSD + "decoder.py::test_a_late_draft_that_is_wrong_is_rejected",
]
_MODEL = [_ENUMERATED + "drafters_keep_the_distribution[model-block]"]
_MASKED = [_CONFORMANCE + "grammar.py::test_drafters_keep_the_law_of_a_grammar[model-block]"]
_FORCED = [_CORE + "sample/test_grammar.py::test_forced_tokens_are_drafted_and_verified"]
_TREE = [_ENUMERATED + "trees_keep_the_distribution[(2, 1)-rejection]"]
_CAPTURED = _CONFORMANCE + "captured.py::test_captured_"
_WINDOW_ROUNDS = [_ENUMERATED + "a_window_after_a_model_shares_no_noise_between_rounds[block]"]
_WHOLE = [_BLOCK + "the_text_is_distributed_as_the_targets[1-3-fixed]"]
_KEPT = [_CORE + "model/test_runner.py::test_a_committed_path_equals_the_same_tokens_fed_as_text[pad-unshared]"]

MUTANTS = [
    Mutant("every draft accepted", "bass_core/verify/rejection.py",
           "accepted = accepted_prefix((u * q_drafts < p_drafts) & drafted)",
           "accepted = accepted_prefix((u < 2) & drafted)", _REFERENCE),
    Mutant("q ignored in the test", "bass_core/verify/rejection.py",
           "accepted = accepted_prefix((u * q_drafts < p_drafts) & drafted)",
           "accepted = accepted_prefix((u < p_drafts) & drafted)", _REFERENCE),
    Mutant("q is not what was sampled from", "bass_core/draft/chain.py",
           "yield DraftStep(tokens, columns, q, logits)",
           "yield DraftStep(tokens, columns, q if q is None else q.sqrt_().div_(q.sum(-1, keepdim=True)), logits)",
           _SAMPLED),
    Mutant("argmax drafts with a soft q", "bass_core/draft/chain.py",
           "columns = draw(q, keys.seed, keys.sequence_ids, positions, streams, self.vocabulary)",
           "columns = q.argmax(-1)", _SAMPLED),
    Mutant("one noise stream for draft and test", "bass_core/verify/rejection.py",
           "u = uniform(keys.seed, *keys.at(width), keys.stream(Role.ACCEPT)[:, None])",
           "from ..sample.noise import token_uniforms\n        streams = keys.stream(Role.DRAFT)[:, None]\n"
           "        u = token_uniforms(keys.seed, *keys.at(width), streams, p.shape[-1])\n"
           "        u = u.gather(2, drafts[..., None])[..., 0]", _REFERENCE),
    Mutant("the key without the round", "bass_core/sample/noise.py", "_STREAMS * begins + int(role)",
           "torch.full_like(begins, int(role))", [
           _ENUMERATED + "lengths_that_depend_on_a_heads_stop_keep_the_distribution[rejection]",
           _ENUMERATED + "policies_keep_the_distribution[fixed 3-block]"]),
    Mutant("recovered token drawn from p", "bass_core/verify/rejection.py",
           "weights = torch.where(usable[:, None], left, at_end)", "weights = at_end", _REFERENCE),
    Mutant("top-p on the residual", "bass_core/verify/rejection.py",
           "weights = torch.where(usable[:, None], left, at_end)",
           "weights = torch.where(usable[:, None], left, at_end)\n"
           "        from ..sample.distribution import _nucleus\n"
           "        weights = _nucleus(weights / weights.sum(-1, keepdim=True), 0.8)", _REFERENCE),
    Mutant("residual not normalised, the rest to the last token", "bass_core/verify/rejection.py",
           "weights = torch.where(usable[:, None], left, at_end)",
           "rest = torch.zeros_like(left)\n        rest[:, -1] = 1 - left.sum(-1)\n"
           "        weights = torch.where(usable[:, None], left + rest, at_end)", _REFERENCE),
    Mutant("no bonus token", "bass_core/verify/rejection.py", "accepted = accepted_prefix((agrees > 0) & drafted)",
           "accepted = accepted_prefix((agrees > 0) & drafted).clamp(max=max(width - 1, 0))", _GREEDY),
    Mutant("CPU kernels: no bonus token", "kernels/cpu/sampling/verification.py",
           "if accepted == i and i < judged and agrees", "if accepted == i and i < judged - 1 and agrees",
           _PERFECT),
    Mutant("padding of shorter rows accepted", "bass_core/verify/rejection.py",
           "accepted = accepted_prefix((agrees > 0) & drafted)", "accepted = accepted_prefix(agrees > 0)",
           _GREEDY),
    Mutant("CPU kernels: padding of shorter rows accepted", "kernels/cpu/sampling/verification.py",
           "if accepted == i and i < judged and agrees", "if accepted == i and agrees",
           [_CONFORMANCE + "ends.py::test_the_context_ends_a_text"]),
    Mutant("draft cache lacks the last accepted draft", "bass_core/draft/model.py",
           "before + min(accepted[r], width - 1)", "before + accepted[r]", _PERFECT),
    Mutant("stale lengths in the draft loop", "bass_core/draft/chain.py", "[end + depth for end in self.ends]",
           "list(self.ends)", _PERFECT),
    Mutant("positions off by one in one row", "bass_core/model/base.py", "positions = plan.positions\n",
           "positions = plan.positions + (torch.arange(len(plan.positions))[:, None] == 1)\n",
           [_CONFORMANCE + "greedy.py::test_rows_that_diverge_write_the_targets_text[llama-bass]"]),
    Mutant("a row's cache left behind when it moves", "bass_core/decode/verifier.py",
           "        self.target.move_row(source, target)\n", "", _ENDS),
    Mutant("coupled draft with a noise of its own", "bass_core/verify/rules.py",
           "return Role.TARGET if self.coupled else Role.DRAFT", "return Role.DRAFT", _NEVER_REFUSED),
    Mutant("the head reads an older state than the target's newest", "bass_core/draft/head/states.py",
           "read[r, at : at + len(piece)] = next(finished)",
           "read[r, at : at + len(piece)] = next(finished).roll(1, 0)",
           [_CORE + "draft/test_head.py::test_proposals_equal_those_of_an_uncached_head"]),
    Mutant("a pointer to what the text does not have yet", "bass_core/model/pointer.py",
           "(positions + 1 < lengths", "(positions < lengths", [_CORE + "model/test_pointer.py"]),
    Mutant("a pointer searches text that was taken back", "bass_core/draft/head/texts.py",
           "= min(self._known[row], length)", "= self._known[row]",
           [_CORE + "draft/test_rewind.py::test_a_pointer_does_not_search_rewound_text"]),
    Mutant("a head points at text that was taken back", "bass_core/draft/head/feed.py",
           "self.texts.rewind(row, length)", "pass",
           [_CORE + "draft/test_rewind.py::test_a_head_does_not_point_at_rewound_text"]),
    Mutant("a head points at another row's text", "bass_core/draft/head/feed.py",
           "self.texts.move_row(source, target)", "pass",
           [_CORE + "draft/test_rewind.py::test_a_head_does_not_point_at_rewound_text"]),
    Mutant("copied drafts judged by the model's q", "bass_core/draft/lookup.py",
           "        full[row, np.arange(width), tokens[row].numpy()] = 1\n",
           "        full[row, :, 0] = 1\n",
           [_CORE + "draft/test_lookup.py::test_a_cascade_asks_the_model_only_for_rows_that_cannot_copy"]),
    Mutant("text goes on behind its end", "bass_core/sequence.py",
           "            if self.finish_reason:\n                break",
           '            if self.finish_reason == "length":\n                break', _ENDS),
    Mutant("one end-of-text id of several", "bass_core/decode/checks.py", "    return frozenset(ids)",
           "    return frozenset(sorted(ids)[:1])", _ENDS),
    Mutant("drafts for which there is no room", "bass_core/decode/batch.py", "min(most, row.remaining - 1)",
           "min(most, row.remaining)", [_CONFORMANCE + "counts.py::test_counts_of_partly_right_drafts_are_exact"]),
    Mutant("a draft that skips what rounds without drafts wrote", "bass_core/draft/model.py",
           "row.tokens[start:] if most", "row.tokens[max(start, len(row.tokens) - 2) :] if most",
           [_CONFORMANCE + "counts.py::test_rounds_without_drafts_keep_the_draft_in_step"]),
    Mutant("q of a reduced vocabulary at other ids", "bass_core/sample/distribution.py",
           "return calls.scatter_columns(q, ids, size)",
           "return calls.scatter_columns(q, torch.arange(len(ids)), size)",
           [_CONFORMANCE + "distribution.py::test_texts_have_the_distribution[bass-reduced-1.0-3-1.0]"]),
    Mutant("all rows share their noise", "bass_core/sample/noise.py", "broadcast_tensors(sequence_ids,",
           "broadcast_tensors(0 * sequence_ids,", [_CORE + "sample/test_noise.py::test_words_equal_philox"]),
    Mutant("AMUSD: a draft counts that came too late", "bass_core/decode/amusd/session.py",
           "if read[: len(now)] == now:", "if len(now) <= len(read):",
           [_AMUSD + "session.py::test_a_draft_that_comes_too_late_is_dropped"]),
    Mutant("AMUSD: the draft's cache keeps a refused token", "bass_core/draft/model.py",
           "self.runner.commit(row, min(self.runner.lengths[row], length))",
           "self.runner.commit(row, min(self.runner.lengths[row], length + 1))",
           [_AMUSD + "session.py::test_after_a_rejection_the_drafts_follow_the_new_text"]),
    Mutant("AMUSD: a draft comes with another row's q", "bass_core/decode/amusd/session.py",
           "q = dict(zip(drawn,", "q = dict(zip(drawn[::-1],",
           [_CONFORMANCE + "distribution.py::test_texts_have_the_distribution[amusd-other-1.0-0-1.0]"]),
    Mutant("AMUSD: a late draft counts as fed to the target", "bass_core/decode/batch.py",
           "[path[:count] for path, count in", "[path for path, count in", _LATE),
    Mutant("AMUSD: a late draft stands untested", "bass_core/decode/amusd/decoder.py",
           "ends=[n <= count for", "ends=[n < count or len(verdict.outcomes.drafts[0]) == count for", _LATE),
    Mutant("a token drawn from NaN", "bass_core/verify/acceptance.py", "    if UNSOUND in tokens:",
           "    if False:",
           ["tests/faults/test_broken_models.py::test_a_target_with_nan_raises_a_model_error"]),
    Mutant("the rule chosen by what the proposal looks like", "bass_core/decode/batch.py",
           "return check_type(proposal, self._branches)",
           "given: Any = check_type(proposal, self._branches)\n"
           "        line = [list(range(-1, count - 1)) for count in given.num_drafted]\n"
           "        if self._branches and given.parents == line and given.drawn and given.probs is not None:\n"
           "            width = given.tokens.shape[1]\n"
           "            places = torch.tensor([(row + [0] * width)[:width] for row in given.drawn])\n"
           "            given = Proposal(given.tokens, given.num_drafted, given.probs[places])\n"
           "        return given",
           [_ENUMERATED + "trees_keep_the_distribution[a user's trees, chains except after 0-auto]"]),
    Mutant("the rule chosen by the second draft", "bass_core/verify/rejection.py",
           "    p_drafts = p[:, :width].gather(",
           "    if rule is Rule.BLOCK and width > 1 and int(drafts[0, 1]) == 0:\n"
           "        rule = Rule.REJECTION\n    p_drafts = p[:, :width].gather(", _MODEL),
    Mutant("a length cut by a drawn token's own q", "bass_core/draft/chain.py",
           "proposal = Proposal(torch.stack(tokens, dim=1), counts, q)",
           "if q is not None:\n"
           "            own_q = q.gather(2, torch.stack(tokens, dim=1)[..., None])[..., 0]\n"
           "            likely = (own_q >= 0.3).long().cumprod(1).sum(1).tolist()\n"
           "            counts = [min(n, m) for n, m in zip(counts, likely, strict=True)]\n"
           "        proposal = Proposal(torch.stack(tokens, dim=1), counts, q)",
           _MODEL),
    Mutant("a chain cut after its last token was seen", "bass_core/draft/chain.py",
           "proposal = Proposal(torch.stack(tokens, dim=1), counts, q)",
           "counts = [n - (n > 1 and int(tokens[n - 1][r]) == 0) for r, n in enumerate(counts)]\n"
           "        proposal = Proposal(torch.stack(tokens, dim=1), counts, q)",
           _MODEL),
    Mutant("a head that is sure by the token it drew", "bass_core/draft/chain.py",
           "            chance, counts = chance * step.chances[:, 0], counts + active\n",
           "            chance = chance * step.chances[:, 0]\n"
           "            active = active & (chance >= self.confidence)\n"
           "            counts = counts + active\n",
           [_ENUMERATED + "drafters_keep_the_distribution[a head that stops-block]"]),
    Mutant("a drawn node dropped", "bass_core/verify/tree_shape.py",
           "                    self.drawn_at[r][parent] = i\n",
           "                    if token:\n                        self.drawn_at[r][parent] = i\n", _TREE),
    Mutant("the q of another drawn child", "bass_core/verify/tree.py",
           "return self.tree.probs[self.tree.drawn[row][draft]]",
           "return self.tree.probs[max(self.tree.drawn[row])]", _TREE),
    Mutant("the number of children chosen after the draw", "bass_core/draft/tree.py",
           "                if not chance > min_chance:\n",
           "                if not chance > min_chance or (0 < first == child and int(tokens[at, child]) == 1):\n",
           _TREE),
    Mutant("trees: each level read on the host", "bass_core/draft/tree.py",
           "known = [[1.0] * width] * len(parents) if is_accelerator(tokens.device) else chances.tolist()",
           "known = chances.tolist()",
           ["tests/devices/test_decoding.py::test_a_round_of_trees_waits_once[perturbed-greedy]"]),
    Mutant("a head that looks on an accelerator whether it is unsure", "bass_core/draft/registry.py",
           "confidence = 0.0 if is_accelerator(runner.device) else confidence", "pass",
           ["tests/bass_core/draft/test_head.py::test_an_unsure_head_stops_on_what_it_knew_before_the_draw"]),
    Mutant("block: the residual unchanged", "bass_core/sample/rows.py",
           "return (reach[..., None] * p - q).clamp_(min=0)", "return p.clone()", _WHOLE),
    Mutant("a q that is no number judged like others", "bass_core/verify/rejection.py",
           "judged, outcome = judged_drafts(sound, drawn_from, num_drafted), None",
           "judged, outcome = num_drafted, None",
           ["tests/kernels/cpu/test_verification.py::test_unsound_numbers_discard_the_later_drafts_of_a_row"]),
    Mutant("trees: a residual of the target's own", "bass_core/verify/tree.py",
           "rest = residual(p[i], q, torch.ones((), device=device))", "rest = p[i].clone()",
           _TREE),
    Mutant("the number of a test used for the residual", "bass_core/verify/rejection.py",
           "torch.where(rejected, keys.stream(Role.RESIDUAL)", "torch.where(rejected, keys.stream(Role.ACCEPT)",
           [_ENUMERATED + "drafters_keep_the_distribution[model-rejection]"]),
    Mutant("the number of a draw used for its test", "bass_core/verify/rejection.py",
           "u = uniform(keys.seed, *keys.at(width), keys.stream(Role.ACCEPT)[:, None])",
           "u = uniform(keys.seed, *keys.at(width), keys.stream(Role.DRAFT)[:, None])", _MODEL),
    Mutant("CPU kernels: the number of a draw used for its test", "bass_core/verify/rejection.py",
           "streams = keys.stream(Role.ACCEPT),", "streams = keys.stream(Role.DRAFT),", _REFERENCE),
    Mutant("a row's copy judged by its neighbour's q", "bass_core/draft/lookup.py",
           "_with_points(probs, self.tokens, self._copies)",
           "_with_points(probs, self.tokens, self._copies).flip(0)",
           [_ENUMERATED + "two_rows_are_independent_if_one_copies[first row-rejection]"]),
    Mutant("chains: a q that is NaN judged as any other", "bass_core/verify/acceptance.py",
           "fit = fit & draft_probs.sum(-1).isfinite()", "pass",
           ["tests/kernels/cpu/test_verification.py::test_unsound_numbers_discard_the_later_drafts_of_a_row"]),
    Mutant("chains: a block goes on over logits that are NaN", "bass_core/verify/acceptance.py",
           "    fit = sound[:, :-1]\n", "    fit = torch.ones_like(sound[:, :-1])\n",
           [_UNSOUND + "the_distribution_is_the_targets_whichever_place_is_nan"]),
    Mutant("chains: only the newest token's logits can be unsound", "bass_core/verify/rejection.py",
           "used = sound.gather(1, outcome.accepted[:, None])[:, 0]", "used = sound[:, 0]", _GREEDY),
    Mutant("CPU kernels: only the newest token's logits can be unsound", "kernels/cpu/sampling/verification.py",
           "choices[last] if np.isfinite(values[last])", "choices[last] if np.isfinite(values[places[row, 0]])",
           [_UNSOUND + "only_nan_logits_that_a_row_used_end_it[greedy]"]),
    Mutant("chains: unused logits end a row", "bass_core/verify/rejection.py",
           "used = sound.gather(1, outcome.accepted[:, None])[:, 0]", "used = sound.all(-1)", _GREEDY),
    Mutant("chains: the residual unchanged", "bass_core/verify/rejection.py",
           "left = residual(at_end, draft_probs[rows, index], reach[rows, accepted])", "left = at_end",
           _REFERENCE),
    Mutant("sampling: top-k behind the temperature", "bass_core/sample/distribution.py",
           "threshold = scaled.topk(params.top_k, dim=-1)",
           "scaled = scaled / params.divisor\n        threshold = scaled.topk(params.top_k, dim=-1)",
           ["tests/kernels/cpu/test_sampling.py::test_top_k_selects_before_the_temperature"]),
    Mutant("block: the residual of the rejection rule", "bass_core/sample/rows.py",
           "return (reach[..., None] * p - q).clamp_(min=0)", "return (p - q).clamp_(min=0)", _WHOLE),
    Mutant("block: the recovered token without the reach", "bass_core/verify/rejection.py",
           "residual(at_end, draft_probs[rows, index], reach[rows, accepted])",
           "residual(at_end, draft_probs[rows, index], reach[rows, 0 * accepted])",
           _REFERENCE),
    Mutant("block: the first failure ends it", "bass_core/verify/rejection.py",
           "accepted = last_passed((u < chance) & drafted)", "accepted = accepted_prefix((u < chance) & drafted)",
           _REFERENCE),
    Mutant("block: the last draft judged as the others", "bass_core/verify/block.py",
           "has_next = torch.arange(2, width + 1, device=p.device) <= num_drafted[:, None]",
           "has_next = torch.arange(1, width, device=p.device) <= num_drafted[:, None]", _WHOLE),
    Mutant("block: padding accepted", "bass_core/verify/rejection.py",
           "accepted = last_passed((u < chance) & drafted)", "accepted = last_passed(u < chance)",
           [_BLOCK + "the_reported_tests_explain_the_decision[True-False]"]),
    Mutant("trees: a verdict that passes over drawn drafts of small q", "bass_core/verify/tree.py",
           "            if drawn is None:\n",
           "            if drawn is None or self._drawn_from(r, drawn)[self.tree.tokens[r][drawn]] < 0.4:\n",
           _TREE),
    Mutant("trees: a q that is NaN kept", "bass_core/verify/tree.py",
           " or not self.fit[self.tree.drawn[row][draft]]", "",
           [_UNSOUND + "the_first_token_has_the_targets_distribution"]),
    Mutant("trees: a coin that may be equal", "bass_core/verify/tree.py", "if coins[i] * proposed < chance:",
           "if coins[i] * proposed <= chance:", [_UNSOUND + "a_draft_of_no_probability_is_never_accepted"]),
    Mutant("trees: an accepted path that stays where it lies", "bass_core/model/runner.py",
           "self.cache.keep_all(moves)", "pass", _KEPT),
    Mutant("trees: a draft that sees its siblings", "bass_core/model/forward.py",
           "row_sees.append(row_sees[parent + 1] | 1 << draft)", "row_sees.append((1 << (draft + 1)) - 1)", _KEPT),
    Mutant("trees: drafts at the positions of their columns", "bass_core/model/forward.py",
           "row_depths.append(row_depths[parent + 1] + 1)", "row_depths.append(draft)", _KEPT),
    Mutant("trees: a draft model at the positions of its columns", "bass_core/draft/chain.py",
           "row_depths.append(1 + row_depths[parent] if parent >= 0 else 0)", "row_depths.append(len(row_depths))",
           [_FED + "logits_in_a_tree_equal_those_after_the_path[model]"]),
    Mutant("trees: a head that reads the newest token's state behind every draft", "bass_core/draft/chain.py",
           "[parent - first for parent in row]", "[0 for _ in row]",
           [_FED + "logits_in_a_tree_equal_those_after_the_path[head]"]),
    Mutant("trees: states of the first drafts in place of the accepted ones", "bass_core/verify/acceptance.py",
           "[[0, *(draft + 1 for draft in path)] for path in self.paths]",
           "[range(len(path) + 1) for path in self.paths]",
           [_FED + "a_head_gets_the_states_of_the_accepted_path"]),
    Mutant("penalties that know no drafts", "bass_core/sample/shaping.py",
           "ahead = np.array(", "ahead = 0 * np.array(",
           [_ENUMERATED + "penalties_count_the_drafts_before[all-block]"]),
    Mutant("penalties that know no drafts on an accelerator", "bass_core/sample/shaping.py",
           "drafted.cumsum(1, dtype=torch.int32)", "0 * drafted.cumsum(1, dtype=torch.int32)",
           [_CORE + "sample/test_shaping.py::test_an_accelerators_logits_equal_the_hosts"]),
    Mutant("penalties of p alone", "bass_core/draft/model.py",
           "logits = shaped_next(logits[:, 0], self.params, rows, drawn)[:, None]", "pass",
           [_CORE + "sample/test_shaping.py::test_drafts_of_the_target_itself_are_all_accepted"]),
    Mutant("grammar: masks of the accepted text alone", "bass_core/sample/grammar.py",
           "here))\n        return masks", "here))\n        return masks[:1] * len(masks)",
           _MASKED),
    Mutant("grammar: masks off by one", "bass_core/sample/grammar.py",
           "here))\n        return masks", "here))\n        return [masks[0], *masks[:-1]]",
           _MASKED),
    Mutant("grammar: drafts are consumed before they are accepted", "bass_core/sample/grammar.py",
           "(children[0], self._after([]))", "(children[0], self._matcher)", _MASKED),
    Mutant("grammar: captured rounds read masks off by one", "bass_core/sample/shaping.py",
           "zip(out[r], masks, strict=False)", "zip(out[r][1:], masks, strict=False)",
           [_CONFORMANCE + "captured.py::test_captured_chains_keep_the_distribution[grammars]"]),
    Mutant("grammar: greedy rounds make no masks", "bass_core/sample/grammar.py",
           "matcher.is_accepting() if likeliest in self.eos else self._read(matcher, [likeliest])", "True",
           [_CORE + "sample/test_grammar.py::test_greedy_rounds_need_only_masks_that_forbid_the_largest_logit"]),
    Mutant("grammar: forced tokens are not verified", "bass_core/sequence.py",
           "            if token in self.eos:\n",
           "            for forced in self.grammar.forced() if self.grammar and not complete else ():\n"
           "                complete = self.grammar.write(forced)\n"
           "                self.token_ids.append(forced)\n                self.tokens.append(forced)\n"
           "                self.origins.append(\"accepted\")\n            if token in self.eos:\n", _FORCED),
    Mutant("grammar: a drawn draft is cut because it is forbidden", "bass_core/draft/forced.py",
           "row.grammar.fitting(drafts[: counts[r]]) + (drawn and sources[r] != COPY)",
           "row.grammar.fitting(drafts[: counts[r]])",
           [_CONFORMANCE + "grammar.py::test_drafters_keep_the_law_of_a_grammar[a head that stops-block]"]),
    Mutant("grammar: the end is allowed everywhere", "bass_core/sample/grammar.py",
           "if token < self.vocab], matcher.is_accepting())", "if token < self.vocab], True)",
           [_CORE + "sample/test_grammar.py::test_a_text_ends_only_where_its_grammar_may"]),
    Mutant("a stop string's beginning is streamed", "bass_core/decode/text.py",
           "self._show(self._held_back + new, self._stop_prefix_len(self._held_back + new))",
           "self._show(self._held_back + new, 0)",
           [_CORE + "decode/test_text.py::test_a_stop_string_ends_the_text_before_it"]),
    Mutant("what a mask says is dropped", "bass_core/model/attention.py",
           "window = sliding_window if attention_mask is None else attention_mask", "window = sliding_window",
           ["tests/zoo/test_zoo.py::test_an_architecture_runs_or_is_refused_as_documented[phimoe]"]),
    Mutant("AMUSD: an unlikely draft is not verified", "bass_core/draft/registry.py",
           "if not chance * max_prob >= AHEAD_CONFIDENCE:", "if not chance * token_prob >= AHEAD_CONFIDENCE:",
           [_AMUSD + "session.py::test_whether_a_draft_is_verified_never_depends_on_the_token_drawn_there"]),
    Mutant("AMUSD: an unlikely late draft is not verified", "bass_core/decode/amusd/decoder.py",
           "count + (len(self._ahead[row.index]) > count and row.remaining > count)",
           "count + (len(own := self._ahead[row.index]) > count and row.remaining > count "
           "and own[count].own > 0.3)",
           [_CONFORMANCE + "amusd.py::test_amusd_keeps_the_distribution"
                           "[depends on the text-an unsure head-block]"]),
    Mutant("a head's q is not what was sampled from", "bass_core/draft/chain.py",
           "yield DraftStep(tokens, columns, q, logits)",
           "yield DraftStep(tokens, columns, q if q is None else q.flip(-1), logits)",
           [_ENUMERATED + "drafters_keep_the_distribution[a head with a pointer-rejection]"]),
    Mutant("a window's drafts with the q of the drafter in front", "bass_core/draft/window.py",
           "probs = probabilities(output.logits, params) if self._inner_noise else None",
           "probs = probabilities(output.logits.flip(-1), params) if self._inner_noise else None",
           [_ENUMERATED + "drafters_keep_the_distribution[a window after a model-rejection]"]),
    Mutant("hooks and replaced modules are left out", "bass_core/model/select.py",
           "llama_compiled.why_not(model) or why_modified(model)", "llama_compiled.why_not(model)",
           [_CORE + "model/weights/test_modified.py::test_a_changed_model_runs_its_own_code"
            "[its module model.norm has another variance_epsilon]"]),
    Mutant("a forward of our own is not tried", "bass_core/model/select.py",
           "return expected is None or (not expected.slides and probe.agrees(selected, expected))", "return True",
           [_CORE + "model/weights/test_modified.py::test_a_changed_model_runs_its_own_code"
            "[our kernels compute other logits than its own code]"]),
    Mutant("weights of yesterday", "bass_core/model/pair.py",
           "if not any(changed):", "if True:",
           [_CORE + "model/weights/test_modified.py::test_changes_after_pairing_take_effect_at_the_next_call"
            "[load_state_dict-dtype1]"]),
    Mutant("weights that were written past torch's count", "bass_core/model/weights/modified.py",
           "[string_at(*word) for word in self._words]", "[]",
           [_CORE + "model/weights/test_modified.py::test_changes_after_pairing_take_effect_at_the_next_call"
            "[through_data-dtype1]"]),
    Mutant("graphs: drafts of one chain share their noise", "bass_core/draft/chain.py",
           "positions = keys.positions + step", "positions = keys.positions",
           [_CAPTURED + "chains_keep_the_distribution[chain]"]),
    Mutant("graphs: every draft with the first one's q", "bass_core/draft/chain_graph.py",
           "spread(step.q, vocabulary, probs[:, i])", "spread(step.q, vocabulary, probs[:, 0])",
           [_CAPTURED + "chains_keep_the_distribution[chain]"]),
    Mutant("graphs: a head's q in the first columns", "bass_core/draft/tree_graph.py",
           "out.index_copy_(-1, ids, q)", "out[..., : q.shape[-1]].copy_(q)",
           [_CAPTURED + "chains_keep_the_distribution[eagle head]"]),
    Mutant("graphs: a pointer that knows no drafts", "bass_core/draft/head/chain.py",
           "last = append_token(level.inherit(last), level.tokens)", "last = level.inherit(last)",
           [_CAPTURED + "rounds_write_as_much_as_eager_ones"]),
    Mutant("graphs: a tree judged by another row's q", "bass_core/draft/tree_graph.py",
           "place + r * places if place >= 0", "place if place >= 0",
           [_CAPTURED + "trees_keep_the_distribution[two rows]"]),
    Mutant("graphs: siblings share their children's noise", "bass_core/draft/tree_graph.py",
           "first = shape.firsts[level - 1] + 1 if level else 0", "first = 0",
           [_CAPTURED + "trees_keep_the_distribution[of a head]"]),
    Mutant("graphs: copies keep the model's q", "bass_core/model/graphs.py",
           "    if probs is not None:\n        at, is_copy", "    if False:\n        at, is_copy",
           [_CAPTURED + "chains_keep_the_distribution[copies in a row]"]),
    Mutant("graphs: copies in every row", "bass_core/model/graphs.py",
           "copied_drafts.where(copies[:, None], drafts)", "copied_drafts.where(copies[:, None] | True, drafts)",
           [_CAPTURED + "chains_keep_the_distribution[copies in a row]"]),
    Mutant("graphs: penalties that know no drafts", "bass_core/verify/judge.py",
           "shaper.apply(logits, text, positions, inputs.prompts, drafts)",
           "shaper.apply(logits, text, positions, inputs.prompts, drafts * 0)",
           [_CAPTURED + "chains_keep_the_distribution[penalties]"]),
    Mutant("graphs: penalties read text that an eager round has not uploaded", "bass_core/decode/verifier.py",
           "len(row.tokens) + accepted", "len(row.tokens) + accepted + 2",
           [_CAPTURED + "chains_keep_the_distribution[eager rounds between]"]),
    Mutant("rounds ahead: lengths without the target's own token", "bass_core/verify/judge.py",
           "written = packed[:, 0].long() + 1", "written = packed[:, 0].long()", [_AHEAD + "[regular]"]),
    Mutant("rounds ahead: a drafter that is not fed the target's own token", "bass_core/draft/chain_graph.py",
           "counts = (accepted + 1 - kept)", "counts = (accepted - kept).clamp(min=1)", [_AHEAD + "[head]"]),
    Mutant("rounds ahead: a draft's cache that keeps one draft too many", "bass_core/draft/model_graph.py",
           "return levels - 1\n", "return levels\n", [_AHEAD + "[draft model, rows end]"]),
    Mutant("rounds ahead: a text that has ended gets one more round", "bass_core/decode/batch.py",
           "_replace(staying=self._staying())", "_replace(staying=None)", [_AHEAD + "[head, rows end]"]),
    Mutant("rounds ahead: read before the next one is launched", "bass_core/decode/batch.py",
           "        self._next = None if gone else self._launch_ahead(launch)\n"
           "        verdict = self.verifier.read(self._rows, launch.verifying)\n",
           "        verdict = self.verifier.read(self._rows, launch.verifying)\n"
           "        self._next = None if gone else self._launch_ahead(launch)\n",
           ["tests/devices/test_launched_ahead.py::test_the_next_round_is_launched_before_this_one_is_read"]),
    Mutant("graphs: a row that moves leaves its text behind", "bass_core/model/static_step.py",
           "self.tokens[target].copy_(self.tokens[source])", "pass",
           [_CAPTURED + "chains_keep_the_distribution[penalties, a row leaves]"]),
    Mutant("graphs: positions taken for sequence ids", "bass_core/model/static_step.py",
           "NoiseKeys(self.seeds[:1], self.ids, self.positions)",
           "NoiseKeys(self.seeds[:1], self.positions, self.positions)",
           [_CAPTURED + "chains_keep_the_distribution[lengths by rows]"]),
    Mutant("inner rounds of two rounds share their noise", "bass_core/sample/noise.py", "high << 32 | low",
           "self.sequence_ids", _WINDOW_ROUNDS),
    Mutant("inner rounds with the noise of their round", "bass_core/draft/window.py",
           "inner = keys.inner(positions) if self._inner_noise else keys_at_ends", "inner = keys_at_ends",
           _WINDOW_ROUNDS),
    Mutant("a window's drafts with a q without the temperature", "bass_core/draft/window.py",
           "probs = probabilities(output.logits, params) if self._inner_noise else None",
           "probs = probabilities(output.logits, SamplingParams(1.0)) if self._inner_noise else None",
           _WINDOW_ROUNDS),
    Mutant("inner noise of ids that are 2**32 apart", "bass_core/sample/noise.py", "high << 32 | low",
           "self.sequence_ids ^ (self.begins << 32)",
           [_CORE + "sample/test_noise.py::test_inner_rounds_share_no_numbers"]),
    Mutant("a step of one token without its gap", "kernels/reference/attention.py",
           " or plan.tree is not None or plan.gap is not None", " or plan.tree is not None",
           [_CORE + "draft/test_window.py::test_a_windowed_step_does_not_depend_on_other_rows[split]"]),
    Mutant("Ctrl-C is taken for a failure", "bass_core/errors.py",
           """return isinstance(error, Exception) or type(error).__name__ == "PanicException\"""", "return True",
           [_CORE + "lanes/test_race.py::test_an_interrupt_is_raised_also_if_it_arrives_as_a_runtime_error"]),
    Mutant("sampled drafts are remembered", "bass_core/decode/measuring.py",
           "request.sampling.greedy and request.synthetic", "request.synthetic",
           [_CORE + "decode/test_measuring.py::test_only_greedy_drafts_are_remembered"]),
    Mutant("recorded lengths for rows that the prefill ends", "bass_core/length/policies.py",
           "self.position or isinstance(entry, int) or len(entry) >= len(offers)", "True",
           [_CORE + "lanes/test_trace.py::test_a_run_repeats_if_a_row_ends_with_its_first_token"]),
]  # fmt: skip

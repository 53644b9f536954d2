"""Known ways to break CPU and GPU kernels, captured steps and shared prefixes, in the format of mutations.py."""

from __future__ import annotations

from .mutations import Mutant

_CONFORMANCE = "tests/conformance/test_"
_BLOCK = "tests/bass_core/verify/test_block.py::test_"
_VERIFIED = "tests/kernels/cpu/test_verification.py::test_"
_SAMPLED = [_CONFORMANCE + "distribution.py::test_texts_have_the_distribution[bass-other-1.0-0-1.0-rejection]"]
_VERIFICATION = "kernels/cpu/sampling/verification.py"
_KERNELS = "tests/kernels/test_"
_CPU = "tests/kernels/cpu/test_"
_CPU_TREES = "tests/kernels/cpu/attention/test_tree.py::test_"
_PREFIX = "tests/bass_core/model/test_prefix.py::test_"
_CAPTURED = "tests/bass_core/model/test_captured_trees.py::test_"
_ATTENTION = "tests/kernels/cpu/attention/test_attention.py::test_"
_RECOVERED = [_KERNELS + "accept.py::test_recovered_tokens_of_a_block_equal_the_reference"]
_SHARED = [_ATTENTION + "a_row_has_the_same_bits_with_and_without_a_shared_prefix[float32-1]"]
_PATH = [_CPU_TREES + "a_node_has_the_bits_of_its_path_as_a_text[float32-15-1]"]
_REPLAYED = [_CAPTURED + "a_replay_of_trees_equals_the_eager_step[CausalModel-pad-False]"]
_HELD = [_PREFIX + "rows_attend_over_their_prompts_and_each_prefix_is_fed_once"]
_ROTATED = _KERNELS + "layer_kernels.py::test_a_tree_token_is_rotated_by_its_position_and_written_to_its_column"

_TILES = "tests/kernels/cpu/test_emulated_tiles.py::test_"

KERNEL_MUTANTS = [
    Mutant("stale tail attended", "kernels/plan.py", "hidden = columns > last\n", "hidden = columns > last + 1\n",
           ["tests/bass_core/model/test_runner.py::test_lengths_change_only_with_commits"]),
    Mutant("window ignored", "kernels/plan.py", "return positions <= last - window", "return positions < 0",
           [_CONFORMANCE + "greedy.py::test_rows_that_diverge_write_the_targets_text[gemma3-bass]"]),
    Mutant("CPU kernels: the excess behind a draft with the reach before it", _VERIFICATION,
           "            for j in range(i):\n", "            for j in range(i - 1):\n",
           [_BLOCK + "the_reported_tests_explain_the_decision[True-True]"]),
    Mutant("CPU kernels: every draft accepted", _VERIFICATION, "u * q_draft < p_draft", "u < np.float32(2.0)",
           _SAMPLED),
    Mutant("CPU kernels: q ignored in the test", _VERIFICATION, "u * q_draft < p_draft", "u < p_draft",
           [_CONFORMANCE + "counts.py::test_a_perfect_draft_is_never_rejected"]),
    Mutant("CPU kernels: recovered token drawn from p", _VERIFICATION, "(weights, 0) if left else (p, at)",
           "(p, at)", _SAMPLED),
    Mutant("CPU kernels: a recovered token without the reach", _VERIFICATION,
           "            reach = accepted_reach\n", "            reach = np.float32(1.0)\n",
           [_BLOCK + "the_recovered_token_is_drawn_from_the_residual"]),
    Mutant("CPU kernels: the first failure ends a block", _VERIFICATION, "if i < judged and u < chance:",
           "if i < judged and u < chance and accepted == i:", [_VERIFIED + "decisions_equal_the_reference"]),
    Mutant("CPU kernels: a q that is no number judged like others", _VERIFICATION,
           "rule == COUPLED or not has_q or _is_finite(q, row, i, size)", "True",
           [_VERIFIED + "unsound_numbers_discard_the_later_drafts_of_a_row"]),
    Mutant("CPU kernels: the token that reaches top-p left out", "kernels/cpu/sampling/distribution.py",
           "threshold, mass = _nucleus(out, to, size, top_p, buckets, selected)",
           "threshold, mass = _nucleus(out, to, size, top_p * np.float32(0.98), buckets, selected)",
           [_CPU + "sampling.py::test_filters_equal_the_reference"]),
    Mutant("CPU kernels: top-k among equals by their place", "kernels/cpu/sampling/distribution.py",
           "floor = _rank(selected, count, top_k, buckets) if count >= top_k else floor",
           "floor = _rank(selected, count, top_k + 1, buckets) if count > top_k else floor",
           [_CPU + "sampling.py::test_filters_equal_the_reference"]),
    Mutant("CPU kernels: hopeless noise skipped too soon", "kernels/cpu/sampling/draws.py",
           "low = limit * _MIN_UNIFORM", "low = limit * np.float32(2.0**-12)",
           [_CPU + "sampling.py::test_many_draws_equal_the_argmax_over_stored_noise"]),
    Mutant("CPU kernels: a pointer to the oldest match", "kernels/cpu/chain.py", "            if size > best:\n",
           "            if size >= best:\n",
           ["tests/bass_core/draft/test_head.py::test_a_pointer_is_the_same_in_one_compiled_call"]),
    Mutant("Triton: the residual of the rejection rule", "kernels/triton/accept.py",
           "tl.maximum(factor * weight - taken, 0.0)", "tl.maximum(weight - taken, 0.0)", _RECOVERED),
    Mutant("a launch that could not be compiled is launched", "kernels/triton/launch.py",
           "        raise CompileFailed(name)\n", "        pass\n",
           [_KERNELS + "left_out.py::test_attention_tries_its_other_tile_sizes_before_torch"]),
    Mutant("the start ends with the launch that its compiler died of", "bass_core/machine/gpu_kernels.py",
           'launch += order["step"]', "launch = None",
           ["tests/faults/test_compiler.py::test_the_page_runs_although_the_compiler_dies"]),
    Mutant("flash-attn where it was not faster", "kernels/backends.py",
           "plain and shape_key(query, key) in FLASH_FASTER", "plain",
           [_KERNELS + "flash.py::test_mixed_uses_flash_only_where_it_is_faster_and_supported"]),
    Mutant("Triton: the first failure ends a block", "kernels/triton/accept.py",
           "accepted = tl.max(tl.where(is_test & passes & (i < count), i + 1, 0), 1)",
           "accepted = tl.min(tl.where(is_test & ~(passes & (i < count)), i, width), 1)", _RECOVERED),
    Mutant("Triton: the excess of other places", "kernels/triton/block.py", "here = last + 1\n", "here = last\n",
           [_KERNELS + "accept.py::test_chances_equal_the_reference"]),
    Mutant("CPU kernels: a prefix read a tile too early", "kernels/cpu/attention/gather.py",
           "place = (first + column) // TILE * tile_bytes",
           "place = max(first + column - TILE, 0) // TILE * tile_bytes", _SHARED),
    Mutant("CPU kernels: segments merged without their maximum", "kernels/cpu/attention/phases.py",
           "shrink, factor = exp2(old_max - new_max), exp2(segment_max - new_max)",
           "shrink, factor = np.float32(1.0), np.float32(1.0)",
           [_ATTENTION + "prompts_and_ragged_steps_equal_torch"]),
    Mutant("CPU kernels: a row that writes to its prefix", "kernels/cpu/attention/phases.py",
           "keys, values = head_addresses(caches, 0, layer, row, head, kv_heads, size, dot)\n            column",
           "own = 1 - min(visible[0][row], 1)\n            of = row if own else visible[1][row]\n"
           "            keys, values = head_addresses(caches, 1 - own, layer, of, head, kv_heads, size, dot)\n"
           "            column", _SHARED),
    Mutant("CPU kernels: a path that lies as in the tree, with room for the siblings",
           "kernels/cpu/attention/paths.py", "            place += 1\n        sees",
           "        place += 1\n        sees", _PATH),
    Mutant("CPU kernels: a tree's nodes at the positions of their columns", "kernels/cpu/attention/plan.py",
           "bases[row] + depths[token] if len(sees)", "lengths[row] + token - first if len(sees)", _PATH),
    Mutant("CPU kernels: an accepted path moved in the first layer alone", "kernels/cpu/attention/paths.py",
           "for layer in range(layers):", "for layer in range(min(layers, 1)):",
           [_CPU_TREES + "accepted_columns_move_as_in_a_plain_cache[False]"]),
    Mutant("CPU kernels: blocks of vectors in reverse order", "kernels/cpu/products.py",
           "np.uintp(4 * (start * stride + at))",
           "np.uintp(4 * (starts[len(starts) - 2 - block] * stride + at))",
           [_CPU + "products.py::test_a_vector_has_the_same_bits_by_itself_and_among_others"]),
    Mutant("CPU kernels: bytes without the correction of their sign", "kernels/cpu/vectors.py",
           "whole(0) if low else self._word(x, c, STEP // 4 + 1, INT)", "whole(0)",
           [_CPU + "products.py::test_quantised_products_equal_those_of_the_dequantised_numbers"]),
    Mutant("GPU kernels: what a token sees of its tree shifted by one", "kernels/triton/blocks.py",
           ">> (inside & 31)) & 1 != 0", ">> (inside + 1 & 31)) & 1 != 0",
           [_KERNELS + "fused_attention.py::test_the_deepest_and_the_widest_tree_equal_the_reference[False]"]),
    Mutant("GPU kernels: a token of a tree rotated by its column", "kernels/triton/cache_write.py",
           "position = tl.load(positions + token)", "position += 0",
           [_ROTATED + "[kernels.triton.cache_write]"]),
    Mutant("GPU forward: tokens of a tree rotated by their columns", "bass_core/model/llama_cuda.py",
           "positions = None if plan.tree is None else plan.positions", "positions = None",
           [_CAPTURED + "the_logits_of_a_tree_are_those_of_its_paths[LlamaCuda-pad-llama]"]),
    Mutant("GPU kernels: a rejected draft's q left in p", "kernels/triton/walk.py",
           "tl.maximum(weight - taken, 0.0)", "weight",
           [_KERNELS + "walk.py::test_decisions_equal_the_reference[True-2.0-8-5-9]"]),
    Mutant("captured steps: a tree's masks as they were captured", "bass_core/model/static_step.py",
           "for static, fresh in zip(_parts(buffers.tree), _parts(self.tree), strict=True):",
           "for static, fresh in zip(_parts(buffers.tree)[2:], _parts(self.tree)[2:], strict=True):", _REPLAYED),
    Mutant("captured steps: a tree replays a chain's step", "bass_core/model/graphs.py",
           "trees = batch.tree is not None", "trees = False", _REPLAYED),
    Mutant("a prefix that is a token short", "kernels/reference/prefix.py", "max(starts.values())\n",
           "max(starts.values()) - 1\n", _HELD),
    Mutant("a prefix merged without the joint maximum", "kernels/reference/prefix.py",
           "weights = torch.exp(score - highest[part.rows])",
           "weights = torch.exp(score - score.amax(-1, keepdim=True))", _HELD),
    Mutant("a prefix that a row writes to", "bass_core/model/cache.py", "write(keys, values, self.buffer[layer],",
           "write(keys, values, (self.prefix or self).buffer[layer],",
           [_PREFIX + "a_step_never_writes_to_the_prefix"]),
    Mutant("a row that leaves its prefix behind when it moves", "bass_core/model/cache.py",
           "self.starts[target], self.groups[target] = self.starts[source], self.groups[source]", "pass",
           [_PREFIX + "rows_move_with_their_prefix_and_can_be_prefilled_again"]),
    Mutant("tiles: the last group of vectors does not overlap", "kernels/cpu/tiles.py",
           "firsts[-1] = b.sub(columns, count(ROWS))", "pass",
           [_TILES + "a_product_has_the_bits_of_the_reference"]),
    Mutant("tiles: results without gaps between them", "kernels/cpu/tiles.py", "row = b.mul(stride, count(4))",
           "row = count(128)", [_TILES + "a_product_has_the_bits_of_the_reference"]),
    Mutant("tiles: as many rows for few vectors as for many", "kernels/cpu/tiles.py",
           'few = b.icmp_signed("<", args[0], count(ROWS))', 'few = b.icmp_signed("<", args[0], count(0))',
           [_TILES + "a_product_has_the_bits_of_the_reference"]),
    Mutant("tiles: queries without gaps between them", "kernels/cpu/attention/tiled.py",
           "b.add(queries, of_queries), stride)", "b.add(queries, of_queries), b.mul(words, count(4)))",
           [_TILES + "attention_has_the_bits_of_the_reference"]),
    Mutant("tiles: values after the last four tiles", "kernels/cpu/attention/tiled.py",
           "block(b.add(rest, single.index), 1)", "block(single.index, 1)",
           [_TILES + "attention_has_the_bits_of_the_reference"]),
]  # fmt: skip

"""Known ways to break the kernels of a CPU and a GPU, captured trees, and attention over prefixes that rows share.

Contract: as in mutations.py.
"""

from __future__ import annotations

from .mutations import Mutant

_CPU = "tests/kernels/cpu/test_"
_SHARED = ["tests/kernels/cpu/attention/test_attention.py::test_the_same_bits_shared_or_alone[float32-1]"]
_MERGED = ["tests/kernels/cpu/attention/test_attention.py::test_prompts_and_ragged_steps"]
_TREES = "tests/kernels/cpu/attention/test_trees.py::"
_RUNNER = "tests/bass_core/model/test_prefix.py::"
_CAPTURED = "tests/bass_core/model/test_captured_trees.py::"
_ROTATED = "test_a_token_of_a_tree_is_rotated_by_its_position_and_written_to_its_column"

KERNEL_MUTANTS = [
    Mutant(
        "CPU kernels: a prefix read a tile too early",
        "kernels/cpu/attention/gather.py",
        "place = (first + column) // TILE * each",
        "place = max(first + column - TILE, 0) // TILE * each",
        _SHARED,
    ),
    Mutant(
        "CPU kernels: segments merged without their maximum",
        "kernels/cpu/attention/phases.py",
        "shrink, factor = exp2(before - now), exp2(largest - now)",
        "shrink, factor = np.float32(1.0), np.float32(1.0)",
        _MERGED,
    ),
    Mutant(
        "CPU kernels: a row that writes to its prefix",
        "kernels/cpu/attention/phases.py",
        "keys, values = places(caches, 0, layer, row, head, kv_heads, size, dot)\n            column",
        "own = 1 - min(sight[0][row], 1)\n"
        "            of = row if own else sight[1][row]\n"
        "            keys, values = places(caches, 1 - own, layer, of, head, kv_heads, size, dot)\n"
        "            column",
        _SHARED,
    ),
    Mutant(
        "CPU kernels: a path that lies as in the tree, with room for the siblings",
        "kernels/cpu/attention/paths.py",
        "            place += 1\n        sees",
        "        place += 1\n        sees",
        [_TREES + "test_a_node_has_the_bits_of_its_path[float32-15-1]"],
    ),
    Mutant(
        "CPU kernels: a tree's nodes at the positions of their columns",
        "kernels/cpu/attention/plan.py",
        "bases[row] + depths[token] if len(sees)",
        "lengths[row] + token - first if len(sees)",
        [_TREES + "test_a_node_has_the_bits_of_its_path[float32-15-1]"],
    ),
    Mutant(
        "CPU kernels: an accepted path moved in the first layer alone",
        "kernels/cpu/attention/paths.py",
        "for layer in range(layers):",
        "for layer in range(min(layers, 1)):",
        [_TREES + "test_columns_are_kept_as_in_a_cache_of_rows[False]"],
    ),
    Mutant(
        "CPU kernels: blocks of vectors in reverse order",
        "kernels/cpu/products.py",
        "np.uintp(4 * (start * rows + first * ROWS))",
        "np.uintp(4 * (starts[len(starts) - 2 - block] * rows + first * ROWS))",
        [_CPU + "products.py::test_a_vector_has_the_same_bits_alone_and_among_others"],
    ),
    Mutant(
        "GPU kernels: what a token sees of its tree shifted by one",
        "kernels/triton/blocks.py",
        ">> (inside & 31)) & 1 != 0",
        ">> (inside + 1 & 31)) & 1 != 0",
        ["tests/kernels/test_fused_attention.py::test_the_deepest_and_widest_tree[False]"],
    ),
    Mutant(
        "GPU kernels: a token of a tree rotated by its column",
        "kernels/triton/cache_write.py",
        "position = tl.load(positions + token)",
        "position += 0",
        ["tests/kernels/test_layer_kernels.py::" + _ROTATED + "[kernels.triton.cache_write]"],
    ),
    Mutant(
        "GPU forward: tokens of a tree rotated by their columns",
        "bass_core/model/llama_cuda.py",
        "positions = None if plan.tree is None else plan.positions",
        "positions = None",
        [_CAPTURED + "test_a_token_of_a_tree_is_the_end_of_its_path[LlamaCuda-pad-llama]"],
    ),
    Mutant(
        "GPU kernels: a rejected draft's q left in p",
        "kernels/triton/walk.py",
        "tl.maximum(weight - taken, 0.0)",
        "weight",
        ["tests/kernels/test_walk.py::test_takes_the_references_decisions[True-2.0-8-5-9]"],
    ),
    Mutant(
        "captured steps: a tree's masks as they were captured",
        "bass_core/model/static_step.py",
        "for static, fresh in zip(_parts(buffers.tree), _parts(self.tree), strict=True):",
        "for static, fresh in zip(_parts(buffers.tree)[2:], _parts(self.tree)[2:], strict=True):",
        [_CAPTURED + "test_a_replay_of_trees_is_the_eager_step[CausalModel-pad-False]"],
    ),
    Mutant(
        "captured steps: a tree replays a chain's step",
        "bass_core/model/graphs.py",
        "trees = batch.tree is not None",
        "trees = False",
        [_CAPTURED + "test_a_replay_of_trees_is_the_eager_step[CausalModel-pad-False]"],
    ),
    Mutant(
        "a prefix that is a token short",
        "kernels/reference/prefix.py",
        "max(starts.values())\n",
        "max(starts.values()) - 1\n",
        [_RUNNER + "test_rows_hold_their_prompts_and_the_prefix_is_fed_once"],
    ),
    Mutant(
        "a prefix merged without the joint maximum",
        "kernels/reference/prefix.py",
        "weights = torch.exp(score - highest[part.rows])",
        "weights = torch.exp(score - score.amax(-1, keepdim=True))",
        [_RUNNER + "test_rows_hold_their_prompts_and_the_prefix_is_fed_once"],
    ),
    Mutant(
        "a prefix that a row writes to",
        "bass_core/model/cache.py",
        "write(keys, values, self.buffer[layer],",
        "write(keys, values, (self.prefix or self).buffer[layer],",
        [_RUNNER + "test_a_step_never_writes_to_the_prefix"],
    ),
    Mutant(
        "a row that leaves its prefix behind when it moves",
        "bass_core/model/cache.py",
        "self.starts[target], self.groups[target] = self.starts[source], self.groups[source]",
        "pass",
        [_RUNNER + "test_rows_move_with_their_prefix_and_start_anew"],
    ),
]

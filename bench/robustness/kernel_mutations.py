"""Known ways to break the kernels of a CPU, and attention over prefixes that rows share.

Contract: as in mutations.py.
"""

from __future__ import annotations

from .mutations import Mutant

_CPU = "tests/kernels/cpu/test_"
_PREFIX = "tests/kernels/test_shared_prefix.py::"
_RUNNER = "tests/bass_core/engine/test_prefix.py::"

KERNEL_MUTANTS = [
    Mutant(
        "CPU kernels: scores without the last lanes of a head",
        "kernels/cpu/attention.py",
        "    rest = dim - dim % LANES\n",
        "    rest = dim\n",
        [_CPU + "forward.py::test_prompts_and_ragged_steps[qwen3 of 32, heads of 2-dtype0-False]"],
    ),
    Mutant(
        "CPU kernels: blocks of vectors in reverse order",
        "kernels/cpu/products.py",
        "np.uintp(4 * (start * rows + first * ROWS))",
        "np.uintp(4 * (starts[len(starts) - 2 - block] * rows + first * ROWS))",
        [_CPU + "products.py::test_a_vector_has_the_same_bits_alone_and_among_others"],
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
        "bass_core/attention/cache.py",
        "self._vectors[layer].index_copy_(0, plan.places, vectors)",
        "(self.prefix or self)._vectors[layer].index_copy_(0, plan.places, vectors)",
        [_RUNNER + "test_a_step_never_writes_to_the_prefix"],
    ),
    Mutant(
        "a row that leaves its prefix behind when it moves",
        "bass_core/attention/cache.py",
        "self.starts[target], self.groups[target] = self.starts[source], self.groups[source]",
        "pass",
        [_RUNNER + "test_rows_move_with_their_prefix_and_start_anew"],
    ),
]

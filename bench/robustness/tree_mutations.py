"""Known ways to break trees of drafts: how they are fed, verified and kept.

Contract: as in mutations.py.
"""

from __future__ import annotations

from .mutations import Mutant

_UNSOUND = "tests/bass_core/verify/test_unsound.py::test_"
_WALK = ["tests/conformance/test_enumeration.py::test_trees[(2, 1)-rejection]"]
_FED = "tests/bass_core/draft/test_trees_fed.py::test_"
_ASKED = _FED + "a_draft_in_a_tree_is_asked_as_at_the_end_of_its_path"
_KEPT = ["tests/bass_core/model/test_trees.py::test_a_kept_path_is_what_was_fed_as_text[pad-alone]"]

TREE_MUTANTS = [
    Mutant(
        "trees: a verdict that passes over drawn drafts of small q",
        "bass_core/verify/tree.py",
        "            if drawn is None:\n",
        "            if drawn is None or self._drawn_from(r, drawn)[self.tree.tokens[r][drawn]] < 0.4:\n",
        _WALK,
    ),
    Mutant(
        "trees: the residual unchanged",
        "bass_core/verify/tree.py",
        "residual = (p[i] - q).clamp_(min=0)",
        "residual = p[i].clone()",
        _WALK,
    ),
    Mutant(
        "trees: a q that is NaN kept",
        "bass_core/verify/tree.py",
        " or not self.fit[self.tree.drawn[row][draft]]",
        "",
        [_UNSOUND + "whole_verifications_write_the_targets_first_token"],
    ),
    Mutant(
        "trees: a coin that may be equal",
        "bass_core/verify/tree.py",
        "if coins[i] * proposed < chance:",
        "if coins[i] * proposed <= chance:",
        [_UNSOUND + "a_draft_of_no_probability_is_never_accepted"],
    ),
    Mutant(
        "trees: an accepted path that stays where it lies",
        "bass_core/model/runner.py",
        "self.cache.keep(row, first, [end + column for column in path])",
        "pass",
        _KEPT,
    ),
    Mutant(
        "trees: a draft that sees its siblings",
        "bass_core/model/forward.py",
        "seen.append(seen[parent + 1] | 1 << draft)",
        "seen.append((1 << (draft + 1)) - 1)",
        _KEPT,
    ),
    Mutant(
        "trees: drafts at the positions of their columns",
        "bass_core/model/forward.py",
        "deep.append(deep[parent + 1] + 1)",
        "deep.append(draft)",
        _KEPT,
    ),
    Mutant(
        "trees: a draft model at the positions of its columns",
        "bass_core/draft/tree.py",
        "own_depths.append(1 + own_depths[parent] if parent >= 0 else 0)",
        "own_depths.append(len(own_depths))",
        [_ASKED + "[model]"],
    ),
    Mutant(
        "trees: a head that reads the newest token's state behind every draft",
        "bass_core/draft/tree.py",
        "0 if parent < 0 else self._places[r][parent]",
        "0",
        [_ASKED + "[head]"],
    ),
    Mutant(
        "trees: states of the first drafts in place of the accepted ones",
        "bass_core/decode/batch.py",
        "states[r, [0, *(i + 1 for i in path)]]",
        "states[r, : len(path) + 1]",
        [_FED + "a_head_gets_the_states_of_the_accepted_path"],
    ),
]

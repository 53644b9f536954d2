"""Known ways to decide after a draw what must be decided before it, and to use a draw's numbers wrongly.

Contract: as in mutations.py. The enumeration of whole rounds catches each of them; few move a text so far that a
count would.
"""

from __future__ import annotations

from .mutations import Mutant

_TEST = "tests/conformance/test_enumeration.py::test_"
_MODEL = [_TEST + "drafters[model-block]"]
_TREE = [_TEST + "trees[(2, 1)-rejection]"]
_STATIC = "bass_core/draft/tree.py"
_PROPOSED = "return Proposal(torch.stack(drawn, dim=1), max_drafts, stacked, own=own.own(length))"

DRAFTING_MUTANTS = [
    Mutant(
        "the rule chosen by what the proposal looks like",
        "bass_core/decode/batch.py",
        "return check_type(self.drafter.propose(self._rows, lengths, keys), self._branches)",
        "given: Any = check_type(self.drafter.propose(self._rows, lengths, keys), self._branches)\n"
        "        line = [list(range(-1, count - 1)) for count in given.num_drafted]\n"
        "        if self._branches and given.parents == line and given.drawn and given.probs is not None:\n"
        "            width = given.tokens.shape[1]\n"
        "            places = torch.tensor([(row + [0] * width)[:width] for row in given.drawn])\n"
        "            given = Proposal(given.tokens, given.num_drafted, given.probs[places])\n"
        "        return given",
        [_TEST + "trees[a user's, a chain unless 0-auto]"],
    ),
    Mutant(
        "the rule chosen by the second draft",
        "bass_core/verify/rejection.py",
        "    rule = verification.chains\n",
        "    rule = verification.chains\n"
        "    if rule is Rule.BLOCK and width > 1 and int(drafts[0, 1]) == 0:\n"
        "        rule = Rule.REJECTION\n",
        _MODEL,
    ),
    Mutant(
        "a length cut by a drawn token's own q",
        "bass_core/draft/model.py",
        _PROPOSED,
        "if stacked is not None:\n"
        "            own_q = stacked.gather(2, torch.stack(drawn, dim=1)[..., None])[..., 0]\n"
        "            likely = (own_q >= 0.3).long().cumprod(1).sum(1).tolist()\n"
        "            max_drafts = [min(n, m) for n, m in zip(max_drafts, likely, strict=True)]\n        "
        + _PROPOSED,
        _MODEL,
    ),
    Mutant(
        "a chain cut after its last token was seen",
        "bass_core/draft/model.py",
        _PROPOSED,
        "max_drafts = [n - (n > 1 and int(drawn[n - 1][r]) == 0) for r, n in enumerate(max_drafts)]\n        "
        + _PROPOSED,
        _MODEL,
    ),
    Mutant(
        "a head that is sure by the token it drew",
        "bass_core/draft/head.py",
        "                drafted += going\n",
        "                going = going & (sure >= self.confidence)\n                drafted += going\n",
        [_TEST + "drafters[a head that stops-block]"],
    ),
    Mutant(
        "a drawn node dropped",
        "bass_core/verify/tree.py",
        "                    self.drawn_at[r][parent] = i\n",
        "                    if token:\n                        self.drawn_at[r][parent] = i\n",
        _TREE,
    ),
    Mutant(
        "the q of another drawn child",
        "bass_core/verify/tree.py",
        "return self.tree.probs[self.tree.drawn[row][draft]]",
        "return self.tree.probs[max(self.tree.drawn[row])]",
        _TREE,
    ),
    Mutant(
        "the number of children chosen after the draw",
        _STATIC,
        "            if mass > LEAST_MASS:\n",
        "            if mass > LEAST_MASS and (drawn != 1 or not likely):\n",
        _TREE,
    ),
    Mutant(
        "chains: the residual unchanged",
        "bass_core/verify/block.py",
        "return (reach[:, None] * p - q).clamp_(min=0)",
        "return p.clone()",
        _MODEL,
    ),
    Mutant(
        "a q that is no number judged like others",
        "bass_core/verify/rejection.py",
        "judged, judge = judged_drafts(sound, drawn_from, num_drafted), verify_here",
        "judged, judge = num_drafted, verify_here",
        [_TEST + "a_draft_that_breaks_behind_some_tokens[block-True]"],
    ),
    Mutant(
        "trees: a residual of the target's own",
        "bass_core/verify/tree.py",
        "residual = (p[i] - q).clamp_(min=0)",
        "residual = p[i].clone()",
        _TREE,
    ),
    Mutant(
        "the number of a test used for the residual",
        "bass_core/verify/rejection.py",
        "torch.where(rejected, keys.stream(Role.RESIDUAL)",
        "torch.where(rejected, keys.stream(Role.ACCEPT)",
        [_TEST + "drafters[model-rejection]"],
    ),
    Mutant(
        "the number of a draw used for its test",
        "bass_core/verify/rejection.py",
        "u = uniform(keys.seed, *keys.at(width), keys.stream(Role.ACCEPT)[:, None])",
        "u = uniform(keys.seed, *keys.at(width), keys.stream(Role.DRAFT)[:, None])",
        _MODEL,
    ),
    Mutant(
        "a number of one round used in the next",
        "bass_core/sample/noise.py",
        "_STREAMS * begins + int(role)",
        "torch.full_like(begins, int(role))",
        [_TEST + "policies[fixed 3-block]"],
    ),
    Mutant(
        "a row's copy judged by its neighbour's q",
        "bass_core/draft/lookup.py",
        "merged.probs = torch.where(copies[..., None], points, probs)",
        "merged.probs = torch.where(copies[..., None], points, probs).flip(0)",
        [_TEST + "two_rows_of_which_one_copies[the first-rejection]"],
    ),
]

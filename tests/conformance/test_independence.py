"""A row's text does not depend on the other rows.

In float32, a row's tokens depend only on prompt, seed and sequence id. For sampled text this holds only with a
fixed draft length; for greedy and coupled text it always holds.
"""

from functools import partial

import pytest

from bass_core import METHODS, RequestError, SamplingParams, generate
from tests.support.models import prompts, slow_but, texts_of, tiny_pair
from tests.support.rows import check_rows_alone

from .table import BUDGETS, serves

PAIR = tiny_pair()
TARGET = PAIR.target
ROWS = prompts(8)
WARM = SamplingParams(0.9)


def texts(rows, **arguments):
    out = generate(PAIR, [ROWS[row] for row in rows], max_new_tokens=20, sequence_ids=rows, **arguments)
    return texts_of(out)


WAYS = [
    {"sampling": SamplingParams(1.0, top_k=20, top_p=0.9), "draft_length": 4},
    {"sampling": WARM, "draft_length": "bass", "verification": "coupled"},
    {"sampling": WARM, "draft_length": 3, "drafter": "prompt_lookup"},
    {"tree": (3, 2, 1)},
    {"sampling": WARM, "tree": (3, 2), "verification": "coupled"},
    {"draft_length": BUDGETS["by cost"]},
    {"sampling": WARM, "draft_length": BUDGETS["by cost"], "verification": "coupled", "drafter": "adaptive"},
    {"sampling": WARM, "method": "regular"},
]


@pytest.mark.parametrize("arguments", slow_but(WAYS[:1], WAYS))
def test_rows_do_not_depend_on_their_neighbours(arguments):
    together = check_rows_alone(partial(texts, **arguments), 8, (0, 6))
    if arguments.get("method") == "regular":
        return
    # In text that is neither greedy nor coupled, a position's noise depends on where the rounds end.
    fixed = "sampling" in arguments and arguments.get("verification") != "coupled"
    for method in METHODS.values():
        if method.drafts and method.name != "bass" and not (method.overlaps and fixed):
            drafter = arguments.get("drafter", "model")
            draft, length = "self" if drafter == "model" else drafter, "tree 3 2 1" if "tree" in arguments else 3
            if not serves(method, draft, length):
                continue
            written = partial(texts, **arguments, method=method.name)
            assert together == (check_rows_alone(written, 8, [6]) if method.overlaps else written(list(range(8))))


def test_seed_and_sequence_id_change_the_text():
    options = {"sampling": WARM, "draft_length": 3}
    first, other_id, other_seed = (
        generate(PAIR, ROWS[0], max_new_tokens=20, sequence_ids=[key], seed=seed, **options).sequences[0].token_ids
        for key, seed in ((0, 0), (1, 0), (0, 1))
    )
    assert first != other_id and other_seed != first


@pytest.mark.parametrize(("method", "length"), [("speculative", "auto"), ("bass", "bass")])
def test_equal_sequence_ids_are_refused_if_lengths_depend_on_other_rows(method: str, length: str) -> None:
    twice = {"n": 2, "sequence_ids": [7, 7], "max_new_tokens": 2}
    warm = {"sampling": SamplingParams(0.9), "draft_length": length}
    with pytest.raises(RequestError, match=r"sequence_ids must differ .*\[7, 7\]"):
        generate(PAIR, ROWS[0], method=method, **warm, **twice)
    for harmless in ({"draft_length": 3}, {"sampling": SamplingParams()}, {"verification": "coupled"}):
        rows = generate(PAIR, ROWS[0], method=method, **(warm | harmless), **twice).sequences
        assert rows[0].token_ids == rows[1].token_ids
    generate(PAIR, ROWS[0], method="regular", **warm, **twice)

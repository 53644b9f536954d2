"""A row's text does not depend on its neighbours, on how attention is split, or on what else uses the device.

Contract: in float32, seed and sequence id decide a row's tokens. Sampled text needs a fixed draft length for that;
greedy and coupled text do not.
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
    """The texts of these of the rows."""
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
def test_alone_together_and_shuffled(arguments):
    together = check_rows_alone(partial(texts, **arguments), 8, (0, 6))
    if arguments.get("method") == "regular":
        return
    # The end of a round decides which noise a position uses, unless the text is greedy or coupled.
    fixed = "sampling" in arguments and arguments.get("verification") != "coupled"
    for method in METHODS.values():
        if method.drafts and method.name != "bass" and not (method.overlaps and fixed):
            drafter = arguments.get("drafter", "model")
            draft, length = "self" if drafter == "model" else drafter, "tree 3 2 1" if "tree" in arguments else 3
            if not serves(method, draft, length):
                continue
            written = partial(texts, **arguments, method=method.name)
            assert together == (check_rows_alone(written, 8, [6]) if method.overlaps else written(list(range(8))))


def test_seeds_and_ids_matter():
    same = {"sampling": WARM, "draft_length": 3}
    one, other, third = (
        generate(PAIR, ROWS[0], max_new_tokens=20, sequence_ids=[key], seed=seed, **same).sequences[0].token_ids
        for key, seed in ((0, 0), (1, 0), (0, 1))
    )
    assert one != other and third != one


@pytest.mark.parametrize(("method", "length"), [("speculative", "auto"), ("bass", "bass")])
def test_rows_of_one_noise_key_are_refused_where_lengths_go_by_other_rows(method: str, length: str) -> None:
    twice = {"n": 2, "sequence_ids": [7, 7], "max_new_tokens": 2}
    warm = {"sampling": SamplingParams(0.9), "draft_length": length}
    with pytest.raises(RequestError, match=r"sequence_ids must differ .*\[7, 7\]"):
        generate(PAIR, ROWS[0], method=method, **warm, **twice)
    for harmless in ({"draft_length": 3}, {"sampling": SamplingParams()}, {"verification": "coupled"}):
        rows = generate(PAIR, ROWS[0], method=method, **(warm | harmless), **twice).sequences
        assert rows[0].token_ids == rows[1].token_ids
    generate(PAIR, ROWS[0], method="regular", **warm, **twice)

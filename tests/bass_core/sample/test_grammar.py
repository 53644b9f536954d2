"""Grammars: every method writes the text of masked regular decoding, and a matcher is left as it was by drafts.

tests/conformance/test_grammar.py enumerates the distributions of sampled texts.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pydantic
import pytest
import torch

from bass_core import (
    METHODS,
    ModelError,
    ModelPair,
    Options,
    RequestError,
    SamplingParams,
    draws,
    generate,
    stream,
)
from bass_core.decode.request import check_options, make_request
from bass_core.draft.base import point_masses
from bass_core.sample import shaping
from bass_core.sample.grammar import compiled
from bass_core.sample.rows import RaggedRows
from bass_core.sequence import Sequence
from tests.conformance.enumerated import letters, matcher
from tests.support.models import byte_tokenizer, perturbed, tiny, tiny_pair

guidance = pytest.importorskip("llguidance")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LARK = 'start: "<" word ("," word)* ">"\nword: /[a-d]{2,3}/'
# The model has ids that the tokenizer lacks.
TOKENIZER = byte_tokenizer((json.dumps({"name": "name", "age": 10}),) * 3, 24)
TARGET = tiny("llama", vocab_size=300)
PAIR = ModelPair(TARGET, perturbed(TARGET, 0.025), TOKENIZER)
EOS = 1
PROMPT = 'Call the tool: {"name": "call", "tool": 1}, {"name": "call", "age": 1'
MIXED: dict[str, Any] = {
    "json_schema": [SCHEMA, None, None, None],
    "regex": [None, "[ab]{2,9}", None, None],
    "grammar": [None, None, LARK, None],
}


def masked_regular(source: str | None, tokens: int) -> list[int]:
    """Return the greedy text under a grammar in llguidance's form, by transformers' forward."""
    ids: list[int] = TOKENIZER(PROMPT)["input_ids"]
    prompt = len(ids)
    tokenizer = guidance.hf.from_tokenizer(TOKENIZER, eos_token=EOS)
    follower = source and guidance.LLMatcher(tokenizer, source, log_level=0)
    while len(ids) < prompt + tokens:
        logits = TARGET(torch.tensor([ids])).logits[0, -1]
        if follower:
            bits = np.frombuffer(follower.compute_bitmask(), np.uint8)
            logits[np.unpackbits(bits, count=len(logits), bitorder="little") == 0] = -torch.inf
        ids.append(int(logits.argmax()))
        if ids[-1] == EOS or (follower and follower.consume_token(ids[-1]) and follower.is_stopped()):
            break
    return ids[prompt:]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    import llguidance.hf  # noqa: F401

    make = guidance.LLMatcher
    layout = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    sources = [
        make.grammar_from_json_schema(SCHEMA, defaults=layout),
        make.grammar_from_regex("[ab]{2,9}"),
        make.grammar_from_lark(LARK),
        None,
    ]
    return [masked_regular(source, 40) for source in sources]


ARMS: list[tuple[str, dict[str, Any]]] = [
    ("regular", {}),
    ("speculative", {}),
    ("bass", {}),
    ("bass", {"draft_length": 5}),
    ("bass", {"drafter": "prompt_lookup", "draft_length": 4}),
    ("bass", {"drafter": "adaptive", "logprobs": True}),
    ("bass", {"tree": (2, 1)}),
    ("amusd", {}),
    ("transformers", {}),
]


@pytest.mark.parametrize(("method", "others"), ARMS, ids=[f"{name}-{'-'.join(others)}" for name, others in ARMS])
def test_every_method_writes_the_text_of_masked_regular_decoding(
    method: str, others: dict[str, Any], expected: list[list[int]]
) -> None:
    """Rows have three different grammars or none; copies come from another call in the prompt."""
    out = generate(
        PAIR, PROMPT, n=4, method=method, max_new_tokens=40, eos_token_id=EOS, raw=True, **MIXED, **others
    )
    assert [row.token_ids for row in out.sequences] == expected
    assert [row.complete for row in out.sequences] == [True, True, True, None]
    assert out.sequences[0].finish_reason == "grammar"
    assert set(json.loads(out.sequences[0].text or "")) == {"name", "age"}


@pytest.mark.parametrize("method", ["speculative", "bass", "amusd"])
def test_coupled_texts_equal_masked_regular_decoding(method: str) -> None:
    options = Options(
        n=4, max_new_tokens=40, sampling=SamplingParams(1.0), verification="coupled", eos_token_id=EOS, **MIXED
    )
    texts = [[row.token_ids for row in generate(PAIR, PROMPT, method=name, options=options).sequences]
             for name in ("regular", method)]  # fmt: skip
    assert texts[0] == texts[1]


def test_forced_tokens_are_drafted_and_verified() -> None:
    regex = "(yes|no), certainly"
    options = Options(max_new_tokens=40, eos_token_id=EOS, regex=regex, draft_length=8, inspect=True)
    rows = [row for round_ in stream(PAIR, "x", options=options) for row in round_.rows]
    details = [(row.detail.sources, row.accepted) for row in rows if row.detail]
    assert (["grammar"] * 8, 8) in details, "eight of the certain tokens, in one round"
    assert [row.certain for row in rows if row.detail] == ["grammar" in sources for sources, _ in details]
    out = generate(PAIR, "x", method="regular", options=replace(options, inspect=False))
    assert out.metrics.target_forwards == out.metrics.new_tokens, "a token was written without a forward"


def test_drafts_leave_a_matcher_as_it_was() -> None:
    """Masks along drafts equal those of a new matcher that reads the same text, also behind forbidden drafts."""
    random.seed(0)
    for _ in range(9):
        ours, text = matcher(REGEX, frozenset({3})), list[int]()
        while not text or (len(text) < 9 and not ours.write(text[-1])):
            drafts = [random.randrange(5) for _ in range(3)]
            parents = random.choice([[-1, 0, 1], [-1, -1, 0], [-1, 0, -1]])
            paths: list[list[int]] = [[]]
            for draft, parent in zip(drafts, parents, strict=True):
                paths.append([*paths[parent + 1], draft])
            for path, mask in zip(paths, ours.masks(drafts, parents), strict=True):
                expected = fresh(text, path)
                assert mask == ours.next_mask(path) == expected
                assert expected is None or ours.fitting(path) == len(path)
            (mask,) = ours.masks([])
            assert mask is not None
            text.append(random.choice([token for token in range(3) if int(mask[0]) >> token & 1]))


def test_greedy_rounds_need_only_masks_that_forbid_the_largest_logit() -> None:
    """Their largest logits are those under all masks, also among equals, in chains, trees and ragged rows."""
    torch.manual_seed(0)
    drafts, parents, left = [[0, 1, 1], [1, 0, 2], [2, 0, 0]], [[-1, -1, 1], [-1, 0, 0], [-1, 0, -1]], 0
    for _ in range(20):
        rows = [Sequence(r, r, [5], 9, frozenset({3})) for r in range(3)]
        rows[0].grammar, rows[2].grammar = matcher("ab*|c(ab)+", rows[0].eos), matcher("c?a+b", rows[2].eos)
        logits = torch.randn(3, 4, 6).mul(2).round()
        for tree in (parents, None):
            full, few = logits.clone(), logits.clone()
            shaping.forbid(full, rows, drafts, tree)
            shaping.forbid(few, rows, drafts, tree, greedy=True)
            assert torch.equal(full.argmax(-1), few.argmax(-1))
            left += int((few != full).any(-1).sum())
        real = torch.tensor([0, 1, 2, 3, 4, 5, 8, 9, 10])
        ragged = RaggedRows(logits.flatten(0, 1)[real], [0, 4, 6, 9], 4, real)
        shaping.forbid(ragged, rows, drafts, greedy=True)
        assert torch.equal(ragged.rows, torch.cat((few[0], few[1, :2], few[2, :3])))
    assert left > 50, "masks of allowed choices were made too"


REGEX = "(ab?c|ca{1,3}b|b(ca)*)c"


def fresh(text: list[int], drafts: list[int]) -> list[int] | None:
    """Return the mask of a new matcher after a text and drafts, or None if it can't read them or the text ends."""
    new = guidance.LLMatcher(letters(), guidance.LLMatcher.grammar_from_regex(REGEX), log_level=0)
    read = max(drafts, default=0) < 3 and new.consume_tokens([*text, *drafts])
    if not read or (new.is_stopped() and new.is_accepting()):
        return None
    return np.frombuffer(new.compute_bitmask(), np.int32)[:1].tolist()


def test_a_text_ends_only_where_its_grammar_may() -> None:
    """The end is an id of its own, allowed after "ab" and "abb" and nowhere else; other ends are forbidden."""
    ours = matcher("abb?", frozenset({2}))
    assert [mask is not None and mask[0] for mask in ours.masks([0, 1, 1])] == [0b001, 0b010, 0b110, False]
    assert ours.fitting([0, 1, 2, 0]) == 3 and ours.fitting([0, 2]) == 1 and ours.fitting([3]) == 0
    assert matcher("abb?").masks([0, 1])[2] == [0b010], "a text without end ids goes on"


# llguidance can't take tokens back over the first three rules. The fourth exceeds its limits after "a", which no
# text needs; MANY is a way into it.
MANY = "\n".join(f'r{i}: "a" s{i}\ns{i}: /[b-d]{i % 7}/ "q"' for i in range(3000))
NO_WAY_BACK = [
    'start: x "d"\nx[stop="c"]: /[ab]*/',
    'start: x "d"\nx[max_tokens=3]: /[ab]*/',
    'start: x y\nx[stop=/[ab]c/]: /.*/\ny: "d"{3}',
]
BEYOND = f"""start: /[0-9]/ ("a" ({"|".join(f"r{i}" for i in range(3000))}) | "b" /[k-m]{{3}}/)\n{MANY}"""


class Fixed:
    """Drafts one token again and again."""

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, rows: list[Sequence], max_drafts: list[int], keys: Any) -> Any:
        return point_masses([[self.token] * min(most, 1) for most in max_drafts])


@pytest.mark.parametrize("lark", NO_WAY_BACK)
@pytest.mark.parametrize(
    "others", [{"draft_length": 3}, {"tree": (2, 1)}, {"drafter": "prompt_lookup", "draft_length": 4}], ids=str
)
def test_drafts_change_no_text_whose_grammar_has_no_way_back(lark: str, others: dict[str, Any]) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": EOS, "grammar": lark}
    expected = generate(PAIR, "abababcababa", method="regular", **options)
    out = generate(PAIR, "abababcababa", method="bass", **options, **others)
    assert [row.token_ids for row in out.sequences] == [row.token_ids for row in expected.sequences]


@pytest.mark.slow
def test_a_draft_beyond_llguidances_limits_costs_nothing() -> None:
    """Texts that get there themselves end in llguidance's own reason, with drafts and without."""
    into = TOKENIZER.encode("a")[-1]
    options: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": EOS, "grammar": BEYOND}
    drafted: dict[str, Any] = {"method": "bass", "drafter": Fixed(into), "draft_length": 3}
    expected = generate(PAIR, "ab", method="regular", **options)
    assert generate(PAIR, "ab", **drafted, **options).sequences[0].token_ids == expected.sequences[0].token_ids
    biased = SamplingParams(logit_bias={into: 50.0})
    for call in ({"method": "regular"}, drafted):
        with pytest.raises(ModelError, match=r"can't follow a row's grammar any further \(.*3001 items"):
            generate(PAIR, "ab", sampling=biased, **call, **options)


def test_drafts_are_read_by_copies() -> None:
    ours = matcher("[ab]*c")
    moves = list[str]()

    class Watched:
        def __init__(self, own: Any) -> None:
            self.own = own

        def __getattr__(self, name: str) -> Any:
            moves.append(name)
            return getattr(self.own, name)

    ours._matcher = Watched(ours._matcher)
    assert all(mask is not None for mask in ours.masks([0, 1, 0])) and ours.fitting([0, 1, 0]) == 3
    assert ours.next_mask([0, 1]) is not None and not {"consume_token", "consume_tokens"}.intersection(moves)
    assert moves.count("deep_copy") == 2 and not ours.write(1) and moves.count("consume_token") == 1


def test_ends_may_lie_behind_the_tokenizers_ids_and_not_behind_the_models() -> None:
    ours = matcher("ab?", frozenset({70}))
    first, second, _ = ours.masks([0, 1])
    assert first is not None and second is not None and first.tolist() == [1, 0, 0]
    assert second.tolist() == [2, 0, 1 << 6] and ours.fitting([0, 70]) == 2
    with pytest.raises(RequestError, match="allows no text that the model can write"):
        compiled(guidance.LLMatcher.grammar_from_regex("ca?"), letters(), frozenset(), 2)


@pytest.mark.parametrize("method", ["regular", "bass", "transformers"])
def test_a_row_without_a_token_ends_in_the_same_sentence_everywhere(method: str) -> None:
    """The tokenizer can't spell the euro sign's first byte alone."""
    few = ModelPair(tiny("llama", vocab_size=60), None, TOKENIZER)
    with pytest.raises(ModelError, match="The tokenizer has no token that row 0's grammar allows"):
        generate(few, [[33, 34]], method=method, regex="!a", max_new_tokens=6, eos_token_id=EOS)


def test_the_tokenizers_own_end_as_a_draft_ends_no_text() -> None:
    """llguidance can't roll back over it once a text is complete, even if the request has other ends or none."""
    ours = matcher("ab")
    assert [mask is not None for mask in ours.masks([0, 1, 3, 3])] == [True, True, False, False, False]
    assert ours.fitting([0, 1, 3]) == 2 and not ours.write(0) and ours.write(1)


@pytest.mark.parametrize("method", list(METHODS))
def test_a_grammar_of_the_empty_text_writes_only_the_end(method: str) -> None:
    (row,) = generate(PAIR, "x", method=method, regex="", eos_token_id=EOS).sequences
    assert (row.token_ids, row.finish_reason, row.complete) == ([EOS], "eos", True)


def test_an_end_that_is_also_text_is_allowed_only_where_the_grammar_may_end() -> None:
    """Here the letter c ends texts, so it can't be a part of one."""
    options: dict[str, Any] = {"eos_token_id": TOKENIZER.encode("c")[-1], "raw": True, "max_new_tokens": 12}
    (row,) = generate(PAIR, PROMPT, regex="[ab]{2,4}(c[ab])?", **options).sequences
    assert options["eos_token_id"] not in row.token_ids[:-1] and row.complete
    with pytest.raises(ModelError, match="no token that row 0's grammar allows"):
        generate(PAIR, PROMPT, regex="[ab]{2,4}c", **options)


def test_a_copying_rows_text_does_not_depend_on_who_drafts_for_its_neighbours() -> None:
    """Its forbidden copies are cut, whether the neighbour's drafts come with distributions or not."""
    copies, no_copies = (TOKENIZER.encode(text) for text in ("qwqwqwqwqwqwqw", "kzhfopj"))
    first = TOKENIZER.encode("xaxbxcxaxbxcxd xaxbxcx")
    for seed in range(8):
        texts = [
            generate(
                PAIR, prompts, seed=seed, regex=["[ab]+"] + [None] * (len(prompts) - 1), drafter="adaptive",
                sequence_ids=list(range(len(prompts))), sampling=SamplingParams(1.0), eos_token_id=None, raw=True,
                draft_length=3, max_new_tokens=5, verification="rejection",
            ).sequences[0].token_ids
            for prompts in ([first], [first, copies], [first, no_copies])
        ]  # fmt: skip
        assert texts[0] == texts[1] == texts[2]


def test_chains_of_drafts_may_be_as_long_as_the_longest() -> None:
    follower = matcher("[ab]*", frozenset({2}))
    masks = follower.masks([0, 2, 1] + [0] * 1021)
    assert [mask is not None for mask in masks[:3]] == [True, True, False] and len(masks) == 1025
    assert all(mask is not None for mask in follower.masks([0] * 1024))
    assert not follower.write(1) and follower.complete


@pytest.mark.parametrize(
    ("options", "reason"), [({"stop": "name"}, "stop"), ({"max_new_tokens": 2}, "length")], ids=["stop", "length"]
)
def test_a_cut_text_says_that_it_is_incomplete(options: dict[str, Any], reason: str) -> None:
    (row,) = generate(PAIR, "x", json_schema=SCHEMA, eos_token_id=EOS, **options).sequences
    assert (row.finish_reason, row.complete) == (reason, False) and "incomplete" in repr(row)


def test_bad_words_may_not_forbid_all_that_a_grammar_allows() -> None:
    with pytest.raises(RequestError, match="bad_words forbid all tokens that row 0's grammar allows"):
        generate(PAIR, "x", regex="qz", sampling=SamplingParams(bad_words=((TOKENIZER("z")["input_ids"][0],),)))


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_a_pydantic_model_is_a_schema() -> None:
    sampling = SamplingParams(logit_bias={TOKENIZER('"')["input_ids"][0]: 50.0})
    (row,) = generate(PAIR, "x", json_schema=Person, sampling=sampling, eos_token_id=EOS).sequences
    assert row.complete is False or Person.model_validate_json(row.text or "")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"properties": {"a": {"type": "strin"}}}}, "at #/properties/a: Invalid type: strin."),
    ({"json_schema": "{"}, "json_schema is not JSON"),
    ({"json_schema": [None, 3]}, "json_schema of row 1 must be a dictionary"),
    ({"json_schema": {"enum": []}}, "Unsatisfiable schema"),
    ({"regex": "(ab"}, "regex can't be compiled: unclosed group, at character 1 of "),
    ({"regex": 3}, "regex must be a text"),
    ({"regex": "\ud800"}, "regex can't be read"),
    ({"grammar": 'start: "\ud800"'}, "grammar can't be read"),
    ({"json_schema": "[" * 100_000}, "json_schema is not JSON"),
    ({"json_schema": nested(1500)}, "json_schema "),
    (
        {"json_schema": pydantic.create_model("Calls", call=(Callable[[int], int], ...))},
        "json_schema has no JSON schema",
    ),
    ({"grammar": 'start: "a" b'}, "grammar can't be compiled: line 1, column 8: unknown name"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_a_grammar_that_cant_be_used_is_refused_without_a_pair(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        check_options(Options(**options))
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"regex": ["a"]}, "regex must be one value, or a list of 2, one per row; got 1."),
    ({"regex": "a", "json_schema": SCHEMA}, "Row 0 has several grammars"),
    ({"regex": "a", "synthetic_acceptance": 0.5}, "synthetic_acceptance accepts drafts that a grammar forbids"),
    ({"regex": "", "eos_token_id": None}, "A grammar allows no text that the model can write"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_a_grammar_must_fit_the_request(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message.replace("(", r"\(")):
        make_request(PAIR, "x", n=2, **options)


def test_a_grammar_needs_llguidance_and_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="needs a tokenizer"):
        make_request(tiny_pair(), [[1, 2]], regex="a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="pip install llguidance"):
        make_request(PAIR, "x", regex="a")


def test_masks_on_an_accelerator_equal_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Sequence(r, r, [5], 9, frozenset({70})) for r in range(3)]
    rows[0].grammar, rows[2].grammar = matcher("ab|ca"), matcher("b+")
    logits, drafts = torch.randn(3, 3, 80), torch.tensor([[0, 1], [2, 2], [1, 0]])
    ours = shaping.shaped(logits, SamplingParams(), rows, drafts)
    monkeypatch.setattr(shaping, "is_accelerator", lambda device: True)
    assert torch.equal(shaping.shaped(logits, SamplingParams(), rows, drafts), ours)
    assert torch.equal(ours[1], logits[1]) and ours[0, 0].isfinite().nonzero()[:, 0].tolist() == [0, 2]


def test_draws_of_a_text_under_a_grammar_follow_it() -> None:
    options = Options(sampling=SamplingParams(1.0), regex="[ab]{6}", verification="rejection", drafter="model")
    (row,) = generate(PAIR, "x", options=options).sequences
    drawn = draws(PAIR, "x", row=0, tokens=row.token_ids[:2], options=options, count=50)
    assert {entry["text"] for entry in drawn["tokens"] if entry["p"] > 1e-6} == {"a", "b"}
    with pytest.raises(RequestError, match="Nothing is drafted at this position"):
        draws(PAIR, "x", row=0, tokens=row.token_ids, options=options, count=50)

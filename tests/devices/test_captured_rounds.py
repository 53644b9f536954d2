"""A round of captured graphs: few operators outside of them, and the drafts of the eager round.

Operators are counted by a dispatch mode that ignores what a graph records or replays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bass_core import METHODS, ModelPair, SamplingParams, generate
from bass_core.decode.admission import estimate_bytes
from bass_core.decode.request import make_request
from bass_core.draft.base import Proposal, TreeProposal
from bass_core.draft.chain_graph import ChainGraphs
from bass_core.draft.head.chain import HeadDrafter
from bass_core.draft.lookup import PromptLookupDrafter
from bass_core.draft.model import ModelDrafter
from bass_core.draft.tree import TreePlanner
from bass_core.lanes.lane import Lane
from bass_core.model.base import CausalModel
from bass_core.model.cache import RaggedCache
from bass_core.model.graphs import MAX_STEPS, GraphRunner, make_runner, probs_numbers
from bass_core.model.llama_cuda import LlamaCuda
from bass_core.model.static_step import GraphDrafts, tensors
from bass_core.sample.grammar import compiled
from bass_core.sample.noise import RowKeys
from bass_core.sequence import Sequence
from bass_core.verify.judge import Judge
from bass_core.verify.rules import VERIFICATIONS
from tests.support.models import each_once, tiny

from ..conformance import table
from ..conformance.enumerated import letters
from .emulation import emulated, fused, ledger, order
from .emulation.models import TYPE, pair

pytestmark = pytest.mark.slow

SAMPLING = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(0.8),
    "top-p": SamplingParams(0.8, top_p=0.9),
    "penalties": SamplingParams(
        0.8,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        logit_bias={3: 2.0},
        bad_words=((4,), (5, 6), (7, 8, 9)),
    ),
    "greedy, penalties": SamplingParams(repetition_penalty=1.3, bad_words=((5, 6),)),
    "bias": SamplingParams(0.8, logit_bias={3: 2.0}),
}


@pytest.fixture
def one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    fused.hash_at_once(monkeypatch)


# For tests that count no operators.
hashes_at_once = pytest.mark.usefixtures("one_hash")


class Operators(TorchDispatchMode):
    """Counts operators on the device outside of graphs."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        self.count += not order.captures and any(tensor.device.type == TYPE for tensor in tensors)
        return out


@contextmanager
def allocations(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collect the sizes of tensors that are made on the device outside of graphs."""
    sizes: list[int] = []
    wrap = emulated.wrap

    def wrapped(raw: torch.Tensor, device: int) -> torch.Tensor:
        if not order.captures:
            sizes.append(raw.numel())
        return wrap(raw, device)

    with patch.context() as inside:
        inside.setattr(emulated, "wrap", wrapped)
        yield sizes


def lane_of(
    method: str, batch: int, sampling: str, draft: str = "head", prepared: bool = False, **options: Any
) -> Lane:
    """Return a lane; without `prepared`, rounds are captured when they are first needed, which takes less time."""
    models = pair("llama", table.DRAFTS[draft].kind)
    rows = (table.PROMPTS["different"] * batch)[:batch]
    lengths = {} if "tree" in options else {"draft_length": 3}
    request = make_request(
        models, rows, sampling=SAMPLING[sampling], seed=3,
        **{"drafter": "model", "max_new_tokens": 60, "eos_token_id": None, **lengths, **options},
    )  # fmt: skip
    lane = Lane(models, request, method)
    if prepared:
        lane.prepare()
    return lane


ROUNDS = [("regular", 1, "head"), *product(["bass"], (1, 5, 32), ("head", "perturbed"))]


@pytest.mark.parametrize(("sampling", "method", "batch", "draft"), each_once(SAMPLING, ROUNDS))
def test_a_round_is_two_graphs(
    method: str, batch: int, draft: str, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that is launched before the last one is read takes all its numbers from the device."""
    # No row ends meanwhile. Preparing more rows would capture up to 60 rounds, of which two are needed.
    lane = lane_of(method, batch, sampling, draft, prepared=batch == 1, max_new_tokens=100)
    # Enough steps to capture both widths of unread tokens that three drafts can leave.
    for _ in range(16):
        lane.step()
    ledger.clear()
    with allocations(monkeypatch) as sizes, Operators() as operators:
        for _ in range(3):
            assert lane.step().kind == ("plain" if method == "regular" else "verify")
    assert operators.count <= 3 * (10 if method == "regular" else 30)
    ahead = "penalties" not in sampling and sampling != "bias"
    assert ledger.uploads == ({} if ahead else {"queued": 3 * (1 if method == "regular" else 2)})
    assert ledger.reads.total() == 3 and not sizes and not ledger.races
    lane.end("stopped")


@pytest.mark.parametrize(
    ("sampling", "draft"), each_once(["greedy", "sampled", "penalties"], ["head", "perturbed"])
)
def test_a_round_with_copies_in_some_rows_is_two_graphs(
    sampling: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptLookupDrafter, "_match", lambda self, row, tokens: 1 if row in (1, 3) else None)
    options: dict[str, Any] = {"drafter": "adaptive", "draft_length": 5, "max_new_tokens": 100}
    lane = lane_of("bass", 5, sampling, draft, prepared=sampling == "greedy", **options)
    for _ in range(12):
        lane.step()
    ledger.clear()
    with allocations(monkeypatch) as sizes, Operators() as operators:
        for _ in range(3):
            assert all(row.drafted for row in lane.step().rows)
    assert operators.count <= 3 * 30 and ledger.uploads == {"queued": 3 * 2}
    assert ledger.reads.total() == 3 and not sizes and not ledger.races
    lane.end("stopped")


@pytest.mark.parametrize(
    ("sampling", "draft", "batch"),
    [("greedy", "head", 1), ("sampled", "perturbed", 5), ("top-p", "head", 5), ("greedy", "perturbed", 32)],
)
def test_a_round_of_trees_is_two_graphs(
    sampling: str, draft: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides, rows that accept other drafts than their first ones move them in the cache, with one upload."""
    moves, keep_all = [], RaggedCache.keep_all

    def counted(self: RaggedCache, *arguments: Any) -> None:
        moves.append(arguments)
        keep_all(self, *arguments)

    monkeypatch.setattr(RaggedCache, "keep_all", counted)
    rule = "auto" if sampling == "greedy" else "coupled"
    options: dict[str, Any] = {"max_new_tokens": 100, "tree": (2, 2, 1), "verification": rule}
    lane = lane_of("bass", batch, sampling, draft, prepared=True, **options)
    for _ in range(16):
        lane.step()
    ledger.clear()
    moves.clear()
    with allocations(monkeypatch) as sizes, Operators() as operators:
        for _ in range(3):
            assert lane.step().kind == "verify"
    assert len(moves) <= 3 and operators.count <= 3 * 30 + 16 * len(moves)
    assert ledger.uploads == {"queued": 3 * 2 + len(moves)}
    assert ledger.reads.total() == 3 and len(sizes) <= 4 * len(moves) and not ledger.races
    lane.end("stopped")


def distributions(proposal: Proposal) -> list[Any]:
    """Return the distributions that each row's drafts were drawn from."""
    if proposal.probs is None:
        return []
    if isinstance(proposal, TreeProposal):
        q = proposal.probs.cpu()
        return [[q[place] for place in row if place >= 0] for row in proposal.drawn or []]
    return [row[:n] for row, n in zip(proposal.probs.cpu(), proposal.num_drafted, strict=True)]


def drafted(
    monkeypatch: pytest.MonkeyPatch, sampling: str, draft: str, graphs: bool, **options: Any
) -> tuple[list[Any], list[Any]]:
    """Return each round's drafts, with the distributions that they were drawn from, and the texts."""
    proposals: list[Any] = []
    drafter: Any = ModelDrafter if draft == "perturbed" else HeadDrafter
    propose = drafter.propose

    def kept(*arguments: Any) -> Proposal:
        proposal = propose(*arguments)
        probs = distributions(proposal)
        tokens = [row[:n] for row, n in zip(proposal.tokens.tolist(), proposal.num_drafted, strict=True)]
        if isinstance(proposal, TreeProposal):
            tokens = [*zip(tokens, proposal.parents, strict=True)]
        proposals.append((tokens, probs, None if proposal.greedy_probs is None else proposal.greedy_probs()))
        return proposal

    with monkeypatch.context() as patch:
        patch.setenv("BASS_GRAPHS", "1" if graphs else "0")
        patch.setattr(drafter, "propose", kept)
        # Inspecting asks for the probabilities of greedy drafts. Three rows leave graphs of four partly filled.
        lane = lane_of("bass", 3, sampling, draft, inspect=True, **options)
        while not lane.finished:
            lane.step()
    return proposals, [sequence.token_ids for sequence in lane.sequences]


@hashes_at_once
@pytest.mark.parametrize(("sampling", "draft"), each_once(SAMPLING, ["head", "perturbed"]))
def test_captured_chains_draft_what_eager_ones_draft(
    sampling: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, texts = drafted(monkeypatch, sampling, draft, graphs=True, max_new_tokens=24)
    eager, expected = drafted(monkeypatch, sampling, draft, graphs=False, max_new_tokens=24)
    assert texts == expected and len(captured) == len(eager) > 5
    for (tokens, probs, own), (other_tokens, other_probs, other_own) in zip(captured, eager, strict=True):
        assert tokens == other_tokens
        torch.testing.assert_close(probs, other_probs, atol=1e-5, rtol=1e-4)
        assert (own is None) == (other_own is None) == ("greedy" not in sampling)
        for row, other_row in zip(own or [], other_own or [], strict=True):
            assert row == pytest.approx(other_row[: len(row)], rel=1e-3)


RULES = [("greedy", "auto"), ("sampled", "auto"), ("top-p", "auto"), ("sampled", "coupled")]


@hashes_at_once
@pytest.mark.parametrize(("sampling", "rule", "draft"), each_once(RULES, ["head", "perturbed", "eagle"]))
def test_captured_trees_are_those_of_eager_rounds(
    sampling: str, rule: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rounds of a row are less deep."""
    options: dict[str, Any] = {"tree": (3, 2, 1, 2), "verification": rule, "max_new_tokens": 24}
    eager, expected = drafted(monkeypatch, sampling, draft, graphs=False, **options)
    monkeypatch.setattr(TreePlanner, "propose", None)
    captured, texts = drafted(monkeypatch, sampling, draft, graphs=True, **options)
    assert texts == expected and len(captured) == len(eager) > 5 and not ledger.races
    for (trees, probs, own), (other_trees, other_probs, other_own) in zip(captured, eager, strict=True):
        assert trees == other_trees
        torch.testing.assert_close(probs, other_probs, atol=1e-5, rtol=1e-4)
        assert (own is None) == (other_own is None) == (sampling != "greedy")
        for row, other_row in zip(own or [], other_own or [], strict=True):
            assert row == pytest.approx(other_row, rel=1e-3)


@hashes_at_once
@pytest.mark.parametrize("length", [7, 12])
@pytest.mark.parametrize(("sampling", "prompts"), [("greedy", "different"), ("sampled", "mixed")])
def test_captured_chains_follow_copies_and_rows_that_leave(
    sampling: str, prompts: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows accept many drafts, copy now and then, end at different times, and may share a prefix.

    Longer chains differ by more than rounding: this head makes a difference 1.7 times as large with each draft.
    """
    models = pair("llama", table.DRAFTS["head"].kind)
    for model in (CausalModel, LlamaCuda):
        monkeypatch.setattr(model, "min_shared_tokens", 16)

    def match(self: PromptLookupDrafter, row: int, tokens: list[int]) -> int | None:
        return 1 if len(tokens) > 60 and (len(tokens) * 7 + tokens[-1]) % 4 == 0 else None

    monkeypatch.setattr(PromptLookupDrafter, "_match", match)
    propose, replay, widths = HeadDrafter.propose, ChainGraphs.replay, set()

    def noted(self: ChainGraphs, levels: int, starts: list[int], unread: list[list[int]], *others: Any) -> Any:
        widths.add((max(map(len, unread)), levels > 0))
        zeros = [0] * len(starts)
        for line in RowKeys(0, zeros, zeros, self.runner.device)._copied:
            assert line.data_ptr() % 16 == 0
        return replay(self, levels, starts, unread, *others)

    monkeypatch.setattr(ChainGraphs, "replay", noted)
    results = []
    for on in ("1", "0"):
        log: list[Any] = []

        def kept(self: HeadDrafter, rows: Any, most: Any, keys: Any, log: list[Any] = log) -> Proposal:
            proposal = propose(self, rows, most, keys)
            drafts = [row[:n] for row, n in zip(proposal.tokens.tolist(), proposal.num_drafted, strict=True)]
            log.append(([row.id for row in rows], drafts))
            return proposal

        with monkeypatch.context() as patch:
            patch.setenv("BASS_GRAPHS", on)
            patch.setattr(HeadDrafter, "propose", kept)
            request = make_request(
                models, table.PROMPTS[prompts][:5], max_new_tokens=60, draft_length=length, drafter="adaptive",
                sampling=SAMPLING[sampling], seed=3, eos_token_id=list(range(0, 96, 31)), synthetic_acceptance=0.8,
            )  # fmt: skip
            lane = Lane(models, request, "bass")
            while not lane.finished:
                lane.step()
            results.append((log, [sequence.token_ids for sequence in lane.sequences]))
    assert results[0] == results[1] and not ledger.races
    assert len({width for width, drafts in widths if drafts}) > 5


MASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("greedy", "head", {}),
    ("sampled", "head", {}),
    ("greedy, penalties", "perturbed", {}),
    ("penalties", "head", {"logprobs": True}),
    ("sampled", "perturbed", {"tree": (2, 1), "verification": "coupled"}),
]


@hashes_at_once
@pytest.mark.parametrize(("sampling", "draft", "options"), MASKED)
def test_captured_rounds_with_grammars_write_what_eager_ones_write(
    sampling: str, draft: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row has no grammar, and one ends before the others. A head's rounds wait for the device twice."""
    verify, captured = GraphRunner.verify_in_graph, list[bool]()

    def noted(self: GraphRunner, drafts: GraphDrafts, *others: Any) -> Any:
        result = verify(self, drafts, *others)
        captured.append(drafts.write_masks is not None and result is not None)
        return result

    monkeypatch.setattr(GraphRunner, "verify_in_graph", noted)
    models, rounds = pair("llama", table.DRAFTS[draft].kind), dict[str, list[Any]]()
    length = {} if "tree" in options else {"draft_length": 3}
    request = make_request(
        models, table.PROMPTS["different"][:3], sampling=SAMPLING[sampling], seed=3, eos_token_id=None,
        drafter="model", max_new_tokens=24, **length, **options,
    )  # fmt: skip
    request = replace(request, grammars=(grammar("(abcab|b[ac]{2}|c(bb)?)+a"), None, grammar("(abc|bca){3}")))
    for on in ("1", "0"):
        monkeypatch.setenv("BASS_GRAPHS", on)
        captured.clear()
        lane, log = Lane(models, request, "bass"), rounds.setdefault(on, [])
        prepared: list[Any] | None = None
        if on == "1" and length and sampling == "sampled":
            lane.prepare()
            decoder: Any = lane._decoder
            prepared = judged_steps(decoder)
        while not lane.finished:
            ledger.clear()
            round_ = lane.step()
            log += [row.record() | {"tokens": row.tokens, "logprobs": row.logprobs} for row in round_.rows]
            if on == "1" and draft == "head" and round_.kind != "prefill":
                assert ledger.reads.total() <= 2 + ("logprobs" in options)
            assert not ledger.races
        assert all(captured) and bool(captured) == (on == "1")
        assert prepared is None or judged_steps(decoder) == prepared, "a round was captured late"
        assert [row.finish_reason for row in lane.sequences] == ["length", "length", "grammar"]
        assert set(lane.sequences[0].token_ids) <= {0, 1, 2} and not set(lane.sequences[1].token_ids) <= {0, 1, 2}
    for row, other in zip(rounds["1"], rounds["0"], strict=True):
        for name, value in row.items():
            if name in ("p", "q", "u", "next_p", "chance", "logprobs"):
                # None stands for NaN, or for log-probabilities that nobody asked for.
                both = [found if isinstance(found, list) else [found] for found in (value, other[name])]
                numbers, expected = ([math.nan if x is None else x for x in found] for found in both)
                assert numbers == pytest.approx(expected, abs=1e-4, rel=1e-3, nan_ok=True), name
            else:
                assert value == other[name], name


def judged_steps(decoder: Any) -> list[Any]:
    """Return the keys of all captured verifications."""
    return sorted((key for key in decoder.target.slot.steps if key[0] == "judged"), key=str)


def grammar(regex: str) -> Any:
    """Return a grammar of the letters a, b and c, which are tokens 0, 1 and 2."""
    guidance = pytest.importorskip("llguidance")
    return compiled(guidance.LLMatcher.grammar_from_regex(regex), letters(), frozenset())


def test_a_first_round_that_only_copies_leaves_its_states_to_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its verification is wider than what the head can take in at once."""

    def match(self: PromptLookupDrafter, row: int, tokens: list[int]) -> int | None:
        return 0 if len(tokens) == 6 else None

    monkeypatch.setattr(PromptLookupDrafter, "_match", match)
    models = pair("llama", table.DRAFTS["head"].kind)
    options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None}
    texts = [
        generate(models, [[5, 6, 7, 8, 9]], method=method, **options, **more).sequences[0].token_ids
        for method, more in (("regular", {}), ("bass", {"draft_length": 17, "drafter": "adaptive"}))
    ]
    assert texts[0] == texts[1]


def test_distributions_of_another_type_are_never_rounded() -> None:
    """A drafter of the user's own may give q in float16. Its rounds are not captured."""
    model = pair("llama", "none").target_step
    runner = make_runner(model, 2, 64, model.vocab, "pad")
    judge = Judge(SAMPLING["sampled"], VERIFICATIONS["rejection"], None)
    drafts = torch.ones(2, 2, dtype=torch.long).to(TYPE)
    rows = [Sequence(row, row, [1, 2, 3, 4, 1], 9, frozenset()) for row in range(2)]
    inputs = judge.inputs(rows, [2, 2], RowKeys(3, [0, 1], [5, 5], model.device))
    q = torch.full((2, 2, model.vocab), 1 / model.vocab).to(TYPE)
    assert runner.verify_in_graph(GraphDrafts(drafts, q.half()), judge, inputs, False) is None
    assert runner.verify_in_graph(GraphDrafts(drafts, q), judge, inputs, False) is not None


def test_states_of_an_earlier_request_are_never_read() -> None:
    lane = lane_of("bass", 3, "greedy")
    decoder: Any = lane._decoder
    decoder.drafter.unread.states.fill_(torch.nan)
    while not lane.finished:
        lane.step()
    clean = lane_of("bass", 3, "greedy")
    while not clean.finished:
        clean.step()
    drafts = [
        [[row["drafted"] for row in round_["rows"]] for round_ in each.trace.records] for each in (lane, clean)
    ]
    assert drafts[0] == drafts[1]


@hashes_at_once
@pytest.mark.parametrize(
    ("drafter", "draft", "sampling", "length", "batch"),
    [
        ("adaptive", "head", "sampled", "auto", 8),
        ("adaptive", "head", "sampled", "bass", 1),
        ("adaptive", "perturbed", "greedy", 3, 8),
        ("adaptive", "perturbed", "greedy", "auto", 1),
        ("model", "head", "greedy", "bass", 8),
        ("model", "head", "greedy", 3, 1),
    ],
)
def test_no_round_waits_for_a_capture(
    drafter: str, draft: str, sampling: str, length: Any, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows accept different numbers of drafts, copy now and then, and end at different times."""
    captured, record = list[Any](), GraphRunner._record_in_pool

    def counted(self: GraphRunner, key: Any, *arguments: Any) -> Any:
        captured.append(key)
        return record(self, key, *arguments)

    def match(self: PromptLookupDrafter, row: int, tokens: list[int]) -> int | None:
        return 1 if (len(tokens) * 7 + row) % 5 == 0 else None

    monkeypatch.setattr(GraphRunner, "_record_in_pool", counted)
    monkeypatch.setattr(PromptLookupDrafter, "_match", match)
    lane = lane_of(
        "bass", batch, sampling, draft, prepared=True, drafter=drafter, draft_length=length, max_new_tokens=40,
        synthetic_acceptance=0.7,
    )  # fmt: skip
    prepared, captured[:] = len(captured), []
    while not lane.finished:
        lane.step()
    assert not captured and 0 < prepared <= 2 * MAX_STEPS and lane.error is None


class Varied:
    """A policy whose lengths change from round to round."""

    limit, rounds = 9, 0

    def lengths(self, offers: Any) -> list[int]:
        self.rounds += 1
        return [(1, 3, 2, 9, 5)[self.rounds % 5]] * len(offers)

    def observe(self, feedback: Any) -> None:
        pass


class Late:
    """A policy that drafts as soon as `length` is set."""

    limit, length = 3, 0

    def lengths(self, offers: Any) -> list[int]:
        return [self.length] * len(offers)

    def observe(self, feedback: Any) -> None:
        pass


def test_rounds_that_draft_late_leave_no_states_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head read the prompts early, and graphs take in what plain rounds write whenever its buffer is full."""
    replay, replayed = ChainGraphs.replay, list[int]()

    def noted(self: ChainGraphs, levels: int, *others: Any) -> Any:
        replayed.append(levels)
        return replay(self, levels, *others)

    monkeypatch.setattr(ChainGraphs, "replay", noted)
    lane = lane_of("bass", 3, "greedy", draft_length=Late())
    decoder: Any = lane._decoder
    assert lane.step().kind == "prefill"
    replayed.clear()
    for _ in range(40):
        assert lane.step().kind == "plain"
        assert not any(decoder.drafter.feed.states.waiting(3))
    decoder.policy.length = 3
    assert lane.step().kind == "verify"
    assert replayed[:-1] and not any(replayed[:-1]) and replayed[-1] == 3


def test_a_row_that_goes_back_has_its_later_text_uploaded_again() -> None:
    lane = lane_of("bass", 2, "greedy")
    for _ in range(5):
        lane.step()
    drafter: Any = lane._decoder.drafter
    known, length = drafter._text.num_valid[0], drafter.runner.lengths[0] - 2
    drafter.rewind(0, length)
    assert drafter._text.num_valid[0] == length < known


@hashes_at_once
def test_rounds_of_all_lengths_share_one_buffer_of_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer drafts replace the buffer, and nothing that was captured over the old one is used again."""
    lane = lane_of("bass", 3, "sampled", "perturbed", draft_length=Varied())
    decoder: Any = lane._decoder
    runners = [decoder.target, decoder.drafter.runner]
    while not lane.finished:
        lane.step()
    monkeypatch.setenv("BASS_GRAPHS", "0")
    eager = lane_of("bass", 3, "sampled", "perturbed", draft_length=Varied())
    while not eager.finished:
        eager.step()
    assert [row.token_ids for row in lane.sequences] == [row.token_ids for row in eager.sequences]
    for runner in runners:
        buffer, rows = runner.slot.buffers["probs"], runner.cache.max_batch
        assert buffer.numel() == probs_numbers(rows, 9, runner.vocab) == 16 * rows * runner.vocab
        users = [step for step in runner.slot.steps.values() if step.shared]
        assert len(users) >= 2 and all(step.shared["probs"] is buffer for step in users)
        # The buffer counts towards no capture, so that many lengths don't drop each other's graphs.
        kept = [tensor for step in users for tensor in (*step.static_inputs.values(), *tensors(step.output))]
        storages = {tensor.untyped_storage().data_ptr() for tensor in kept}
        assert storages and buffer.untyped_storage().data_ptr() not in storages


def test_admission_counts_the_buffers_of_distributions() -> None:
    models = pair("llama", table.DRAFTS["perturbed"].kind)
    options: dict[str, Any] = {"max_new_tokens": 20, "draft_length": 5}
    greedy, sampled = (
        make_request(models, [[1, 2, 3]] * 3, sampling=SAMPLING[name], **options) for name in ("greedy", "sampled")
    )
    logits = 3 * 7 * models.vocab * 4
    needed = [estimate_bytes(models, request, [METHODS["bass"]], 3) for request in (greedy, sampled)]
    assert needed[1] - needed[0] == 5 * logits + 2 * 4 * probs_numbers(3, 5, models.vocab)


def test_a_later_request_leaves_the_tensors_of_a_chains_graph_alone() -> None:
    """Single-sequence speculation starts a new drafter for each row. All rows use the first row's graph."""
    models, rows = pair("llama", table.DRAFTS["perturbed"].kind), table.PROMPTS["different"][:3]
    options: dict[str, Any] = {"sampling": SAMPLING["bias"], "seed": 3, "eos_token_id": None}
    out = generate(
        models, rows, method="speculative", drafter="model", max_new_tokens=12, draft_length=3, **options
    )
    assert [len(row.token_ids) for row in out.sequences] == [12] * 3 and not ledger.races


def test_a_round_without_drafts_between_trees_has_its_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    models, rows = pair("llama", table.DRAFTS["perturbed"].kind), table.PROMPTS["different"][:3]

    def texts(graphs: str, seed: int) -> list[list[int]]:
        monkeypatch.setenv("BASS_GRAPHS", graphs)
        out = generate(
            models, rows, drafter="model", sampling=SamplingParams(1.0, repetition_penalty=20.0), seed=seed,
            eos_token_id=None, max_new_tokens=2, tree=(2, 1),
        )  # fmt: skip
        return [row.token_ids for row in out.sequences]

    assert all(texts("1", seed) == texts("0", seed) for seed in range(4))


def test_an_empty_tree_allows_longer_bad_words() -> None:
    """The draft's context is shorter than the text, so the tree is empty."""
    target, draft = tiny("llama", max_position_embeddings=1024), tiny("llama", 1, max_position_embeddings=64)
    out = generate(
        ModelPair(target.to(TYPE), draft.to(TYPE)), [list(range(80))], drafter="model", tree=(2, 1),
        sampling=SamplingParams(bad_words=((5, 6, 7),)), eos_token_id=None, max_new_tokens=6,
    )  # fmt: skip
    assert len(out.sequences[0].token_ids) == 6

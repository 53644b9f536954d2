"""The target as its own draft: what it proposes and when, and that drafting leaves the cache unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bass_core import RequestError, SamplingParams, generate, stream
from bass_core.decode.calibrate import measure_costs
from bass_core.decode.cost_store import costs_path
from bass_core.decode.request import make_request
from bass_core.draft.registry import DRAFTERS
from bass_core.draft.window import WINDOW, WindowDrafter
from bass_core.lanes.utilization import Work
from bass_core.model.base import CausalModel
from bass_core.model.forward import ForwardBatch
from bass_core.model.graphs import GraphRunner, record_calls
from bass_core.model.runner import ModelRunner
from bass_core.model.weights.cost import ModelCost
from bass_core.sample.noise import NoiseKeys
from bass_core.sequence import Round, RowRound, Sequence, WindowWork
from bass_core.verify.rules import VERIFICATIONS
from kernels.plan import SINKS, window_start
from tests.support.models import VOCAB, small_window, texts_of, tiny_pair

PAIR = tiny_pair()
TARGET = PAIR.target
LENGTHS = (300, 190, 60, 191)
RNG = torch.Generator().manual_seed(0)
ROWS = [torch.randint(1, VOCAB, (length,), generator=RNG).tolist() for length in LENGTHS]
REQUEST: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None}
CASES = [("auto", 0.0), ("coupled", 0.9), ("rejection", 0.9), ("block", 0.9)]


def shrink_window(monkeypatch: pytest.MonkeyPatch, window: int = 32) -> None:
    for user in ("registry", "window"):
        monkeypatch.setattr(f"bass_core.draft.{user}.WINDOW", window)


class WholeText(WindowDrafter):
    """A window drafter that drafts although its window covers the whole text."""

    def __init__(self, target: Any, params: Any, verification: Any, window: int) -> None:
        super().__init__(target, params, verification, 10**6)

    def usable(self, rows: Any, max_drafts: list[int]) -> list[int]:
        return max_drafts


@pytest.mark.parametrize(("verification", "temperature"), CASES)
@pytest.mark.parametrize("drafter", ["window", "head"])
def test_drafts_of_a_window_that_hides_nothing_are_accepted(
    drafter: str, verification: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft and target then agree, unless a draft was drawn at a wrong position or not from the reported q."""
    monkeypatch.setattr("bass_core.draft.registry.WindowDrafter", WholeText)
    pair = tiny_pair("head", target=TARGET) if drafter == "head" else PAIR
    name = "window_model" if drafter == "head" else drafter
    sampling = SamplingParams(temperature)
    out = generate(
        pair, ROWS, drafter=name, draft_length=6, sampling=sampling, verification=verification, **REQUEST
    )
    drafted, rate = out.metrics.drafted, out.metrics.acceptance_rate
    assert drafted and rate is not None
    assert rate > 0.99, "only rounding separates p and q"


@pytest.mark.parametrize("backend", ["pad", "split", "sdpa"])
def test_a_windowed_step_does_not_depend_on_other_rows(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer neighbour makes the step gather its visible columns; shorter rows alone do without."""
    small_window(monkeypatch)
    model, window = CausalModel(TARGET), 8

    def logits(rows: list[list[int]], window: int | None) -> Any:
        runner = ModelRunner(model, len(rows), 256, model.vocab, backend)
        padded = torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
        runner.forward(ForwardBatch(padded, [0] * len(rows), list(map(len, rows))))
        newest = torch.tensor([row[-1:] for row in rows])
        return runner.forward(ForwardBatch(newest, [len(row) - 1 for row in rows], window=window)).logits[:, 0]

    rows = [ROWS[0][:30], ROWS[1]]
    alone, together = logits(rows[:1], window), logits(rows, window)[:1]
    torch.testing.assert_close(alone, together, atol=1e-4, rtol=1e-4)
    assert (alone - logits(rows[:1], None)).abs().max() > 1e-3, "the window hides nothing"


@pytest.mark.slow
@pytest.mark.parametrize(("verification", "temperature"), CASES[:2])
@pytest.mark.parametrize("drafter", ["window", "window_model"])
def test_text_equals_regular_decoding(
    drafter: str, verification: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row drafts once its window leaves out tokens: two rows do from the start, one later, and one never."""
    shrink_window(monkeypatch)
    arguments: dict[str, Any] = REQUEST | {"sampling": SamplingParams(temperature), "verification": verification}
    regular = generate(PAIR, ROWS, method="regular", **arguments)
    rounds = list(stream(PAIR, ROWS, drafter=drafter, draft_length=4, **arguments))
    texts: dict[int, list[int]] = {}
    drafted = [0] * len(ROWS)
    for round_ in rounds:
        for row in round_.rows:
            texts.setdefault(row.sequence, []).extend(row.tokens)
            drafted[row.sequence] += len(row.drafted)
    assert [texts[row] for row in range(len(ROWS))] == texts_of(regular)
    assert drafted[0] and drafted[1] and drafted[3] and not drafted[2], "a row without a gap drafts nothing"


def test_drafting_changes_neither_lengths_nor_cached_tokens() -> None:
    runner = ModelRunner(PAIR.target_step, 2, 400, VOCAB, "pad")
    rows = [Sequence(i, i, ROWS[i], 40, frozenset()) for i in range(2)]
    width = max(map(len, ROWS[:2]))
    runner.forward(ForwardBatch(torch.tensor([(row + [0] * width)[:width] for row in ROWS[:2]]), [0, 0]))
    for r, row in enumerate(rows):
        runner.commit(r, len(row.tokens) - 1)
    before, cached = list(runner.lengths), [len(row.tokens) - 1 for row in rows]
    stored = [runner.cache.buffer[:, :, r, :, :length].clone() for r, length in enumerate(cached)]
    drafter = WindowDrafter(runner, SamplingParams(), VERIFICATIONS["auto"], 32)
    keys = NoiseKeys(0, torch.arange(2), torch.tensor([len(row.tokens) for row in rows]))
    proposal = drafter.propose(rows, [5, 2], keys)
    assert proposal.num_drafted == [5, 2] and proposal.tokens.shape == (2, 5)
    assert (drafter.calls, drafter.drafted, list(runner.lengths)) == (5, 7, before)
    for r, length in enumerate(cached):
        assert torch.equal(runner.cache.buffer[:, :, r, :, :length], stored[r])
    num_read = sum(SINKS + n + i - window_start(n + i, 32) for n in cached for i in range(5))
    assert proposal.windowed == WindowWork(5, 10, num_read, num_read)


@pytest.mark.parametrize("drafter", [name for name, kind in DRAFTERS.items() if kind.windows])
def test_an_attention_without_windows_is_refused(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If such an attention were accepted, a step would fail, and the target would also lose its captured steps."""
    monkeypatch.setattr("bass_core.decode.request.choose_backend", lambda *arguments: "flash")
    with pytest.raises(RequestError, match=f'drafter="{drafter}" .* choose attention="sdpa".'):
        make_request(PAIR, ROWS, drafter=drafter)
    assert make_request(PAIR, ROWS, drafter="model").backend == "flash"


def test_the_target_is_billed_for_its_own_drafts() -> None:
    """The row has 10 tokens. Each of 3 windowed forwards reads 4 tokens, and the verification reads all tokens."""
    target = ModelCost(100, 200, 8, 5)
    sequence = Sequence(0, 0, [1] * 10, 9, frozenset())
    sequence.write([1], ["recovered"])
    row = RowRound(0, [1] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3, 0, [1], ["recovered"], None)
    work = Work(target)
    work.add(Round("verify", 3, [row], 0.0, 3, 3, WindowWork(3, 3, 12, 12)), [sequence])
    assert work.flops == 2 * 100 * (4 + 3) + 5 * (11 + 12 + 13 + 14 + 12 + 3)
    assert work.bytes_read == 200 * (1 + 3) + 8 * (13 + 12)


def test_window_drafts_have_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost table has a draft cost, and is stored in a separate file."""
    small_window(monkeypatch)
    for drafter in ("window", "window_model"):
        table = measure_costs(PAIR, DRAFTERS[drafter], "pad", SamplingParams(), [1])
        assert table.draft_ms(1) > 0
    paths = {
        str(costs_path(PAIR, DRAFTERS[name], "pad", SamplingParams()))
        for name in ("prompt_lookup", "model", "window")
    }
    assert len(paths) == 3


def test_each_window_size_is_captured_separately() -> None:
    tokens = torch.tensor([ROWS[0]])
    plain = ModelRunner(PAIR.target_step, 1, 512, VOCAB, "pad")
    captured = GraphRunner(PAIR.target_step, 1, 512, VOCAB, "pad", record_calls)
    logits = []
    for runner in (plain, captured):
        runner.forward(ForwardBatch(tokens, [0], eager=True))
        logits.append(
            [
                runner.forward(ForwardBatch(tokens[:, -1:], [299], window=window)).logits.clone()
                for window in (None, 32, 64, None, 32)
            ]
        )
    for expected, actual in zip(*logits, strict=True):
        torch.testing.assert_close(expected, actual, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits[0][0], logits[0][1], atol=1e-2)
    assert WINDOW % 64 == 0

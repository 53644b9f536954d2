"""Layers that keep states: after every round a row's state is that of its committed text, whatever was drafted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from bass_core import ModelPair, PairError, RequestError, generate
from bass_core.draft.base import Drafter, point_masses
from bass_core.model.base import CausalModel
from bass_core.model.forward import ForwardBatch
from bass_core.model.prefill import PrefillSteps
from bass_core.model.runner import ModelRunner
from kernels.plan import PREFIX_UNIT
from tests.support.models import VOCAB, prompts, reference, slow_but, small_window, texts_of, tiny, tiny_pair
from tests.zoo.making import make

TARGET = tiny("qwen3_5")
TEXTS = prompts(4, longest=30)
# Drafts accepted in each round by each row.
ROUNDS = [[0, 3, 1, 2], [3, 0, 2, 0], [1, 3, 3, 3], [0, 0, 0, 0], [2, 1, 0, 3]]


def own_logits(model: Any, text: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([text])).logits[0]


@pytest.mark.parametrize("kind", ["qwen3_5", "mamba2", "mamba", "lfm2_moe"])
def test_rows_stand_at_the_lengths_that_they_accepted(kind: str) -> None:
    """Rows accept different numbers of drafts, one leaves, and the last takes its place."""
    model = TARGET if kind == "qwen3_5" else make(kind)
    runner = ModelRunner(CausalModel(model), len(TEXTS), 100, VOCAB, "sdpa")
    runner.prefill_tokens = 28  # several chunks, some with rows that have ended
    prefill, texts = PrefillSteps(runner, TEXTS), [list(text) for text in TEXTS]
    while not prefill.done:
        prefill.step()
    generator = torch.Generator().manual_seed(2)
    for number, accepted in enumerate(ROUNDS):
        rows = range(len(texts))
        fed = torch.randint(1, VOCAB, (len(texts), 4), generator=generator)
        logits = runner.forward(ForwardBatch(fed, [len(text) for text in texts])).logits
        for row, count in zip(rows, accepted, strict=False):
            whole = own_logits(model, texts[row] + fed[row].tolist())[-4:]
            torch.testing.assert_close(logits[row], whole, rtol=1e-3, atol=1e-3)
            texts[row] += fed[row, : 1 + count].tolist()
            runner.commit(row, len(texts[row]))
        if number == 2:
            runner.move_row(len(texts) - 1, 1)
            texts[1] = texts.pop()


@pytest.mark.parametrize("drafted_again", [False, True])
def test_drafts_that_were_fed_one_by_one_are_dropped_at_once(drafted_again: bool) -> None:
    """A draft model feeds its own drafts in several steps, without knowing how many will be accepted."""
    runner, text = ModelRunner(CausalModel(TARGET), 2, 60, VOCAB, "sdpa"), TEXTS[0]
    runner.forward(ForwardBatch(torch.tensor([text, text]), [0, 0], eager=True))
    for row in (0, 1):
        runner.commit(row, len(text))
    for step in range(4):
        drafts = torch.full((2, 1), 7 + step)
        runner.forward(ForwardBatch(drafts, [len(text) + step] * 2))
    lengths = [len(text), len(text) + 3]
    if not drafted_again:
        runner.commit(0, lengths[0])
        runner.commit(1, lengths[1])
    logits = runner.forward(ForwardBatch(torch.tensor([[50], [51]]), lengths)).logits
    expected = [own_logits(TARGET, rest)[-1] for rest in (text + [50], text + [7, 8, 9, 51])]
    torch.testing.assert_close(logits[:, 0], torch.stack(expected), rtol=1e-3, atol=1e-3)


class Known(Drafter):
    """Drafts the tokens of these texts, moved by `off`: 0 drafts what the target chooses."""

    def __init__(self, texts: list[list[int]], off: int = 0) -> None:
        self.texts, self.off = texts, off

    def propose(self, rows: list[Any], max_drafts: list[int], keys: Any) -> Any:
        drafts = []
        for row, most in zip(rows, max_drafts, strict=True):
            written = len(row.tokens) - len(row.prompt)
            following = self.texts[row.index][written : written + most]
            drafts.append([(token - 1 + self.off) % (VOCAB - 1) + 1 for token in following])
        return point_masses(drafts)


def test_many_drafts_are_computed_as_new_tokens_not_as_a_prompt() -> None:
    """Zamba2 limits the time steps of prompts only."""
    pair = ModelPair(make("zamba2"))
    options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None}
    expected = texts_of(generate(pair, [[5, 6, 7, 8]], method="regular", **options))
    written = generate(pair, [[5, 6, 7, 8]], drafter=Known(expected), draft_length=24, **options)
    assert texts_of(written) == expected and written.metrics.token_acceptance == 1


@pytest.mark.parametrize("batch", [1, 5])
def test_greedy_texts_equal_transformers_own(batch: int) -> None:
    """Drafts are always, sometimes and never accepted; texts cross chunks."""
    rows = prompts(batch, seed=4, longest=40)
    expected = [reference(TARGET, row, 24) for row in rows]
    rates = []
    for draft, drafter in (("self", "model"), ("perturbed", "model"), ("none", Known(expected, 1))):
        pair = tiny_pair(draft, architecture="qwen3_5", target=TARGET)
        written = generate(pair, rows, drafter=drafter, draft_length=4, max_new_tokens=24, eos_token_id=None)
        assert texts_of(written) == expected, draft
        rates.append(written.metrics.token_acceptance)
    assert rates[0] == 1 and 0.3 < rates[1] < 1 and rates[2] == 0


@pytest.mark.parametrize(
    "options",
    [{"method": "amusd"}, {"drafter": "window"}, {"drafter": "window_model"}, {"drafter": "adaptive"}, {"n": 3}],
    ids=str,
)
def test_a_target_with_states_runs_with_every_kind_of_draft(options: dict[str, Any], monkeypatch: Any) -> None:
    """The draft model has no states."""
    small_window(monkeypatch)
    rows = prompts(2, seed=4, longest=40) if "n" not in options else prompts(1, longest=40)[0]
    expected = [reference(TARGET, row, 12) for row in (rows if "n" not in options else [rows] * 3)]
    pair = tiny_pair("random", architecture="qwen3_5", target=TARGET)
    written = generate(pair, rows, draft_length=3, max_new_tokens=12, eos_token_id=None, **options)
    assert texts_of(written) == expected


@pytest.mark.parametrize("kind", slow_but(["qwen3_5"], ["qwen3_5", "mamba2"]))
def test_rows_begin_with_the_states_after_a_shared_prefix(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second call the runner has other prefixes, and rows that used the first ones."""
    monkeypatch.setattr(CausalModel, "min_shared_tokens", PREFIX_UNIT)
    target = TARGET if kind == "qwen3_5" else make(kind)
    pair = tiny_pair(0.02, target=target)
    for first in (1, 40):
        head = list(range(first, first + 2 * PREFIX_UNIT))
        rows = [[*head, 5, 6], [9, 8, 7], [*head, 70], head]
        expected = [reference(target, row, 12) for row in rows]
        written = generate(pair, rows, draft_length=3, max_new_tokens=12, eos_token_id=None)
        assert texts_of(written) == expected


def test_states_count_in_admission() -> None:
    model = CausalModel(TARGET)
    config = TARGET.config
    heads, size = config.linear_num_value_heads, config.linear_key_head_dim * config.linear_value_head_dim
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    channels = 2 * keys + heads * config.linear_value_head_dim
    state = 4 * (heads * size + channels * config.linear_conv_kernel_dim)
    # One of the two layers has keys and values.
    per_token = 2 * 4 * config.num_key_value_heads * config.head_dim
    assert model.cache_bytes(3, 10) == 3 * (10 * per_token + 2 * state)
    assert model.new_cache(3, 10).buffer.nbytes == 30 * per_token
    assert model.cost.kv_bytes == per_token


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": (2, 1)}, "can't attend over trees"),
        ({"method": "amusd"}, "can't go back over several rounds"),
        ({"drafter": "window_model"}, "can't go back over several rounds"),
    ],
)
def test_what_states_can_not_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        generate(tiny_pair("perturbed", architecture="qwen3_5", target=TARGET), TEXTS, **options)


def test_layers_with_another_forward_are_refused() -> None:
    """Ours would stand in for it."""
    model = copy.deepcopy(TARGET)
    mixer = model.model.layers[0].linear_attn
    mixer.forward = mixer.forward
    with pytest.raises(PairError, match="another forward than their class"):
        tiny_pair("none", target=model)


def test_models_whose_states_we_do_not_know_are_refused() -> None:
    with pytest.raises(PairError, match="it keeps a state that can't be rolled back"):
        tiny_pair("none", target=make("recurrent_gemma"))

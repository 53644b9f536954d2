"""Prompts share the prefixes that save the most tokens, and a cache stores each prefix once."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from bass_core import generate
from bass_core.decode.admission import cache_bytes
from bass_core.model import graphs as cuda_graphs
from bass_core.model.base import CausalModel
from bass_core.model.forward import ForwardBatch
from bass_core.model.prefill import PrefillSteps
from bass_core.model.prefix import CachedTexts, share_prompts
from bass_core.model.runner import ModelRunner
from kernels.plan import PREFIX_UNIT
from tests.support.models import VOCAB, tiny, tiny_pair

HEAD = list(range(1, 1 + 3 * PREFIX_UNIT))
OTHER = list(range(50, 50 + 2 * PREFIX_UNIT))


@pytest.fixture(autouse=True)
def share_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CausalModel, "min_shared_tokens", PREFIX_UNIT)


def tokens_saved(prompts: list[list[int]], prefixes: tuple[tuple[int, ...], ...]) -> int:
    """Return how many tokens these prefixes save, if each prompt uses the longest prefix that it begins with."""
    used = [max((p for p in prefixes if tuple(prompt[: len(p)]) == p), key=len, default=()) for prompt in prompts]
    return sum(map(len, used)) - sum(map(len, set(used)))


def test_only_whole_units_are_shared() -> None:
    assert share_prompts([HEAD + [7], HEAD + [8], HEAD[:20]]).prefixes == (tuple(HEAD),)
    assert share_prompts([HEAD[:20], HEAD[:20]]).prefixes == (tuple(HEAD[:PREFIX_UNIT]),)
    assert share_prompts([HEAD[: PREFIX_UNIT - 1]] * 4).prefixes == ()
    assert share_prompts([HEAD]).prefixes == share_prompts([]).prefixes == ()
    assert share_prompts([HEAD] * 3, 6 * PREFIX_UNIT).prefixes == (tuple(HEAD),)
    assert share_prompts([HEAD] * 3, 6 * PREFIX_UNIT + 1).prefixes == (), "the prefix saves too little"


def test_no_set_of_prefixes_saves_more() -> None:
    """For small random groups of prompts, compare the chosen prefixes with every possible set of prefixes."""
    rng = random.Random(0)
    units = [[i] * PREFIX_UNIT for i in range(2)]
    for _ in range(60):
        prompts = [
            sum((rng.choice(units) for _ in range(rng.randint(0, 3))), [9]) for _ in range(rng.randint(2, 5))
        ]
        prompts = [prompt[1:] + prompt[:1] for prompt in prompts]
        prefixes = {
            tuple(prompt[: n * PREFIX_UNIT])
            for prompt in prompts
            for n in range(1, len(prompt) // PREFIX_UNIT + 1)
        }
        sets = itertools.chain.from_iterable(
            itertools.combinations(sorted(prefixes), n) for n in range(len(prefixes) + 1)
        )
        # In a flat set, no prefix begins with another one, so no prompt begins with two of them.
        flat = [s for s in sets if not any(a != b and b[: len(a)] == a for a in s for b in s)]
        best = max(tokens_saved(prompts, prefix_set) for prefix_set in flat)
        assert tokens_saved(prompts, share_prompts(prompts).prefixes) == best


def test_prompts_that_each_continue_another_are_shared() -> None:
    """For example, the turns of a long conversation, each as a prompt."""
    prompts = [[1] * (PREFIX_UNIT * turns) + [2] for turns in range(1, 1200)]
    assert share_prompts(prompts).prefixes


def test_a_row_has_columns_for_its_unshared_tokens() -> None:
    texts = CachedTexts([HEAD + [7], HEAD, OTHER], [80, 60, 40])
    shared = texts.shared(PREFIX_UNIT)
    assert shared.prefixes == (tuple(HEAD),) and shared.longest == len(HEAD)
    assert texts.columns(shared) == 40
    assert texts.shared(None).prefixes == () and texts.columns(texts.shared(None)) == 80


def prefilled(runner: ModelRunner, prompts: list[list[int]]) -> tuple[int, torch.Tensor]:
    """Prefill; return the number of fed tokens and the logits."""
    prefill = PrefillSteps(runner, prompts, return_states=True)
    while not prefill.done:
        prefill.step()
    assert prefill.fed == prefill.total
    return prefill.total, prefill.logits()


def runner_over(prompts: list[list[int]], rows: int, spare: int = 8) -> ModelRunner:
    model = CausalModel(tiny("llama"))
    texts = CachedTexts(prompts, [len(prompt) + spare for prompt in prompts])
    shared = texts.shared(PREFIX_UNIT)
    return ModelRunner(model, rows, texts.columns(shared), VOCAB, "pad", shared=shared)


PROMPTS = [HEAD + [5, 6], OTHER, HEAD, HEAD + [5, 6], OTHER + [3], [4, 4]]


def test_rows_attend_over_their_prompts_and_each_prefix_is_fed_once() -> None:
    runner = runner_over(PROMPTS, 6)
    fed, logits = prefilled(runner, PROMPTS)
    assert fed == len(HEAD) + len(OTHER) + 2 + 1 + 2
    assert list(runner.lengths) == [len(prompt) for prompt in PROMPTS]
    assert runner.cache.starts == [48, 32, 48, 48, 32, 0]
    assert runner.cache.max_len == 10 and runner.cache.prefix.max_len == 48
    step = torch.arange(1, 13).view(6, 2)
    after = runner.forward(ForwardBatch(step, runner.lengths)).logits
    model = runner.model
    for row, prompt in enumerate(PROMPTS):
        cache = model.new_cache(1, 60)
        first = model.forward(ForwardBatch(torch.tensor([prompt]), [0]), cache).logits[0, -1]
        torch.testing.assert_close(logits[row], first, atol=1e-4, rtol=1e-4)
        second = model.forward(ForwardBatch(step[row : row + 1], [len(prompt)]), cache).logits[0]
        torch.testing.assert_close(after[row], second, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("captured", [False, True])
def test_the_estimated_cache_size_is_the_allocated_one(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With captured steps, the number of columns is rounded up to a multiple of 256."""
    monkeypatch.setattr(cuda_graphs, "enabled", lambda device: captured)
    texts, model = CachedTexts(PROMPTS, [len(prompt) + 8 for prompt in PROMPTS]), CausalModel(tiny("llama"))
    cache = cuda_graphs.runner_for(model, 6, texts, VOCAB, "pad").cache
    assert cache.max_len == (256 if captured else 10)
    assert cache_bytes(model, texts, "pad", 6) == cache.nbytes


def test_prefill_states_include_the_prefix() -> None:
    runner = runner_over(PROMPTS, 6)
    prefill = PrefillSteps(runner, PROMPTS, return_states=True)
    while not prefill.done:
        prefill.step()
    for prompt, states in zip(PROMPTS, prefill.states(), strict=True):
        batch = ForwardBatch(torch.tensor([prompt]), [0], return_states=True)
        expected = runner.model.forward(batch, runner.model.new_cache(1, 60)).require_states()[0]
        torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-4)


def test_prompts_may_consist_of_only_their_prefix() -> None:
    """A second prefill feeds no tokens, and gives the same rows and states as the first."""
    prompts = [HEAD, HEAD, OTHER, OTHER]
    runner = runner_over(prompts, 4)
    _, logits = prefilled(runner, prompts)
    prefill = PrefillSteps(runner, prompts, return_states=True)
    assert prefill.done and not prefill.total
    prefill.step()
    assert runner.cache.starts == [48, 48, 32, 32] and list(runner.lengths) == [48, 48, 32, 32]
    assert len(set(runner.cache.groups[:2])) == len(set(runner.cache.groups[2:])) == 1
    torch.testing.assert_close(prefill.logits(), logits)
    for row, states in enumerate(prefill.states()):
        assert states is runner.prefix_output(tuple(prompts[row]))[1]


def test_single_rows_reuse_the_prefix_of_the_row_before() -> None:
    runner = runner_over(PROMPTS, 1)
    assert runner.cache.prefix.max_batch == 1
    fed = [prefilled(runner, [prompt])[0] for prompt in (PROMPTS[0], PROMPTS[3], PROMPTS[2], PROMPTS[1], HEAD)]
    assert fed == [50, 2, 0, 32, 48]
    assert list(runner.lengths) == [48]


def test_rows_move_with_their_prefix_and_can_be_prefilled_again() -> None:
    runner = runner_over(PROMPTS, 6)
    prefilled(runner, PROMPTS)
    runner.move_row(4, 2)
    assert runner.lengths[2] == 33 and runner.cache.starts[2] == 32
    token = torch.tensor([[9]] * 5)
    moved = runner.forward(ForwardBatch(token, runner.lengths[:5])).logits
    torch.testing.assert_close(moved[2], moved[4], atol=1e-5, rtol=1e-5)
    fed, _ = prefilled(runner, PROMPTS[:2])
    assert fed == 2, "both prefixes are still there"
    assert runner.cache.starts[2:] == [0] * 4


def test_a_step_never_writes_to_the_prefix() -> None:
    runner = runner_over(PROMPTS, 6)
    prefilled(runner, PROMPTS)
    before = runner.cache.prefix.buffer.clone()
    runner.forward(ForwardBatch(torch.ones(6, 8, dtype=torch.long), runner.lengths))
    assert torch.equal(before, runner.cache.prefix.buffer)


class Late:
    """Drafts nothing in the first two rounds."""

    limit, rounds = 3, 0

    def lengths(self, offers: Any) -> list[int]:
        return [min(3, offer.most) if self.rounds >= 2 else 0 for offer in offers]

    def observe(self, feedback: Any) -> None:
        self.rounds += 1


def test_a_draft_model_may_read_shared_prompts_in_a_later_round() -> None:
    """Its rows have no columns for the prefix that they share. Row 1 has left by then."""
    models, prompts = tiny_pair("self", architecture="llama"), [HEAD + [row] for row in range(4)]

    def texts_of(length: Any, end: int | None) -> list[list[int]]:
        options: dict[str, Any] = {"drafter": "model", "draft_length": length, "max_new_tokens": 12}
        return [row.token_ids for row in generate(models, prompts, eos_token_id=end, **options).sequences]

    end = texts_of(0, None)[1][1]
    texts = [texts_of(0, end), texts_of(Late(), end)]
    assert texts[0] == texts[1] and min(map(len, texts[0])) == 2 and max(map(len, texts[0])) > 6

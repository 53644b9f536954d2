"""A head of several positions: what it drafts behind one forward, alone and beside others, and the saved head."""

import pytest
import torch
import torch.nn.functional as F

from bass_core import ModelPair, SamplingParams
from bass_core.draft.head import HeadDrafter
from bass_core.machine import cpu_kernels
from bass_core.model.draft_head import DraftHead
from bass_core.model.runner import ModelRunner
from bass_core.sample.noise import NoiseKeys
from bass_core.sequence import Sequence

from ...models import prompts, tiny
from .test_head import tiny_head

DRAWN = SamplingParams(temperature=0.9, top_k=20)


def proposed(pair, sampling, most, *, confidence=0.0, rows=None, seed=2):
    """A first proposal for these rows, and the drafter that made it; every state is a vector of ones."""
    rows = list(range(len(most))) if rows is None else rows
    texts = prompts(8)
    made = [Sequence(i, i, texts[i], 24, frozenset()) for i in rows]
    body = ModelRunner(pair.draft_step, len(rows), 96, len(pair.draft.vocabulary), "pad")
    drafter = HeadDrafter(pair.draft, body, pair.vocab, sampling, confidence=confidence)
    drafter.start(made)
    drafter._source._waiting = [[torch.ones(len(row.tokens), 64)] for row in made]
    keys = NoiseKeys(seed, torch.tensor(rows), torch.tensor([len(row.tokens) for row in made]))
    return drafter.propose(made, most, keys), drafter


def by_hand(head: DraftHead, tokens: list[int], count: int) -> list[int]:
    """Greedy drafts of a head of three positions from uncached passes of its body; every state is ones."""
    states = torch.ones(1, len(tokens), 64)
    drafts: list[int] = []
    while len(drafts) < count:
        ids = torch.tensor([[*tokens, *drafts]])
        x = torch.cat((head.embedding[ids], states), dim=-1)
        out = head.body(inputs_embeds=F.linear(x, head.fuse.weight), output_hidden_states=True)
        newest = out.hidden_states[-1][0, -1]
        made = F.linear(newest, head.slots.weight, head.slots.bias).view(2, 64 + 8)
        later = [newest, *(newest + one[:64] for one in made)]
        for place in range(3):
            logits = head.body.lm_head(later[place])
            if place:
                column = head.vocabulary.tolist().index(drafts[-1])
                known = head.link_down.weight @ head.body.lm_head.weight[column] * (1 + made[place - 1, 64:])
                logits = logits + head.body.lm_head(head.link_up.weight @ known)
            drafts.append(int(head.vocabulary[logits.argmax()]))
        # Each drafted token is fed with the state that stood for the one before it.
        states = torch.cat((states, torch.stack(later)[None]), dim=1)
    return drafts[:count]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 7])
def test_drafts_are_what_the_head_says(most):
    target = tiny("llama")
    head = tiny_head(target, positions=3)
    expected = [by_hand(head, prompt, most) for prompt in prompts(8)[:3]]
    proposal, drafter = proposed(ModelPair(target, head), SamplingParams(), [most] * 3)
    assert proposal.tokens.tolist() == expected
    assert proposal.num_drafted == [most] * 3 and drafter.calls == -(-most // 3)


def test_each_token_was_drawn_from_its_q():
    """Over many seeds the second token behind a first one is as frequent as the q that was proposed says."""
    pair = ModelPair(tiny("llama"), tiny_head(tiny("llama"), positions=3, size=4))
    counts, said = {}, {}
    for seed in range(400):
        proposal, _ = proposed(pair, SamplingParams(temperature=1.5), [3], seed=seed)
        first, second, _ = proposal.tokens[0].tolist()
        q = proposal.probs[0, 1]
        assert torch.equal(said.setdefault(first, q), q)
        counts.setdefault(first, torch.zeros(pair.vocab))[second] += 1
    assert len(said) > 1
    for first, seen in counts.items():
        expected = said[first] * seen.sum()
        assert (seen[said[first] == 0] == 0).all()
        assert ((seen - expected).abs() < 4.5 * expected.clamp(min=1).sqrt()).all()
    one, other = list(said.values())[:2]
    assert not torch.equal(one, other), "the link makes them differ"


@pytest.mark.skipif(not cpu_kernels.available(), reason="numba is not there")
def test_a_rows_q_has_the_same_bits_alone_and_beside_others():
    target = tiny("llama").to(torch.bfloat16)
    head = tiny_head(target, positions=3).to(torch.bfloat16)
    pair = ModelPair(target, head)
    together, _ = proposed(pair, DRAWN, [5, 3, 1, 4])
    for row, most in enumerate([5, 3, 1, 4]):
        alone, _ = proposed(pair, DRAWN, [most], rows=[row])
        assert torch.equal(alone.tokens[0], together.tokens[row, :most])
        assert torch.equal(alone.probs[0], together.probs[row, :most])


def test_trees_ask_behind_any_token_without_a_forward():
    """Behind each draft of a tree stand the logits that a chain of the same tokens has."""
    target = tiny("llama")
    head = tiny_head(target, positions=3)
    _, drafter = proposed(ModelPair(target, head), SamplingParams(), [1, 1])
    rows = [Sequence(i, i, prompts(8)[i], 24, frozenset()) for i in range(2)]
    drafter.start(rows)
    drafter._source._waiting = [[torch.ones(len(row.tokens), 64)] for row in rows]
    with torch.inference_mode():
        drafter.root(rows, [True, True])
        calls, ids = drafter.calls, head.vocabulary.tolist()
        strange = next(i for i in range(target.config.vocab_size) if i not in ids)
        first = drafter.level([[-1, -1], [-1]], torch.tensor([[ids[3], strange], [ids[4], 0]]))
        second = drafter.level([[1], [0, 0]], torch.tensor([[ids[7], 0], [ids[7], ids[8]]]))
        ahead = drafter._linked.ahead
        torch.testing.assert_close(first[0, 0], ahead.logits(1, torch.tensor([3, 4]))[0])
        torch.testing.assert_close(first[1, 0], ahead.logits(1, torch.tensor([3, 4]))[1])
        assert torch.equal(first[0, 1], ahead.base[0, 1]), "a token that the head can't propose adds nothing"
        torch.testing.assert_close(second[0, 0], ahead.logits(2, torch.tensor([7, 8]))[0])
        torch.testing.assert_close(second[1, 1], ahead.logits(2, torch.tensor([7, 8]))[1])
    assert drafter.calls == calls and drafter.reach == 2


@pytest.mark.parametrize("sampling", [SamplingParams(), DRAWN], ids=["greedy", "sampled"])
def test_only_a_head_that_is_sure_goes_on(sampling):
    """Within a forward it stops below the confidence; another forward asks for more. Drafts stay the same."""
    pair = ModelPair(tiny("llama"), tiny_head(tiny("llama"), positions=3))
    endless, drafter = proposed(pair, sampling, [7, 7, 2])
    assert endless.num_drafted == [7, 7, 2] and drafter.calls == 3
    seen = set()
    for confidence in (0.0005, 0.002, 0.01, 0.03, 0.1, 0.3, 1.1):
        found, drafter = proposed(pair, sampling, [7, 7, 2], confidence=confidence)
        width = found.tokens.shape[1]
        assert width == max(found.num_drafted) and drafter.calls >= -(-width // 3)
        assert torch.equal(found.tokens, endless.tokens[:, :width])
        assert found.probs is None or torch.equal(found.probs, endless.probs[:, :width])
        seen.update(found.num_drafted)
    assert len(seen) > 2 and 0 in seen and {3, 6} & seen

"""EAGLE-3 heads: a plain pass without a cache gives the same drafts, and each forward hands out the same streams.

`expected_logits` is the definition that speculators' Eagle3DraftModel computes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bass_core import ModelPair, PairError, SamplingParams, generate
from bass_core.decode.base import DecodingParams
from bass_core.decode.batch import BatchDecoder
from bass_core.draft.registry import head_drafter
from bass_core.length.policies import FixedLength
from bass_core.machine import cpu_kernels
from bass_core.model.base import CausalModel
from bass_core.model.eagle import EagleHead, EagleStep
from bass_core.model.forward import ForwardBatch, HostTreeMask
from bass_core.model.graphs import GraphRunner, record_calls
from bass_core.model.llama_cuda import LlamaCuda
from bass_core.model.runner import ModelRunner
from bass_core.sequence import Sequence
from tests.support.models import eagle_parts, prompts, texts_of, tiny, tiny_eagle, tiny_pair

READS = (1, 3, 5)
WARM = SamplingParams(temperature=1.0)
HEADS = {
    "one layer": {},
    "all flags": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "own_table": True},
    "Qwen3's norms, two layers": {"head_norms": True, "fc_norm": True, "layers": 2},
}


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rotated(x: Tensor) -> Tensor:
    """Rotate x [heads, S, dim] by its positions 0, 1, ..."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = x.split(half, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


def expected_logits(target: Any, parts: tuple[Any, Tensor, dict[str, Tensor]], text: list[int], drafts: list[int]):
    """Return the logits [drafts, V'] from which a head with these parts drew these tokens."""
    config, _, weights = parts
    w = {name.removesuffix(".weight"): weight for name, weight in weights.items()}
    table = w.get("embed_tokens", target.get_input_embeddings().weight)
    streams = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    streams = [streams[layer][0] for layer in READS]
    if config.fc_norm:
        streams = [rms(stream, w[f"fc_norm.{i}"]) for i, stream in enumerate(streams)]
    read = torch.cat(streams, dim=-1)
    if config.norm_before_fc:
        read = rms(read, w["input_norm"])
    states, logits = read @ w["fc"].T, []
    for step in range(len(drafts)):
        ids = torch.tensor(text[1:] + drafts[:step])
        x, embedded = states, rms(table[ids], w["layers.0.input_layernorm"])
        for layer in range(config.layers.num_hidden_layers):
            names = {name.removeprefix(f"layers.{layer}."): value for name, value in w.items()}
            if layer == 0:
                normed = rms(x, names["hidden_norm"])
                x = normed if config.norm_before_residual else x
                normed = torch.cat((embedded, normed), dim=-1)
            else:
                normed = rms(x, names["input_layernorm"])
            projected = (normed @ names[f"self_attn.{part}_proj"].T for part in "qkv")
            q, k, v = (part.unflatten(-1, (-1, 16)).transpose(0, 1) for part in projected)
            if config.head_norms:
                q, k = rms(q, names["self_attn.q_norm"]), rms(k, names["self_attn.k_norm"])
            q, k, v = rotated(q), rotated(k).repeat_interleave(2, 0), v.repeat_interleave(2, 0)
            scores = q @ k.transpose(1, 2) / 4
            scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
            attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
            x = x + attended @ names["self_attn.o_proj"].T
            normed = rms(x, names["post_attention_layernorm"])
            gate, up, down = (names[f"mlp.{part}_proj"].T for part in ("gate", "up", "down"))
            x = x + (F.silu(normed @ gate) * (normed @ up)) @ down
        out = rms(x, w["norm"])
        logits.append(out[-1] @ w["lm_head"].T)
        states = torch.cat((states, (out if config.norm_output else x)[-1:]))
    return torch.stack(logits)


@pytest.mark.parametrize("way", ["eager", "captured", pytest.param("kernels", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", HEADS)
def test_a_chains_logits_equal_those_of_a_plain_pass(name: str, way: str) -> None:
    """Rows have prompts of different lengths, of one token as well. The text is read in chunks of up to 128.

    way: "kernels" runs the head's products, rotation, cache writes and attention in Triton.
    """
    target = tiny("llama", layers=6)
    parts = eagle_parts(target, READS, **HEADS[name])
    pair = ModelPair(target, tiny_eagle(target, READS, **HEADS[name]))
    texts = [*prompts(1), [7], prompts(1)[0] * 11]
    rows = [Sequence(i, i, text, 7, frozenset()) for i, text in enumerate(texts)]
    make = partial(GraphRunner, record=record_calls) if way == "captured" else ModelRunner
    target_runner = make(pair.target_step, 3, 320, pair.vocab, "pad")
    pair.draft_step.has_kernels = way == "kernels"
    body = make(pair.draft_step, 3, 320, 40, "fused" if way == "kernels" else "pad")
    drafter = head_drafter(pair.draft, body, pair.vocab, WARM)
    decoder = BatchDecoder(rows, target_runner, DecodingParams(WARM), drafter, FixedLength(3))
    seen, propose = [], drafter.propose

    def recorded(rows: list[Sequence], max_drafts: list[int], keys: Any) -> Any:
        texts = [list(row.tokens) for row in rows]
        proposal = propose(rows, max_drafts, keys)
        seen.extend(
            zip(texts, proposal.tokens.tolist(), proposal.num_drafted, proposal.probs.clone(), strict=True)
        )
        return proposal

    drafter.propose = recorded
    while not decoder.finished:
        decoder.step()
    drafted = [proposal for proposal in seen if proposal[2]]
    for text, drafts, count, q in drafted:
        logits = expected_logits(target, parts, text, drafts[:count])
        expected = torch.zeros(count, 96).index_copy(1, parts[1], logits.softmax(-1))
        torch.testing.assert_close(q[:count], expected, atol=2e-5, rtol=2e-4)
    assert len(drafted) > 6 and min(len(text) for text, *_ in drafted) == 2


def test_a_tree_reads_the_states_of_its_own_path() -> None:
    """Feeding two branches together gives the logits of feeding each by itself."""
    target = tiny("llama", layers=6)
    step = EagleStep(tiny_eagle(target, READS).body)
    torch.manual_seed(1)
    text, drafts = torch.randn(1, 5, 128), torch.randn(1, 3, 128)
    outputs = []
    for columns, tree in (
        ([0, 1], None),
        ([0, 2], None),
        ([0, 1, 2], HostTreeMask([[0b001, 0b011, 0b101]], [[0, 1, 1]], [0])),
    ):
        cache = step.new_cache(1, 16)
        step.forward(ForwardBatch(text, [0]), cache)
        outputs.append(step.forward(ForwardBatch(drafts[:, columns], [5], tree=tree), cache).logits[0])
    torch.testing.assert_close(outputs[2], torch.stack((outputs[0][0], outputs[0][1], outputs[1][1])))


@pytest.mark.parametrize("forward", [CausalModel, LlamaCuda])
def test_targets_hand_out_their_plain_streams(forward: type[CausalModel]) -> None:
    target = tiny("llama", layers=6)
    head = tiny_eagle(target, READS)
    step = forward(target)
    step.has_kernels = False  # they would run in Triton's interpreter
    step.readout = head.readout()
    ids = torch.tensor(prompts(1))
    states = step.forward(ForwardBatch(ids, [0], return_states=True), step.new_cache(1, 32)).require_states()
    streams = target(ids, output_hidden_states=True).hidden_states
    expected = head.fc(torch.cat([streams[layer] for layer in READS], dim=-1))
    torch.testing.assert_close(states, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.skipif(not cpu_kernels.available(), reason="this CPU has no kernels of ours")
def test_our_cpu_kernels_hand_out_their_plain_streams() -> None:
    """As raw states too, of which only those that are drafted from go through `fc`."""
    target = tiny("llama", layers=6).to(torch.bfloat16)
    pair = ModelPair(target, tiny_eagle(target, READS))
    assert pair.computed_by and pair.computed_by.startswith("own kernels")
    ids = torch.tensor(prompts(1))
    streams = target(ids, output_hidden_states=True).hidden_states
    expected = pair.draft.fc(torch.cat([streams[layer] for layer in READS], dim=-1)).float()
    for raw in (False, True):
        batch = ForwardBatch(ids, [0], return_states=True, raw_states=raw)
        states = pair.target_step.forward(batch, pair.target_step.new_cache(1, 32)).require_states()
        states = pair.target_step.readout.finish(states) if raw else states
        assert F.cosine_similarity(states.float(), expected, dim=-1).min() > 0.995
    texts = [
        texts_of(generate(pair, prompts(3), method=method, max_new_tokens=12, eos_token_id=None))
        for method in ("regular", "bass")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_targets_of_other_architectures_are_drafted_for(architecture: str) -> None:
    pair = tiny_pair("eagle", architecture=architecture)
    drafted = generate(pair, prompts(3), drafter="adaptive", max_new_tokens=12, eos_token_id=None)
    regular = generate(pair, prompts(3), method="regular", max_new_tokens=12, eos_token_id=None)
    assert texts_of(drafted) == texts_of(regular) and drafted.metrics.drafted > 0


def test_a_head_with_a_copy_of_the_targets_table_shares_it() -> None:
    target = tiny("llama", layers=6)
    config, vocabulary, weights = eagle_parts(target, READS, own_table=True)
    table = target.get_input_embeddings().weight
    head = EagleHead(target, config, vocabulary, weights | {"embed_tokens.weight": table.clone()})
    assert head.embedding.data_ptr() == table.data_ptr()


def test_a_head_follows_a_changed_target() -> None:
    """The pair reads the target's new table; a head with its own table doesn't know new ids."""
    target = tiny("llama", layers=6)
    pair, other = (ModelPair(target, tiny_eagle(target, READS, own_table=own)) for own in (False, True))
    target.resize_token_embeddings(100)
    out = generate(pair, prompts(2), max_new_tokens=8, draft_length=2, eos_token_id=None)
    assert out.metrics.drafted and pair.draft.embedding.shape[0] == 100
    with pytest.raises(PairError, match="does not know all ids of LlamaForCausalLM, which now has 100"):
        generate(other, prompts(2), max_new_tokens=8)

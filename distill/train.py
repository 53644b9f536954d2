"""Train a draft head on the target's texts and on its whole distribution at each token. Call `train`.

The head shares the target's embedding and output head. Its layers start with random weights, or from a trained
head, or from the target's last layers (worse in short trials, see RESULTS.md). `train` minimises divergences that
determine acceptance (`pulls`; DistillSpec, arXiv 2310.08461). Besides the target's last state, the head may read
the states of earlier layers (EAGLE-3, arXiv 2503.01840, section 3.1). The second and later draft tokens are
trained on the head's own states, with the target's states before them, as in drafting (HASS, arXiv 2408.15766).

A checkpoint is written every few minutes, and a killed run continues from it. The same settings and steps give the
same weights up to the machine's rounding, except in a run with a deadline.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

from bass_core import ModelPair
from bass_core.machine.transfer import to_device
from bass_core.model.base import cache_keyword
from bass_core.model.draft_head import DraftHead, HeadConfig, is_draft_head, load_draft_head
from bass_core.model.pointer import followers, windows
from kernels.support import is_accelerator

from .batches import Batch, Batches, Reader, Row, Scale, frequent_ids, load_rows, scale_of, shifted
from .corpus import shards
from .duplicates import without_test_questions
from .settings import Settings, TrainSettings

# A checkpoint is measured on CHECKED_ROWS to 2 CHECKED_ROWS rows of each held-out shard, or on all its rows if it
# has fewer. A batch has ROWS_AT_ONCE of them.
CHECKED_ROWS, ROWS_AT_ONCE = 24, 8
# The number of draft tokens that are measured.
MEASURED_DRAFTS = 3
CHECKPOINT = "checkpoint.pt"
# Positions whose distributions are computed together. On a CPU they fit the processor's caches.
POSITIONS_AT_ONCE = {"cpu": 128, "accelerator": 4096}


@dataclass(frozen=True)
class Loss:
    """The loss of one draft token: kl * KL(p, q) - log * log a + variation * (1 - a).

    p and q are the target's and the head's distributions, and a = sum min(p, q) is the probability that the draft
    is accepted (arXiv 2211.17192, theorem 3.5). Draft token d, from 0, has the weight `fall` ** d.
    """

    kl: float
    log: float
    variation: float
    fall: float


# "variation" is the loss of DSpark (arXiv 2607.05147).
LOSSES = {"log": Loss(1.0, 1.0, 0.0, 1.0), "variation": Loss(0.1, 0.0, 0.9, math.exp(-0.25))}


def new_head(
    pair: ModelPair, settings: TrainSettings, vocabulary: Tensor, reads_layers: tuple[int, ...] = ()
) -> DraftHead:
    """Return a head before training; its fuse layer adds the embedding and the target's last state."""
    target: Any = pair.target
    hidden = target.config.hidden_size
    torch.manual_seed(0)
    config = HeadConfig(settings.layers, hidden, settings.reads_states, reads_layers, settings.qk_norm)
    head = DraftHead(target, config, vocabulary).to(target.device).float()
    layers = head.body.model.layers
    if settings.start == "target":
        for layer, parent in zip(layers, target.model.layers[-settings.layers :], strict=True):
            layer.load_state_dict(parent.state_dict(), strict=not settings.qk_norm)
        head.body.model.norm.load_state_dict(target.model.norm.state_dict())
    with torch.no_grad():
        head.fuse.weight.normal_(std=0.01)
        eye = torch.eye(hidden, device=target.device)
        head.fuse.weight[:, :hidden] += eye
        if settings.reads_states:
            # The state comes after the target's final norm. Undo the norm's gain, so that the state is as large as
            # the embedding.
            gain = target.model.norm.weight.float()
            head.fuse.weight[:, hidden:] += torch.diag(0.1 / gain.clamp(min=gain.mean() / 4))
        if reads_layers:
            # At first pass on only the last state; the head learns the contribution of the other layers.
            head.project.weight.zero_()
            head.project.weight[:, -hidden:] += eye
            head.project.bias.zero_()
    if settings.start not in ("random", "target"):
        _continue_from(head, load_draft_head(Path(settings.start), target).float(), settings.start)
    return head


def _continue_from(head: DraftHead, trained: DraftHead, start: str) -> None:
    """Load a trained head's weights into a new head; they fit any vocabulary, so the new head keeps its own.

    The new head may have more layers, and may read more layers of the target. It learns their contribution.
    """
    ours, theirs = head.config, trained.config
    reads_more = set(theirs.reads_layers) <= set(ours.reads_layers)
    same = (theirs.reads_states, theirs.qk_norm) == (ours.reads_states, ours.qk_norm)
    if not same or theirs.layers > ours.layers or not reads_more:
        raise SystemExit(
            f"The head in {start} is {theirs}, and the one to train {ours}: train one that has and reads the same "
            "layers or more (--set layers=..., reads_states=..., reads_layers=..., qk_norm=...), or start from "
            "another head."
        )
    weights = trained.own_weights()
    with torch.no_grad():
        if theirs.reads_layers:
            parts = dict(
                zip(
                    (*ours.reads_layers, "last"),
                    head.project.weight.chunk(len(ours.reads_layers) + 1, 1),
                    strict=True,
                )
            )
            trained_parts = weights.pop("project.weight").chunk(len(theirs.reads_layers) + 1, 1)
            for layer, part in zip((*theirs.reads_layers, "last"), trained_parts, strict=True):
                parts[layer].copy_(part)
        for new_layer in head.body.model.layers[theirs.layers :]:
            new_layer.self_attn.o_proj.weight.zero_()
            new_layer.mlp.down_proj.weight.zero_()
    if not trained.pointer.by_size.any():
        # The trained head is older than pointers: keep the new head's initial pointer.
        weights = {name: value for name, value in weights.items() if not name.startswith("pointer.")}
    head.load_state_dict(weights, strict=False)


@torch.no_grad()
def pulls(
    students: list[Tensor], teacher: Tensor, rows: Tensor, raised: list[Tensor], columns: Tensor, loss: Loss
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return how well each depth drafts at N positions, and the gradients of its loss.

    p and q are the softmax of states @ rows^T, with the pointer's increase added in q. The quality is the mean of
    a = sum min(p, q). The gradient of -log a is that of the total variation 1 - a divided by a, so it does not
    vanish where q is almost 0.

    Args:
        students: for each depth, the head's states [N, hidden].
        teacher: the target's states [N, hidden].
        rows: the rows of the output layer [V', hidden].
        raised: for each depth, the pointer's increase [N] of the logits of `columns`.
        columns: int64 [N], columns of the vocabulary, -1 for none.
        loss: the loss of each position and depth; we take its mean over the positions.

    Returns:
        The quality [depths], and the gradients for `students` and for `raised`.
    """
    quality = torch.zeros(len(students), device=teacher.device)
    gradients, lifts = ([torch.empty_like(part) for part in parts] for parts in (students, raised))
    at_once = POSITIONS_AT_ONCE["accelerator" if is_accelerator(teacher.device) else "cpu"]
    for first in range(0, len(teacher), at_once):
        part = slice(first, first + at_once)
        at, points = columns[part, None].clamp(min=0), columns[part] >= 0
        p = (teacher[part] @ rows.t()).softmax(-1)
        for depth, student in enumerate(students):
            logits = student[part] @ rows.t()
            q = logits.scatter_add_(1, at, (raised[depth][part] * points)[:, None]).softmax(-1)
            overlap = torch.minimum(p, q).sum(-1, keepdim=True).clamp_(min=1e-30)
            below = q.masked_fill(q >= p, 0.0)
            slope = loss.log / overlap + loss.variation
            pull = (
                q.mul_(loss.kl + below.sum(-1, keepdim=True) * slope)
                .sub_(p, alpha=loss.kl)
                .sub_(below.mul_(slope))
            )
            weight = loss.fall**depth / len(teacher)
            gradients[depth][part] = pull @ rows * weight
            lifts[depth][part] = pull.gather(1, at)[:, 0] * points * weight
            quality[depth] += overlap.sum() / len(teacher)
    return quality, gradients, lifts


def depths(head: DraftHead, batch: Batch, own_states: int) -> list[Tensor]:
    """Return the head's states [B, T, hidden] for the 1st, 2nd, ... draft token.

    In entry d (from 0), the newest target state that position t has seen is that of position t - 1 - d. The d
    states after it are the head's own, as in drafting.
    """
    size = batch.ids.shape[1]
    cache = DynamicCache()
    places = torch.arange(size, device=batch.ids.device)
    positions = places[None].expand(len(batch.ids), -1)
    width = head.project.in_features if head.config.reads_layers else head.config.hidden
    seen, result = shifted(head.project(batch.states[..., -width:])), []
    for depth in range(own_states + 1):
        # Position t sees its own key of this depth, the key of position t-1 of the previous depth, and so on; of
        # depth 0 it sees the keys of positions 0 to t-depth.
        blocks = [places[:, None] - (depth - other) == places[None] for other in range(depth + 1)]
        blocks[0] = places[:, None] - depth >= places[None]
        mask = torch.cat(blocks, dim=1)[None, None].expand(len(batch.ids), 1, -1, -1)
        out = head.body.model(
            inputs_embeds=head.inputs(batch.ids, seen),
            position_ids=positions,
            attention_mask=mask,
            **{cache_keyword(head.body.model): cache},
            use_cache=True,
        ).last_hidden_state
        result.append(out)
        seen = shifted(out)
    return result


def pointed(head: DraftHead, batch: Batch, picked: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pointer's proposals at the picked positions, and the lengths of its matches.

    A proposal is a column of the head's vocabulary, or -1 for none. Proposals are the same at every depth, because
    the pointer does not search in the chain's own drafts.
    """
    text = windows(batch.ids)
    lengths = 1 + torch.arange(batch.ids.shape[1], device=text.device).expand_as(batch.ids)
    ids, sizes = followers(text, lengths, text)
    return head.column_of(ids[picked]), sizes[picked]


def measure(head: DraftHead, batches: list[Batch], own_states: int) -> list[dict[str, float]]:
    """Return for each draft token the mean overlap 1 - TV(p, q), and how often p and q have the same argmax.

    Both are over the head's vocabulary.
    """
    head.eval()
    sums = torch.zeros(own_states + 1, 2, device=head.vocabulary.device)
    count = 0
    with torch.no_grad():
        for batch in batches:
            teacher = head.body.lm_head(batch.states[batch.scored][:, -head.config.hidden :])
            p = teacher.softmax(-1)
            count += len(p)
            columns, sizes = pointed(head, batch, batch.scored)
            for depth, states in enumerate(depths(head, batch, own_states)):
                state = states[batch.scored]
                lift = head.pointer(state, sizes) * (columns >= 0)
                student = head.body.lm_head(state).scatter_add(1, columns[:, None].clamp(min=0), lift[:, None])
                sums[depth, 0] += torch.minimum(p, student.softmax(-1)).sum()
                sums[depth, 1] += (student.argmax(-1) == teacher.argmax(-1)).sum()
    head.train()
    return [{"overlap": row[0] / count, "agreement": row[1] / count} for row in sums.tolist()]


def train(
    pair: ModelPair,
    settings: Settings,
    corpus: Path,
    out: Path,
    steps: int,
    questions: Sequence[str] = (),
    deadline: float = math.inf,
) -> dict[str, Any]:
    """Train for `steps` in all and save the head and the log in `out`; return the log.

    Conversations whose prompts resemble one of the `questions` are left out. Training also ends at `deadline`, a
    time of `time.monotonic`, and the learning rate decays until then.

    Raises:
        SystemExit: if there are too few shards, or `out` has a run with another recipe.
    """
    options = settings.train
    if options.loss not in LOSSES:
        raise SystemExit(f"loss must be one of {', '.join(LOSSES)}; got {options.loss!r}.")
    paths = shards(corpus)
    if len(paths) <= options.held_out_shards:
        raise SystemExit(f"{corpus} holds {len(paths)} shards: write more with `python -m distill corpus`.")
    layers = layers_read(settings)
    # The recipe identifies a run; the log and the checkpoint contain it.
    recipe = {**vars(options), "layers_read": list(layers), "seed": settings.seed}
    if questions:
        recipe["questions"] = hashlib.sha256("\n".join(questions).encode()).hexdigest()
    checkpoint = _load_checkpoint(out / CHECKPOINT, recipe)
    if checkpoint and max(checkpoint["step"] / steps, checkpoint["timed"]) >= 1 and is_draft_head(out):
        return dict(checkpoint["log"])
    rows = load_rows(paths[options.held_out_shards :], layers)
    if questions:
        every = len(rows)
        rows = without_test_questions(rows, questions, pair)
        print(f"{every - len(rows)} of {every} conversations resemble a test question and are left out.")
    reader = Reader(pair, layers, options.longest_row)
    # A checkpoint's weights need the scale that they were trained with.
    scale = (
        Scale(*(part.to(pair.device) for part in checkpoint["scale"]))
        if checkpoint
        else scale_of(rows, reader, options.tokens_per_step)
    )
    reader = replace(reader, scale=scale)
    # Each shard has one temperature, so each held-out shard is measured separately.
    checks = [_held_out(load_rows([path], layers), reader) for path in paths[: options.held_out_shards]]
    vocabulary = frequent_ids(rows, options.vocabulary, set(pair.default_eos()))
    # With a checkpoint, ignore `start`: the checkpoint's weights replace the initial ones, and the folder `start`
    # may have changed.
    head = new_head(pair, replace(options, start="random") if checkpoint else options, vocabulary, layers)
    if layers:
        absorb(head, -scale.mean / scale.deviation, 1 / scale.deviation)
    run = _Run(head, options, scale, out / CHECKPOINT, steps, checkpoint or _empty_checkpoint(recipe), deadline)

    def save() -> None:
        run.save([measure(head, check, MEASURED_DRAFTS - 1) for check in checks])

    if checkpoint is None:
        save()  # The log starts with the untrained head.
    source = Batches(rows, reader, options.tokens_per_step, settings.seed).from_step(run.step)
    with tqdm(total=steps, initial=run.step, desc="train", unit="step") as bar:
        while run.done() < 1:
            bar.set_postfix(overlap=f"{run.update(next(source)):.3f}")
            bar.update(1)
            if run.due():
                save()
    save()
    if layers:
        absorb(head, scale.mean, scale.deviation)
    head.save(out)
    return run.log


def _held_out(rows: list[Row], reader: Reader) -> list[Batch]:
    """Return some rows of a held-out shard that have scored tokens, as batches."""
    rows = rows[:: max(1, len(rows) // CHECKED_ROWS)]
    rows = [row for row in rows if row.scored[: reader.longest_row].any()]
    return [reader(rows[first : first + ROWS_AT_ONCE]) for first in range(0, len(rows), ROWS_AT_ONCE)]


def layers_read(settings: Settings) -> tuple[int, ...]:
    """Return the target's layers that the head reads, ascending."""
    return tuple(sorted(settings.train.reads_layers)) if settings.train.reads_states else ()


def absorb(head: DraftHead, mean: Tensor, deviation: Tensor) -> None:
    """Change `project` so that it reads unscaled states: x now gives what (x - mean) / deviation gave before.

    Both `mean` and `deviation` have the shape [width].
    """
    with torch.no_grad():
        head.project.weight /= deviation
        head.project.bias -= head.project.weight @ mean


def _load_checkpoint(path: Path, recipe: dict[str, Any]) -> dict[str, Any] | None:
    """Return the checkpoint of a killed run, or None; exit if that run had another recipe."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    other = state["log"]["options"]
    differing = sorted(name for name in {*other, *recipe} if other.get(name) != recipe.get(name))
    if differing:
        raise SystemExit(
            f"{path} was made with other settings ({', '.join(differing)}): continue with those, or choose "
            "another --name."
        )
    return state


def _empty_checkpoint(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint of a run before its first step, without weights."""
    return {"step": 0, "seconds": 0.0, "timed": 0.0, "log": {"options": recipe, "overlap": [], "held_out": []}}


@contextmanager
def _bfloat16_products() -> Iterator[None]:
    """Multiply float32 matrices in bfloat16 where the machine can. Sums stay in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Run:
    """A run of the optimiser that can be interrupted and continued."""

    def __init__(
        self,
        head: DraftHead,
        options: TrainSettings,
        scale: Scale,
        path: Path,
        steps: int,
        state: dict[str, Any],
        deadline: float = math.inf,
    ) -> None:
        """Start a run from a checkpoint `state`, or from `_empty_checkpoint`; `deadline` as in `train`."""
        self.head, self.options, self.scale, self.path, self.steps = head, options, scale, path, steps
        self.trained = [p for p in head.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=options.weight_decay
        )
        self.step, self.log, self.spent = state["step"], state["log"], state["seconds"]
        if "head" in state:
            head.load_state_dict(state["head"], strict=False)
            self.optimizer.load_state_dict(state["optimizer"])
        self.begun = self.saved = time.monotonic()
        self.deadline, self._timed_before = deadline, state["timed"]

    def done(self) -> float:
        """Return the share of the run that is done: of its steps or of its time, whichever is larger."""
        return max(self.step / self.steps, self._timed())

    def _timed(self) -> float:
        """Return the share of the run's time that is over, 0 without a deadline."""
        passed, whole = time.monotonic() - self.begun, max(0.0, self.deadline - self.begun)
        share = passed / whole if passed < whole else 1.0
        return self._timed_before + (1 - self._timed_before) * share

    @_bfloat16_products()
    def update(self, batch: Batch) -> float:
        """Take one step of the optimiser and return the mean overlap at the first depth."""
        torch.manual_seed(self.step)
        drawn = torch.rand(batch.ids.shape) < self.options.share
        picked = batch.scored & to_device(drawn, batch.ids.device)
        head = self.head
        students = [states[picked] for states in depths(head, batch, self.options.own_states)]
        teacher = batch.states[picked][:, -head.config.hidden :]
        columns, sizes = pointed(head, batch, picked)
        raised = [head.pointer(student, sizes) for student in students]
        weight, loss = head.body.lm_head.weight, LOSSES[self.options.loss]
        quality, *gradients = pulls(students, teacher, weight, raised, columns, loss)
        scaled = [gradient / len(students) for group in gradients for gradient in group]
        torch.autograd.backward([*students, *raised], scaled)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        warmup = self.options.warmup_steps
        rate = self.options.learning_rate * schedule(self.step, warmup, self.done(), warmup / self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        overlaps: list[float] = quality.tolist()
        if self.step % 10 == 0 or self.step <= 10:
            self.log["overlap"].append([self.step, *(round(a, 4) for a in overlaps)])
        return overlaps[0]

    def due(self) -> bool:
        return time.monotonic() - self.saved > self.options.checkpoint_seconds

    def save(self, held_out: list[list[dict[str, float]]]) -> None:
        """Write the checkpoint (replaced atomically) and the log."""
        seconds = self.spent + time.monotonic() - self.begun
        self.log["held_out"].append({"step": self.step, "seconds": round(seconds), "shards": held_out})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "head": self.head.own_weights(),
            "optimizer": self.optimizer.state_dict(),
            "scale": (self.scale.mean, self.scale.deviation),
            "step": self.step,
            "timed": self._timed(),
            "log": self.log,
            "seconds": seconds,
        }
        torch.save(state, self.path.with_suffix(".part"))
        os.replace(self.path.with_suffix(".part"), self.path)
        (self.path.parent / "log.json").write_text(json.dumps(self.log, indent=1) + "\n", encoding="utf-8")
        self.saved = time.monotonic()


def schedule(step: int, warmup: int, done: float, warm: float) -> float:
    """Return the factor of the learning rate: linear warm-up, then cosine decay to a twentieth.

    Args:
        step: the number of steps taken.
        warmup: the steps of the warm-up.
        done: the share of the run that is done.
        warm: the share of the run that is the warm-up.
    """
    if step < warmup:
        return (step + 1) / warmup
    decayed = max(0.0, done - warm) / max(1e-9, 1 - warm)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, decayed)))

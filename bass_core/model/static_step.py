"""A captured step (`CapturedStep`), and what it reads: a round's numbers (`RoundInputs`) and texts (`DeviceText`).

A step serves every round with at most its rows and columns. All numbers of a round go to the device in one copy,
which nothing waits for. Surplus rows and columns are padding: such a row has length 0, and a padding token of a
tree sees only itself.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.plan import MAX_TREE_TOKENS, TreeMask

from ..machine.transfer import pinned_zeros, to_device
from ..sample.noise import NoiseKeys
from ..sequence import Sequence
from .forward import ForwardOutput, HostTreeMask


class Padded(NamedTuple):
    """One list of numbers per row, padded with zeros to `width` numbers."""

    rows: Seq[Seq[int]]
    width: int


class RoundInputs(NamedTuple):
    """A round's numbers by name.

    On the host, a field has one number per row, or is Padded. In a captured step it is int64 [R] or [R, W], a view
    of the step's buffer. A field that the step does not read is None.

    Attributes:
        lengths: how many tokens of the row are cached.
        starts, groups: the row's place in the cache's prefix; None without a prefix.
        counts: number of its drafts, or of its unread tokens.
        prompts: the length of its prompt.
        ids, positions, seeds: its noise keys.
        tokens: its newest token, or its unread tokens.
        state_slots: the column of the state that each unread token reads.
        num_copied: number of its copied drafts; 0 if the model drafted for it.
        copied_drafts: the copied drafts.
        sees, depths, before: its tree, as in HostTreeMask.
        turns: for steps that make the numbers of later rounds themselves (draft/chain_graph.py): 1 if the host
            wrote them, 2 in later rounds.
        most_kept: for these steps, how many of its drafts stay in the cache if all are accepted.
    """

    lengths: Any = None
    starts: Any = None
    groups: Any = None
    counts: Any = None
    prompts: Any = None
    ids: Any = None
    positions: Any = None
    seeds: Any = None
    tokens: Any = None
    state_slots: Any = None
    num_copied: Any = None
    copied_drafts: Any = None
    sees: Any = None
    depths: Any = None
    before: Any = None
    turns: Any = None
    most_kept: Any = None

    @property
    def prefix(self) -> tuple[Tensor, Tensor] | None:
        """The rows' starts and groups in the cache's prefix, or None without a prefix."""
        return None if self.starts is None else (self.starts, self.groups)

    @property
    def keys(self) -> NoiseKeys:
        """The round's noise keys."""
        return NoiseKeys(self.seeds[:1], self.ids, self.positions)

    @property
    def tree(self) -> TreeMask | None:
        """The trees that the step's tokens form, or None for chains."""
        if self.sees is None:
            return None
        return TreeMask(self.sees.contiguous(), self.depths.contiguous(), self.before)

    def packed(self, rows: int, device: torch.device) -> Tensor:
        """Return the buffer for `device` on the host: int64 [n, at least `rows`], one line per number of a row."""
        # An even number of columns, because Triton compiles other code for rows at odd multiples of 8 bytes.
        host, at = pinned_zeros(sum(map(_lines, self)), rows + rows % 2, device=device), 0
        array = host.numpy()
        for part in self:
            if isinstance(part, Padded):
                columns = list(zip_longest(*part.rows, fillvalue=0))
                if columns:
                    array[at : at + len(columns), : len(part.rows)] = columns
            elif part is not None:
                array[at, : len(part)] = part
            at += _lines(part)
        return host

    def views(self, buffer: Tensor) -> RoundInputs:
        """Return the fields as views of a buffer [n, R] with the lines of `packed`."""

        def view(field: Any, lines: Tensor) -> Tensor | None:
            if field is None:
                return None
            return lines.t() if isinstance(field, Padded) else lines[0]

        return RoundInputs(*map(view, self, buffer.split([*map(_lines, self)])))


def _lines(part: Any) -> int:
    """Return the number of a field's lines."""
    if part is None:
        return 0
    return part.width if isinstance(part, Padded) else 1


class GraphDrafts(NamedTuple):
    """The drafts that a captured verification reads.

    Attributes:
        tokens: int64 [B, l], the drafts.
        probs: float32 [B, l, V], the distributions that they were drawn from; None for point masses.
        copies: the drafts of rows that copy, in place of those in `tokens`; [] for other rows. None if no
            row copies.
        write_masks: writes what the rows' grammars allow to int32 [R, 1 + l', V / 32], a bit for each token; the
            array may have more rows and columns than the round. None if no row has a grammar.
    """

    tokens: Tensor
    probs: Tensor | None
    copies: list[list[int]] | None = None
    write_masks: Callable[[NDArray[np.int32]], None] | None = None


class Judged(NamedTuple):
    """What a StepJudge returns.

    Attributes:
        packed: float32 [B, n], the outcomes.
        logits: [B, S, V], the target's with penalties and masks; None if they are the forward's.
    """

    packed: Tensor
    logits: Tensor | None


class CapturedRound(NamedTuple):
    """A round that a captured step has judged. Its tensors are valid until the next forward.

    Attributes:
        output: the forward's output.
        judged: the judge's.
        repeat: judge the next round with these drafts, if the step `advances`. Its results replace these.
        repeats: whether that is possible if no row has lengthened by more than this many tokens.
    """

    output: ForwardOutput
    judged: Judged
    repeat: Callable[[GraphDrafts], None]
    repeats: Callable[[int], bool]


class DeviceText:
    """The rows' texts, in a buffer that belongs to the runner's cache.

    A graph writes the tokens that it is fed, and its drafts after them. `upload` copies whole texts, but only if
    tokens were written without a graph. Make it with `ModelRunner.device_text`.

    Attributes:
        tokens: int64 [rows, columns].
        num_valid: how many tokens of each row's text the buffer has. Update it after each graph.
    """

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.num_valid = tokens, [0] * len(tokens)

    def upload(self, rows: list[Sequence], needed: list[int]) -> None:
        """Copy the texts to the device, unless it has at least needed[r] tokens of each."""
        if all(valid >= length for valid, length in zip(self.num_valid, needed, strict=False)):
            return
        longest = max(len(row.tokens) for row in rows)
        padded = [row.tokens + [0] * (longest - len(row.tokens)) for row in rows]
        self.tokens[: len(rows), :longest].copy_(to_device(padded, self.tokens.device))
        self.num_valid[: len(rows)] = [len(row.tokens) for row in rows]

    def move_row(self, source: int, target: int) -> None:
        """Let row `source` take the place of row `target`."""
        self.tokens[target].copy_(self.tokens[source])
        self.num_valid[target] = self.num_valid[source]


class StepJudge(Protocol):
    """What follows a round's forward in a captured step (verify/judge.py). Equal judges share captured steps."""

    @property
    def columns(self) -> int | None: ...

    def constants(self, device: torch.device) -> dict[str, Tensor]: ...

    def tree(self, constants: dict[str, Tensor], rows: int) -> TreeMask | None: ...

    def run(
        self,
        logits: Tensor,
        fed: Tensor,
        inputs: RoundInputs,
        probs: Tensor | None,
        text: Tensor | None,
        constants: dict[str, Tensor],
    ) -> Judged: ...

    def advance(self, inputs: RoundInputs, packed: Tensor) -> None: ...

    def __hash__(self) -> int: ...


@dataclass
class CapturedStep:
    """A captured function of a round's numbers.

    Attributes:
        numbers: the buffer of its RoundInputs, to be refilled before each replay.
        output: the tensors that it writes.
        replay: runs it again.
        taken: bytes by which the pool grew during the capture. They include intermediate results only if this
            step's need more memory than those of earlier steps.
        static_inputs: further tensors that it reads, by name.
        keep_alive: other tensors that it reads.
        shared: buffers that it shares with other captures, by name.
    """

    numbers: Tensor
    output: Any
    replay: Callable[[], Any]
    taken: int = 0
    static_inputs: dict[str, Tensor] = field(default_factory=dict)
    keep_alive: tuple[Tensor, ...] = ()
    shared: dict[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        inputs = sum(tensor.nbytes for tensor in self.static_inputs.values())
        return inputs + max(self.taken, sum(tensor.nbytes for tensor in tensors(self.output)))

    def fill(self, packed: Tensor) -> None:
        """Overwrite the numbers with `RoundInputs.packed`, in one copy that nothing waits for."""
        self.numbers.copy_(packed, non_blocking=True)


def fits_tree(tree: HostTreeMask | None, columns: int) -> bool:
    """Return whether the trees' bit masks have a separate bit for every padding token of a step this wide."""
    return tree is None or max(tree.before) + columns <= MAX_TREE_TOKENS


def pad_tree(tree: HostTreeMask, rows: int, columns: int) -> HostTreeMask:
    """Pad the trees with rows and tokens."""
    before = [*tree.before, *[0] * (rows - len(tree.before))]
    sees = [*tree.sees, *([] for _ in range(rows - len(tree.sees)))]
    depths = [*tree.depths, *([] for _ in range(rows - len(tree.depths)))]
    return HostTreeMask(
        [
            row + [1 << first + column for column in range(len(row), columns)]
            for row, first in zip(sees, before, strict=True)
        ],
        [row + [0] * (columns - len(row)) for row in depths],
        before,
    )


def tensors(output: Any) -> list[Tensor]:
    """Return the tensors in a captured function's output: a ForwardOutput, a tensor, None, or a tuple of these."""
    if isinstance(output, ForwardOutput):
        output = (output.logits, output.states)
    if isinstance(output, tuple):
        return [tensor for part in output for tensor in tensors(part)]
    return [] if output is None else [output]

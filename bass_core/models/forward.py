"""What goes into one forward of a model, and what comes out.

Contract: plain data. Whoever wants logits makes a `ForwardBatch`, which is passed unchanged to the model's own
computation. A new kind of step is one more field of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class ForwardBatch:
    """S new tokens for each of B rows.

    tokens: ids int64 [B, S], or embeddings [B, S, hidden]. lengths: tokens of each row that are cached already.
    counts: how many tokens of each row are real, None for all; logits and states of the padding after them are
    meaningless, and a model may skip it. take: the one column of each row whose logits are wanted, None for all.
    return_states: whether to return the hidden states that the model's `readout` makes. eager: do not capture the
    step, because its shape comes only once, as that of a prompt's chunk. window: a draft step, in which a row sees
    of its cached tokens only the first SINKS and the last `window`, rounded up to whole blocks (kernels/plan.py).
    """

    tokens: Tensor
    lengths: Sequence[int]
    counts: list[int] | None = None
    take: list[int] | None = None
    return_states: bool = False
    eager: bool = False
    window: int | None = None


@dataclass(slots=True)
class CapturedBatch:
    """What a captured step reads: static buffers, refilled before each replay, whose values the host doesn't know.

    tokens: as in ForwardBatch. lengths: int64 [B] on the device. extent: attention reads the first `extent`
    columns of the cache, and no row may grow beyond them; None for all. shared: the cache's starts and groups
    int64 [B], if it has a prefix. window: as in ForwardBatch.
    """

    tokens: Tensor
    lengths: Tensor
    extent: int | None = None
    return_states: bool = False
    shared: tuple[Tensor, Tensor] | None = None
    window: int | None = None

    @property
    def take(self) -> None:
        """The logits of all columns are returned."""
        return None


@dataclass(slots=True)
class ForwardOutput:
    """logits [B, S, V], or [B, V] if `take` chose one column per row; states [B, S, ...] if they were asked for.

    Both may be views of buffers that the next forward overwrites: copy what must be kept longer.
    """

    logits: Tensor
    states: Tensor | None = None

    def require_states(self) -> Tensor:
        """The states. Raises ValueError if the batch did not ask for them."""
        if self.states is None:
            raise ValueError("these logits came without states: the batch must say return_states=True")
        return self.states

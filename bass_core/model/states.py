"""States of recurrent layers that can be taken back: `RecurrentStates`, the part of a cache for such layers.

A recurrent layer (linear attention, Mamba, a short convolution) keeps one state per row, not keys and values. We
keep the state at each row's *anchor*, a committed length, and the small inputs of the recurrence for the tokens
fed since then. From these we compute the state at any later length. So drafts can be rejected: the next step's
lengths decide which tokens count, and only a commit moves an anchor.

`stand_in` prepares a model. Its layers run transformers' own code, but their recurrences read and write the states
of the enclosing `step`. Padding always follows a row's own tokens, so it never enters a state that counts.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache

_Function = Callable[..., Any]
# Shortest and longest chunk of a delta rule; the longest is transformers' default. A short chunk is several times
# faster than its tokens one by one (`python -m bench states`), because the state is read once.
_CHUNKS = 8, 64


class _Recurrence(NamedTuple):
    """One of transformers' functions that scan several tokens, and how to call it.

    Attributes:
        step: the name of the function in the same file that transformers calls for one token.
        compute: calls the scan or the step, given both, whether to scan, and the scan's arguments; returns outputs
            and final states.
        inputs: the scan's arguments with one entry per token that change the state.
        outputs: those that change only the outputs. To compute a state, the argument of the given name is passed
            instead, which has the same shape, or None.
        state: the argument of `compute` with the states before the first token.
        dim: the dimension of the tokens in each of `inputs`.
    """

    step: str
    compute: Callable[..., tuple[Tensor, Tensor]]
    inputs: tuple[str, ...]
    outputs: dict[str, str | None]
    state: str = "initial_state"
    dim: int = 1


def _delta_rule(scan: _Function, step: _Function, scans: bool, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute a gated delta rule, in a chunk that is not much longer than the tokens."""
    tokens = arguments["key"].shape[1]
    size = min(max(_CHUNKS[0], 1 << (tokens - 1).bit_length()), _CHUNKS[1])
    outputs: tuple[Tensor, Tensor] = step(**arguments) if tokens == 1 else scan(**arguments | {"chunk_size": size})
    return outputs


def _mamba(scan: _Function, step: _Function, scans: bool, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute Mamba's scan token by token, because its scan can't start from a state."""
    hidden, dt, B, C, A = (arguments[name] for name in ("hidden_states", "dt", "B", "C", "A"))
    z: Tensor | None = arguments.get("z")
    common = {"D": arguments.get("D"), "dt_bias": arguments.get("delta_bias"), "dt_softplus": True}
    state = _copied(arguments["initial_state"], (*hidden.shape[:2], A.shape[-1]), hidden)
    gates = [None] * hidden.shape[-1] if z is None else z.unbind(-1)
    tokens = zip(*(x.unbind(-1) for x in (hidden, dt, B, C)), gates, strict=True)
    steps = [step(state, x, dt_now, A, B_now, C_now, **common, z=gate) for x, dt_now, B_now, C_now, gate in tokens]
    return torch.stack(steps, dim=-1), state


def _mamba2(scan: _Function, step: _Function, scans: bool, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute Mamba 2's scan."""
    hidden, dt, B, C = (arguments[name] for name in ("hidden_states", "dt", "B", "C"))
    if scans:
        outputs: tuple[Tensor, Tensor] = scan(**arguments)
        return outputs
    heads, size = hidden.shape[2:]
    A = arguments["A"][:, None, None].expand(-1, size, B.shape[-1])
    common = {name: arguments[name][:, None].expand(-1, size) for name in ("D", "dt_bias")}
    state = _copied(arguments["initial_states"], (len(hidden), heads, size, B.shape[-1]), hidden)
    tokens = zip(*(x.unbind(1) for x in (hidden, dt[..., None].expand(-1, -1, -1, size), B, C)), strict=True)
    steps = [
        step(state, x, dt_now, A, B_now, C_now, **common, dt_softplus=True) for x, dt_now, B_now, C_now in tokens
    ]
    return torch.stack(steps, dim=1), state


def _copied(state: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a copy of states that a function may overwrite, or zeros."""
    return like.new_zeros(shape, dtype=torch.float32) if state is None else state.clone()


_KEYS = ("key", "value", "g", "beta")
_TOKENS = ("hidden_states", "dt", "B")
_RECURRENCES = {
    "torch_chunk_gated_delta_rule": _Recurrence(
        "torch_recurrent_gated_delta_rule", _delta_rule, _KEYS, {"query": "key"}
    ),
    "chunk_kimi_delta_attention": _Recurrence(
        "recurrent_kimi_delta_attention", _delta_rule, _KEYS, {"query": "key"}
    ),
    "mamba2_chunk_scan": _Recurrence(
        "mamba2_selective_state_update", _mamba2, _TOKENS, {"C": "B"}, "initial_states"
    ),
    "mamba_selective_scan": _Recurrence(
        "mamba_selective_state_update", _mamba, _TOKENS, {"C": "B", "z": None}, dim=2
    ),
}
# The functions of transformers' cache by which layers store their states.
_UPDATES = ("update_conv_state", "update_recurrent_state")
# The states of the step that this thread computes.
_stepping: ContextVar[RecurrentStates] = ContextVar("stepping")


@dataclass
class _State:
    """One state of one layer.

    Attributes:
        advance: returns the states after some tokens, given their inputs [R, n, ...] by name and states [R, ...].
        committed: [max_batch, ...], the states at the rows' anchors.
        inputs: the inputs [B, T, ...] of the tokens fed since then.
        latest: [B, ...], the states after the last step's tokens, padding included.
    """

    advance: Callable[[dict[str, Tensor], Tensor], Tensor]
    committed: Tensor
    inputs: dict[str, Tensor] = field(default_factory=dict)
    latest: Tensor = field(default_factory=lambda: torch.empty(0))


class _Move(NamedTuple):
    """Rows whose states move by the same number of tokens; tokens None: to their latest states."""

    rows: list[int]
    tokens: int | None


class RecurrentStates:
    """The states of all recurrent layers for `max_batch` rows. All of them are zero at length 0."""

    def __init__(self, max_batch: int) -> None:
        self._states: dict[tuple[int, str, int], _State] = {}
        self._committed, self._anchors = [0] * max_batch, [0] * max_batch
        # For each row, how many tokens after the anchor have inputs, and the length of its latest states.
        self._fed, self._latest = [0] * max_batch, [-1] * max_batch
        self._ahead: list[int] = []
        self._moves: list[_Move] = []
        self._layer, self._calls, self._scans = 0, Counter[int](), False

    def commit(self, row: int, length: int) -> None:
        """Set the row's committed length: later steps start at it or after it, or the row begins again at 0."""
        self._committed[row] = length

    @torch.inference_mode()  # as the steps, whose tensors can't be changed outside of it
    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the states of row `source` at its committed `length` to row `target`."""
        self.commit(source, length)
        self._settle([source])
        self.commit(target, length)
        self._anchors[target], self._fed[target], self._latest[target] = length, 0, -1
        for state in self._states.values():
            state.committed[target] = state.committed[source]

    @torch.inference_mode()
    def copy_prefix(self, prefix: RecurrentStates, group: int, row: int) -> None:
        """Copy the states of row `group` of the prefixes, at its committed length, to a row."""
        prefix._settle([group])
        length, rows = prefix._committed[group], len(self._anchors)
        self.commit(row, length)
        self._anchors[row], self._fed[row], self._latest[row] = length, 0, -1
        for key, source in prefix._states.items():
            if key not in self._states:
                zeros = source.committed.new_zeros(rows, *source.committed.shape[1:])
                self._states[key] = _State(source.advance, zeros)
            self._states[key].committed[row] = source.committed[group]

    @contextmanager
    def step(self, lengths: Sequence[int], width: int, prompt: bool) -> Iterator[None]:
        """Let this thread's recurrent layers feed `width` tokens to rows 0 to B - 1 in the block.

        Args:
            lengths: how many tokens of each row count. Later ones are dropped.
            width: the number of new tokens per row.
            prompt: whether these are tokens of prompts.

        Raises:
            RuntimeError: if a row would have to go back behind its committed length.
        """
        self._settle(range(len(self._anchors)))
        rows = range(len(lengths))
        self._ahead = [length - anchor for length, anchor in zip(lengths, self._anchors, strict=False)]
        self._moves, self._calls = self._moves_to(rows, lengths), Counter()
        # As transformers does: prompts are scanned in chunks, new tokens computed one by one. In Mamba 2 the two
        # ways round differently, and in Zamba2 they give other values.
        self._scans = prompt
        token = _stepping.set(self)
        try:
            yield
        finally:
            _stepping.reset(token)
        behind = len(self._fed) - len(lengths)
        self._fed = [ahead + width for ahead in self._ahead] + [0] * behind
        self._latest = [length + width for length in lengths] + [-1] * behind

    @torch.inference_mode()
    def drop_inputs(self) -> None:
        """Move all states to the committed lengths, and free the inputs, which a prompt's chunk makes large."""
        self._settle(range(len(self._anchors)))
        for state in self._states.values():
            state.inputs.clear()

    def enter(self, layer: int) -> None:
        """Name the layer that computes the next recurrences."""
        self._layer = layer

    def convolve(self, inputs: Tensor, layer: int, index: int, size: int) -> Tensor:
        """Feed inputs [B, C, S] to a convolution of this kernel size.

        Returns:
            [B, C, size + S], with the row's inputs before them.
        """
        key = (layer, "convolution", index)
        state = self._states.get(key)
        if state is None:
            zeros = inputs.new_zeros(len(self._anchors), inputs.shape[1], size)
            state = self._states[key] = _State(_shifted, zeros)
        joined = torch.cat((self._start(state), inputs), dim=-1)
        self._keep(state, {"x": inputs.transpose(1, 2)}, joined[..., -size:])
        return joined

    def recur(
        self, kind: _Recurrence, scan: _Function, step: _Function, arguments: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Compute one of a layer's recurrences; returns its outputs and final states."""
        compute = partial(kind.compute, scan, step, self._scans)
        key = (self._layer, "recurrence", self._calls[self._layer])
        self._calls[self._layer] += 1
        state = self._states.get(key)
        start = None if state is None else self._start(state)
        outputs, latest = compute(**arguments | {kind.state: start})
        # Made in each step: the arguments hold weights, which may have changed.
        per_token = {*kind.inputs, *kind.outputs}
        others = {name: value for name, value in arguments.items() if name not in per_token}
        advance = partial(_advanced, kind, compute, others)
        if state is None:
            zeros = latest.new_zeros(len(self._anchors), *latest.shape[1:])
            state = self._states[key] = _State(advance, zeros)
        state.advance = advance
        self._keep(state, {name: arguments[name].movedim(kind.dim, 1) for name in kind.inputs}, latest)
        return outputs, latest

    def _settle(self, rows: Iterable[int]) -> None:
        """Move the anchors of these rows to their committed lengths."""
        lengths = self._committed
        again = [row for row in rows if lengths[row] == 0 < self._anchors[row]]
        for row in again:
            self._anchors[row], self._fed[row], self._latest[row] = 0, 0, -1
        moved = [row for row in rows if lengths[row] != self._anchors[row]]
        moves = self._moves_to(moved, [lengths[row] for row in moved])
        for state in self._states.values():
            if again:
                state.committed[again] = 0
            _apply(state, moves, state.committed)
        for row in moved:
            self._anchors[row], self._fed[row] = lengths[row], 0

    def _moves_to(self, rows: Iterable[int], lengths: Sequence[int]) -> list[_Move]:
        """Group rows by the number of tokens from their anchors to these lengths; leave out rows with none."""
        groups: dict[int | None, list[int]] = {}
        for row, length in zip(rows, lengths, strict=True):
            count = length - self._anchors[row]
            if not 0 <= count <= self._fed[row]:
                raise RuntimeError(f"the states of row {row} can't be taken back to {length} tokens")
            if count:
                groups.setdefault(None if length == self._latest[row] else count, []).append(row)
        return [_Move(members, count) for count, members in groups.items()]

    def _start(self, state: _State) -> Tensor:
        """Return the states [B, ...] before the step's tokens. The caller must not change them."""
        batch = len(self._ahead)
        if self._moves == [_Move(list(range(batch)), None)]:
            return state.latest
        start = state.committed[:batch]
        if self._moves:
            start = start.clone()
            _apply(state, self._moves, start)
        return start

    def _keep(self, state: _State, inputs: dict[str, Tensor], latest: Tensor) -> None:
        """Keep a step's inputs [B, S, ...], each row's after those that still count, and its final states."""
        for name, new in inputs.items():
            if longest := max(self._ahead):
                batch, width = new.shape[:2]
                old = state.inputs[name][:batch, :longest]
                joined = new.new_zeros(batch, longest + width, *new.shape[2:])
                joined[: len(old), : old.shape[1]] = old
                ahead, rows = (torch.tensor(x, device=new.device)[:, None] for x in (self._ahead, range(batch)))
                joined[rows, ahead + torch.arange(width, device=new.device)] = new
                new = joined
            state.inputs[name] = new
        state.latest = latest


def _apply(state: _State, moves: list[_Move], target: Tensor) -> None:
    """Write to `target` [R, ...] the states of the rows that move."""
    for rows, tokens in moves:
        if tokens is None:
            target[rows] = state.latest[rows]
        else:
            inputs = {name: kept[rows, :tokens] for name, kept in state.inputs.items()}
            target[rows] = state.advance(inputs, state.committed[rows])


def _shifted(inputs: dict[str, Tensor], window: Tensor) -> Tensor:
    """Return the last inputs of a convolution [R, C, size] after more of them."""
    return torch.cat((window, inputs["x"].transpose(1, 2)), dim=-1)[..., -window.shape[-1] :]


def _advanced(
    kind: _Recurrence, compute: _Function, others: dict[str, Any], inputs: dict[str, Tensor], states: Tensor
) -> Tensor:
    """Return the states after more inputs of a recurrence; `others` are its other arguments."""
    moved = {name: part.movedim(1, kind.dim) for name, part in inputs.items()}
    unused = {name: None if other is None else moved[other] for name, other in kind.outputs.items()}
    after: Tensor = compute(**others | moved | unused | {kind.state: states})[1]
    return after


def _stand_in(kind: _Recurrence, function: _Function, step: _Function) -> _Function:
    """Return a function that computes a recurrence from the states of the enclosing step."""
    signature = inspect.signature(function)

    def recur(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        return _stepping.get().recur(kind, function, step, arguments | arguments.pop("kwargs", {}))

    return recur


def _called_by(module: nn.Module) -> set[str]:
    """Return the names that the forward of a module's class uses."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set() if code is None else set(code.co_names)


def _mixers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that store states in transformers' cache."""
    return [module for module in model.modules() if not _called_by(module).isdisjoint(_UPDATES)]


def can_take_back(model: nn.Module) -> bool:
    """Return whether the model keeps states, all by recurrences that `stand_in` knows."""
    calls = [_called_by(mixer) for mixer in _mixers(model)]
    known = all(_UPDATES[1] not in called or not called.isdisjoint(_RECURRENCES) for called in calls)
    return hasattr(Cache, "get_conv_state") and bool(calls) and known


def has_replaced_layers(model: nn.Module) -> bool:
    """Return whether a layer with states has another forward than its class, which `stand_in` would bypass."""
    return any("forward" in vars(mixer) for mixer in _mixers(model))


def stand_in(model: nn.Module) -> None:
    """Let the recurrences of a copy of a model read and write the states of the enclosing step."""
    for module in model.modules():
        if names := _called_by(module) & _RECURRENCES.keys():
            forward: Any = inspect.unwrap(type(module).forward)
            known = dict(forward.__globals__)
            for name in names:
                kind = _RECURRENCES[name]
                known[name] = _stand_in(kind, known[name], known[kind.step])
            parts = (forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__)
            own = FunctionType(*parts)
            own.__kwdefaults__ = forward.__kwdefaults__
            vars(module)["forward"] = MethodType(own, module)

"""`python -m bench states`: two ways to take back the states of recurrent layers, by time and memory of a round.

The model has random weights in the shape of Qwen3.5 4B, with fewer layers and a small vocabulary. A round feeds
the newest token and DRAFTS drafts per row; row r accepts r modulo (DRAFTS + 1) of them. "inputs" is what BASS does
(model/states.py): it keeps the inputs of the recurrence, and computes the state after the accepted tokens in the
next round. "states" computes token by token and keeps each state, as other engines do. The arms take turns, and
the times are medians.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import transformers
from torch import Tensor

from bass_core.model.base import CausalModel
from bass_core.model.forward import ForwardBatch
from bass_core.model.runner import ModelRunner
from bass_core.model.states import RecurrentStates

from ..report.report import Row, at_most, finish, median, parser, whole

CONTEXT, DRAFTS, VOCAB = 64, 4, 4096
ROWS = (1, 8)
SHAPE: dict[str, Any] = {
    "hidden_size": 2560, "intermediate_size": 9216, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "vocab_size": VOCAB,
}  # fmt: skip
SMALL = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


class EachState(RecurrentStates):
    """States that keep the state after each token of a round."""

    def recur(self, kind: Any, scan: Any, step: Any, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Compute one of a layer's recurrences, as RecurrentStates does, but token by token."""
        if self._scans:
            return super().recur(kind, scan, step, arguments)
        key = (self._layer, "recurrence", self._calls[self._layer])
        self._calls[self._layer] += 1
        latest, outputs, after = self._start(self._states[key]), [], []
        tokens = [name for name in (*kind.inputs, *kind.outputs) if arguments.get(name) is not None]
        for token in range(arguments[kind.inputs[0]].shape[kind.dim]):
            one = {name: arguments[name].narrow(kind.dim, token, 1) for name in tokens}
            output, latest = kind.compute(scan, step, False, **arguments | one | {kind.state: latest})
            outputs.append(output)
            after.append(latest)
        self._states[key].advance = lambda inputs, states: inputs["state"][:, -1]
        self._keep(self._states[key], {"state": torch.stack(after, dim=1)}, latest)
        return torch.cat(outputs, dim=kind.dim), latest


def main(argv: list[str]) -> None:
    """Measure, print, and write."""
    options = parser("states", __doc__ or "", "dtype", "device")
    options.add_argument("--repeats", type=whole(), default=8)
    options.add_argument("--layers", type=whole(), default=4)
    arguments = options.parse_args(argv)
    torch.manual_seed(arguments.seed)
    shape = SHAPE | (SMALL if arguments.quick else {})
    types = (["linear_attention"] * 3 + ["full_attention"]) * arguments.layers
    config = transformers.Qwen3_5TextConfig(
        **shape, num_hidden_layers=arguments.layers, layer_types=types[: arguments.layers]
    )
    device = "cuda" if arguments.device == "auto" and torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    torch.set_default_dtype(dtype)
    target = transformers.Qwen3_5ForCausalLM(config).eval().to(device)
    torch.set_default_dtype(torch.float32)
    model = CausalModel(target)
    rows = [row for batch in ROWS for row in _compared(model, batch, 2 if arguments.quick else arguments.repeats)]
    ms, mb = (
        {(row["rows"], row["way"]): row[name] for row in rows} for name in ("ms a round", "MB of states a row")
    )
    claims = [
        at_most(
            f"memory of inputs / memory of states, batch {batch}", mb[batch, "inputs"] / mb[batch, "states"], 0.6
        )
        for batch in ROWS
    ]
    claims += [
        at_most(
            f"time with inputs / time with states, batch {batch}",
            ms[batch, "inputs"] / ms[batch, "states"],
            1.0,
            not arguments.quick,
        )
        for batch in ROWS
    ]
    finish("states", arguments, model.device, rows, claims)


def _compared(model: CausalModel, batch: int, repeats: int) -> list[Row]:
    """Measure rounds of `batch` rows in both ways."""
    runners = {"inputs": _runner(model, batch, RecurrentStates), "states": _runner(model, batch, EachState)}
    taken: dict[str, list[float]] = {way: [] for way in runners}
    texts: dict[str, list[Tensor]] = {way: [] for way in runners}
    for number, (way, runner) in itertools.product(range(repeats + 1), runners.items()):
        ids = torch.randint(0, VOCAB, (batch, 1 + DRAFTS), generator=torch.Generator().manual_seed(number))
        start = time.perf_counter()
        logits = runner.forward(ForwardBatch(ids.to(model.device), list(runner.lengths))).logits
        texts[way].append(logits.argmax(-1).cpu())
        if number:
            taken[way].append(1000 * (time.perf_counter() - start))
        for row in range(batch):
            runner.commit(row, runner.lengths[row] + 1 + row % (1 + DRAFTS))
    same = sum(map(torch.equal, texts["inputs"], texts["states"]))
    return [
        {
            "rows": batch,
            "way": way,
            "ms a round": median(times),
            "MB of states a row": _bytes(runners[way].cache.states) / batch / 1e6,
            "rounds alike": f"{same} of {repeats + 1}",
        }
        for way, times in taken.items()
    ]


def _runner(model: CausalModel, batch: int, kind: type[RecurrentStates]) -> ModelRunner:
    """Return a runner whose rows have CONTEXT tokens."""
    runner = ModelRunner(model, batch, 1024, VOCAB, "sdpa")
    runner.cache.states = kind(batch)
    ids = torch.randint(0, VOCAB, (batch, CONTEXT), generator=torch.Generator().manual_seed(7))
    runner.forward(ForwardBatch(ids.to(model.device), [0] * batch, eager=True))
    for row in range(batch):
        runner.commit(row, CONTEXT)
    return runner


def _bytes(states: RecurrentStates | None) -> int:
    """Return the bytes that are kept between two rounds."""
    assert states is not None
    kept = [
        tensor
        for state in states._states.values()
        for tensor in (state.committed, state.latest, *state.inputs.values())
    ]
    return sum(
        {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}.values()
    )

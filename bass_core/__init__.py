"""Exact batched speculative decoding.

The names in `__all__` are the public API and stay stable. Start with `load_pair`, then `generate`, `stream` or
`race`.

Speculation never changes the distribution of the target's output.
"""

from .machine import openmp as openmp  # must come before torch

# isort: split
from kernels.backends import BACKENDS as ATTENTIONS
from kernels.support import on_zero_gpu

from .decode.cost_store import may_measure
from .decode.measuring import costs_file, expected_speedup, measure_ahead, stored_costs
from .decode.prompts import count_tokens
from .draft.registry import DRAFTERS, choose_drafter
from .errors import (
    BassError,
    MemoryShortage,
    ModelError,
    PairError,
    RequestError,
    TokenizerError,
    WeightsError,
)
from .lanes.draws import Draws, draws
from .lanes.generate import Generation, generate, stream
from .lanes.methods import DEFAULT_LANES, DEFAULT_METHOD, METHODS, Method, register, unregister
from .lanes.metrics import Metrics
from .lanes.pace import LEAST_ROUNDS, Pace
from .lanes.race import race
from .lanes.schedule import SCHEDULINGS
from .lanes.snapshot import (
    ClockRecord,
    DeviceReading,
    Difference,
    LaneSnapshot,
    SequenceSnapshot,
    Snapshot,
)
from .length.costs import CostTable
from .length.policies import Algorithm1, RecordedLengths
from .machine.monitor import Monitor
from .machine.user_cache import cache_root
from .model.loading.catalogue import load_pair
from .model.pair import ModelPair
from .options import Options
from .predict.clock import SimulatedClock
from .predict.hardware import HARDWARE, Assumptions, Hardware
from .predict.rounds import mean_steps
from .predict.shapes import PAIRS, ModelSize
from .predict.speedups import SpeedUp, SpeedUps, predict_speedups
from .sample.params import SamplingParams
from .sequence import Record, Round, RowRound
from .verify.rules import VERIFICATIONS

__version__ = "0.1.0"

__all__ = [
    "ATTENTIONS",
    "DEFAULT_LANES",
    "DEFAULT_METHOD",
    "DRAFTERS",
    "HARDWARE",
    "LEAST_ROUNDS",
    "METHODS",
    "PAIRS",
    "SCHEDULINGS",
    "VERIFICATIONS",
    "Algorithm1",
    "Assumptions",
    "BassError",
    "ClockRecord",
    "CostTable",
    "DeviceReading",
    "Difference",
    "Draws",
    "Generation",
    "Hardware",
    "LaneSnapshot",
    "MemoryShortage",
    "Method",
    "Metrics",
    "ModelError",
    "ModelPair",
    "ModelSize",
    "Monitor",
    "Options",
    "Pace",
    "PairError",
    "Record",
    "RecordedLengths",
    "RequestError",
    "Round",
    "RowRound",
    "SamplingParams",
    "SequenceSnapshot",
    "SimulatedClock",
    "Snapshot",
    "SpeedUp",
    "SpeedUps",
    "TokenizerError",
    "WeightsError",
    "__version__",
    "cache_root",
    "choose_drafter",
    "costs_file",
    "count_tokens",
    "draws",
    "expected_speedup",
    "generate",
    "load_pair",
    "may_measure",
    "mean_steps",
    "measure_ahead",
    "on_zero_gpu",
    "predict_speedups",
    "race",
    "register",
    "stored_costs",
    "stream",
    "unregister",
]

"""Exact batched speculative decoding: the decoders, and what they need.

Contract: the names below are the public API and stay stable. Speculation never changes what the target says.
"""

from .budget.policies import RecordedLengths
from .errors import BassError, MemoryShortage, ModelError, PairError, RequestError, WeightsError
from .lanes.generation import Generation, generate, stream
from .lanes.metrics import Metrics
from .lanes.race import race
from .loading.catalogue import load_pair
from .machine.monitor import Monitor
from .models.pair import ModelPair
from .sampling.params import SamplingParams
from .sequence import Round, RowRound

__all__ = [
    "BassError",
    "Generation",
    "MemoryShortage",
    "Metrics",
    "ModelError",
    "ModelPair",
    "Monitor",
    "PairError",
    "RecordedLengths",
    "RequestError",
    "Round",
    "RowRound",
    "SamplingParams",
    "WeightsError",
    "generate",
    "load_pair",
    "race",
    "stream",
]

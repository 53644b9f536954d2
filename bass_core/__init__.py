"""Exact batched speculative decoding: the decoders, and what they need.

Contract: the names below are the public API and stay stable. Speculation never changes what the target says.
"""

from .catalogue import load_pair
from .errors import BassError, MemoryShortage, ModelError, PairError, RequestError, WeightsError
from .generation import Generation, generate, stream
from .metrics import Metrics
from .monitor import Monitor
from .pair import ModelPair
from .policies import RecordedLengths
from .race import race
from .sampling import SamplingParams
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

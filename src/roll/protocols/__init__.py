"""The interfaces between packages, as `typing.Protocol` classes."""

from roll.protocols.data import Draw, Items, PromptSource, Reward
from roll.protocols.engines import (
    InferenceEngine,
    PauseMode,
    SupportsAdapterScoring,
    SupportsPrefetch,
    SupportsReadback,
)
from roll.protocols.trainers import (
    LossFn,
    Scorer,
    StateKind,
    SupportsAdapterSync,
    TrainBackend,
    TrainerGroup,
    WeightSource,
)
from roll.protocols.workers import ActorHandle, WorkerPool

__all__ = [
    "ActorHandle",
    "Draw",
    "InferenceEngine",
    "Items",
    "LossFn",
    "PauseMode",
    "PromptSource",
    "Reward",
    "Scorer",
    "StateKind",
    "SupportsAdapterScoring",
    "SupportsAdapterSync",
    "SupportsPrefetch",
    "SupportsReadback",
    "TrainBackend",
    "TrainerGroup",
    "WeightSource",
    "WorkerPool",
]

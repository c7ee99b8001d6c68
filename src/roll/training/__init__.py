"""Train back-ends: packed batches, gradients, optimizer, checkpoints. Importing it imports no torch."""

from roll.training.schedule import Schedule
from roll.training.spec import Role, TrainerSpec

__all__ = ["Role", "Schedule", "TorchBackend", "TrainerSpec"]


def __getattr__(name: str) -> object:
    if name == "TorchBackend":
        from roll.training.backend import TorchBackend

        return TorchBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

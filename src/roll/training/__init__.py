"""Train back-ends: packed batches, gradients, optimiser, checkpoints. Importing it imports no torch."""

from roll.training.spec import TrainerSpec

__all__ = ["TorchBackend", "TrainerSpec"]


def __getattr__(name: str) -> object:
    if name == "TorchBackend":
        from roll.training.backend import TorchBackend

        return TorchBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

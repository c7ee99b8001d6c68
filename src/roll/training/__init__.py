"""Training back-ends: packed batches, gradients, optimizer, checkpoints. Importing this package does not import torch.

    TrainBackend (torch, deepspeed/, megatron/)
      rank ── passes ──► packing/ ──► network/ with attention/, experts ──► loss ──► gradients ──► optimizer
      distributed, parallel/: several ranks      memory/, offload: less memory      checkpoint/: save, load, export

`spec` describes a rank. `backend` is the back-end `torch`; `rank` (a training step) and `passes` (its micro-batches)
are shared by all back-ends.
"""

from roll.training.schedule import Schedule
from roll.training.spec import Role, TrainerSpec

__all__ = ["Role", "Schedule", "TorchBackend", "TrainerSpec"]  # noqa: F822 (`__getattr__` imports the backend)


def __getattr__(name: str) -> object:
    if name == "TorchBackend":
        from roll.training.backend import TorchBackend

        return TorchBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

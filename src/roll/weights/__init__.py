"""Bringing the trainer's weights to the engines, and proving that they arrived. See docs/weight-sync.md."""

from roll.weights.checksum import tensor_checksum
from roll.weights.receiver import Receiver, open_update
from roll.weights.sender import Sender, SendSteps, run_sync, send_weights
from roll.weights.sync import SyncReport, WeightSync

__all__ = [
    "Receiver",
    "SendSteps",
    "Sender",
    "SyncReport",
    "WeightSync",
    "open_update",
    "run_sync",
    "send_weights",
    "tensor_checksum",
]

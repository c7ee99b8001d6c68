"""Weight sync: transfer of the trainer's weights to the engines, and verification. See docs/weight-sync.md."""

from roll.weights.checksum import compute_checksum
from roll.weights.receiver import Receiver, open_update
from roll.weights.sender import Sender, SendSteps, run_sync, send_weights
from roll.weights.sync import SyncReport, WeightSync

__all__ = [
    "Receiver",
    "SendSteps",
    "Sender",
    "SyncReport",
    "WeightSync",
    "compute_checksum",
    "open_update",
    "run_sync",
    "send_weights",
]

"""Bringing the trainer's weights to the engines, and proving that they arrived. See docs/weight-sync.md."""

from roll.weights.checksum import tensor_checksum
from roll.weights.receiver import Receiver, open_update

__all__ = ["Receiver", "open_update", "tensor_checksum"]

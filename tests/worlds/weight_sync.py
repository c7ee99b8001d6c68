"""Weights that a test sends to an engine, as a trainer would."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch

from roll.protocols import InferenceEngine, WeightSource
from roll.types import WeightReceipt, WeightUpdate
from roll.weights import Sender, send_weights

__all__ = ["Weights", "send"]


class Weights:
    """A `WeightSource` over a dictionary."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())

    def names(self) -> list[str]:
        return list(self.tensors)


async def send(
    engine: InferenceEngine,
    source: WeightSource,
    version: int,
    transport: str = "in_process",
    adapter: str | None = None,
) -> WeightReceipt:
    """Send what a source yields, of the policy or of an adapter; the checksums of both ends are equal."""
    receipts: list[WeightReceipt] = []

    async def deliver(update: WeightUpdate) -> None:
        receipts.append(await engine.update_weights(dataclasses.replace(update, adapter=adapter)))

    sender = Sender()
    sent = await send_weights(source, version, transport, deliver, sender=sender)
    sender.close()
    assert dict(sent) == dict(receipts[0].checksums)
    return receipts[0]

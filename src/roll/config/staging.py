"""Which layers each stage of a model has (`training.parallel.pp`).

Layers are assigned one by one, each to the stage with the least compute, and in it to the part with the least; of
several parts to the latest, since earlier ones keep more micro-batches in flight.
"""

from __future__ import annotations

__all__ = ["layers_by_part"]


def layers_by_part(num_layers: int, num_stages: int, num_chunks: int, projection: float) -> list[int]:
    """Return how many layers each part of a model has, in the model's order.

    Args:
        num_layers: number of layers, at least one for each part.
        num_stages: number of stages, at least two.
        num_chunks: number of parts of each stage.
        projection: cost of the vocabulary projection, in layers.
    """
    count = num_stages * num_chunks
    counts = [1] * count
    loads = [1.0] * (count - 1) + [1.0 + projection]
    for _ in range(num_layers - count):
        stage = min(range(num_stages), key=lambda i: (sum(loads[i::num_stages]), -i))
        least = min(range(stage, count, num_stages), key=lambda i: (loads[i], -i))
        counts[least] += 1
        loads[least] += 1.0
    return counts

"""Assignment of a model's layers to pipeline stages (`training.parallel.pp`).

Layers are assigned one by one to the stage with the least compute, and within it to the model chunk with the least
compute. In a tie, the last chunk gets the layer, because earlier chunks have more micro-batches in flight.
"""

from __future__ import annotations

__all__ = ["assign_layers"]


def assign_layers(num_layers: int, num_stages: int, num_chunks: int, projection: float) -> list[int]:
    """Assign layers to pipeline stages, and return the number of layers of each model chunk, from first to last.

    Args:
        num_layers: number of layers, at least one for each chunk.
        num_stages: number of stages, at least two.
        num_chunks: number of chunks of each stage.
        projection: cost of the vocabulary projection, relative to the cost of one layer.
    """
    count = num_stages * num_chunks
    counts = [1] * count
    loads = [1.0] * (count - 1) + [1.0 + projection]
    # In a tie the later stage and the later chunk get the layer, since earlier ones keep the activations of more
    # micro-batches in flight.
    for _ in range(num_layers - count):
        stage = min(range(num_stages), key=lambda i: (sum(loads[i::num_stages]), -i))
        least = min(range(stage, count, num_stages), key=lambda i: (loads[i], -i))
        counts[least] += 1
        loads[least] += 1.0
    return counts

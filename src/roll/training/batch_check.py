"""The check of a batch's tokens and experts before a pass, because later code does not check them."""

from __future__ import annotations

import numpy as np

from roll.errors import ModelError, shorten
from roll.training.distributed import Ranks
from roll.training.network.routing import Routing
from roll.types import TrainingBatch

__all__ = ["check_batch"]


def check_batch(batch: TrainingBatch, vocab_size: int, routing: Routing | None, ranks: Ranks, model: str) -> None:
    """Check that a model has all token IDs and experts of a batch.

    Args:
        batch: The batch.
        vocab_size: The number of the model's embeddings.
        routing: The routers of the model, if any.
        ranks: The ranks that share the work. If each has the experts of its own samples, the call is collective.
        model: The name of the model, for messages.

    Raises:
        ModelError: A sample has a token ID or an expert index that is out of the model's range.
    """
    for sample in batch.samples:
        tokens = np.concatenate([sample.token_ids, sample.predicted_ids])
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            wrong = int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])
            raise ModelError(
                f"sample {shorten(sample.sample_id)} has token {wrong}, but '{model}' has {vocab_size} embeddings: the "
                "tokenizer belongs to another model, or tokens were added to it, but not to the model"
            )
    if routing is None:
        return
    problem: ModelError | None = None
    try:
        routing.check_choices(batch.held_samples)
    except ModelError as error:
        problem = error
    if batch.held is not None:
        # If only one rank raised an error, the others would wait for it in the passes.
        problem = next((each for each in ranks.gather(problem) if each is not None), None)
    if problem is not None:
        raise problem

"""Your own loss: PPO's clip with a squared penalty toward the old policy, averaged over all tokens of the batch."""

import torch

from roll.algorithms.ratio import clamp_log_ratio
from roll.types import LossInputs, LossOutputs

PULL = 0.05


def loss(inputs: LossInputs) -> LossOutputs:
    """Return the micro-batch's share of the loss.

    Each micro-batch divides by the number of tokens of the whole batch, so the sum over micro-batches and ranks does
    not depend on how the batch is split.
    """
    log_ratio = clamp_log_ratio(inputs.logprobs - inputs.old_logprobs)
    ratio = log_ratio.exp()
    objective = torch.minimum(ratio * inputs.advantages, ratio.clamp(0.8, 1.2) * inputs.advantages)
    pull = PULL * log_ratio.square()
    metrics = {"own/pull": pull.detach().sum() / inputs.num_tokens}
    return LossOutputs(loss=(pull - objective).sum() / inputs.num_tokens, metrics=metrics)

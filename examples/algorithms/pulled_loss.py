"""A loss of your own: PPO's clip with a squared pull towards the old policy, mean over all tokens of the batch."""

import torch

from roll.algorithms.ratio import clamp_log_ratio
from roll.types import LossInputs, LossOutputs

PULL = 0.05


def loss(inputs: LossInputs) -> LossOutputs:
    """Divides by the number of tokens of the whole batch, so micro-batches and ranks change nothing."""
    log_ratio = clamp_log_ratio(inputs.logprobs - inputs.old_logprobs)
    ratio = log_ratio.exp()
    objective = torch.minimum(ratio * inputs.advantages, ratio.clamp(0.8, 1.2) * inputs.advantages)
    pull = PULL * log_ratio.square()
    metrics = {"own/pull": pull.detach().sum() / inputs.num_tokens}
    return LossOutputs(loss=(pull - objective).sum() / inputs.num_tokens, metrics=metrics)

"""A loss: PPO's clipped objective (arXiv 1707.06347, equation 7) with a penalty on the KL divergence of the update."""

import torch

from roll.types import LossInputs, LossOutputs

CLIP, KL_WEIGHT = 0.2, 0.05


def clipped_kl(inputs: LossInputs) -> LossOutputs:
    """Return the micro-batch's share of the mean loss over all tokens of the batch.

    Each micro-batch divides by the number of tokens of the whole batch, so the sum over micro-batches and ranks does
    not depend on how the batch is split.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    objective = torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    kl = ratio - 1 - log_ratio  # the k3 estimator: unbiased and never negative
    metrics = {"own/kl": kl.detach().sum() / inputs.num_tokens}
    return LossOutputs(loss=(KL_WEIGHT * kl - objective).sum() / inputs.num_tokens, metrics=metrics)

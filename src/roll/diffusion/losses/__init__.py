"""Losses of diffusion models: see `base` for their interface."""

from roll.diffusion.losses.base import DiffusionLoss, Term, Terms, collate
from roll.diffusion.losses.flow_matching import FlowMatchingLoss
from roll.diffusion.losses.nft import NFTLoss
from roll.diffusion.losses.policy_gradient import PolicyGradientLoss
from roll.diffusion.losses.preference import DPOLoss
from roll.diffusion.losses.reward_gradient import RewardGradientLoss

__all__ = [
    "DPOLoss",
    "DiffusionLoss",
    "FlowMatchingLoss",
    "NFTLoss",
    "PolicyGradientLoss",
    "RewardGradientLoss",
    "Term",
    "Terms",
    "collate",
]

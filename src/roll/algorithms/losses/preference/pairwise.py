"""Pairwise losses: functions of the scores of the chosen and the rejected answer.

With s_w, s_l the scores of the chosen and the rejected answer (see `PreferenceLoss`), d = s_w - s_l, z = beta d, and
ls = log sigmoid. Each loss is a picklable callable `(chosen [P], rejected [P], beta) -> losses [P]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from roll.algorithms.probabilities import log_odds

__all__ = [
    "ApoDownLoss",
    "ApoZeroLoss",
    "DiscopopLoss",
    "ExoPairLoss",
    "HingeLoss",
    "NcaPairLoss",
    "OddsRatioLoss",
    "PairwiseLoss",
    "SigmoidLoss",
    "SppoHardLoss",
    "SquaredLoss",
]


class PairwiseLoss(Protocol):
    """Interface of a pairwise loss: a function from the scores of two answers to the loss of the pair."""

    supports_margin: ClassVar[bool]
    """True if the loss depends only on the difference of the scores, so that a margin can shift the difference."""

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """Return the loss of every pair, shape [P]."""
        ...


class _DifferenceLoss:
    """Base class of pairwise losses that depend only on the difference of the two scores."""

    __slots__ = ()

    supports_margin: ClassVar[bool] = True


class _ScoreLoss:
    """Base class of pairwise losses that depend on each score separately, and so do not support margins."""

    __slots__ = ()

    supports_margin: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SigmoidLoss(_DifferenceLoss):
    """The logistic loss -log sigmoid(z) of DPO, arXiv 2305.18290 eq. 7, with z = beta (chosen - rejected).

    With label smoothing e (the assumed fraction of wrong labels), this is conservative DPO (Mitchell, "A note on DPO
    with noisy preferences", 2023): -(1 - e) ls(z) - e ls(-z), with ls = log sigmoid. With `robust`, the loss is
    unbiased under that noise instead, arXiv 2403.00409: [-(1 - e) ls(z) + e ls(-z)] / (1 - 2 e).
    """

    label_smoothing: float = 0.0
    """Assumed fraction of wrong labels, e; at least 0 and below 1/2."""
    robust: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be >= 0 and < 0.5, got {self.label_smoothing}")

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """Return the loss of every pair, shape [P]."""
        z, noise = beta * (chosen - rejected), self.label_smoothing
        if self.robust:
            return (noise * logsigmoid(-z) - (1.0 - noise) * logsigmoid(z)) / (1.0 - 2.0 * noise)
        return -(1.0 - noise) * logsigmoid(z) - noise * logsigmoid(-z)


@dataclass(frozen=True, kw_only=True, slots=True)
class HingeLoss(_DifferenceLoss):
    """The hinge loss max(0, 1 - beta (chosen - rejected)) of SLiC, arXiv 2305.10425.

    It is applied to DPO's scores, as in RSO, arXiv 2309.06657.
    """

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """Return the loss of every pair, shape [P]."""
        return torch.relu(1.0 - beta * (chosen - rejected))


@dataclass(frozen=True, kw_only=True, slots=True)
class SquaredLoss(_DifferenceLoss):
    """The squared loss (chosen - rejected - 1 / (2 beta))^2 of IPO, arXiv 2310.12036 eq. 17, where beta is called tau.

    The authors of IPO use scores that are means over tokens.
    """

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """Return the loss of every pair, shape [P]."""
        return (chosen - rejected - 0.5 / beta).square()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExoPairLoss(_DifferenceLoss):
    """The loss of EXO, arXiv 2402.00856 eq. 16: KL(the model's preference || labels smoothed by `label_smoothing`)."""

    label_smoothing: float = 1e-3
    """Smoothing of the labels, e; above 0 and below 1/2."""

    def __post_init__(self) -> None:
        if not 0 < self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be > 0 and < 0.5 for EXO, got {self.label_smoothing}")

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """Return the loss of every pair, shape [P]."""
        z = beta * (chosen - rejected)
        noise = torch.tensor(self.label_smoothing, dtype=z.dtype, device=z.device)
        right = torch.sigmoid(z) * (logsigmoid(z) - torch.log1p(-noise))
        return right + torch.sigmoid(-z) * (logsigmoid(-z) - noise.log())


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscopopLoss(_DifferenceLoss):
    """The loss of DiscoPOP, arXiv 2406.08414 eq. 5: (1 - m) (-log sigmoid(z)) + m exp(-z).

    z = beta (chosen - rejected) and m = sigmoid(z / tau).
    """

    tau: float = 0.05
    """Temperature of the mixing weight m; above 0 and below 1."""

    def __post_init__(self) -> None:
        if not 0 < self.tau < 1:
            raise ValueError(f"tau must be > 0 and < 1 (otherwise the loss is unbounded), got {self.tau}")

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """Return the loss of every pair, shape [P]."""
        z = beta * (chosen - rejected)
        exponential = (logsigmoid(z / self.tau) - z).exp()  # as one exponential it cannot overflow
        return exponential - torch.sigmoid(-z / self.tau) * logsigmoid(z)


@dataclass(frozen=True, kw_only=True, slots=True)
class NcaPairLoss(_ScoreLoss):
    """The loss of NCA, arXiv 2402.05369: -ls(beta s_w) - ls(-beta s_w) / 2 - ls(-beta s_l) / 2.

    s_w and s_l are the scores of the chosen and the rejected answer, and ls is log sigmoid.
    """

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """Return the loss of every pair, shape [P]."""
        better, worse = beta * chosen, beta * rejected
        return -logsigmoid(better) - 0.5 * logsigmoid(-better) - 0.5 * logsigmoid(-worse)


@dataclass(frozen=True, kw_only=True, slots=True)
class SppoHardLoss(_ScoreLoss):
    """The loss of SPPO, arXiv 2405.00675 eq. 4.7, with hard labels.

    (s_w - 1 / (2 beta))^2 + (s_l + 1 / (2 beta))^2, where s_w and s_l are the scores of the chosen and the rejected
    answer.
    """

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """Return the loss of every pair, shape [P]."""
        return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


@dataclass(frozen=True, kw_only=True, slots=True)
class ApoZeroLoss(_ScoreLoss):
    """The loss of APO-zero, arXiv 2408.06266 eq. 7: sigmoid(-beta chosen) + sigmoid(beta rejected)."""

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """Return the loss of every pair, shape [P]."""
        return torch.sigmoid(-beta * chosen) + torch.sigmoid(beta * rejected)


@dataclass(frozen=True, kw_only=True, slots=True)
class ApoDownLoss(_ScoreLoss):
    """The loss of APO-down, arXiv 2408.06266 eq. 8, for chosen answers that are worse than the policy's answers.

    sigmoid(beta chosen) + sigmoid(-beta (chosen - rejected)), a function of the two scores.
    """

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """Return the loss of every pair, shape [P]."""
        return torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * (chosen - rejected))


@dataclass(frozen=True, kw_only=True, slots=True)
class OddsRatioLoss(_ScoreLoss):
    """The loss of ORPO, arXiv 2403.07691 eq. 6: -beta log sigmoid(log odds(chosen) - log odds(rejected)).

    A score is the log-prob log p of an answer, and its odds are p / (1 - p).

    `beta` is the paper's lambda. Scores must be mean log-probs without a reference.
    """

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """Return the loss of every pair, shape [P]."""
        return -beta * logsigmoid(log_odds(chosen) - log_odds(rejected))

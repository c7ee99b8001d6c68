"""Forms of pair losses: functions of the scores of a pair.

With s_w, s_l the scores of the chosen and the rejected answer (see `PreferenceLoss`), d = s_w - s_l, z = beta d, and
ls = log sigmoid. Each form is a picklable callable `(chosen [P], rejected [P], beta) -> losses [P]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from roll.algorithms.probabilities import log_odds

__all__ = [
    "ApoDown",
    "ApoZero",
    "Discopop",
    "ExoPair",
    "Hinge",
    "NcaPair",
    "OddsRatio",
    "PairForm",
    "Sigmoid",
    "SppoHard",
    "Squared",
]


class PairForm(Protocol):
    """Interface of forms."""

    takes_margin: ClassVar[bool]
    """Whether the form depends only on the difference of the scores, so that a margin can shift the difference."""

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """Return the loss of every pair, shape [P]."""
        ...


class _OfDifference:
    """A form that depends only on d."""

    __slots__ = ()

    takes_margin: ClassVar[bool] = True


class _OfEach:
    """A form that also compares each score with a constant."""

    __slots__ = ()

    takes_margin: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Sigmoid(_OfDifference):
    """-ls(z): DPO, arXiv 2305.18290 eq. 7, and other methods with a Bradley-Terry model of preferences.

    With label smoothing e, the assumed share of wrong labels, it is conservative DPO (Mitchell, "A note on DPO with
    noisy preferences", 2023): -(1 - e) ls(z) - e ls(-z). With `robust`, the loss is unbiased under that noise instead,
    arXiv 2403.00409: [-(1 - e) ls(z) + e ls(-z)] / (1 - 2 e).
    """

    label_smoothing: float = 0.0
    """e, 0 … below 1/2."""
    robust: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing is {self.label_smoothing}: it is a share of labels, 0 … below 0.5")

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """See `PairForm`."""
        z, noise = beta * (chosen - rejected), self.label_smoothing
        if self.robust:
            return (noise * logsigmoid(-z) - (1.0 - noise) * logsigmoid(z)) / (1.0 - 2.0 * noise)
        return -(1.0 - noise) * logsigmoid(z) - noise * logsigmoid(-z)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hinge(_OfDifference):
    """max(0, 1 - z): SLiC, arXiv 2305.10425, on DPO's scores as in RSO, arXiv 2309.06657."""

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """See `PairForm`."""
        return torch.relu(1.0 - beta * (chosen - rejected))


@dataclass(frozen=True, kw_only=True, slots=True)
class Squared(_OfDifference):
    """(d - 1 / (2 beta))^2: IPO, arXiv 2310.12036 eq. 17, with beta as its tau. Its authors use means over tokens."""

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """See `PairForm`."""
        return (chosen - rejected - 0.5 / beta).square()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExoPair(_OfDifference):
    """KL(model's preference || labels smoothed by e): EXO, arXiv 2402.00856 eq. 16."""

    label_smoothing: float = 1e-3
    """e, above 0 and below 1/2."""

    def __post_init__(self) -> None:
        if not 0 < self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing is {self.label_smoothing}: EXO needs one above 0 and below 0.5")

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """See `PairForm`."""
        z = beta * (chosen - rejected)
        noise = torch.tensor(self.label_smoothing, dtype=z.dtype, device=z.device)
        right = torch.sigmoid(z) * (logsigmoid(z) - torch.log1p(-noise))
        return right + torch.sigmoid(-z) * (logsigmoid(-z) - noise.log())


@dataclass(frozen=True, kw_only=True, slots=True)
class Discopop(_OfDifference):
    """(1 - m) (-ls(z)) + m exp(-z) with m = sigmoid(z / tau): DiscoPOP, arXiv 2406.08414 eq. 5."""

    tau: float = 0.05
    """Above 0 and below 1."""

    def __post_init__(self) -> None:
        if not 0 < self.tau < 1:
            raise ValueError(f"tau is {self.tau}: it must lie between 0 and 1, or the loss has no bound")

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """See `PairForm`."""
        z = beta * (chosen - rejected)
        exponential = (logsigmoid(z / self.tau) - z).exp()  # as one exponential it cannot overflow
        return exponential - torch.sigmoid(-z / self.tau) * logsigmoid(z)


@dataclass(frozen=True, kw_only=True, slots=True)
class NcaPair(_OfEach):
    """-ls(beta s_w) - ls(-beta s_w) / 2 - ls(-beta s_l) / 2: NCA, arXiv 2402.05369."""

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """See `PairForm`."""
        better, worse = beta * chosen, beta * rejected
        return -logsigmoid(better) - 0.5 * logsigmoid(-better) - 0.5 * logsigmoid(-worse)


@dataclass(frozen=True, kw_only=True, slots=True)
class SppoHard(_OfEach):
    """(s_w - 1 / (2 beta))^2 + (s_l + 1 / (2 beta))^2: SPPO, arXiv 2405.00675 eq. 4.7, with certain (hard) winners."""

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """See `PairForm`."""
        return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


@dataclass(frozen=True, kw_only=True, slots=True)
class ApoZero(_OfEach):
    """sigmoid(-beta s_w) + sigmoid(beta s_l): APO-zero, arXiv 2408.06266 eq. 7."""

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """See `PairForm`."""
        return torch.sigmoid(-beta * chosen) + torch.sigmoid(beta * rejected)


@dataclass(frozen=True, kw_only=True, slots=True)
class ApoDown(_OfEach):
    """sigmoid(beta s_w) + sigmoid(-z): APO-down, arXiv 2408.06266 eq. 8, for chosen answers below the policy's own."""

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """See `PairForm`."""
        return torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * (chosen - rejected))


@dataclass(frozen=True, kw_only=True, slots=True)
class OddsRatio(_OfEach):
    """-beta ls(log odds_w - log odds_l), odds = p / (1 - p), log p = s: ORPO, arXiv 2403.07691 eq. 6.

    `beta` is the paper's lambda. Scores must be mean log-probs without a reference.
    """

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """See `PairForm`."""
        return -beta * logsigmoid(log_odds(chosen) - log_odds(rejected))

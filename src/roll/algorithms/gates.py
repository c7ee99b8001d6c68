"""Gates: how a ratio r and an advantage A become an objective per token, to be maximised.

Each is a few lines, a picklable callable `(log_ratio [N], logprobs [N], advantages [N]) -> objective [N]`. At r = 1 the
gradient of every one of them is that of A log pi, except for weights that are its own (`SignSplit`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "Bounds",
    "DualClip",
    "Gate",
    "LogProb",
    "MinClip",
    "NoGate",
    "SignSplit",
    "SoftGate",
    "SquaredPenalty",
    "StopGradient",
]

Bounds: TypeAlias = tuple[float, float]


class Gate(Protocol):
    """The seam."""

    @property
    def bounds(self) -> Bounds:
        """Ratios outside count as clipped in the metrics."""
        ...

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """Objective of every token [N]."""
        ...


_UNBOUNDED: Bounds = (0.0, float("inf"))


@dataclass(frozen=True, kw_only=True, slots=True)
class MinClip:
    """min(r A, clip(r, 1 - low, 1 + high) A): PPO, arXiv 1707.06347 eq. 7."""

    low: float = 0.2
    high: float = 0.2

    @property
    def bounds(self) -> Bounds:
        """Of the clip."""
        return 1.0 - self.low, 1.0 + self.high

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """See `Gate`."""
        ratio = log_ratio.exp()
        return torch.minimum(ratio * advantages, ratio.clamp(*self.bounds) * advantages)


@dataclass(frozen=True, kw_only=True, slots=True)
class DualClip:
    """`MinClip`, and where A < 0 never below bound x A: arXiv 1912.09729 eq. 5."""

    low: float = 0.2
    high: float = 0.2
    bound: float = 3.0

    @property
    def bounds(self) -> Bounds:
        """Of the inner clip."""
        return 1.0 - self.low, 1.0 + self.high

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """See `Gate`."""
        inner = MinClip(low=self.low, high=self.high)(log_ratio, logprobs, advantages)
        return torch.where(advantages < 0, torch.maximum(inner, self.bound * advantages), inner)


@dataclass(frozen=True, kw_only=True, slots=True)
class StopGradient:
    """sg(clip(r, lower, upper)) A log pi.

    (0, 1) is TIS (arXiv 2510.11345), (1 - e, 1 + e) CISPO (arXiv 2506.13585). `mask` drops a token whose ratio has left
    the bounds in the direction of its advantage, as PPO's clip does (CISPO's unified mask).
    """

    lower: float = 0.0
    upper: float = 1.0
    mask: bool = False

    @property
    def bounds(self) -> Bounds:
        """Of the weight."""
        return self.lower, self.upper

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """See `Gate`."""
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(self.lower, self.upper)
        if self.mask:
            gone = ((advantages > 0) & (ratio > self.upper)) | ((advantages < 0) & (ratio < self.lower))
            weight = weight.masked_fill(gone, 0.0)
        return weight * advantages * logprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class SignSplit:
    """A > 0: w+ A log pi. A <= 0: w- sg(clip(r, lower, upper)) A log pi: TOPR, arXiv 2503.14286 eq. 8."""

    positive_weight: float = 1.0
    negative_weight: float = 1.0
    lower: float = 0.0
    upper: float = 1.0

    @property
    def bounds(self) -> Bounds:
        """Of the weight of negative tokens."""
        return self.lower, self.upper

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """See `Gate`."""
        tapered = self.negative_weight * log_ratio.detach().exp().clamp(self.lower, self.upper)
        weight = torch.where(advantages > 0, torch.full_like(tapered, self.positive_weight), tapered)
        return weight * advantages * logprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class NoGate:
    """r A."""

    @property
    def bounds(self) -> Bounds:
        """None."""
        return _UNBOUNDED

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """See `Gate`."""
        return log_ratio.exp() * advantages


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProb:
    """A log pi, whatever the ratio: REINFORCE (Williams 1992)."""

    @property
    def bounds(self) -> Bounds:
        """None."""
        return _UNBOUNDED

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """See `Gate`."""
        return advantages * logprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class SquaredPenalty:
    """A log pi - tau/2 (log r)^2: Kimi k1.5, arXiv 2501.12599 section 2.3.2."""

    tau: float = 0.1

    @property
    def bounds(self) -> Bounds:
        """None."""
        return _UNBOUNDED

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """See `Gate`."""
        return advantages * logprobs - 0.5 * self.tau * log_ratio.square()


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftGate:
    """4/tau sigmoid(tau (r - 1)) A, with a tau for each sign of A: SAPO, arXiv 2511.20347 eq. 6."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    @property
    def bounds(self) -> Bounds:
        """None: it fades without a bound."""
        return _UNBOUNDED

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """See `Gate`."""
        ratio = log_ratio.exp()
        tau = torch.where(
            advantages > 0, torch.full_like(ratio, self.tau_positive), torch.full_like(ratio, self.tau_negative)
        )
        return 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantages

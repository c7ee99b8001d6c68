"""Gates: functions of a ratio r and an advantage A that return an objective per token, to be maximized.

A gate is a picklable callable `(log_ratio [N], logprobs [N], advantages [N]) -> objective [N]`; see `Gate`. At r = 1
the gradient of every gate is that of A log pi, up to a gate's own weights (`SignSplit`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from roll.errors import ConfigError, find_raise_location, one_line_error
from roll.user_code import check_call, load_function

__all__ = [
    "DualClip",
    "Gate",
    "LogProbGate",
    "MinClip",
    "NoGate",
    "SignSplit",
    "SoftGate",
    "SquaredPenalty",
    "StopGradient",
    "UserGate",
]


class Gate(Protocol):
    """Interface of gates: functions from log-ratio and advantage to an objective per token."""

    @property
    def uses_ratio(self) -> bool:
        """True if the gate takes the exponential of the log-ratio, which must then be clamped."""
        ...

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """Return the objective of every token, shape [N]."""
        ...

    def compute_clip_mask(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return a mask [N] of the tokens whose objective is clipped, for the metric `clip_fraction`."""
        ...


class _ExponentialGate:
    """Base class of gates that exponentiate the log-ratio."""

    __slots__ = ()

    @property
    def uses_ratio(self) -> bool:
        return True


class _UnboundedGate(_ExponentialGate):
    """Base class of gates that exponentiate the log-ratio and have no bound."""

    __slots__ = ()

    def compute_clip_mask(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        return torch.zeros_like(ratio, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class MinClip(_ExponentialGate):
    """PPO's objective min(r A, clip(r, 1 - low, 1 + high) A) of ratio r and advantage A, arXiv 1707.06347 eq. 7."""

    low: float = 0.2
    high: float = 0.2

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        ratio = log_ratio.exp()
        # PPO, arXiv 1707.06347 eq. 7: the minimum is a lower bound of the unclipped objective.
        return torch.minimum(ratio * advantages, ratio.clamp(1.0 - self.low, 1.0 + self.high) * advantages)

    def compute_clip_mask(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        return ((ratio > 1.0 + self.high) & (advantages > 0)) | ((ratio < 1.0 - self.low) & (advantages < 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class DualClip(MinClip):
    """`MinClip` with a lower bound where the advantage A is negative: `bound` x A, arXiv 1912.09729 eq. 5."""

    bound: float = 3.0

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        inner = MinClip.__call__(self, log_ratio, logprobs, advantages)
        # arXiv 1912.09729 eq. 5: PPO's minimum does not bound the objective for A < 0, where the ratio can grow freely.
        return torch.where(advantages < 0, torch.maximum(inner, self.bound * advantages), inner)

    def compute_clip_mask(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        return MinClip.compute_clip_mask(self, ratio, advantages) | ((ratio > self.bound) & (advantages < 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class StopGradient(_ExponentialGate):
    """The objective sg(clip(r, lower, upper)) A log pi of ratio r and advantage A; sg stops the gradient.

    Bounds of (0, 1) give TIS (arXiv 2510.11345), (1 - e, 1 + e) CISPO (arXiv 2506.13585). `mask` drops a token whose
    ratio has left the bounds in the direction of its advantage, as PPO's clip does (CISPO's unified mask).
    """

    lower: float = 0.0
    upper: float = 1.0
    mask: bool = False

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        # The ratio is a weight (sg in the formula): the gradient flows only through log pi, also outside the bounds.
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(self.lower, self.upper)
        if self.mask:
            gone = ((advantages > 0) & (ratio > self.upper)) | ((advantages < 0) & (ratio < self.lower))
            weight = weight.masked_fill(gone, 0.0)
        return weight * advantages * logprobs

    def compute_clip_mask(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        return (ratio > self.upper) | (ratio < self.lower)


@dataclass(frozen=True, kw_only=True, slots=True)
class SignSplit(_ExponentialGate):
    """The objective of TOPR, arXiv 2503.14286 eq. 8, which clips the ratio r where the advantage A is not positive.

    A > 0: `positive_weight` A log pi. A <= 0: `negative_weight` sg(clip(r, lower, upper)) A log pi, where sg stops the
    gradient.
    """

    positive_weight: float = 1.0
    negative_weight: float = 1.0
    lower: float = 0.0
    upper: float = 1.0

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        # TOPR, arXiv 2503.14286 eq. 8: only answers with A <= 0 are tapered, since these can drive the loss to
        # infinity.
        tapered = self.negative_weight * log_ratio.detach().exp().clamp(self.lower, self.upper)
        weight = torch.where(advantages > 0, torch.full_like(tapered, self.positive_weight), tapered)
        return weight * advantages * logprobs

    def compute_clip_mask(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        return ((ratio > self.upper) | (ratio < self.lower)) & (advantages < 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoGate(_UnboundedGate):
    """The objective r A, ratio times advantage, without a bound."""

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return log_ratio.exp() * advantages


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProbGate(_UnboundedGate):
    """REINFORCE's objective A log pi (Williams 1992): advantage times log-prob, without a ratio."""

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return advantages * logprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class SquaredPenalty(_UnboundedGate):
    """The objective A log pi - tau/2 (log r)^2 of Kimi k1.5, arXiv 2501.12599 section 2.3.2.

    A is the advantage, r the ratio.
    """

    tau: float = 0.1

    @property
    def uses_ratio(self) -> bool:
        return False

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        # Kimi k1.5, arXiv 2501.12599 section 2.3.2: the square regularizes towards the old policy without a bound.
        return advantages * logprobs - 0.5 * self.tau * log_ratio.square()


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftGate(_UnboundedGate):
    """The objective 4/tau sigmoid(tau (r - 1)) A of SAPO, arXiv 2511.20347 eq. 6, of ratio r and advantage A.

    tau depends on the sign of A.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        ratio = log_ratio.exp()
        positive, negative = (torch.full_like(ratio, tau) for tau in (self.tau_positive, self.tau_negative))
        tau = torch.where(advantages > 0, positive, negative)
        # SAPO, arXiv 2511.20347 eq. 6: the factor 4 / tau gives the gradient weight 1 at ratio 1 for every tau.
        return 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantages


@dataclass(frozen=True, kw_only=True, slots=True)
class UserGate:
    """A user-defined gate. It is built in the process that uses it, so it does not have to be picklable."""

    path: str
    """`package.module:Class`, or `path/to/file.py:Class`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""

    @property
    def uses_ratio(self) -> bool:
        return getattr(self._build(), "uses_ratio", True)

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return self._build()(log_ratio, logprobs, advantages)

    def compute_clip_mask(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return the clip mask of the user's gate; all false if the gate has no method `compute_clip_mask`."""
        gate = self._build()
        method = getattr(gate, "compute_clip_mask", None) or getattr(gate, "clipped", None)  # a former name
        return torch.zeros_like(ratio, dtype=torch.bool) if method is None else method(ratio, advantages)

    def check(self) -> None:
        """Build the gate and check that it is callable.

        Raises:
            ConfigError: The class cannot be imported, does not accept its options, or is not callable as a gate.
        """
        gate = self._build()
        if not callable(gate):
            raise ConfigError(f"gate '{self.path}' is not callable: its class must define `__call__` as `Gate` does.")
        check_call(gate, f"gate '{self.path}'", "log_ratio", "logprobs", "advantages")

    def _build(self) -> Gate:
        factory = load_function(self.path, "gate")
        try:
            return cast(Gate, factory(**self.options))
        except Exception as error:
            raise ConfigError(
                f"gate '{self.path}' cannot be created with algorithm.gate.options {dict(self.options)} "
                f"({find_raise_location(error)}): {one_line_error(error)}"
            ) from error

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

from roll.errors import ConfigError, one_line_error, raised_at
from roll.user_code import check_call, load_function

__all__ = [
    "DualClip",
    "Gate",
    "LogProb",
    "MinClip",
    "NoGate",
    "SignSplit",
    "SoftGate",
    "SquaredPenalty",
    "StopGradient",
    "UserGate",
]


class Gate(Protocol):
    """Interface of gates."""

    @property
    def exponentiates(self) -> bool:
        """Whether the gate takes the exponential of the log-ratio, which must then be clamped."""
        ...

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """Return the objective of every token, shape [N]."""
        ...

    def clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return a mask [N], for metrics, of the tokens whose objective a bound changes."""
        ...


class _Exponential:
    """A gate that exponentiates the log-ratio."""

    __slots__ = ()

    @property
    def exponentiates(self) -> bool:
        return True


class _Unbounded(_Exponential):
    """A gate without a bound."""

    __slots__ = ()

    def clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        return torch.zeros_like(ratio, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class MinClip(_Exponential):
    """min(r A, clip(r, 1 - low, 1 + high) A): PPO, arXiv 1707.06347 eq. 7."""

    low: float = 0.2
    high: float = 0.2

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        ratio = log_ratio.exp()
        return torch.minimum(ratio * advantages, ratio.clamp(1.0 - self.low, 1.0 + self.high) * advantages)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        return ((ratio > 1.0 + self.high) & (advantages > 0)) | ((ratio < 1.0 - self.low) & (advantages < 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class DualClip(MinClip):
    """`MinClip` that, where A < 0, is never below bound x A: arXiv 1912.09729 eq. 5."""

    bound: float = 3.0

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        inner = MinClip.__call__(self, log_ratio, logprobs, advantages)
        return torch.where(advantages < 0, torch.maximum(inner, self.bound * advantages), inner)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        return MinClip.clipped(self, ratio, advantages) | ((ratio > self.bound) & (advantages < 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class StopGradient(_Exponential):
    """sg(clip(r, lower, upper)) A log pi.

    (0, 1) is TIS (arXiv 2510.11345), (1 - e, 1 + e) CISPO (arXiv 2506.13585). `mask` drops a token whose ratio has left
    the bounds in the direction of its advantage, as PPO's clip does (CISPO's unified mask).
    """

    lower: float = 0.0
    upper: float = 1.0
    mask: bool = False

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(self.lower, self.upper)
        if self.mask:
            gone = ((advantages > 0) & (ratio > self.upper)) | ((advantages < 0) & (ratio < self.lower))
            weight = weight.masked_fill(gone, 0.0)
        return weight * advantages * logprobs

    def clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        return (ratio > self.upper) | (ratio < self.lower)


@dataclass(frozen=True, kw_only=True, slots=True)
class SignSplit(_Exponential):
    """A > 0: w+ A log pi. A <= 0: w- sg(clip(r, lower, upper)) A log pi: TOPR, arXiv 2503.14286 eq. 8."""

    positive_weight: float = 1.0
    negative_weight: float = 1.0
    lower: float = 0.0
    upper: float = 1.0

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        tapered = self.negative_weight * log_ratio.detach().exp().clamp(self.lower, self.upper)
        weight = torch.where(advantages > 0, torch.full_like(tapered, self.positive_weight), tapered)
        return weight * advantages * logprobs

    def clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        return ((ratio > self.upper) | (ratio < self.lower)) & (advantages < 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoGate(_Unbounded):
    """r A."""

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return log_ratio.exp() * advantages


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProb(_Unbounded):
    """A log pi, whatever the ratio: REINFORCE (Williams 1992)."""

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return advantages * logprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class SquaredPenalty(_Unbounded):
    """A log pi - tau/2 (log r)^2: Kimi k1.5, arXiv 2501.12599 section 2.3.2."""

    tau: float = 0.1

    @property
    def exponentiates(self) -> bool:
        return False

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return advantages * logprobs - 0.5 * self.tau * log_ratio.square()


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftGate(_Unbounded):
    """4/tau sigmoid(tau (r - 1)) A, with a tau for each sign of A: SAPO, arXiv 2511.20347 eq. 6."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        ratio = log_ratio.exp()
        positive, negative = (torch.full_like(ratio, tau) for tau in (self.tau_positive, self.tau_negative))
        tau = torch.where(advantages > 0, positive, negative)
        return 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantages


@dataclass(frozen=True, kw_only=True, slots=True)
class UserGate:
    """A user-defined gate; it is built in the process that runs it, so it need not be picklable."""

    path: str
    """`package.module:Class`, or `path/to/file.py:Class`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""

    @property
    def exponentiates(self) -> bool:
        return getattr(self._build(), "exponentiates", True)

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return self._build()(log_ratio, logprobs, advantages)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return the user gate's `clipped`; a gate without that method is treated as unbounded."""
        own = getattr(self._build(), "clipped", None)
        return torch.zeros_like(ratio, dtype=torch.bool) if own is None else own(ratio, advantages)

    def check(self) -> None:
        """Build the gate and check that it is callable.

        Raises:
            ConfigError: The class cannot be imported, does not accept its options, or is not callable as a gate.
        """
        gate = self._build()
        if not callable(gate):
            raise ConfigError(f"gate '{self.path}' cannot be called: give its class `__call__`, as `Gate` has it.")
        check_call(gate, f"gate '{self.path}'", "log_ratio", "logprobs", "advantages")

    def _build(self) -> Gate:
        factory = load_function(self.path, "gate")
        try:
            return cast(Gate, factory(**self.options))
        except Exception as error:
            raise ConfigError(
                f"gate '{self.path}' cannot be built with algorithm.gate.options {dict(self.options)} "
                f"({raised_at(error)}): {one_line_error(error)}"
            ) from error

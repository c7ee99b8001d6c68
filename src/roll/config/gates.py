"""The registries of policy losses and of gates, and the settings of each gate.

To add a gate, add its section and its entry here, and its class to `roll.algorithms.gates`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from roll.config.base import EXTENSION_PATTERN, Section, option, path_option
from roll.extensions import ExtensibleRegistry

__all__ = ["GATES", "LOSSES", "GateConfig", "MinClipConfig"]

LOSSES: ExtensibleRegistry[Callable[..., Any]] = ExtensibleRegistry("loss", {}, group="roll.losses")
"""Functions of `LossInputs`, used instead of the loss composed of ratio, gate, KL and entropy."""
GATES: ExtensibleRegistry[Callable[..., Any]] = ExtensibleRegistry(
    "gate",
    {
        "min_clip": "roll.algorithms.gates:MinClip",
        "dual_clip": "roll.algorithms.gates:DualClip",
        "stop_gradient": "roll.algorithms.gates:StopGradient",
        "sign_split": "roll.algorithms.gates:SignSplit",
        "none": "roll.algorithms.gates:NoGate",
        "log_prob": "roll.algorithms.gates:LogProbGate",
        "squared_penalty": "roll.algorithms.gates:SquaredPenalty",
        "soft": "roll.algorithms.gates:SoftGate",
    },
    group="roll.gates",
)


class _ClipRange(Section):
    low: float = option(0.2, "Lower clip range: the ratio is clipped from below at 1 - low.", ge=0, le=1)
    high: float = option(0.2, "Upper clip range: the ratio is clipped from above at 1 + high.", ge=0)


class MinClipConfig(_ClipRange):
    """min(r A, clip(r, 1 - low, 1 + high) A): PPO, arXiv 1707.06347."""

    type: Literal["min_clip"] = option(..., "Objective type.")


class DualClipConfig(_ClipRange):
    """`min_clip` with the lower bound `bound` x A for negative advantages (dual-clip PPO): arXiv 1912.09729."""

    type: Literal["dual_clip"] = option(..., "Objective type.")
    bound: float = option(3.0, "Dual-clip constant c: upper bound of the ratio for negative advantages.", gt=1)


_GateWithBounds = TypeVar("_GateWithBounds", "StopGradientConfig", "SignSplitConfig")


def _check_lower_and_upper(gate: _GateWithBounds) -> _GateWithBounds:
    if gate.lower > gate.upper:
        raise ValueError(f"lower must be <= upper, got {gate.lower} and {gate.upper}")
    return gate


class StopGradientConfig(Section):
    """sg(clip(r, lower, upper)) A log pi: TIS (0, 1), CISPO (1 - e, 1 + e)."""

    type: Literal["stop_gradient"] = option(..., "Objective type.")
    lower: float = option(0.0, "Lower bound of the clipped ratio.", ge=0)
    upper: float = option(1.0, "Upper bound of the clipped ratio.", gt=0)
    mask: bool = option(
        False, "Whether to mask tokens whose ratio exceeds the clip range in the direction of the advantage."
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> StopGradientConfig:
        return _check_lower_and_upper(self)


class SignSplitConfig(Section):
    """A > 0: w+ A log pi. A <= 0: w- sg(clip(r, lower, upper)) A log pi: TOPR, arXiv 2503.14286."""

    type: Literal["sign_split"] = option(..., "Objective type.")
    positive_weight: float = option(1.0, "Weight w+ of tokens with positive advantage.", ge=0)
    negative_weight: float = option(1.0, "Weight w- of tokens with negative advantage.", ge=0)
    lower: float = option(0.0, "Lower bound of the clipped ratio of tokens with negative advantage.", ge=0)
    upper: float = option(1.0, "Upper bound of the clipped ratio of tokens with negative advantage.", gt=0)

    @model_validator(mode="after")
    def _check_bounds(self) -> SignSplitConfig:
        return _check_lower_and_upper(self)


class NoGateConfig(Section):
    """r A without clipping; in the first update, its gradient equals the gradient of A log pi."""

    type: Literal["none"] = option(..., "Objective type.")


class LogProbGateConfig(Section):
    """A log pi, without a ratio: REINFORCE."""

    type: Literal["log_prob"] = option(..., "Objective type.")


class SquaredPenaltyConfig(Section):
    """A log pi - tau/2 (log r)^2: Kimi k1.5, arXiv 2501.12599."""

    type: Literal["squared_penalty"] = option(..., "Objective type.")
    tau: float = option(0.1, "Weight of the squared log-ratio.", ge=0)


class SoftGateConfig(Section):
    """4/tau sigmoid(tau (r - 1)) A, with a tau for each sign of A: SAPO, arXiv 2511.20347."""

    type: Literal["soft"] = option(..., "Objective type.")
    tau_positive: float = option(1.0, "Steepness for positive advantages.", gt=0)
    tau_negative: float = option(1.05, "Steepness for negative advantages.", gt=0)


class PythonGateConfig(Section):
    """A user-defined surrogate objective; see `Gate` in `roll.algorithms.gates`."""

    type: Literal["python"] = option(..., "Objective type.")
    gate: str = path_option(
        ...,
        "Class of the surrogate objective: `package.module:Class`, `path/to/file.py:Class`, or the name that an "
        "installed package registers (entry points `roll.gates`).",
        pattern=EXTENSION_PATTERN,
        examples=["gates.py:Cubic"],
    )
    options: dict[str, Any] = option({}, "Keyword arguments of the class.")

    @field_validator("gate")
    @classmethod
    def _check_gate(cls, name: str) -> str:
        return GATES.validate_name(name)


GateConfig = Annotated[
    MinClipConfig
    | DualClipConfig
    | StopGradientConfig
    | SignSplitConfig
    | NoGateConfig
    | LogProbGateConfig
    | SquaredPenaltyConfig
    | SoftGateConfig
    | PythonGateConfig,
    Field(discriminator="type"),
]

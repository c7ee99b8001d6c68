"""Construction of losses from the settings of an algorithm or of a preference method."""

from __future__ import annotations

from typing import Any

from roll.algorithms.correction import Correction
from roll.algorithms.gates import Gate, UserGate
from roll.algorithms.losses import (
    AttentionCreditLoss,
    PolicyAndValueLoss,
    PolicyLoss,
    PreferenceLoss,
    UserLoss,
    ValueLoss,
)
from roll.algorithms.losses.preference import pairwise
from roll.config.algorithm import AlgorithmConfig
from roll.config.gates import GATES, LOSSES, GateConfig
from roll.config.preference import PreferenceLossSection
from roll.errors import ConfigError
from roll.protocols import LossFn
from roll.types import AttentionRange
from roll.user_code import check_call, load_function

__all__ = [
    "build_policy_loss",
    "build_preference_loss",
    "build_value_loss",
    "check_user_functions",
    "get_attention_range",
]


def check_user_functions(algorithm: AlgorithmConfig) -> None:
    """Import the user-defined loss, gate and advantage function before anything is started.

    Raises:
        ConfigError: A function cannot be imported, or does not accept its arguments.
    """
    if algorithm.advantage.function is not None:
        function = load_function(algorithm.advantage.function, "advantage function")
        check_call(function, f"advantage function '{algorithm.advantage.function}'", "episodes")
    if algorithm.loss is not None:
        UserLoss(path=LOSSES.path(algorithm.loss)).check()
    elif algorithm.gate.type == "python":
        UserGate(path=GATES.path(algorithm.gate.gate), options=algorithm.gate.options).check()


def get_attention_range(algorithm: AlgorithmConfig) -> AttentionRange | None:
    """Return the range for which the policy loss needs attention statistics; `None` if the loss needs none."""
    credit = algorithm.credit
    if credit.type == "none":
        return None
    return AttentionRange(window=credit.window, horizon=(credit.horizon_start, credit.horizon_end))


def build_policy_loss(algorithm: AlgorithmConfig, kl_coefficient: float | None = None) -> LossFn:
    """Build the policy loss of an algorithm.

    Args:
        algorithm: The algorithm's settings.
        kl_coefficient: An adaptive KL coefficient that replaces the configured one.
    """
    loss, observed, pattern = (
        _build_plain_policy_loss(algorithm, kl_coefficient),
        get_attention_range(algorithm),
        algorithm.credit.type,
    )
    if algorithm.shares_critic:
        loss = PolicyAndValueLoss(
            policy=loss, value=build_value_loss(algorithm), coefficient=algorithm.critic.coefficient
        )
    if observed is None or pattern == "none":
        return loss
    settings = algorithm.credit.model_dump(exclude={"type", "window", "horizon_start", "horizon_end"})
    return AttentionCreditLoss(loss=loss, range=observed, pattern=pattern, **settings)


def _build_plain_policy_loss(algorithm: AlgorithmConfig, kl_coefficient: float | None) -> LossFn:
    """Build the policy loss without attention credit and without the loss of a shared critic."""
    if algorithm.loss is not None:
        return UserLoss(path=LOSSES.path(algorithm.loss))
    coefficient = algorithm.kl.coefficient if kl_coefficient is None else kl_coefficient
    return PolicyLoss(
        ratio_level=algorithm.ratio.level,
        ratio_reduce=algorithm.ratio.reduce,
        ratio_against=algorithm.ratio.against,
        ratio_token_limit=algorithm.ratio.max_token_log_ratio,
        gate=_build_gate(algorithm.gate),
        aggregation=algorithm.aggregation,
        correction=Correction(**algorithm.correction.model_dump(exclude={"snapshots"})),
        kl_coefficient=coefficient if algorithm.kl.apply_to == "loss" else 0.0,
        kl_estimator=algorithm.kl.estimator,
        entropy_coefficient=algorithm.entropy.coefficient,
    )


def _build_gate(section: GateConfig) -> Gate:
    if section.type == "python":
        return UserGate(path=GATES.path(section.gate), options=section.options)
    return GATES.get(section.type)(**section.model_dump(exclude={"type"}))


def build_value_loss(algorithm: AlgorithmConfig) -> ValueLoss:
    """Build the critics' loss of an algorithm."""
    return ValueLoss(clip=algorithm.critic.value_clip)


def build_preference_loss(section: PreferenceLossSection) -> PreferenceLoss:
    """Build the loss of a preference method on pairs of answers.

    Raises:
        ConfigError: A setting is invalid.
    """
    method = section.method
    try:
        pairwise_loss = getattr(pairwise, method.pairwise_loss)(
            **method.pairwise_arguments, **section.pairwise_settings
        )
        arguments: dict[str, Any] = {**method.arguments, **section.settings}
        return PreferenceLoss(pairwise_loss=pairwise_loss, **arguments)
    except ValueError as error:
        raise ConfigError(f"preference.type {section.type}: {error}.") from None

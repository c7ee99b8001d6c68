"""Checks whether the gradients of a run's groups can be computed before the step's other groups are known."""

from __future__ import annotations

from roll.config.algorithm import AlgorithmConfig
from roll.config.training import TrainingConfig

__all__ = ["find_streaming_problem"]


def find_streaming_problem(key: str, algorithm: AlgorithmConfig, training: TrainingConfig, scheduling_type: str) -> str:
    """Return the first setting that streamed gradients do not support, and its alternative; empty if there is none.

    Args:
        key: The key that requires streamed gradients.
        algorithm: The algorithm's settings.
        training: The training's settings.
        scheduling_type: `rollout.scheduling.type`.
    """
    for setting, applies, needed in [
        *_list_algorithm_conditions(algorithm),
        *_list_run_conditions(training, scheduling_type),
    ]:
        if applies:
            return f"{key} does not support {setting}; it requires {needed}"
    return ""


def _list_algorithm_conditions(algorithm: AlgorithmConfig) -> list[tuple[str, bool, str]]:
    """Return each unsupported setting (key and value), whether the algorithm uses it, and the supported alternative."""
    advantage, updates, single = algorithm.advantage, algorithm.updates, "advantages of single groups"
    scopes = {"mean": advantage.mean, "std": advantage.std}
    scaled = [f"{name} {scope}" for name, scope in scopes.items() if scope in ("batch", "running")]
    weights = [name for name in ("difficulty", "length") if getattr(algorithm.weights, name)]
    share = algorithm.filters.top_variance
    return [
        (
            f"algorithm.updates.num_minibatches {updates.num_minibatches}",
            updates.num_minibatches > 1,
            "one update per step: set num_minibatches to 1",
        ),
        (
            f"algorithm.updates.num_epochs {updates.num_epochs}",
            updates.num_epochs > 1,
            "one update per step: set num_epochs to 1",
        ),
        (
            f"algorithm.advantage.function {advantage.function}",
            advantage.function is not None,
            f"{single}, but a custom function may compare groups: remove it",
        ),
        (
            f"algorithm.loss {algorithm.loss}",
            algorithm.loss is not None,
            "a built-in loss, because the normalization of a custom loss is unknown: remove it",
        ),
        (
            "algorithm.advantage.estimator gae",
            algorithm.uses_critic,
            "advantages without critics: set estimator to outcome, token, turn or chunk",
        ),
        (f"algorithm.advantage.{' and '.join(scaled)}", bool(scaled), f"{single}: set mean and std to group or none"),
        (
            "algorithm.advantage.mean greedy",
            advantage.mean == "greedy",
            f"{single} without greedy answers: set mean to group, leave_one_out or none",
        ),
        (
            f"algorithm.advantage.whiten {advantage.whiten}",
            advantage.whiten != "none",
            f"{single}: set whiten to none",
        ),
        (f"algorithm.weights.{' and '.join(weights)}", bool(weights), f"{single}: set it to false"),
        (f"algorithm.filters.top_variance {share:g}", share < 1, "filters of single groups: set top_variance to 1"),
        (
            "algorithm.kl.apply_to reward",
            algorithm.uses_reference and algorithm.kl.apply_to == "reward",
            "a single pass over the policy, but this penalty requires the log-probs first: set apply_to to loss",
        ),
    ]


def _list_run_conditions(training: TrainingConfig, scheduling_type: str) -> list[tuple[str, bool, str]]:
    """Return the unsupported settings outside the algorithm, in the format of `_list_algorithm_conditions`."""
    return [
        (
            f"training.router_aux_loss {training.router_aux_loss:g}",
            training.router_aux_loss > 0,
            "no loss over the expert loads of the whole batch: set router_aux_loss to 0",
        ),
        (
            f"training.router_bias_rate {training.router_bias_rate:g}",
            training.router_bias_rate > 0,
            "no update from the expert loads of the whole batch: set router_bias_rate to 0",
        ),
        (
            f"training.backend {training.backend}",
            training.backend == "deepspeed",
            "a back-end that accumulates gradients over several calls: set backend to torch",
        ),
        (
            f"rollout.scheduling.type {scheduling_type}",
            scheduling_type == "batch",
            "groups that finish separately, but `batch` scores all groups together: set type to queue",
        ),
    ]

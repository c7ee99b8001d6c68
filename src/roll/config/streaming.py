"""Checks whether the gradients of a run's groups can be computed before the step's other groups are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roll.config.reinforcement_run import ReinforcementRunConfig

__all__ = ["find_streaming_problem"]


def find_streaming_problem(config: ReinforcementRunConfig) -> str:
    """Return the first key that `stream_training` does not support, and its alternative; empty if there is none."""
    algorithm, training = config.algorithm, config.training
    advantage, updates, scheduling = algorithm.advantage, algorithm.updates, config.rollout.scheduling
    scopes = {"mean": advantage.mean, "std": advantage.std}
    scaled = [f"{name} {scope}" for name, scope in scopes.items() if scope in ("batch", "running")]
    weights = [name for name in ("difficulty", "length") if getattr(algorithm.weights, name)]
    reinforced = algorithm.uses_reference and algorithm.kl.apply_to == "reward"
    problems = {
        f"algorithm.updates.num_minibatches {updates.num_minibatches}": (
            updates.num_minibatches > 1,
            "one update per step: set num_minibatches to 1",
        ),
        f"algorithm.updates.num_epochs {updates.num_epochs}": (
            updates.num_epochs > 1,
            "one update per step: set num_epochs to 1",
        ),
        f"algorithm.advantage.function {advantage.function}": (
            advantage.function is not None,
            "advantages of single groups, but your function may compare groups: remove it",
        ),
        f"algorithm.loss {algorithm.loss}": (
            algorithm.loss is not None,
            "a loss whose normalization is known, but yours is not: remove it",
        ),
        "algorithm.advantage.estimator gae": (
            algorithm.uses_critic,
            "advantages without critics: set algorithm.advantage.estimator to outcome, token, turn or chunk",
        ),
        f"algorithm.advantage.{' and '.join(scaled)}": (
            bool(scaled),
            "advantages of single groups: set mean and std to group or none",
        ),
        "algorithm.advantage.mean greedy": (
            advantage.mean == "greedy",
            "advantages of single groups without greedy answers: set mean to group, leave_one_out or none",
        ),
        f"algorithm.advantage.whiten {advantage.whiten}": (
            advantage.whiten != "none",
            "advantages of single groups: set whiten to none",
        ),
        f"algorithm.weights.{' and '.join(weights)}": (bool(weights), "advantages of single groups: set it to false"),
        f"algorithm.filters.top_variance {algorithm.filters.top_variance:g}": (
            algorithm.filters.top_variance < 1,
            "filters of single groups: set top_variance to 1",
        ),
        "algorithm.kl.apply_to reward": (
            reinforced,
            "one pass over the policy, but this penalty needs its log-probs first: set apply_to to loss",
        ),
        "demonstrations (expert_key or anchors)": (
            config.has_demonstrations,
            "groups without demonstrations: remove expert_key or anchors",
        ),
        f"training.router_aux_loss {training.router_aux_loss:g}": (
            training.router_aux_loss > 0,
            "no loss over the expert loads of the whole batch: set router_aux_loss to 0",
        ),
        f"training.router_bias_rate {training.router_bias_rate:g}": (
            training.router_bias_rate > 0,
            "no update from the expert loads of the whole batch: set router_bias_rate to 0",
        ),
        f"training.backend {training.backend}": (
            training.backend == "deepspeed",
            "a back-end that accumulates gradients over several calls: set training.backend to torch",
        ),
        f"rollout.scheduling.type {scheduling.type}": (
            scheduling.type == "batch",
            "groups that finish one after the other, but `batch` scores all at once: set type to queue",
        ),
        "cluster.offload_colocated true": (
            config.cluster.offload_colocated is True,
            "devices that only the trainer uses: map actor_train and actor_infer to different devices "
            "(cluster.device_mapping), and set offload_colocated to auto",
        ),
    }
    for key, (applies, needed) in problems.items():
        if applies:
            return f"rollout.scheduling.stream_training does not support {key}; it needs {needed}"
    return ""

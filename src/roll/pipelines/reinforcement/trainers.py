"""The trainers of a run with an `algorithm`: specs of policy, critics and reference.

policy      trained, and synced to engines
critics trained on returns, each on one part of the rollouts; started if `algorithm.critic` is used, unless the policy's
            network has a value head
reference   the initial policy: a frozen model, or the policy without its adapters, which needs no memory; for the
            divergence over the whole vocabulary, the policy's trainer loads it
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from roll.config.reinforcement_run import ReinforcementRunConfig
from roll.errors import ModelError
from roll.models import load_tokenizer, resolve_model
from roll.pipelines.learner import BaseModelScorer, Learner
from roll.pipelines.snapshots import PolicySnapshots
from roll.protocols import Scorer, TrainerGroup
from roll.training import Schedule, TrainerSpec

__all__ = [
    "build_critic_specs",
    "build_learner",
    "build_policy_spec",
    "build_reference",
    "build_reference_specs",
    "build_trainer_specs",
    "get_device_role",
    "resolve_critic_path",
]


def build_learner(config: ReinforcementRunConfig, started: Sequence[TrainerGroup]) -> Learner:
    """Build the learner from the started trainers, in the order of `build_trainer_specs`."""
    policy, *others = started
    num_critics = config.algorithm.num_critic_models
    return Learner(
        policy=policy,
        critics=tuple(others[:num_critics]),
        reference=build_reference(config, policy, others[num_critics:]),
        snapshots=PolicySnapshots(policy, config.num_snapshots) if config.algorithm.uses_snapshots else None,
        replays_experts=config.training.router_replay == "old",
        replays_engine=config.training.router_replay == "engine",
    )


def resolve_critic_path(config: ReinforcementRunConfig, model_path: Path) -> Path:
    """Return the path of the critics' backbone.

    Raises:
        ModelError: The model cannot be found, or its tokenizer differs from the policy's.
    """
    name = config.algorithm.critic.model
    if name is None or not config.algorithm.uses_critic:
        return model_path
    path = resolve_model(name)
    load = partial(load_tokenizer, trust_remote_code=config.model.trust_remote_code)
    if load(path).get_vocab() != load(model_path).get_vocab():
        raise ModelError(
            f"the tokenizer of algorithm.critic.model '{name}' differs from that of model.path '{config.model.path}', "
            "but a critic uses the policy's token ids: use a model of the same family."
        )
    return path


def build_trainer_specs(config: ReinforcementRunConfig, model_path: Path) -> list[TrainerSpec]:
    """Return the specs of a run's trainers: the policy, its critics, and the reference if it is a separate role.

    Raises:
        ModelError: The critics' model cannot be used.
    """
    return [
        build_policy_spec(config, model_path),
        *build_critic_specs(config, resolve_critic_path(config, model_path)),
        *build_reference_specs(config, model_path),
    ]


def get_device_role(spec: TrainerSpec) -> str:
    """Return the name of a trainer's role in the device mapping."""
    return "actor_train" if spec.role == "policy" else spec.role


def build_policy_spec(config: ReinforcementRunConfig, model_path: Path) -> TrainerSpec:
    """Return the trainer spec of the policy, for a single rank; a cluster adapts every spec to several ranks."""
    algorithm = config.algorithm
    return TrainerSpec(
        model_path=str(model_path),
        model=config.model,
        training=config.training,
        quantization=config.sent_quantization,
        sends_adapter=config.synced_adapter is not None,
        holds_reference=config.trainer_loads_reference,
        value_head_learning_rate=algorithm.critic.head_learning_rate if algorithm.shares_critic else None,
        schedule=Schedule.from_config(
            config.training,
            updates_per_step=algorithm.updates_per_step,
            idle_steps=algorithm.critic.warmup_steps if algorithm.uses_critic else 0,
        ),
        seed=config.seed,
    )


def build_critic_specs(config: ReinforcementRunConfig, backbone: Path) -> list[TrainerSpec]:
    """Return one spec per critic; empty if the algorithm uses none."""
    algorithm, critic = config.algorithm, config.algorithm.critic
    if not algorithm.num_critic_models:
        return []
    schedule = Schedule.from_config(
        config.training,
        updates_per_step=critic.num_epochs * algorithm.updates.num_minibatches,
        peak_learning_rate=critic.learning_rate,
    )
    return [
        TrainerSpec(
            model_path=str(backbone),
            model=config.model,
            training=config.training,
            role="critic",
            schedule=schedule,
            seed=config.seed + 1 + index,
        )
        for index in range(algorithm.num_critic_models)
    ]


def build_reference_specs(config: ReinforcementRunConfig, model_path: Path) -> list[TrainerSpec]:
    """Return the spec of the reference, if it is a separate role."""
    if not config.has_reference_role:
        return []
    return [TrainerSpec.for_frozen_model(model_path, config.model, config.training, config.seed)]


def build_reference(
    config: ReinforcementRunConfig, policy: TrainerGroup, separate: list[TrainerGroup]
) -> Scorer | None:
    """Return the model that computes `ref_logprobs`: the separate reference or, if `separate` is empty, the policy
    without adapters.

    Return `None` if the run needs no reference, or if the trainers load it themselves.
    """
    if not config.algorithm.uses_reference or config.trainer_loads_reference:
        return None
    return separate[0] if separate else BaseModelScorer(policy)

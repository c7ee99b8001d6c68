"""The trainers of a run with an `algorithm`: specs of policy, critics and reference.

policy      trained, and synced to engines
critics     trained on returns, each on its own share of the rollouts; started if `algorithm.critic` is used, unless
            the policy's network has a value head
reference   the initial policy: a frozen model, or the policy without its adapters, which needs no memory; for the
            divergence over the whole vocabulary, the policy's trainer holds it
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from roll.config.reinforcing import ReinforcingConfig
from roll.errors import ModelError
from roll.models import load_tokenizer, resolve_model
from roll.pipelines.learner import Learner, WithoutAdapters
from roll.pipelines.snapshots import PolicySnapshots
from roll.protocols import Scorer, TrainerGroup
from roll.training import Schedule, TrainerSpec

__all__ = [
    "critic_path",
    "critic_specs",
    "device_role",
    "learner_of",
    "policy_spec",
    "reference_of",
    "reference_specs",
    "trainer_specs",
]


def learner_of(config: ReinforcingConfig, started: Sequence[TrainerGroup]) -> Learner:
    """Build the learner from the started trainers, in the order of `trainer_specs`."""
    policy, *others = started
    num_critics = config.algorithm.num_critic_models
    return Learner(
        policy=policy,
        critics=tuple(others[:num_critics]),
        reference=reference_of(config, policy, others[num_critics:]),
        snapshots=PolicySnapshots(policy, config.num_snapshots) if config.algorithm.uses_snapshots else None,
        replays_experts=config.training.router_replay == "old",
        replays_engine=config.training.router_replay == "engine",
    )


def critic_path(config: ReinforcingConfig, model_path: Path) -> Path:
    """Return the path of the critics' backbone.

    Raises:
        ModelError: The model cannot be found, or has another tokenizer than the policy.
    """
    name = config.algorithm.critic.model
    if name is None or not config.algorithm.uses_critic:
        return model_path
    path = resolve_model(name)
    load = partial(load_tokenizer, trust_remote_code=config.model.trust_remote_code)
    if load(path).get_vocab() != load(model_path).get_vocab():
        raise ModelError(
            f"algorithm.critic.model '{name}' has another tokenizer than model.path '{config.model.path}': a critic "
            "reads the policy's tokens, so take a model of the same family."
        )
    return path


def trainer_specs(config: ReinforcingConfig, model_path: Path) -> list[TrainerSpec]:
    """Return the specs of a run's trainers: the policy, its critics, and the reference if it is a separate role.

    Raises:
        ModelError: The critics' model cannot be used.
    """
    return [
        policy_spec(config, model_path),
        *critic_specs(config, critic_path(config, model_path)),
        *reference_specs(config, model_path),
    ]


def device_role(spec: TrainerSpec) -> str:
    """Return the name of a trainer's role in the device mapping."""
    return "actor_train" if spec.role == "policy" else spec.role


def policy_spec(config: ReinforcingConfig, model_path: Path) -> TrainerSpec:
    """Return the trainer spec of the policy, for a single rank; a cluster adapts every spec to several ranks."""
    algorithm = config.algorithm
    return TrainerSpec(
        model_path=str(model_path),
        model=config.model,
        training=config.training,
        quantization=config.inference.quantization,
        holds_reference=config.trainer_holds_reference,
        value_head_learning_rate=algorithm.critic.head_learning_rate if algorithm.shares_critic else None,
        schedule=Schedule.of(
            config.training,
            updates_per_step=algorithm.updates_per_step,
            idle_steps=algorithm.critic.warmup_steps if algorithm.uses_critic else 0,
        ),
        seed=config.seed,
    )


def critic_specs(config: ReinforcingConfig, backbone: Path) -> list[TrainerSpec]:
    """Return one spec per critic; empty if the algorithm uses none."""
    algorithm, critic = config.algorithm, config.algorithm.critic
    if not algorithm.num_critic_models:
        return []
    schedule = Schedule.of(
        config.training,
        updates_per_step=critic.num_epochs * algorithm.updates.num_minibatches,
        peak=critic.learning_rate,
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


def reference_specs(config: ReinforcingConfig, model_path: Path) -> list[TrainerSpec]:
    """Return the spec of the reference, if it is a separate role."""
    if not config.starts_reference:
        return []
    return [TrainerSpec.frozen(model_path, config.model, config.training, config.seed)]


def reference_of(config: ReinforcingConfig, policy: TrainerGroup, own: list[TrainerGroup]) -> Scorer | None:
    """Return the model for `ref_logprobs`: the separate reference if one was started, else the policy without
    adapters.
    """
    if not config.algorithm.uses_reference or config.trainer_holds_reference:
        return None
    return own[0] if own else WithoutAdapters(policy)

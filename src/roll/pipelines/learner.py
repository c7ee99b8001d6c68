"""The trainers of a run: what policy, critics and reference are built from, and one step of any of them.

policy      trained, sent to engines
critics     trained on returns, each from its own share of the rollouts; started where `algorithm.critic` is used,
            unless the policy has a value head of its own
reference   the policy as it was at first: a frozen model, or the policy without its adapters, which costs nothing;
            for the divergence over the whole vocabulary the policy's own trainer keeps it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.config.pipelines.rlvr import RLVRConfig
from roll.errors import HalfUpdatedError, InfraError
from roll.pipelines.checkpoint_files import SavedRun
from roll.pipelines.run import Run
from roll.protocols import LossFn, Scorer, TrainerGroup
from roll.training import Schedule, TrainerSpec
from roll.types import Output, Outputs, StepResult, TrainingBatch

__all__ = [
    "Learner",
    "WithoutAdapters",
    "critic_specs",
    "device_role",
    "policy_spec",
    "reference_of",
    "reference_specs",
    "trainer_specs",
    "update",
]


class WithoutAdapters:
    """A policy with its LoRA adapters left out; implements `Scorer`."""

    def __init__(self, policy: TrainerGroup) -> None:
        self._policy = policy

    async def forward(self, batch: TrainingBatch, outputs: Outputs) -> Mapping[Output, list[Any]]:
        """See `Scorer.forward`."""
        return await self._policy.forward(batch, outputs, adapter=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """The roles that learn, and the one that they are compared with."""

    policy: TrainerGroup
    critics: tuple[TrainerGroup, ...]
    """Value models, where the algorithm has any."""
    reference: Scorer | None
    """The policy as it was at first, where something compares with it."""

    @classmethod
    def of(cls, config: RLVRConfig, started: Sequence[TrainerGroup]) -> Learner:
        """What was started from `trainer_specs`, in its order."""
        policy, *others = started
        num_critics = config.algorithm.num_critic_models
        return cls(
            policy=policy,
            critics=tuple(others[:num_critics]),
            reference=reference_of(config, policy, others[num_critics:]),
        )

    async def load(self, saved: SavedRun) -> None:
        """Restore what a checkpoint holds of the policy and the critics."""
        await self.policy.load(saved.trainer_path)
        for index, critic in enumerate(self.critics):
            await critic.load(saved.critic_path(index))


async def update(run: Run, trainer: TrainerGroup, batch: TrainingBatch, loss: LossFn) -> StepResult:
    """One optimiser step; where the first of a step fails before it moved a weight, the last boundary still stands."""
    is_first, run.mid_update = not run.mid_update, True
    try:
        return await trainer.train_step(batch, loss)
    except (HalfUpdatedError, InfraError):
        raise
    except Exception:
        run.mid_update = not (is_first and trainer.num_ranks == 1)  # other ranks would wait for the failed one
        raise


def trainer_specs(config: RLVRConfig, model_path: Path, critic_path: Path) -> list[TrainerSpec]:
    """All of a run: the policy, its critics, and the reference where it is a role of its own."""
    return [
        policy_spec(config, model_path),
        *critic_specs(config, critic_path),
        *reference_specs(config, model_path),
    ]


def device_role(spec: TrainerSpec) -> str:
    """What the device mapping calls the role of a trainer."""
    return "actor_train" if spec.role == "policy" else spec.role


def policy_spec(config: RLVRConfig, model_path: Path) -> TrainerSpec:
    """The policy, seen from its only rank; a cluster adapts it, and every other, to several."""
    algorithm = config.algorithm
    return TrainerSpec(
        model_path=str(model_path),
        model=config.model,
        training=config.training,
        holds_reference=config.trainer_holds_reference,
        value_head_learning_rate=algorithm.critic.head_learning_rate if algorithm.shares_critic else None,
        schedule=Schedule.of(
            config.training,
            updates_per_step=algorithm.updates_per_step,
            idle_steps=algorithm.critic.warmup_steps if algorithm.uses_critic else 0,
        ),
        seed=config.seed,
    )


def critic_specs(config: RLVRConfig, backbone: Path) -> list[TrainerSpec]:
    """One for each critic; none where the algorithm uses none."""
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


def reference_specs(config: RLVRConfig, model_path: Path) -> list[TrainerSpec]:
    """The reference, where it is a role of its own."""
    if not config.starts_reference:
        return []
    model, training = config.model, config.training
    return [TrainerSpec(model_path=str(model_path), model=model, training=training, role="reference", seed=config.seed)]


def reference_of(config: RLVRConfig, policy: TrainerGroup, own: list[TrainerGroup]) -> Scorer | None:
    """What says `ref_logprobs`: a model of its own where one was started, else the policy without its adapters."""
    if not config.algorithm.uses_reference or config.trainer_holds_reference:
        return None
    return own[0] if own else WithoutAdapters(policy)

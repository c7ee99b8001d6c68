"""The KL penalty and its adaptive coefficient, in steps that train demonstrations beside rollouts or alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll.algorithms.selection import select_training_rollouts
from roll.config.algorithm import AlgorithmConfig
from roll.config.rollout import RolloutConfig
from roll.pipelines.learner import Learner
from roll.pipelines.learning.state import LearningState
from roll.pipelines.learning.updates import UpdateResults, learn
from roll.types import Group, Prompt, PromptDraw, RewardResult, Rollout, StepResult, TrainingBatch

OWN, REF, SHOWN = -1.0, -1.5, -0.25
"""Log-probs of the policy's tokens by itself and by the reference, and of a demonstration's tokens by itself."""


def rollout(draw: PromptDraw, index: int, reward: float, length: int = 2, *, expert: bool = False) -> Rollout:
    return Rollout(
        draw_id=draw.draw_id,
        index=index,
        prompt=draw.prompt,
        prompt_token_ids=draw.token_ids,
        token_ids=np.full(length, 7, np.int32),
        logprobs=np.zeros(length, np.float32),
        policy_versions=np.zeros(length, np.int32),
        finish_reason="stop",
        text="",
        reward=RewardResult(value=reward),
        expert=expert,
    )


class Trainer:
    """Knows the log-prob of each kind of token; an update reports the divergence that `PolicyLoss` would."""

    def __init__(self, own: float, shown: float) -> None:
        self._own, self._shown = own, shown

    async def forward(self, batch: TrainingBatch, outputs: Sequence[str], options: Any = None) -> dict[str, list[Any]]:
        said = [np.full(len(s), self._shown if s.expert else self._own, np.float32) for s in batch.samples]
        return dict.fromkeys(outputs, said)

    async def train_step(self, batch: TrainingBatch, loss: Any) -> StepResult:
        return StepResult(loss=0.0, num_tokens=1, num_loss_tokens=batch.num_loss_tokens, stepped=True)


@contextmanager
def phase(name: str) -> Iterator[None]:
    yield


def learnt(rewards: Sequence[float], *, num_shown: int = 1, **algorithm: Any) -> tuple[UpdateResults, LearningState]:
    """A step over one group, whose prompt has demonstrations with reward 1."""
    settings = AlgorithmConfig.model_validate(algorithm)
    draw = PromptDraw(draw_id=0, prompt=Prompt(uid="d/0", domain="d", messages=()), token_ids=np.zeros(3, np.int32))
    group = Group(draw=draw, rollouts=tuple(rollout(draw, i, value) for i, value in enumerate(rewards)))
    shown = [rollout(draw, 100 + i, 1.0, length=5, expert=True) for i in range(num_shown)]
    selection = select_training_rollouts([group], settings, max_new_tokens=8, demonstrations=shown)
    state = LearningState(data={})
    run: Any = SimpleNamespace(
        seed=0, state=state, spans=SimpleNamespace(phase=phase), mid_update=False, has_trained=False
    )
    policy: Any = Trainer(OWN, SHOWN)
    reference: Any = Trainer(REF, -3.0)
    learner = Learner(policy=policy, reference=reference, critics=(policy,) * settings.num_critic_models)
    return asyncio.run(learn(run, learner, settings, selection, RolloutConfig())), state


@pytest.mark.parametrize("name", ["grpo", "ipa", "ppo", "asy_ppo", "reinforce_pp", "gi_gpo", "rebn"])
def test_imitation_kl_in_the_reward_of_demonstrations_alone_measures_nothing(name: str) -> None:
    kl = {"coefficient": 0.1, "apply_to": "reward", "target": 0.01, "horizon": 1}
    filters = {"skip_zero_variance": True, "refill": False}
    learned, state = learnt([0.0, 0.0], type=name, kl=kl, filters=filters)
    assert [s.expert for s in learned.batch.samples] == [True] and learned.has_new_weights
    assert "training/kl/reference" not in learned.metrics
    assert learned.metrics["training/kl/coefficient"] == 0.1 and state.kl_coefficient is None


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5)])
@pytest.mark.parametrize("num_shown", [0, 1, 3])
def test_imitation_kl_in_the_reward_is_measured_on_the_policys_own_tokens(
    estimator: str, expected: float, num_shown: int
) -> None:
    kl = {"coefficient": 0.1, "estimator": estimator, "apply_to": "reward", "target": 2 * expected, "horizon": 10}
    learned, state = learnt([1.0, 0.0], num_shown=num_shown, kl=kl)
    assert learned.metrics["training/kl/reference"] == pytest.approx(expected, rel=1e-6)
    # half of the target: 20 % less over 10 rollouts, of which the policy made 2
    assert state.kl_coefficient == pytest.approx(0.1 * (1 - 0.2 * 2 / 10))

"""Demonstrations beside the policy's rollouts: how they come about, what they weigh, and what they never touch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll.algorithms.selection import select_training_rollouts
from roll.algorithms.token_weights import add_advantages
from roll.config.algorithm import AlgorithmConfig
from roll.config.presets import PRESET_NAMES
from roll.data import ChatRenderer
from roll.data.samples import build_batch
from roll.envs.hosting import EnvHosts
from roll.errors import InfraError
from roll.models import load_tokenizer
from roll.pipelines.reinforcement.demonstrations import play_demonstrations
from roll.rollout import SamplingPlan
from roll.rollout.episode_replay import build_trajectory
from roll.rollout.episode_start import EpisodePlan
from roll.types import (
    Anchor,
    DrawOutcome,
    EnvironmentSettings,
    Group,
    Message,
    Prompt,
    PromptDraw,
    RewardResult,
    Rollout,
    SamplingParams,
    TrainingBatch,
    Turn,
)


class Scores:
    """Rewards as an environment gives them; the first `failures` calls find their verifier dead."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures

    async def __call__(self, rollout: Rollout) -> RewardResult:
        self.failures -= 1
        if self.failures >= 0:
            raise InfraError("no verifier")
        return RewardResult(value=float(sum(turn.reward for turn in rollout.turns)))


def parts_of(model: Path, *, failures: int = 0, weight: float = 1.0) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(
            algorithm=AlgorithmConfig.model_validate({"imitation": {"weight": weight}}),
            rollout=SimpleNamespace(max_attempts=2),
        ),
        policy_engines=SimpleNamespace(
            plan=SamplingPlan(purpose="train", group_size=4, sampling=SamplingParams(max_new_tokens=3)),
            generation=SimpleNamespace(
                renderer=ChatRenderer(load_tokenizer(str(model))),
                rewards={"d": Scores(failures)},
                scheduler=SimpleNamespace(hosts=EnvHosts(), episodes=EpisodePlan()),
            ),
        ),
    )


async def shown(parts: Any, draws: list[PromptDraw]) -> list[Rollout]:
    return await play_demonstrations(parts.config, parts.policy_engines, draws)


def game(secret: int, expert: tuple[str, ...]) -> PromptDraw:
    options = {"max_number": 3, "num_turns": 2, "secret": secret}
    environment = EnvironmentSettings(name="guess_number", options=options)
    prompt = Prompt(
        uid=f"d/{secret}",
        domain="d",
        messages=(Message(role="user", content="a"),),
        environment=environment,
        turns=2,
        expert=expert,
    )
    return PromptDraw(draw_id=secret, prompt=prompt, token_ids=np.array([5, 6], np.int32))


async def test_demonstrations_a_demonstration_is_played_and_scored_in_the_models_own_tokens(tiny_model: Path) -> None:
    parts = parts_of(tiny_model)
    (rollout,) = await shown(parts, [game(3, ("2", "3")), game(1, ())])
    renderer = parts.policy_engines.generation.renderer
    hint = renderer.tokenize_follow_up("No, my number is higher than 2. Pick one: 1, 2 or 3. Answer with a number.")
    first, second = renderer.tokenize_answer("2"), renderer.tokenize_answer("3")
    assert rollout.token_ids.tolist() == [*first, *hint, *second]
    ends = len(first) + len(hint)
    assert rollout.turns == (
        Turn(start=0, end=len(first), reward=0.0, state="start"),
        Turn(start=ends, end=ends + len(second), reward=1.0, state="2 higher"),
    )
    assert (rollout.sample_id, rollout.expert, rollout.is_finished) == ("3.4", True, True)  # after the policy's four
    assert rollout.reward is not None and rollout.reward.value == 1.0
    assert not rollout.logprobs.any() and (rollout.policy_versions == -1).all()


async def test_demonstrations_what_was_replayed_to_a_group_is_shown_as_it_was_recorded(tiny_model: Path) -> None:
    parts = parts_of(tiny_model)
    (whole,) = await shown(parts, [game(3, ("2", "3"))])
    begun = replace(game(3, ("1",)), anchor=Anchor(trajectory=build_trajectory(whole), num_turns=1))
    at_the_prompt = replace(begun, anchor=Anchor(trajectory=build_trajectory(whole), num_turns=0))
    (rollout,) = await shown(parts, [begun, at_the_prompt])
    end = whole.turns[0].end
    assert rollout.token_ids.tolist() == whole.token_ids[:end].tolist()
    assert rollout.turns == (whole.turns[0], Turn(start=end, end=end, reward=1.0, state="2 higher"))
    assert (rollout.sample_id, rollout.expert, rollout.purpose) == ("3.4", True, whole.purpose)
    assert rollout.reward is not None and rollout.reward.value == 1.0
    assert await shown(parts_of(tiny_model, weight=0.0), [begun]) == []


async def test_demonstrations_an_expert_with_nothing_left_to_say_ends_its_episode_unfinished(tiny_model: Path) -> None:
    (rollout,) = await shown(parts_of(tiny_model), [game(3, ("1",))])
    assert rollout.reward is not None and rollout.reward.value == 0.0
    assert not rollout.is_finished


@pytest.mark.parametrize(("failures", "found"), [(1, 1), (2, 0)])
async def test_demonstrations_a_verifier_that_stays_dead_costs_the_demonstration_alone(
    tiny_model: Path, failures: int, found: int
) -> None:
    assert len(await shown(parts_of(tiny_model, failures=failures), [game(3, ("2", "3"))])) == found


async def test_demonstrations_nothing_is_shown_where_imitation_weighs_nothing(tiny_model: Path) -> None:
    assert await shown(parts_of(tiny_model, weight=0.0), [game(3, ("2", "3"))]) == []


def rollout(draw_id: int, index: int, reward: float, *, turns: int = 1, expert: bool = False) -> Rollout:
    """Each turn has 2 tokens, and one of the environment's follows it; the reward comes at the end."""
    length = 3 * turns - 1
    return Rollout(
        draw_id=draw_id,
        index=index,
        prompt=Prompt(uid=f"d/{draw_id}", domain="d", messages=()),
        prompt_token_ids=np.zeros(2, np.int32),
        token_ids=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        policy_versions=np.zeros(length, np.int32),
        finish_reason="stop",
        text="",
        reward=RewardResult(value=reward),
        turns=tuple(Turn(start=3 * k, end=3 * k + 2, state=f"{draw_id} {k}") for k in range(turns)),
        expert=expert,
    )


def group(draw_id: int, *rewards: float) -> Group:
    rollouts = tuple(rollout(draw_id, i, reward, turns=2) for i, reward in enumerate(rewards))
    draw = PromptDraw(draw_id=draw_id, prompt=rollouts[0].prompt, token_ids=np.zeros(2, np.int32))
    return Group(draw=draw, rollouts=rollouts)


def learn_from(algorithm: AlgorithmConfig, groups: list[Group], *shown: Rollout) -> tuple[Any, TrainingBatch]:
    greedy = [replace(g, rollouts=g.rollouts[:1]) for g in groups]
    selection = select_training_rollouts(groups, algorithm, max_new_tokens=8, greedy=greedy, demonstrations=shown)
    batch = build_batch(selection.rollouts, temperature=1.0, max_new_tokens=8)
    critics = algorithm.critic.num_critics if algorithm.uses_critic else 0
    values = [[np.full(len(s), 0.1 * m, np.float32) for s in batch.samples] for m in range(critics)]
    return selection, add_advantages(batch, selection, algorithm, values=values)


def advantages(batch: TrainingBatch) -> dict[str, list[float]]:
    return {s.sample_id: s.advantages[s.loss_mask].tolist() for s in batch.samples}


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_demonstrations_the_policys_own_advantages_are_as_without_the_demonstration(preset: str) -> None:
    algorithm = AlgorithmConfig.model_validate({"type": preset, "weights": {"difficulty": True, "length": True}})
    groups = [group(0, 1.0, 0.0, 0.5), group(1, 0.0, 1.0)]
    _, plain = learn_from(algorithm, groups)
    _, shown = learn_from(algorithm, groups, rollout(0, 3, 7.0, turns=3, expert=True))
    found = advantages(shown)
    assert found.pop("0.3")
    assert found == advantages(plain)


def test_demonstrations_ipas_demonstration_weighs_its_own_discounted_return() -> None:
    algorithm = AlgorithmConfig.model_validate({"type": "ipa", "imitation": {"weight": 0.5}})
    _, batch = learn_from(algorithm, [group(0, 1.0, 0.0)], rollout(0, 2, 2.0, turns=2, expert=True))
    expert = batch.samples[-1]
    # 0.5 x 0.95 x 2 one chunk before the end, 0.5 x 2 in the last one; the environment's token has none
    assert expert.advantages.tolist() == pytest.approx([0, 0, 0.95, 0.95, 0, 1.0, 1.0])
    assert expert.expert and not any(s.expert for s in batch.samples[:-1])


def test_demonstrations_ipas_failures_are_negative_also_where_the_reward_comes_with_a_turn() -> None:
    def played(index: int, reward: float) -> Rollout:
        own = rollout(0, index, reward, turns=2)
        return replace(own, turns=(own.turns[0], replace(own.turns[1], reward=reward)))

    won, lost = played(0, 1.0), played(1, 0.0)
    draw = PromptDraw(draw_id=0, prompt=won.prompt, token_ids=np.zeros(2, np.int32))
    algorithm = AlgorithmConfig.model_validate({"type": "ipa"})
    _, batch = learn_from(algorithm, [Group(draw=draw, rollouts=(won, lost))], replace(won, index=2, expert=True))
    found = advantages(batch)
    assert found["0.0"] == pytest.approx([0.475, 0.475, 0.5, 0.5])
    assert found["0.1"] == pytest.approx([-0.475, -0.475, -0.5, -0.5])
    assert found["0.2"] == pytest.approx([0.95, 0.95, 1.0, 1.0])


@pytest.mark.parametrize("preset", ["grpo", "rebn", "ppo", "reinforce_pp"])
def test_demonstrations_other_methods_do_not_discount_a_demonstration_by_token(preset: str) -> None:
    algorithm = AlgorithmConfig.model_validate({"type": preset, "advantage": {"gamma": 0.5 if preset != "grpo" else 1}})
    _, batch = learn_from(algorithm, [group(0, 1.0, 0.0)], rollout(0, 2, 1.0, turns=2, expert=True))
    first = 0.5 if preset == "rebn" else 1.0  # rebn's discount is per turn
    assert advantages(batch)["0.2"] == pytest.approx([first, first, 1.0, 1.0])


def test_demonstrations_a_group_that_is_filtered_still_has_its_demonstration_trained() -> None:
    selection, batch = learn_from(
        AlgorithmConfig.model_validate({"type": "ipa"}), [group(0, 0.0, 0.0)], rollout(0, 2, 1.0, expert=True)
    )
    assert [s.sample_id for s in batch.samples] == ["0.2"]
    assert selection.draw_outcomes == {0: (DrawOutcome.TRAINED, "")}


@pytest.mark.parametrize(("best", "trained"), [(0.0, True), (0.9, True), (1.0, False)])
def test_demonstrations_what_the_policy_can_do_need_not_be_shown(best: float, trained: bool) -> None:
    algorithm = AlgorithmConfig.model_validate({"type": "ipa", "imitation": {"when": "unsolved"}})
    selection, _ = learn_from(algorithm, [group(0, 0.0, best)], rollout(0, 2, 1.0, expert=True))
    assert [r.expert for r in selection.rollouts if r.expert] == [True] * trained


@pytest.mark.parametrize("reward", [0.0, -1.0])
def test_demonstrations_a_demonstration_without_a_reward_is_left_out(reward: float) -> None:
    selection, _ = learn_from(AlgorithmConfig(), [group(0, 1.0, -2.0)], rollout(0, 2, reward, expert=True))
    assert not any(r.expert for r in selection.rollouts)


def test_demonstrations_shaping_holds_for_demonstrations_too() -> None:
    algorithm = AlgorithmConfig.model_validate({"reward": {"scale": 3.0, "shift": -1.0}})
    _, batch = learn_from(algorithm, [group(0, 1.0, 0.0)], rollout(0, 2, 1.0, expert=True))
    assert advantages(batch)["0.2"] == pytest.approx([2.0, 2.0])


def test_demonstrations_imitation_with_anchor_states_discounts_a_demonstration_per_turn() -> None:
    """Two turns of two tokens, with reward 1 at the end: 0.5 one turn before it."""
    algorithm = AlgorithmConfig.model_validate({"type": "gi_gpo", "advantage": {"gamma": 0.5}})
    assert algorithm.advantage.estimator == "anchor_state"
    _, batch = learn_from(algorithm, [group(0, 1.0, 0.0)], rollout(0, 2, 1.0, turns=2, expert=True))
    assert advantages(batch)["0.2"] == pytest.approx([0.5, 0.5, 1.0, 1.0])

"""Runs, rollouts and configurations for the tests of tracking; nothing here is random."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from roll.config.pipelines.rlvr import RLVRConfig
from roll.tracking import RunDirectory, Tracker
from roll.types import Group, Message, Prompt, PromptDraw, RewardResult, Rollout, RolloutStatus


def make_config(output_dir: Path, **tracking: object) -> RLVRConfig:
    """The quickstart, small, with a quiet console unless said otherwise."""
    return RLVRConfig.model_validate(
        {
            "name": "demo",
            "output_dir": str(output_dir),
            "model": "smollm2-135m-instruct",
            "data": [{"source": "arithmetic", "reward": "math"}],
            "rollout": {"prompts_per_step": 2, "group_size": 2},
            "training": {"num_steps": 4, "learning_rate": 1e-5},
            "tracking": {"console": "quiet", **tracking},
        }
    )


def make_group(draw_id: int, rewards: tuple[float | None, ...] = (1.0, 0.0)) -> Group:
    """A group whose rollout i has tokens `draw_id, i, 2` and reward i; `None` is a rollout that we failed."""
    prompt = Prompt(
        uid=f"arithmetic/{draw_id}+1",
        domain="arithmetic",
        messages=(Message(role="system", content="Add."), Message(role="user", content=f"{draw_id} + 1 =")),
        answer=str(draw_id + 1),
    )
    draw = PromptDraw(draw_id=draw_id, prompt=prompt, token_ids=np.array([7, 8], np.int32))

    def rollout(index: int, reward: float | None) -> Rollout:
        result = None
        if reward is not None:
            verdict = "correct" if reward else "wrong"
            result = RewardResult(
                value=reward, components={"math": reward, "form": 0.5}, verdict=verdict, correct=reward == 1.0
            )
        return Rollout(
            draw_id=draw_id,
            index=index,
            prompt=prompt,
            prompt_token_ids=draw.token_ids,
            token_ids=np.array([draw_id, index, 2], np.int32),
            logprobs=np.array([-0.5, -0.25, -0.125], np.float32),
            policy_versions=np.array([draw_id] * 3, np.int32),
            finish_reason="stop",
            text=f"The answer is {draw_id + index}.",
            status=RolloutStatus.COMPLETED if result else RolloutStatus.INFRA_ERROR,
            cause="" if result else "engine died",
            reward=result,
            engine_id="engine-0",
        )

    return Group(draw=draw, rollouts=tuple(rollout(i, r) for i, r in enumerate(rewards)))


def do_step(tracker: Tracker, step: int) -> None:
    """A step with one solved and one failed group; the reward grows with the step."""
    with tracker.spans.step(step):
        groups = [make_group(2 * step), make_group(2 * step + 1, (None, 0.0))]
        with tracker.spans.phase("generate"):
            for group in groups:
                for rollout in group.rollouts:
                    tracker.on_rollout(rollout)
        with tracker.spans.phase("train"):
            pass
        tracker.log_rollouts(step, groups, {f"{2 * step}.0": 1.0, f"{2 * step}.1": -1.0})
        metrics = {
            "reward/mean": step / 8,
            "rollout/num_tokens": 9,
            "training/num_tokens": 16,
            "training/loss": 0.5,
        }
        tracker.log_step(step, metrics | tracker.spans.get_metrics())
        if step % 2 == 0:
            do_evaluation(tracker, step)


def do_evaluation(tracker: Tracker, step: int) -> None:
    with tracker.spans.phase("evaluate"):
        tracker.log_evaluation(step, {"eval/accuracy": step / 4}, [make_group(0)])


@pytest.fixture
def config(tmp_path: Path) -> RLVRConfig:
    return make_config(tmp_path / "runs")


@pytest.fixture
def run(config: RLVRConfig) -> Iterator[RunDirectory]:
    with RunDirectory.create(config.run_dir, config.model_dump(mode="json")) as directory:
        yield directory


@pytest.fixture
def demo() -> SimpleNamespace:
    """The functions above, for test modules, which import nothing from here."""
    return SimpleNamespace(config=make_config, group=make_group, step=do_step, evaluation=do_evaluation)

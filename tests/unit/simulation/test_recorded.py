"""A recorded run's work on simulated engines: its lengths, latencies and turns, under other schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.simulation.run_helpers import STEADY, merged

from roll.config.simulation import SimulationConfig
from roll.errors import DataError
from roll.pipelines.recording.files import RecordingWriter
from roll.pipelines.recording.records import RecordedRequest, RecordedSession, RecordedStep
from roll.simulation.run import simulate
from roll.types import Group, Prompt, PromptDraw, RewardResult, Rollout, Turn

LENGTHS = {(0, 0): 10, (0, 1): 30, (1, 0): 20, (1, 1): 100}
"""Tokens by draw and index."""
REWARD_S = {(0, 0): 0.0, (0, 1): 0.5, (1, 0): 0.0, (1, 1): 2.0}


def record(directory: Path, *, turns: bool = False) -> Path:
    """One step of two prompts with two rollouts each; with turns, the last rollout has a second one of 40 tokens."""
    groups, requests = [], []
    for draw_id in (0, 1):
        prompt = Prompt(uid=f"a/{draw_id}", domain="a", messages=())
        draw = PromptDraw(draw_id=draw_id, prompt=prompt, token_ids=np.zeros(3, np.int32), position=draw_id)
        rollouts = []
        for index in (0, 1):
            length = LENGTHS[draw_id, index]
            name = f"train-{draw_id}.{index}"
            requests.append(RecordedRequest(name, "engine-0", 0.0, 0.0, 1.0, 3, length, "stop"))
            several = turns and (draw_id, index) == (1, 1)
            parts: tuple[Turn, ...] = ()
            if several:
                requests.append(RecordedRequest(f"{name}.t1", "engine-0", 4.0, 4.0, 5.0, 3, 40, "stop"))
                parts = (Turn(start=0, end=100), Turn(start=107, end=147))
                length = 147
            rollouts.append(
                Rollout(
                    draw_id=draw_id,
                    index=index,
                    prompt=prompt,
                    prompt_token_ids=draw.token_ids,
                    token_ids=np.zeros(length, np.int32),
                    logprobs=np.zeros(length, np.float32),
                    policy_versions=np.zeros(length, np.int32),
                    finish_reason="stop",
                    text="",
                    reward=RewardResult(value=1.0, duration_s=REWARD_S[draw_id, index]),
                    turns=parts,
                )
            )
        groups.append(Group(draw=draw, rollouts=tuple(rollouts)))
    writer = RecordingWriter(directory / "recording")
    writer.begin(
        RecordedSession(
            number=1, step=0, started=0.0, version="", config={}, model="", tokenizer="", stream={}, num_draws=0
        )
    )
    times = {"generate": 3.0, "train": 0.75, "sync": 0.125, "step": 4.0}
    writer.write(
        RecordedStep(
            step=1,
            session=1,
            policy_version=0,
            next_policy_version=1,
            groups=tuple(groups),
            requests=tuple(requests),
            timings_s=times,
        )
    )
    return directory


def config(run: Path, **changes: Any) -> SimulationConfig:
    """One engine with room for all, 10 ms a step, prefill in the first: a request of n tokens takes n x 10 ms."""
    base = {key: value for key, value in STEADY.items() if key not in ("answer_tokens", "training")}
    base = merged(base, {"placement.generation": 1, "rollout.prompts_per_step": 2, "rollout.group_size": 2})
    return SimulationConfig.model_validate(merged(base | {"recording": str(run)}, changes))


def test_simulation_recorded_lengths_rewards_updates_and_syncs_are_the_recorded_ones(tmp_path: Path) -> None:
    (step,) = simulate(config(record(tmp_path)), seed=3).steps
    assert (step.num_tokens, step.longest, step.num_samples) == (160, 100, 4)
    assert step.wait_s == pytest.approx(100 * 0.01 + 2.0)  # the longest answer has the slowest reward
    assert (step.train_s, step.sync_s) == pytest.approx((0.75, 0.125))


def test_simulation_recorded_another_schedule_does_the_same_work(tmp_path: Path) -> None:
    run = record(tmp_path)
    alone = config(run, **{"engine.max_num_seqs": 1, "rollout.scheduling.type": "batch"})
    (step,) = simulate(alone, seed=0).steps
    assert step.num_tokens == 160
    assert step.wait_s == pytest.approx(
        160 * 0.01 + 2.0
    )  # one after the other; all are scored at the end, side by side


def test_simulation_recorded_what_was_not_recorded_is_drawn_from_what_was_by_the_seed(tmp_path: Path) -> None:
    changed = config(record(tmp_path), **{"num_steps": 3, "rollout.group_size": 3})
    runs = [simulate(changed, seed=seed) for seed in (1, 1, 2)]
    assert runs[0].digest == runs[1].digest != runs[2].digest
    first = runs[0].steps[0]
    assert first.num_samples == 6
    assert first.num_tokens - 160 in {a + b for a in (10, 30) for b in (20, 100)}  # of the same prompt
    assert [step.train_s for step in runs[0].steps] == pytest.approx([0.75] * 3)


def test_simulation_recorded_turns_come_with_the_environment_between_them(tmp_path: Path) -> None:
    (step,) = simulate(config(record(tmp_path, turns=True)), seed=0).steps
    assert step.num_tokens == 10 + 30 + 20 + 147
    # 100 tokens, 3 s for the environment (from 1.0 to 4.0), 40 tokens, 2 s for the reward
    assert step.wait_s == pytest.approx(100 * 0.01 + 3.0 + 40 * 0.01 + 2.0)


def test_simulation_recorded_a_recording_that_is_not_there_and_turns_said_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no recording"):
        simulate(config(tmp_path / "none"))
    turns = {"num_turns": 2, "latency": {"type": "fixed", "value": 1}}
    with pytest.raises(ValueError, match="environment cannot be combined"):
        config(record(tmp_path), environment=turns)

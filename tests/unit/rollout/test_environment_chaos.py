"""Random schedules whose environments raise, hang, are slow, die and break rules: groups complete, nothing stays.

The world and its invariants are those of `test_schedules`: no rollout is lost or trained twice, no engine works for one
that was stopped, failures have no reward. Beside them here: every environment that was opened is closed.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from worlds.training import Settings, World, random_settings

from roll.envs.hosting import EnvHosts, HostedEnv
from roll.errors import WorkerDiedError
from roll.rollout.episode import play_episode
from roll.simulation.clock import run
from roll.types import EncodedText, EnvironmentSettings, IntArray, Message, PromptDraw, Rollout, RolloutStatus

NUM_SCHEDULES = int(os.environ.get("ROLL_SCHEDULES", "24"))
NUM_TURNS = 3


class Renderer:
    """A character is a token."""

    def render_text(self, messages: Sequence[Any], tools: Sequence[Any] = ()) -> str:
        return "".join(f"{message.role[0]}{message.text}" for message in messages) + ">"

    def encode(self, text: str) -> EncodedText:
        return EncodedText(np.array([ord(letter) for letter in text], np.int32))

    def decode_final_text(self, token_ids: IntArray, context: IntArray) -> str:
        return self.decode(token_ids)

    def decode(self, token_ids: IntArray) -> str:
        return "x" * len(token_ids)

    def parse_answer(self, answer: IntArray, context: IntArray, stops: Collection[int] = ()) -> tuple[str, bool]:
        return "x" * len(answer), False

    def encode_suffix(self, text: str, has_end_token: bool) -> EncodedText | None:
        return self.encode(text)

    def escape_special_tokens(self, text: str) -> str:
        return text

    def tokenize_follow_up(self, observation: str) -> IntArray:
        return self.encode(observation).token_ids


class Chaos:
    """A host of environments that may do anything."""

    def __init__(self, seed: int, share: float) -> None:
        self.chance, self.share = random.Random(f"chaos/{seed}"), share
        self.num_started = self.num_closed = 0

    async def start(self, settings: EnvironmentSettings) -> HostedEnv:
        self.num_started += 1
        env = _Unreliable(self)
        try:
            await env.act(None)
        except BaseException:
            self.num_closed += 1  # as a host does whose start fails
            raise
        return env

    async def close(self) -> None: ...


class _Unreliable:
    def __init__(self, host: Chaos) -> None:
        self._host, self._turn, self._dead = host, 0, False

    async def act(self, value: Any) -> Any:
        chance = self._host.chance
        if self._dead:
            raise WorkerDiedError("the process was ended")
        await asyncio.sleep(chance.choice([0.0, 0.1, 1.0, 4.0]))
        if chance.random() >= self._host.share:
            return value
        match chance.choice(["raise", "die", "hang", "slow", "break"]):
            case "raise":
                raise KeyError("board")
            case "die":
                self._dead = True
                raise WorkerDiedError("signal SIGSEGV")
            case "hang":
                await asyncio.Event().wait()
            case "slow":
                await asyncio.sleep(4.0)
                return value
        return ("not", "five", "values") if value is not None else None

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return await self.act((f"seed {seed}", {"state": "s"}))

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turn += 1
        return await self.act(("go on", 0.25, self._turn == NUM_TURNS, False, {"state": str(self._turn)}))

    async def close(self) -> None:
        self._host.num_closed += 1
        await self.act(None)


class EnvironmentWorld(World):
    """Whose rollouts are episodes."""

    def __init__(self, settings: Settings, share: float) -> None:
        self.host = Chaos(settings.seed, share)
        self.hosts = EnvHosts({"pool": self.host})
        super().__init__(settings)

    async def _loop(self, draw: PromptDraw, index: int, first_request: Any, generate: Any, renderer: Any) -> Any:
        settings = EnvironmentSettings(
            name="chaos", host="pool", seed=draw.draw_id, opening="{prompt}", step_time_limit_s=9.0
        )
        messages: Any = (Message(role="user", content=""),)
        prompt = replace(draw.prompt, environment=settings, turns=NUM_TURNS, messages=messages)
        played = await play_episode(
            replace(draw, prompt=prompt), index, first_request, generate, Renderer(), hosts=self.hosts
        )
        assert len(played.turns) == NUM_TURNS or played.finish_reason != "stop"
        assert sum(turn.reward for turn in played.turns[: NUM_TURNS - 1]) <= 0.25 * (NUM_TURNS - 1)
        return replace(played, prompt=draw.prompt, prompt_token_ids=draw.token_ids)

    def _check_tokens(self, rollout: Rollout, is_trained: bool) -> None:
        """Of an episode: what the environment said has no version, and what is trained is no older than it may be."""
        written = rollout.policy_versions[rollout.policy_versions >= 0]
        assert len(written) == sum(turn.end - turn.start for turn in rollout.turns)
        if is_trained:
            assert self.version - written.min(initial=self.version) <= self.settings.scheduling.max_staleness


def play_out(settings: Settings, share: float) -> EnvironmentWorld:
    """Run one schedule to its end."""

    async def main() -> EnvironmentWorld:
        world = EnvironmentWorld(settings, share)
        try:
            await world.train()
        finally:
            await world.engines.close()
        return world

    return run(main(), seed=settings.seed, shuffle=True, limit_s=1e6)


@pytest.mark.parametrize("part", range(4))
def test_rollout_environment_chaos_environments_that_fail_cost_their_own_rollouts_and_nothing_stays_open(
    part: int,
) -> None:
    failed = 0
    for seed in range(part, NUM_SCHEDULES, 4):
        settings = replace(random_settings(seed), start_failures=0.0)
        world = play_out(settings, share=(0.05, 0.2, 0.6)[seed % 3])
        assert not world.violations
        assert world.hosts.num_open == 0
        assert world.host.num_closed == world.host.num_started
        rollouts = [r for batch in world.batches for group in batch.groups for r in group.rollouts]
        for rollout in rollouts:
            if rollout.status is RolloutStatus.INFRA_ERROR:
                assert rollout.reward is None and rollout.cause, rollout.rollout_id
        failed += sum(r.status is RolloutStatus.INFRA_ERROR for r in rollouts)
    assert failed  # else nothing went wrong often enough to show

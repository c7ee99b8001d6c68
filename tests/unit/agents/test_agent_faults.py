"""Agents and engines that fail at random: every group completes, and no failure of ours is a reward of 0."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import aiohttp
from worlds.agents import Speaker, draw_of

from roll.agents.agent_loop import AgentLoop
from roll.agents.programs import AgentError, AgentTask
from roll.agents.server import AgentServer
from roll.config.agents import AgentConfig
from roll.data import ChatRenderer
from roll.errors import EngineDiedError
from roll.models import load_tokenizer
from roll.rollout.attempts import RolloutRunner, SamplingPlan
from roll.types import Generation, GenerationRequest, RewardResult, Rollout, RolloutStatus, SamplingParams


class Proxy:
    """In place of `LLMProxy`: answers, and three times its engine dies."""

    def __init__(self, speaker: Speaker, chance: random.Random) -> None:
        self.speaker, self.chance, self.deaths = speaker, chance, 3

    async def generate(self, request: GenerationRequest, **more: Any) -> Generation:
        more["on_start"]("e")
        if self.deaths and self.chance.random() < 0.1:
            self.deaths -= 1
            raise EngineDiedError("e", "killed")
        return await self.speaker.generate(request)


class Faulty:
    """An agent of three turns that crashes, hangs, or leaves in the middle of an answer."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.running = chance, 0
        self.faults = ["crash", "crash", "crash", "hang", "leave", "leave", "leave"]

    async def __call__(self, task: AgentTask, base_url: str, api_key: str) -> str | None:
        self.running += 1
        try:
            async with aiohttp.ClientSession() as http:
                return await self._work(http, base_url + "/chat/completions", {"Authorization": f"Bearer {api_key}"})
        finally:
            self.running -= 1

    async def _work(self, http: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> str:
        messages = [{"role": "user", "content": "a"}]
        for _ in range(3):
            fault = self.faults.pop() if self.faults and self.chance.random() < 0.3 else "none"
            if fault == "crash":
                raise AgentError("it crashed")
            if fault == "hang":
                await asyncio.Event().wait()
            body = {"model": "m", "messages": messages, "stream": fault == "leave"}
            async with http.post(url, json=body, headers=headers) as response:
                if fault == "leave":
                    await response.content.read(10)
                    response.close()
                    continue
                if response.status != 200:
                    raise AgentError(f"status {response.status}")
                answer = (await response.json())["choices"][0]["message"]
            messages += [answer, {"role": "user", "content": "on"}]
        return "done"


async def reward(rollout: Rollout) -> RewardResult:
    return RewardResult(value=1.0)


async def test_agent_faults_groups_complete_whatever_fails(tiny_model: Path) -> None:
    renderer = ChatRenderer(load_tokenizer(str(tiny_model)))
    chance = random.Random(5)
    config = AgentConfig(command=["-"], limits={"time_s": 3.0})
    draw = draw_of(renderer)
    plan = SamplingPlan(purpose="train", group_size=20, sampling=SamplingParams(max_new_tokens=99, stop_token_ids=(2,)))
    async with AgentServer() as server:
        program = Faulty(chance)
        loop = AgentLoop(server, program, config, max_context=4096)
        proxy = Proxy(Speaker(renderer, lambda context: "An answer of some length. " * 3), chance)
        attempts = RolloutRunner(
            proxy,  # type: ignore[arg-type]
            {"t": reward},
            renderer,
            seed=1,
            max_attempts=9,
            loop=loop,
        )
        rollouts = await asyncio.gather(
            *(attempts.generate_and_score(draw, index, plan) for index in range(plan.group_size))
        )
        assert program.running == 0 and server.sessions.num_open == 0
        assert program.faults == [] and proxy.deaths == 0
    for rollout in rollouts:  # seven attempts failed at most: each rollout had one left
        assert rollout.status is RolloutStatus.COMPLETED and rollout.reward == RewardResult(value=1.0)
        assert len(rollout.turns) >= 1

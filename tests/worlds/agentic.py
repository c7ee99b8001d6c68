"""Runs under virtual time whose rollouts are episodes with tools, and agents at the endpoint; anything may fail.

The world and its invariants are those of `worlds.training`. Beside them: what is trained is what an engine wrote, token
by token; failures of ours are no rewards; whatever was opened is closed; nothing is left running.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from roll.agents.agent_loop import AgentLoop
from roll.agents.server import AgentServer
from roll.config.agents import AgentConfig
from roll.envs.hosted_tools import ToolBuilder
from roll.envs.hosting import EnvHosts
from roll.envs.process_host import PoolHost
from roll.errors import ReplayError
from roll.rollout.episode import play_episode
from roll.rollout.episode_start import EpisodePlan
from roll.simulation.clock import run
from roll.types import (
    Anchor,
    EnvironmentSettings,
    GenerationRequest,
    Group,
    History,
    Message,
    PromptDraw,
    Rollout,
    RolloutStatus,
    SamplingParams,
    Trajectory,
)
from worlds.clients import Agents
from worlds.engines import TickingEngine
from worlds.failing import Chance, FailingPool, failing_servers
from worlds.training import Settings, World, random_settings
from worlds.writing import END, Characters, WritingEngine, check_written

__all__ = ["AgenticWorld", "Kind", "play_out", "random_kind"]

HISTORIES = (
    History(),
    History(),
    History(kind="window", turns=1),
    History(kind="thinking_stripped"),
    History(kind="stepwise"),
    History(kind="summary", summary_tokens=20, summary_request="Sum up."),
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What rollouts of a schedule are like."""

    faults: float
    """Probability that a call fails."""
    agents: float
    """Share of rollouts that agents make."""
    anchors: float = 0.3
    tools: tuple[str, ...] = ()
    max_tool_uses: int = 4
    turns: int = 4
    plan: EpisodePlan
    forgets: bool = False
    """See `Characters`."""


def random_kind(seed: int) -> Kind:
    """One that the configuration allows."""
    chance = random.Random(f"kind/{seed}")
    tools = tuple(tool for tool in ("own.py:look", "mcp", "python") if chance.random() < 0.6)
    return Kind(
        faults=chance.choice([0.0, 0.02, 0.1, 0.4]),
        agents=chance.choice([0.0, 0.5, 0.5, 1.0]),
        tools=tools,
        max_tool_uses=chance.choice([1, 2, 4]),
        turns=chance.randint(2, 5),
        forgets=chance.random() < 0.5,
        plan=EpisodePlan(
            max_context=chance.choice([None, 600, 900]),
            history=chance.choice(HISTORIES),
            long_observations=chance.choice(["cut", "end"]),
            min_answer_tokens=8,
        ),
    )


class AgenticWorld(World):
    """Whose rollouts are of a kind."""

    engine_type: ClassVar[type[TickingEngine]] = WritingEngine
    sampling: ClassVar[SamplingParams] = SamplingParams(max_new_tokens=80, stop_token_ids=(ord(END),))

    def __init__(self, settings: Settings, kind: Kind) -> None:
        self.kind, self.renderer = kind, Characters(forgets=kind.forgets)
        self.faults = Chance(settings.seed, kind.faults)
        pool: Any = FailingPool(self.faults)
        self.hosts = EnvHosts(
            {"pool": PoolHost(pool)}, ToolBuilder(pool, {"runtime": "subprocess", "trust_programs": True})
        )
        self.server = AgentServer()
        self.agents = Agents(self.server, self.faults, self.violations_of_agents)
        limits = {"time_s": 400.0, "turns": 8, "tokens": 1500, "parallel": 4}
        when = "score" if settings.seed % 3 == 0 else "reissue"
        config = AgentConfig(command=["-"], limits=limits, on_failure=when, train="all")  # type: ignore[arg-type]
        self.agent_loop = AgentLoop(self.server, self.agents, config, max_context=2000)
        self.successes: list[tuple[EnvironmentSettings, Trajectory]] = []
        super().__init__(settings)

    def violations_of_agents(self, text: str) -> None:
        self.violations.append(text)

    async def _loop(
        self, draw: PromptDraw, index: int, first_request: GenerationRequest, generate: Any, renderer: Any
    ) -> Any:
        own = random.Random(f"{self.settings.seed}/{draw.draw_id}")
        messages: Any = (Message(role="user", content=f"Task {draw.draw_id}."),)
        prompt = replace(draw.prompt, messages=messages, turns=self.kind.turns)
        draw = replace(draw, prompt=prompt, token_ids=self.renderer.render(messages))
        first_request = replace(first_request, token_ids=draw.token_ids)
        try:
            if own.random() < self.kind.agents:
                rollout = await self.agent_loop(draw, index, first_request, generate, self.renderer)  # type: ignore[arg-type]
                self.agents.check(first_request.request_id, rollout)
            else:
                rollout = await self._episode(draw, index, first_request, generate, own)
            check_written(rollout)
        except (AssertionError, ReplayError) as error:
            self.violations.append(f"{draw.draw_id}.{index}: {type(error).__name__}: {error}")
            raise
        return rollout

    async def _episode(
        self, draw: PromptDraw, index: int, first_request: GenerationRequest, generate: Any, own: random.Random
    ) -> Rollout:
        settings = EnvironmentSettings(
            name="game",
            host="pool",
            seed=draw.draw_id,
            options={"n": own.randrange(4)},
            opening="{prompt}",
            step_time_limit_s=9.0,
            reset_time_limit_s=15.0,
            tools=self._tools() if self.kind.tools else {},
        )
        anchor = None
        if self.successes and own.random() < self.kind.anchors:
            settings, trajectory = own.choice(self.successes)
            anchor = Anchor(trajectory=trajectory, num_turns=own.randrange(1, len(trajectory.turns)))
        draw = replace(draw, prompt=replace(draw.prompt, environment=settings), anchor=anchor)
        played = await play_episode(
            draw, index, first_request, generate, self.renderer, hosts=self.hosts, plan=self.kind.plan
        )
        assert len(played.turns) + len(played.replayed) >= 1
        if anchor is None and len(played.turns) > 1 and played.is_finished and not played.counts.get("summaries"):
            self.successes.append((settings, self._recorded(played)))
        return played

    def _tools(self) -> dict[str, Any]:
        entries: list[Any] = [{"tool": "mcp", "command": ["x"]} if tool == "mcp" else tool for tool in self.kind.tools]
        return {"tools": entries, "max_tool_uses": self.kind.max_tool_uses, "call_time_limit_s": 20.0}

    @staticmethod
    def _recorded(played: Rollout) -> Trajectory:
        return Trajectory(
            uid=str(played.rollout_id),
            prompt_token_ids=played.prompt_token_ids,
            token_ids=played.token_ids,
            turns=played.spans,
            branches=played.branches,
            reward=1.0,
        )

    def _left_out(self, group: Group) -> str:
        for rollout in group.rollouts:
            if rollout.status is RolloutStatus.INFRA_ERROR and (rollout.reward is not None or not rollout.cause):
                self.violations.append(f"{rollout.rollout_id} failed by us, and has a reward or no cause")
        return super()._left_out(group)

    def _check_tokens(self, rollout: Rollout, is_trained: bool) -> None:
        written = rollout.policy_versions[rollout.policy_versions >= 0]
        assert len(written) == sum(turn.end - turn.start for turn in rollout.spans)
        if is_trained:
            assert self.version - written.min(initial=self.version) <= self.settings.scheduling.max_staleness


async def _main(world: AgenticWorld) -> None:
    try:
        await world.train()
    finally:
        await world.hosts.close()
        await world.engines.close()
        await world.agents.close()
    await asyncio.sleep(400.0)  # simulated engines have calls on their way, up to the time limit of a weight sync
    left = [str(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    left = [task for task in left if "worlds/engines" not in task and "name='bring-up" not in task]
    assert not left, f"tasks are left running: {left}"
    kept = {kind: number for kind, number in world.faults.open.items() if number}
    assert not kept, f"what was opened is still there: {kept}"
    assert world.hosts.num_open == 0 and world.server.sessions.num_open == 0
    assert not world.violations, world.violations[0]


def play_out(seed: int, complaints: list[str], **changes: Any) -> AgenticWorld:
    """Run one schedule to its end; what asyncio complains about, also later, goes to `complaints`."""
    settings = replace(random_settings(seed), start_failures=0.0)
    kind = replace(random_kind(seed), **changes)
    worlds: list[AgenticWorld] = []

    def note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        complaints.append(f"seed {seed}: {context.get('message')}: {context.get('exception')!r}")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(note)
        worlds.append(AgenticWorld(settings, kind))
        await _main(worlds[0])

    try:
        with failing_servers(lambda: worlds[0].faults):
            run(main(), seed=seed, shuffle=True, limit_s=1e6)
    except BaseException as error:
        error.add_note(f"replay it with: play_out({seed}, []), which is {kind} in {settings}")
        raise
    return worlds[0]


def collected(complaints: Sequence[str]) -> Sequence[str]:
    """All complaints, also of what only cycles hold."""
    gc.collect()
    return complaints

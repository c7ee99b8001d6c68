"""Generation: the roles that answer prompts and score the answers.

engines ─► LLMProxy ─┐
workers ─► rewards ──┼─► RolloutScheduler ─► rollouts with rewards
judge ───┘           └─ life cycle ─► trace, phases of a wait, retries
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from roll.agents.agent_loop import open_agents
from roll.cluster.base import Cluster, start_together
from roll.config.generating import GeneratingConfig
from roll.data import ChatRenderer
from roll.envs.places import open_hosts
from roll.envs.timing import watched
from roll.inference import resolve_engine_kind
from roll.pipelines.judge import JudgeRole, start_judge
from roll.pipelines.learning.failures import Retries
from roll.pipelines.preparation import Prepared, engine_specs
from roll.pipelines.start_notes import StartNotes
from roll.protocols import InferenceEngine, Reward, WorkerPool
from roll.rewards.compose import WeightedReward
from roll.rewards.opening import open_rewards
from roll.rollout import LLMProxy, RolloutScheduler, Router
from roll.rollout.engine_group import EngineGroup
from roll.rollout.episode import EpisodePlan
from roll.rollout.lifecycle import FINAL
from roll.rollout.loops import RolloutLoop, load_own_loop
from roll.tracking import RunDirectory, Spans, Tracker
from roll.tracking.rollout_trace import RolloutTrace
from roll.tracking.wait_phases import WaitPhases

__all__ = ["Generation", "Roles", "episode_plan", "open_generation", "start_roles"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """The started roles that answer and score."""

    engines: EngineGroup
    pool: WorkerPool
    judge: JudgeRole | None
    max_context: int
    """Context length of the engines."""


async def start_roles(
    config: GeneratingConfig,
    cluster: Cluster,
    prepared: Prepared,
    stack: AsyncExitStack,
    *,
    run: RunDirectory | None = None,
    tracker: Tracker | None = None,
    trainers: Sequence[tuple[str, Awaitable[Any]]] = (),
    hand_over: bool = False,
) -> tuple[Roles, list[Any]]:
    """Start engines, reward workers, the judge and trainers concurrently.

    Args:
        config: Configuration of the run.
        cluster: Cluster on which the roles start.
        prepared: The model's files and the prompts.
        stack: Exit stack that closes everything that started.
        run: Run directory for the engines' logs.
        tracker: Tracker that shows the roles that are still starting.
        trainers: Roles and start coroutines of trainers.
        hand_over: Whether engines sleep while trainers compute. Engines reserve a share of the free memory, so
            they then start after the trainers have started and offloaded.

    Returns:
        The roles that answer and score; the trainers, in order.
    """
    progress = StartNotes(tracker.note if tracker else _say_nothing)
    emit = tracker.spans.event if tracker else _say_nothing
    kind = resolve_engine_kind(config.inference.engine)
    training = [progress.of(f"trainer ({role})", start) for role, start in trainers]
    before = await start_together(stack, *training) if hand_over else []
    specs = engine_specs(config, prepared, run, sleeps=hand_over)
    starting = [
        progress.of(f"engines ({kind})", cluster.start_engines(specs, "actor_infer")),
        cluster.start_pool(config.rollout.reward_workers),
        *([] if hand_over else training),
    ]
    if config.judge is not None:
        starting.append(progress.of("judge", start_judge(config, cluster, run, emit)))
    engines, pool, *others = await start_together(stack, *starting)
    judge = others.pop() if config.judge is not None else None
    return Roles(engines=engines, pool=pool, judge=judge, max_context=prepared.max_context), before or others


def _say_nothing(*_: object, **__: object) -> None:
    """Ignore all messages; used for work outside a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The components that answer prompts and score the answers."""

    proxy: LLMProxy
    scheduler: RolloutScheduler
    rewards: Mapping[str, WeightedReward]
    """Configured reward of each domain."""
    judge: JudgeRole | None
    """The run's own judge, if rewards use one."""
    renderer: ChatRenderer
    wait_phases: WaitPhases
    retries: Retries = field(default_factory=Retries)

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call: retries, environments, and the judge."""
        figures = self.retries.metrics() | self.scheduler.hosts.metrics()
        return figures | (self.judge.metrics() if self.judge else {})

    def restore(self, verifiers: Mapping[str, Any]) -> None:
        """Restore the state of rewards, by domain: see `LivePolicy.verifiers`."""
        for domain, reward in self.rewards.items():
            reward.restore(verifiers.get(domain, {}))


async def open_generation(
    config: GeneratingConfig,
    roles: Roles,
    renderer: ChatRenderer,
    stack: AsyncExitStack,
    *,
    tracker: Tracker | None = None,
    proxy_type: type[LLMProxy] = LLMProxy,
    bring_up: Callable[[InferenceEngine], Awaitable[object]] | None = None,
    loop: RolloutLoop | None = None,
    scored_by: Callable[[Reward], Reward] = lambda reward: reward,
) -> Generation:
    """Connect started roles to proxy, rewards and scheduler.

    Args:
        config: Configuration of the run.
        roles: Started roles.
        renderer: Converts tokens to text.
        stack: Exit stack that closes everything that is opened.
        tracker: Tracker of the run, which observes every rollout.
        proxy_type: Class of the proxy.
        bring_up: Syncs the current weights to a fresh engine; by default an engine keeps the weights that it loaded.
        loop: Rollout loop that replaces the configured one.
        scored_by: Wrapper of each domain's reward.

    Raises:
        ConfigError: `rollout.loop` cannot be imported.
    """
    rollout, scheduling = config.rollout, config.rollout.scheduling
    proxy = _proxy(config, roles, proxy_type, bring_up)
    stack.push_async_callback(proxy.close)
    judge = roles.judge.model if roles.judge else None
    rewards = await stack.enter_async_context(open_rewards(config.data, config.sandbox, roles.pool, judge))
    scheduler = RolloutScheduler(
        proxy,
        {domain: scored_by(reward) for domain, reward in rewards.items()},
        renderer,
        seed=config.seed,
        max_attempts=rollout.max_attempts,
        retry_wait_s=rollout.retry_wait_s,
        replicate=scheduling.replicate_prompts and scheduling.type != "batch",
        loop=await _loop(config, roles, stack) if loop is None else loop,
        episodes=episode_plan(config, roles.max_context),
        hosts=await stack.enter_async_context(open_hosts(roles.pool, config.sandbox)),
        on_rollout=tracker.on_rollout if tracker else _say_nothing,
    )
    generation = Generation(
        proxy=proxy,
        scheduler=scheduler,
        rewards=rewards,
        judge=roles.judge,
        renderer=renderer,
        wait_phases=WaitPhases(tracker.spans if tracker else Spans()),
    )
    if tracker is not None:
        _listen(generation, tracker, stack, traced=config.tracking.trace_rollouts)
    return generation


def _proxy(
    config: GeneratingConfig,
    roles: Roles,
    proxy_type: type[LLMProxy],
    bring_up: Callable[[InferenceEngine], Awaitable[object]] | None,
) -> LLMProxy:
    scheduling = config.rollout.scheduling
    policy = "round_robin" if scheduling.type == "batch" else "least_loaded"
    return proxy_type(
        roles.engines,
        bring_up,
        max_attempts=config.rollout.max_attempts,
        router=Router(policy, scheduling.max_kv_used),
        restarts=scheduling.interrupted_turns == "restart",
    )


def episode_plan(config: GeneratingConfig, max_context: int) -> EpisodePlan:
    """Return the settings of episodes for contexts of `max_context` tokens."""
    episodes = config.rollout.episodes
    return EpisodePlan(
        max_context=max_context,
        history=episodes.history.settings,
        long_observations=episodes.long_observations,
        min_answer_tokens=episodes.min_answer_tokens,
    )


async def _loop(config: GeneratingConfig, roles: Roles, stack: AsyncExitStack) -> RolloutLoop | None:
    """Return the configured rollout loop, or `None` for ROLL's own; `stack` closes the resources of an agent."""
    agent = config.rollout.agent
    if agent is None:
        return load_own_loop(config.rollout.loop)
    return await stack.enter_async_context(open_agents(agent, config.sandbox, max_context=roles.max_context))


def _listen(generation: Generation, tracker: Tracker, stack: AsyncExitStack, *, traced: bool) -> None:
    """Register observers of the life cycle, and of environments until `stack` is closed."""
    listeners = [generation.retries.on_transition, generation.wait_phases.on_transition]
    if traced:
        listeners.append(RolloutTrace(tracker.spans.event, FINAL).on_transition)
    for listener in listeners:
        generation.scheduler.life.listen(listener)
    stack.enter_context(watched(generation.wait_phases.environment))

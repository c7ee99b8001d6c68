"""Generation: the roles that answer prompts and score the answers.

engines ─► LLMProxy ─┐
workers ─► rewards ──┼─► RolloutScheduler ─► rollouts with rewards
judge ───┘           └─ life cycle ─► trace, phases of a wait, retries
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from roll.agents.agent_loop import open_agent_loop
from roll.cluster.base import Cluster, start_concurrently
from roll.config.rollout_run import RolloutRunConfig
from roll.data import ChatRenderer
from roll.envs.image_storage import ImageStorage
from roll.envs.run_hosts import open_hosts
from roll.envs.timing import watch_activity
from roll.inference import resolve_engine_kind
from roll.pipelines.judge import JudgeRole, start_judge
from roll.pipelines.learning.failures import RetryCounter
from roll.pipelines.preparation import PreparedRun, build_engine_specs, list_engine_ids_by_width
from roll.pipelines.start_notes import StartProgress
from roll.protocols import InferenceEngine, Reward, WorkerPool
from roll.rewards.compose import WeightedReward
from roll.rewards.opening import open_rewards
from roll.rollout import LLMProxy, RolloutScheduler, Router
from roll.rollout.device_classes import DeviceClasses
from roll.rollout.elastic_engines import ElasticEngines, ElasticNodes
from roll.rollout.engine_group import EngineGroup
from roll.rollout.engine_widths import EngineWidths
from roll.rollout.episode_start import EpisodePlan
from roll.rollout.lifecycle import FINAL_STATES
from roll.rollout.loops import RolloutLoop, load_user_loop
from roll.tracking import RunDirectory, Spans, Tracker
from roll.tracking.rollout_trace import RolloutTrace, trace_engine_change
from roll.tracking.wait_phases import WaitPhases

__all__ = [
    "GenerationParts",
    "StartedRoles",
    "build_device_classes",
    "build_episode_plan",
    "open_generation",
    "start_roles",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedRoles:
    """The started roles that generate answers and score them: engines, reward workers, judge."""

    engines: EngineGroup
    pool: WorkerPool
    judge: JudgeRole | None
    max_context: int
    """Context length of the engines."""
    engine_ids: Mapping[int, Sequence[str]]
    """Ids of the engines by width (`inference.tensor_parallel`); those of the first width are awake."""
    elastic_nodes: ElasticNodes | None = None
    """Nodes for further engines that join and leave during the run."""


async def start_roles(
    config: RolloutRunConfig,
    cluster: Cluster,
    prepared: PreparedRun,
    stack: AsyncExitStack,
    *,
    run: RunDirectory | None = None,
    tracker: Tracker | None = None,
    trainers: Sequence[tuple[str, Awaitable[Any]]] = (),
    released_engines: Collection[int] = (),
) -> tuple[StartedRoles, list[Any]]:
    """Start engines, reward workers, the judge and trainers concurrently.

    Args:
        config: Configuration of the run.
        cluster: Cluster on which the roles start.
        prepared: The model's files and the prompts.
        stack: Exit stack that closes everything that started.
        run: Run directory for the engines' logs.
        tracker: Tracker that shows the roles that are still starting.
        trainers: Name and start coroutine of each trainer.
        released_engines: Indices of the engines that release their devices while trainers compute. If there are any,
            engines start after the trainers have started and offloaded, since engines reserve a fraction of the
            free memory.

    Returns:
        The engines, reward workers and judge; and the started trainers, in the order of `trainers`.
    """
    progress = StartProgress(tracker.note if tracker else _do_nothing)
    emit = tracker.spans.add_event if tracker else _do_nothing
    kind = resolve_engine_kind(config.inference.engine)
    training = [progress.await_start(f"trainer ({role})", start) for role, start in trainers]
    before = await start_concurrently(stack, *training) if released_engines else []
    specs = build_engine_specs(config, prepared, run, released=released_engines, is_trained=bool(trainers))
    engine_ids = list_engine_ids_by_width(specs)
    asleep = [ids for width, ids in engine_ids.items() if width != specs[0].tensor_parallel]
    starting = [
        progress.await_start(f"engines ({kind})", cluster.start_engines(specs, "actor_infer", asleep)),
        cluster.start_pool(config.rollout.reward_workers),
        *([] if released_engines else training),
    ]
    if config.judge is not None:
        starting.append(progress.await_start("judge", start_judge(config, cluster, run, emit)))
    engines, pool, *others = await start_concurrently(stack, *starting)
    judge = others.pop() if config.judge is not None else None
    roles = StartedRoles(
        engines=engines,
        pool=pool,
        judge=judge,
        max_context=prepared.max_context,
        engine_ids=engine_ids,
        elastic_nodes=cluster.open_elastic_nodes(replace(specs[0], sleeps=False), "actor_infer"),
    )
    return roles, before or others


def _do_nothing(*_: object, **__: object) -> None:
    """Accept all arguments and do nothing; replaces the tracker's functions outside a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationParts:
    """The components that generate and score rollouts: proxy, scheduler, rewards, judge."""

    proxy: LLMProxy
    scheduler: RolloutScheduler
    rewards: Mapping[str, WeightedReward]
    """Configured reward of each domain."""
    judge: JudgeRole | None
    """The run's judge, if rewards use one."""
    renderer: ChatRenderer
    wait_phases: WaitPhases
    widths: EngineWidths | None = None
    """Switch between engines of several widths; `None` if all engines have the same width."""
    elastic_engines: ElasticEngines | None = None
    """Engines on nodes that join and leave; `None` if the run uses no such nodes."""
    retries: RetryCounter = field(default_factory=RetryCounter)

    def collect_metrics(self) -> dict[str, float]:
        """Return the metrics of retries, environments and judge since the last call."""
        figures = self.retries.collect_metrics() | self.scheduler.hosts.collect_metrics()
        return figures | (self.judge.collect_metrics() if self.judge else {})

    def restore(self, verifiers: Mapping[str, Any]) -> None:
        """Restore the rewards of each domain from the states that `ServedPolicy.get_verifier_states` returned."""
        for domain, reward in self.rewards.items():
            reward.restore(verifiers.get(domain, {}))


async def open_generation(
    config: RolloutRunConfig,
    roles: StartedRoles,
    renderer: ChatRenderer,
    stack: AsyncExitStack,
    *,
    tracker: Tracker | None = None,
    proxy_type: type[LLMProxy] = LLMProxy,
    prepare_engine: Callable[[InferenceEngine], Awaitable[object]] | None = None,
    loop: RolloutLoop | None = None,
    wrap_reward: Callable[[Reward], Reward] = lambda reward: reward,
) -> GenerationParts:
    """Build proxy, rewards and scheduler on the started roles.

    Args:
        config: Configuration of the run.
        roles: Started roles.
        renderer: Converts tokens to text.
        stack: Exit stack that closes everything that is opened.
        tracker: Tracker of the run, which observes every rollout.
        proxy_type: Class of the proxy.
        prepare_engine: Syncs the current weights to a fresh engine; by default, an engine keeps its loaded weights.
        loop: Rollout loop that replaces the configured loop.
        wrap_reward: Wrapper of each domain's reward.

    Raises:
        ConfigError: `rollout.loop` cannot be imported.
    """
    rollout, scheduling = config.rollout, config.rollout.scheduling
    proxy = _build_proxy(config, roles, proxy_type, prepare_engine)
    stack.push_async_callback(proxy.close)
    judge = roles.judge.model if roles.judge else None
    rewards = await stack.enter_async_context(open_rewards(config.data, config.sandbox, roles.pool, judge))
    images = None if (inputs := renderer.media_inputs) is None else ImageStorage(inputs, roles.pool)
    scheduler = RolloutScheduler(
        proxy,
        {domain: wrap_reward(reward) for domain, reward in rewards.items()},
        renderer,
        seed=config.seed,
        max_attempts=rollout.max_attempts,
        retry_wait_s=rollout.retry_wait_s,
        replicate=scheduling.replicate_prompts and scheduling.type != "batch",
        loop=await _build_loop(config, roles, stack, images) if loop is None else loop,
        episodes=build_episode_plan(config, roles.max_context),
        hosts=await stack.enter_async_context(open_hosts(roles.pool, config.sandbox, images)),
        on_rollout=tracker.on_rollout if tracker else _do_nothing,
    )
    generation = GenerationParts(
        proxy=proxy,
        scheduler=scheduler,
        rewards=rewards,
        judge=roles.judge,
        renderer=renderer,
        wait_phases=WaitPhases(tracker.spans if tracker else Spans()),
        widths=await _open_widths(config, roles, proxy),
        elastic_engines=_build_elastic_engines(config, roles, proxy, stack, tracker),
    )
    if tracker is not None:
        _register_listeners(generation, tracker, stack, traced=config.tracking.trace_rollouts)
    return generation


def _build_proxy(
    config: RolloutRunConfig,
    roles: StartedRoles,
    proxy_type: type[LLMProxy],
    prepare_engine: Callable[[InferenceEngine], Awaitable[object]] | None,
) -> LLMProxy:
    scheduling = config.rollout.scheduling
    return proxy_type(
        roles.engines,
        prepare_engine,
        max_attempts=config.rollout.max_attempts,
        router=Router(scheduling.routing_policy, scheduling.max_kv_used, build_device_classes(config)),
        restart_aborted=scheduling.interrupted_turns == "restart",
    )


def _build_elastic_engines(
    config: RolloutRunConfig, roles: StartedRoles, proxy: LLMProxy, stack: AsyncExitStack, tracker: Tracker | None
) -> ElasticEngines | None:
    """Return the engines on nodes that join and leave, which `ElasticEngines.start` starts and `stack` closes.

    Return `None` if the run uses no such nodes.
    """
    elastic, nodes = config.cluster.elastic, roles.elastic_nodes
    if elastic is None or nodes is None:
        return None
    engines = ElasticEngines(
        nodes,
        proxy.transitions,
        min_engines=elastic.min_engines,
        max_engines=elastic.max_engines,
        min_timeout_s=elastic.min_engines_timeout_s,
        first_number=config.num_engines,
        on_change=partial(trace_engine_change, tracker.spans.add_event) if tracker else _do_nothing,
    )
    stack.push_async_callback(engines.close)
    return engines


async def _open_widths(config: RolloutRunConfig, roles: StartedRoles, proxy: LLMProxy) -> EngineWidths | None:
    """Return the switch between engines of several widths, of which those of the first width are awake; `None` if all
    engines have the same width."""
    if len(roles.engine_ids) == 1:
        return None
    widths = EngineWidths(proxy, roles.engine_ids, num_requests=config.rollout.count_running_rollouts())
    await widths.start()
    return widths


def build_device_classes(config: RolloutRunConfig) -> DeviceClasses | None:
    """Return the device classes of the engines and the preferences of the sources; `None` without device classes."""
    names, width = config.engine_classes, config.inference.width
    if not names:
        return None
    classes = config.cluster.device_classes
    return DeviceClasses(
        engine_classes={f"engine-{index}": name for index, name in enumerate(names)},
        engine_prices={name: width * (each.price_per_hour or 1.0) for name, each in classes.items()},
        preferences=config.preferred_classes,
    )


def build_episode_plan(config: RolloutRunConfig, max_context: int) -> EpisodePlan:
    """Return the settings of episodes for contexts of `max_context` tokens."""
    episodes = config.rollout.episodes
    return EpisodePlan(
        max_context=max_context,
        history=episodes.history.settings,
        long_observations=episodes.long_observations,
        min_answer_tokens=episodes.min_answer_tokens,
    )


async def _build_loop(
    config: RolloutRunConfig, roles: StartedRoles, stack: AsyncExitStack, images: ImageStorage | None
) -> RolloutLoop | None:
    """Return the loop of `rollout.agent` or `rollout.loop`; `None` for ROLL's default loop. `stack` closes the
    agent."""
    agent = config.rollout.agent
    if agent is None:
        return load_user_loop(config.rollout.loop)
    return await stack.enter_async_context(
        open_agent_loop(agent, config.sandbox, max_context=roles.max_context, images=images)
    )


def _register_listeners(generation: GenerationParts, tracker: Tracker, stack: AsyncExitStack, *, traced: bool) -> None:
    """Register listeners of rollouts and environments; with `traced`, rollouts are also written to the trace.

    Closing `stack` removes the listener of environments.
    """
    listeners = [generation.retries.on_transition, generation.wait_phases.on_transition]
    if traced:
        listeners.append(RolloutTrace(tracker.spans.add_event, FINAL_STATES).on_transition)
    for listener in listeners:
        generation.scheduler.lifecycle.add_listener(listener)
    stack.enter_context(watch_activity(generation.wait_phases.record_environment_activity))

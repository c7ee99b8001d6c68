"""Answering recorded prompts again: engines, rewards and the scheduler at work, and nobody trained.

    recording ─► prompts in the recorded order ─► AsyncController ─► RolloutScheduler ─► engines, rewards ─► batch
                     └─ lengths, turns, rewards ──────────────────────┘                                       │
                                        the recorded time of training, where generation runs beside it ◄──────┘

Weights stay those that the engines loaded. With `lengths: recorded` every answer that the recorded run finished gets
as many tokens and turns as it had, and its reward's value; the verifier still runs, for its time. Answers that the
recorded run never finished (redundant ones that it stopped) are as long as the model makes them.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from roll.cluster.base import open_cluster
from roll.config.pipelines.rlvr import RLVRConfig
from roll.errors import ConfigError
from roll.models import resolve_model
from roll.pipelines import measures
from roll.pipelines.judge import start_judge
from roll.pipelines.learning.failures import Retries
from roll.pipelines.material import engine_specs, prepare_material, sampling_plans
from roll.pipelines.replay.checks import check_material, check_steps, open_recording
from roll.pipelines.replay.comparison import Comparison
from roll.pipelines.saved import find_model_directory
from roll.pipelines.scheduling import build_controller, build_router, build_scheduler, own_loop
from roll.pipelines.state import RunState
from roll.pipelines.stop import StopRequest
from roll.pipelines.watching import watch
from roll.protocols import Reward
from roll.rewards.opening import open_rewards
from roll.rollout import AsyncController, DataLedger, LLMProxy, RolloutScheduler
from roll.rollout.loops import Generate, Renderer, RolloutLoop, joined, next_turn, play, single_answer
from roll.tracking import RunDirectory, Tracker
from roll.tracking.recording import RecordedWork
from roll.tracking.stages import Stages
from roll.types import Generation, GenerationRequest, PromptDraw, RewardResult, Rollout, Turn

__all__ = ["SameLengths", "SameRewards", "open_generation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _World:
    config: RLVRConfig
    tracker: Tracker
    stop: StopRequest
    work: RecordedWork
    controller: AsyncController
    scheduler: RolloutScheduler
    proxy: LLMProxy
    retries: Retries
    stages: Stages
    first: int


@asynccontextmanager
async def open_generation(
    config: RLVRConfig, run: RunDirectory, tracker: Tracker, stop: StopRequest
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Compare with the recording, start engines and rewards, and end them afterwards; inside, the loop to run.

    Raises:
        UserError: this cannot be replayed; says why.
    """
    assert config.replay is not None, "this is a replay"
    recording = await asyncio.to_thread(open_recording, config)
    start = recording.start
    check_steps(recording, recording.first, config.training.num_steps)
    material = await asyncio.to_thread(prepare_material, config)
    check_material(start, material)
    steps = range(recording.first, recording.last + 1)
    work = await asyncio.to_thread(RecordedWork.of, map(recording.read, steps))
    state = RunState(data=dict(start.stream), step=start.step, pending=[list(entry) for entry in start.pending])
    if config.replay.checkpoint is not None:
        material = replace(material, model_path=_weights(config.replay.checkpoint))
    async with AsyncExitStack() as stack:
        cluster = open_cluster(config.cluster, config.roles, run)
        stack.push_async_callback(cluster.close)
        engines = await cluster.start_engines(engine_specs(config, material, run), "actor_infer")
        stack.push_async_callback(engines.close)
        pool = await cluster.start_pool(config.rollout.reward_workers)
        stack.push_async_callback(pool.close)
        judge = await start_judge(config, cluster, run, tracker.spans.event) if config.judge else None
        if judge is not None:
            stack.push_async_callback(judge.close)
        rewards: Mapping[str, Reward] = await stack.enter_async_context(
            open_rewards(config.data, config.sandbox, pool, judge.model if judge is not None else None)
        )
        attempts, router = config.rollout.max_attempts, build_router(config)
        proxy = LLMProxy(engines, max_attempts=attempts, router=router)
        stack.push_async_callback(proxy.close)
        loop: RolloutLoop | None = None
        if config.replay.lengths == "recorded":
            loop = SameLengths(work, own_loop(config))
            rewards = {domain: SameRewards(reward, work) for domain, reward in rewards.items()}
        scheduler = build_scheduler(config, proxy, rewards, material.data.renderer, tracker.on_rollout, loop=loop)
        retries, stages = watch(config, scheduler, tracker, stack)
        plan = sampling_plans(config, material.stop_token_ids)[0]
        ledger = _ledger_of(start.num_draws)
        controller = build_controller(config, state, material.data, ledger, scheduler, proxy, plan)
        world = _World(
            config=config,
            tracker=tracker,
            stop=stop,
            work=work,
            controller=controller,
            scheduler=scheduler,
            proxy=proxy,
            retries=retries,
            stages=stages,
            first=recording.first,
        )
        yield functools.partial(_generate_again, world)


def _ledger_of(num_draws: int) -> DataLedger:
    """One in which so many draws were opened before."""
    import numpy as np

    from roll.types import Prompt

    ledger, bare = DataLedger(), Prompt(uid="", domain="", messages=())
    ledger.open([PromptDraw(draw_id=i, prompt=bare, token_ids=np.zeros(0, np.int32)) for i in range(num_draws)], step=0)
    return ledger


def _weights(source: str) -> Path:
    """A model's directory: inside a run or a checkpoint, or by a name that `resolve_model` knows."""
    path = Path(source)
    found = find_model_directory(path)
    if found is None and (path / "checkpoints").is_dir():
        raise ConfigError(f"replay.checkpoint '{source}' is a run without a checkpoint: name a model or a checkpoint.")
    return found or resolve_model(source)


async def _generate_again(world: _World) -> None:
    """Run every recorded step.

    Raises:
        Interrupted: a signal asked for a stop.
    """
    comparison = Comparison(work=world.work)
    try:
        for step in range(world.first, world.config.training.num_steps + 1):
            with world.tracker.spans.step(step):
                await world.stop.unless(_step(world, step, comparison))
    finally:
        await world.controller.close()
    comparison.write(world.tracker.run.path / "replay.json")
    world.tracker.console.close()
    world.tracker.console.show(comparison.table())


async def _step(world: _World, step: int, comparison: Comparison) -> None:
    spans, controller, work = world.tracker.spans, world.controller, world.work
    beside = world.config.rollout.scheduling.async_ratio > 0
    with world.stages.waiting("wait" if beside else "generate"):
        batch = await controller.next_batch()
    if beside:  # with nothing beside it, the time of training changes nothing
        with spans.phase("train"):
            await asyncio.sleep(work.train_s[step])
        with spans.phase("sync"):
            async with controller.updating():
                await asyncio.sleep(work.sync_s[step])
    kept = [group for group in batch.groups if group.draw.draw_id not in batch.left_out]
    await controller.settle(step - world.first + 1, {r.rollout_id for group in kept for r in group.scored})
    metrics = measures.rollout_metrics(batch.groups) | measures.batch_metrics(batch)
    metrics |= world.retries.metrics() | measures.engine_metrics(world.proxy)
    metrics |= {
        "replay/recorded_wait_s": work.wait_s[step],
        "replay/recorded_step_s": work.step_s[step],
    } | spans.metrics()
    comparison.add(step, metrics)
    world.tracker.log_rollouts(step, batch.groups)
    world.tracker.log_step(step, metrics)


class SameLengths:
    """A rollout loop that makes answers as long as they were; see `roll.rollout.loops.RolloutLoop`.

    Rollouts of several turns get the recorded turns, with the recorded words of the environment between them: an
    environment that heard other answers would say something else. A loop of the user's own runs as it is, and each of
    its requests gets its recorded length.

    Args:
        work: what was recorded.
        own: the user's own loop.
    """

    def __init__(self, work: RecordedWork, own: RolloutLoop | None = None) -> None:
        self._work = work
        self._own = own

    async def __call__(
        self, draw: PromptDraw, index: int, first: GenerationRequest, generate: Generate, renderer: Renderer
    ) -> Rollout:
        same = functools.partial(self._same, generate)
        name = f"{draw.draw_id}.{index}"
        recorded = first.request_id.startswith("train-")
        if recorded and self._own is None and name in self._work.between:
            return await self._turns(name, draw, index, first, same, renderer)
        loop = self._own or (play if "env" in draw.prompt.metadata else single_answer)
        return await loop(draw, index, first, same, renderer)

    async def _same(self, generate: Generate, request: GenerationRequest) -> Generation:
        length = self._work.tokens.get(request.request_id)
        if not length:
            return await generate(request)
        sampling = replace(request.sampling, max_new_tokens=length, stop_token_ids=())
        found = await generate(replace(request, sampling=sampling))
        ended = found.finish_reason == "length" and self._work.stopped[request.request_id]
        return replace(found, finish_reason="stop") if ended else found

    async def _turns(
        self, name: str, draw: PromptDraw, index: int, first: GenerationRequest, same: Generate, renderer: Renderer
    ) -> Rollout:
        import numpy as np

        between, said = self._work.between[name], self._work.turn_rewards[name]
        generations: list[Generation] = []
        turns: list[Turn] = []
        context, position = draw.token_ids, 0
        for number, (reward, state) in enumerate(said):
            generation = await same(next_turn(first, context, number))
            generations.append(generation)
            end = position + len(generation.token_ids)
            turns.append(Turn(start=position, end=end, reward=reward, state=state))
            if number < len(between):
                context = np.concatenate([context, generation.token_ids, between[number]]).astype(np.int32)
                position = end + len(between[number])
        return joined(draw, index, generations, list(between), tuple(turns), renderer)


class SameRewards:
    """A reward that takes its time and says what was recorded; see `roll.protocols.Reward`.

    Args:
        inner: the run's own.
        work: what was recorded.
    """

    def __init__(self, inner: Reward, work: RecordedWork) -> None:
        self._inner = inner
        self._work = work

    async def __call__(self, rollout: Rollout) -> RewardResult:
        result = await self._inner(rollout)
        recorded = self._work.rewards.get(rollout.rollout_id)
        return result if recorded is None else replace(recorded, duration_s=result.duration_s)

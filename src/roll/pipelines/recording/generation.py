"""Replay without a trainer: engines answer the recorded prompts again, and the answers are scored but not trained on.

    recording ─► prompts in the recorded order ─► AsyncController ─► RolloutScheduler ─► engines, rewards ─► batch
                     └─ lengths, turns, rewards ──────────────────────┘                                       │
                               the recorded time of training, if generation runs concurrently with it ◄───────┘

Engines keep the weights that they loaded. With `lengths: recorded` every answer that the recorded run finished gets the
recorded number of tokens and turns, and the recorded reward; the verifier still runs, for its time. Answers that the
recorded run did not finish (stopped redundant rollouts) have no prescribed length."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from roll.cluster.base import open_cluster
from roll.config.pipelines.rlvr import RLVRConfig
from roll.errors import ConfigError
from roll.models import resolve_model
from roll.pipelines import measures
from roll.pipelines.checkpoint_files import find_model_directory
from roll.pipelines.generation import GenerationParts, build_episode_plan, open_generation, start_roles
from roll.pipelines.learning.state import LearningState
from roll.pipelines.preparation import build_sampling_plans, prepare
from roll.pipelines.recording.batches import build_draw_without_prompt
from roll.pipelines.recording.checks import check_recorded_inputs, check_steps, copy_media, open_recording
from roll.pipelines.recording.comparison import Comparison
from roll.pipelines.recording.recorded_work import RecordedWork
from roll.pipelines.reinforcement.sampling import build_controller
from roll.pipelines.run import Session
from roll.protocols import Reward
from roll.rollout import AsyncController, DataLedger
from roll.rollout.episode import choose_loop
from roll.rollout.episode_start import EpisodePlan
from roll.rollout.loops import Generate, Renderer, RolloutLoop, build_next_request, join_turns, load_user_loop
from roll.running import run_in_thread
from roll.types import (
    TRAIN,
    Branch,
    EncodedText,
    Generation,
    GenerationRequest,
    MediaSpan,
    PromptDraw,
    RewardResult,
    Rollout,
    RolloutId,
    Turn,
    join_encoded,
    shift_media,
    slice_media,
)

__all__ = ["RecordedLengthsLoop", "RecordedRewards", "open_rollout_replay"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _RolloutReplay:
    config: RLVRConfig
    session: Session
    work: RecordedWork
    controller: AsyncController
    generation: GenerationParts
    first: int


@asynccontextmanager
async def open_rollout_replay(config: RLVRConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Check the recording, start engines and rewards, yield the loop to run, and shut everything down afterwards.

    Raises:
        UserError: The run cannot be replayed; the message gives the reason.
    """
    config = config.with_first_width()  # no trainer could send the weights to an engine that wakes
    assert config.replay is not None, "this is a replay"
    recording = await run_in_thread(open_recording, config)
    await run_in_thread(copy_media, recording, session.directory)
    start, tracker = recording.first_session, session.tracker
    check_steps(recording, recording.first_step, config.training.num_steps)
    prepared = await run_in_thread(prepare, config, session.directory.media_dir)
    check_recorded_inputs(start, prepared)
    steps = range(recording.first_step, recording.last_step + 1)
    work = await run_in_thread(RecordedWork.from_steps, map(recording.read, steps))
    state = LearningState(data=dict(start.stream), step=start.step, pending=[list(entry) for entry in start.pending])
    if config.replay.checkpoint is not None:
        prepared = replace(prepared, model_path=_find_weights(config.replay.checkpoint))
    same = config.replay.lengths == "recorded"
    async with AsyncExitStack() as stack:
        cluster = open_cluster(config.cluster, config.roles, session.directory)
        stack.push_async_callback(cluster.close)
        roles, _ = await start_roles(config, cluster, prepared, stack, run=session.directory, tracker=tracker)
        generation = await open_generation(
            config,
            roles,
            prepared.data.renderer,
            stack,
            tracker=tracker,
            loop=RecordedLengthsLoop(
                work, load_user_loop(config.rollout.loop), build_episode_plan(config, prepared.max_context)
            )
            if same
            else None,
            wrap_reward=(lambda reward: RecordedRewards(reward, work)) if same else (lambda reward: reward),
        )
        plan = build_sampling_plans(config, prepared.stop_token_ids)[0]
        ledger = DataLedger()
        ledger.record_draws(map(build_draw_without_prompt, range(start.num_draws)), step=0)
        controller = build_controller(config, state, prepared.data, ledger, generation, plan)
        replay = _RolloutReplay(
            config=config,
            session=session,
            work=work,
            controller=controller,
            generation=generation,
            first=recording.first_step,
        )
        yield functools.partial(_replay_steps, replay)


def _find_weights(source: str) -> Path:
    """Return the model directory that `source` denotes: a run, a checkpoint, or a name for `resolve_model`."""
    path = Path(source)
    found = find_model_directory(path)
    if found is None and (path / "checkpoints").is_dir():
        raise ConfigError(
            f"replay.checkpoint '{source}' is a run without a checkpoint: choose a model or a checkpoint."
        )
    return found or resolve_model(source)


async def _replay_steps(replay: _RolloutReplay) -> None:
    """Run every recorded step.

    Raises:
        Interrupted: A signal requested a stop.
    """
    comparison, tracker = Comparison(work=replay.work), replay.session.tracker
    try:
        for step in range(replay.first, replay.config.training.num_steps + 1):
            with tracker.spans.step(step):
                await replay.session.stop.run_unless_stopped(_replay_step(replay, step, comparison))
    finally:
        await replay.controller.close()
    comparison.write(tracker.run.path / "replay.json")
    tracker.console.close()
    tracker.console.show(comparison.build_table())


async def _replay_step(replay: _RolloutReplay, step: int, comparison: Comparison) -> None:
    tracker, controller, work = replay.session.tracker, replay.controller, replay.work
    spans = tracker.spans
    concurrent = replay.config.rollout.scheduling.async_ratio > 0
    with replay.generation.wait_phases.measure_wait("wait" if concurrent else "generate"):
        batch = await controller.next_batch()
    if concurrent:  # in a synchronous run, the time of training has no effect
        with spans.phase("train"):
            await asyncio.sleep(work.train_s[step])
        with spans.phase("sync"):
            async with controller.pause_for_update():
                await asyncio.sleep(work.sync_s[step])
    kept = [group for group in batch.groups if group.draw.draw_id not in batch.rejection_reasons]
    await controller.complete_step(
        step - replay.first + 1, {r.rollout_id for group in kept for r in group.scored_rollouts}
    )
    metrics = measures.compute_rollout_metrics(batch.groups) | measures.compute_batch_metrics(batch)
    metrics |= replay.generation.retries.collect_metrics() | measures.compute_engine_metrics(
        replay.generation.proxy.get_counters()
    )
    metrics |= {
        "replay/recorded_wait_s": work.wait_s[step],
        "replay/recorded_step_s": work.step_s[step],
    } | spans.get_metrics()
    comparison.add(step, metrics)
    tracker.log_rollouts(step, batch.groups)
    tracker.log_step(step, metrics)


@dataclass(frozen=True, eq=False)
class RecordedLengthsLoop:
    """A rollout loop (`RolloutLoop`) that generates answers of the recorded lengths.

    Rollouts with several turns replay the recorded turns, with the environment's recorded tokens between them, because
    an environment would respond differently to different answers. A user-defined loop runs unchanged, and each of its
    requests generates an answer of the recorded length.
    """

    work: RecordedWork
    """The recorded lengths."""
    user_loop: RolloutLoop | None = None
    """The user-defined loop."""
    episodes: EpisodePlan = field(default_factory=EpisodePlan)
    """Settings of episodes without a recording."""

    async def __call__(
        self, draw: PromptDraw, index: int, first_request: GenerationRequest, generate: Generate, renderer: Renderer
    ) -> Rollout:
        generate_recorded = functools.partial(self._generate_recorded, generate)
        recorded = RolloutId(purpose=TRAIN, draw_id=draw.draw_id, index=index)
        trains = first_request.request_id == recorded.request_id()
        if trains and self.user_loop is None and recorded in self.work.tokens_between_turns:
            return await self._replay_turns(recorded, draw, first_request, generate_recorded, renderer)
        loop = self.user_loop or choose_loop(draw.prompt, plan=self.episodes)
        return await loop(draw, index, first_request, generate_recorded, renderer)

    async def _generate_recorded(self, generate: Generate, request: GenerationRequest) -> Generation:
        length = self.work.tokens.get(request.request_id)
        if not length:
            return await generate(request)
        sampling = replace(request.sampling, max_new_tokens=length, stop_token_ids=())
        found = await generate(replace(request, sampling=sampling))
        ended = found.finish_reason == "length" and self.work.stopped[request.request_id]
        return replace(found, finish_reason="stop") if ended else found

    async def _replay_turns(
        self,
        recorded: RolloutId,
        draw: PromptDraw,
        first_request: GenerationRequest,
        generate_recorded: Generate,
        renderer: Renderer,
    ) -> Rollout:
        between, turn_rewards = self.work.tokens_between_turns[recorded], self.work.turn_rewards[recorded]
        generations: list[Generation] = []
        rollout_media: list[MediaSpan] = []
        contexts = self.work.contexts.get(recorded, {})
        turns: list[Turn] = []
        branches: list[Branch] = []
        recorded_media = self.work.media.get(recorded, ())
        context, position = EncodedText(draw.token_ids, draw.media), 0
        for number, (reward, state) in enumerate(turn_rewards):
            if number in contexts:
                context = contexts[number]
                branches.append(Branch(start=position, context=context.token_ids, media=context.media))
            request = build_next_request(first_request, context.token_ids, number, media=context.media)
            generation = await generate_recorded(request)
            generations.append(generation)
            end = position + len(generation.token_ids)
            turns.append(Turn(start=position, end=end, reward=reward, state=state))
            if number < len(between):
                following = end + len(between[number])
                added = EncodedText(between[number], slice_media(recorded_media, end, following))
                rollout_media += shift_media(added.media, end)
                context = join_encoded(join_encoded(context, EncodedText(generation.token_ids)), added)
                position = following
        parts, media = list(between), tuple(rollout_media)
        return join_turns(draw, recorded.index, generations, parts, tuple(turns), renderer, tuple(branches), media)


@dataclass(frozen=True, eq=False)
class RecordedRewards:
    """A `roll.protocols.Reward` that returns the recorded results. The verifier still runs, so that its time is
    included."""

    inner: Reward
    """The run's reward."""
    work: RecordedWork
    """The recorded rewards."""

    async def __call__(self, rollout: Rollout) -> RewardResult:
        result = await self.inner(rollout)
        recorded = self.work.rewards.get(rollout.rollout_id)
        return result if recorded is None else replace(recorded, duration_s=result.duration_s)

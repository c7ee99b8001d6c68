"""The roles around the scheduler, simulated: engine group, rewards, trainer, weight sync, environment loops."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial

import numpy as np

from roll.cluster.engines import StartedEngines
from roll.config.simulation import EnvironmentLatencyConfig, FailureConfig, SimulationConfig
from roll.errors import EngineDiedError
from roll.protocols import InferenceEngine
from roll.rollout.loops import Generate, Renderer, join_turns, next_turn
from roll.simulation.batch import BatchTotals
from roll.simulation.costs import train_s
from roll.simulation.engine import AnswerTokens, EngineSettings, SimulatedEngine
from roll.simulation.experts import expert_traffic_s
from roll.simulation.hardware import Device, Model
from roll.simulation.workload import Workload, observation
from roll.types import Generation, GenerationRequest, IntArray, Message, PromptDraw, RewardResult, Rollout, WeightUpdate

__all__ = ["EnvironmentTurns", "SimulatedEngines", "SimulatedRenderer", "SimulatedReward", "SimulatedTrainer"]


class SimulatedEngines(StartedEngines):
    """See `roll.rollout.engine_group.EngineGroup`.

    Args:
        num_engines: number of engines.
        settings: settings of each engine.
        answer_tokens: returns the length of an answer.
    """

    def __init__(self, num_engines: int, settings: EngineSettings, answer_tokens: AnswerTokens) -> None:
        self._made: list[SimulatedEngine] = []
        self.failures: list[asyncio.Task[None]] = []

        def make(engine_id: str) -> SimulatedEngine:
            self._made.append(SimulatedEngine(engine_id, settings, answer_tokens))
            return self._made[-1]

        names = (f"engine-{index}" for index in range(num_engines))
        super().__init__({name: partial(make, name) for name in names})

    async def close(self) -> None:
        """Close all engines."""
        for task in self.failures:
            task.cancel()
        await super().close()

    def plan_failures(self, failures: Sequence[FailureConfig]) -> None:
        """Schedule failures at their times; they affect the engine that is in their place then."""

        async def strike(failure: FailureConfig) -> None:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(failure.at_s - loop.time())
            engine = self.engines[failure.engine]
            assert isinstance(engine, SimulatedEngine)
            if failure.type == "death":
                engine.die(f"simulated at {failure.at_s:g} s")
            else:
                engine.stall(failure.duration_s)

        self.failures += [
            asyncio.create_task(strike(failure), name=f"failure-{number}") for number, failure in enumerate(failures)
        ]

    async def sync(self, policy_version: int) -> list[str]:
        """Send new weights to all engines at the same time.

        Returns:
            Ids of the engines that died.
        """
        engines = self.engines
        found = await asyncio.gather(*(self.bring_up(e, policy_version) for e in engines), return_exceptions=True)
        dead = []
        for engine, result in zip(engines, found, strict=True):
            if isinstance(result, EngineDiedError):
                dead.append(engine.engine_id)
            elif isinstance(result, BaseException):
                raise result
        return dead

    async def bring_up(self, engine: InferenceEngine, policy_version: int) -> None:
        """Send the current weights to a new engine."""
        await engine.update_weights(
            WeightUpdate(policy_version=policy_version, manifest=(), transport="simulated", handle=None)
        )

    def totals(self) -> BatchTotals:
        """Return the sums over all engines so far, including those that died."""
        result = BatchTotals()
        for engine in self._made:
            for name in BatchTotals.__slots__:
                setattr(result, name, getattr(result, name) + getattr(engine.totals, name))
        return result


class SimulatedReward:
    """See `roll.protocols.Reward`: takes simulated time, and decides by the prompt's solve rate."""

    def __init__(self, workload: Workload, num_workers: int | None) -> None:
        self._workload = workload
        self._slots: AbstractAsyncContextManager[object] = (
            asyncio.Semaphore(num_workers) if num_workers else nullcontext()
        )

    async def __call__(self, rollout: Rollout) -> RewardResult:
        duration = self._workload.reward_s(rollout)
        if duration:
            async with self._slots:
                await asyncio.sleep(duration)
        right = self._workload.is_correct(rollout)
        return RewardResult(value=float(right), correct=right, duration_s=duration)


class SimulatedRenderer:
    """Renders meaningless tokens; see `roll.rollout.loops.Renderer`."""

    def final_text(self, token_ids: IntArray, context: IntArray) -> str:
        return self.decode(token_ids)

    def decode(self, token_ids: IntArray) -> str:
        return ""

    drops_tools = False

    def escape_special_tokens(self, text: str) -> str:
        return text

    def follow_up(self, observation: str) -> IntArray:
        return np.ones(1, np.int32)

    def text(self, messages: Sequence[Message], tools: Sequence[object] = ()) -> str:
        return ""

    def tokens(self, text: str) -> IntArray:
        return np.ones(1, np.int32)

    def parse_answer(self, answer: IntArray, after: IntArray, stops: Collection[int] = ()) -> tuple[str, bool]:
        return "", True

    def suffix_ids(self, text: str, ended: bool) -> IntArray | None:
        return np.ones(1, np.int32)


class SimulatedTrainer:
    """Durations of updates.

    Args:
        config: the simulation.
        model: the trained model.
        device: device of the trainer.
        workload: the workload, for durations that are given.
    """

    def __init__(self, config: SimulationConfig, model: Model, device: Device, workload: Workload) -> None:
        self._training = config.training
        self._num_devices = config.placement.num_training
        self._model = model
        given = config.training.efficiency
        self._device = device if given is None else device.model_copy(update={"training_efficiency": given})
        self._workload = workload

    def duration_s(self, step: int, lengths: Sequence[int]) -> float:
        """Return the duration of an update.

        Args:
            step: number of the step.
            lengths: tokens of each sample, including the prompt.
        """
        given = self._workload.training_s(step)
        if given is not None:
            return given
        total = sum(lengths)
        if not total:
            return 0.0
        mean = sum(length * length for length in lengths) / total
        training, ranks = self._training, self._num_devices
        seconds = train_s(self._model, self._device, ranks, total, mean, passes=training.passes)
        if self._model.num_experts:
            # Collectives overlap with the computation, so the longer of the two counts.
            traffic_s = expert_traffic_s(
                self._model,
                self._device,
                ranks=ranks,
                ep=training.expert_parallel,
                tokens_per_rank=total / ranks,
                micro_batches=max(1, math.ceil(total / ranks / max(lengths))),
            )
            seconds = max(seconds, traffic_s)
        return training.overhead_s + seconds


class EnvironmentTurns:
    """A rollout loop (see `roll.rollout.loops.RolloutLoop`): turns with the latencies of an environment.

    Args:
        config: turns and their latencies.
        workload: draws the latencies.
    """

    def __init__(self, config: EnvironmentLatencyConfig, workload: Workload) -> None:
        self._config = config
        self._workload = workload
        self._num_playing = 0
        self._waiting: list[asyncio.Future[None]] = []
        """With `lockstep`: rollouts that have completed a turn, or generating one."""
        self._observation = observation(config.observation_tokens)

    async def __call__(
        self, draw: PromptDraw, index: int, first: GenerationRequest, generate: Generate, renderer: Renderer
    ) -> Rollout:
        context = draw.token_ids
        generations: list[Generation] = []
        self._num_playing += 1
        try:
            for turn in range(self._config.num_turns):
                if turn:
                    context = np.concatenate([context, generations[-1].token_ids, self._observation])
                generations.append(await generate(next_turn(first, context, turn)))
                await self._meet()
                await asyncio.sleep(self._workload.turn_s(draw.draw_id, index, turn))
                await self._meet()
        finally:
            self._num_playing -= 1
            self._go_on_together()
        return join_turns(draw, index, generations, [self._observation] * (len(generations) - 1), (), renderer)

    async def _meet(self) -> None:
        """Wait for all rollouts that play now; a group that replaces another in a step comes alone, and some never
        end.
        """
        if not self._config.lockstep:
            return
        arrival = asyncio.get_running_loop().create_future()
        self._waiting.append(arrival)
        self._go_on_together()
        try:
            await arrival
        except asyncio.CancelledError:
            if arrival in self._waiting:
                self._waiting.remove(arrival)
            raise

    def _go_on_together(self) -> None:
        if len(self._waiting) == self._num_playing:
            for arrival in self._waiting:
                arrival.set_result(None)
            self._waiting = []

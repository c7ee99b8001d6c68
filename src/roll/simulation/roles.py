"""Simulate the roles around the scheduler: engine group, rewards, trainer, weights, environment loops."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial

import numpy as np

from roll.cluster.engines import ManagedEngineGroup
from roll.config.distributions import FixedDistribution
from roll.config.simulated_roles import EnvironmentLatencyConfig, FailureConfig
from roll.config.simulation import SimulationConfig
from roll.errors import EngineDiedError
from roll.protocols import InferenceEngine, StateKind
from roll.rollout.loops import Generate, Renderer, RolloutLoop, build_next_request, join_turns
from roll.simulation.batch import BatchTotals
from roll.simulation.costs import compute_train_s
from roll.simulation.engine import AnswerTokens, EngineSettings, SimulatedEngine
from roll.simulation.experts import compute_expert_traffic_s
from roll.simulation.hardware import Device, Model
from roll.simulation.workload import Workload, build_observation
from roll.types import (
    EncodedText,
    Generation,
    GenerationRequest,
    Group,
    IntArray,
    Message,
    PromptDraw,
    RewardResult,
    Rollout,
    WeightUpdate,
)

__all__ = [
    "EnvironmentTurns",
    "SimulatedEngines",
    "SimulatedRenderer",
    "SimulatedReward",
    "SimulatedTrainer",
    "build_turns",
]


class SimulatedEngines(ManagedEngineGroup):
    """A simulated `roll.rollout.engine_group.EngineGroup`.

    Args:
        settings: Settings of every engine.
        answer_tokens: Returns the number of tokens that a request generates.
        widths: Number of devices of every engine; by default 1.
    """

    def __init__(
        self, settings: Sequence[EngineSettings], answer_tokens: AnswerTokens, widths: Sequence[int] | None = None
    ) -> None:
        self._made: list[SimulatedEngine] = []
        self.failures: list[asyncio.Task[None]] = []

        def make(engine_id: str, own: EngineSettings) -> SimulatedEngine:
            self._made.append(SimulatedEngine(engine_id, own, answer_tokens))
            return self._made[-1]

        names = {f"engine-{index}": own for index, own in enumerate(settings)}
        self._widths = dict(zip(names, widths or [1] * len(settings), strict=True))
        super().__init__({name: partial(make, name, own) for name, own in names.items()})

    async def close(self) -> None:
        """Close all engines."""
        for task in self.failures:
            task.cancel()
        await super().close()

    def schedule_failures(self, failures: Sequence[FailureConfig]) -> None:
        """Schedule failures of engines; an index refers to the list of engines at the time of the failure."""

        async def fail_engine(failure: FailureConfig) -> None:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(failure.at_s - loop.time())
            engine = self.engines[failure.engine]
            assert isinstance(engine, SimulatedEngine)
            if failure.type == "death":
                engine.die(f"simulated at {failure.at_s:g} s")
            elif failure.type == "slowdown":
                engine.slow_down(failure.factor)
                await asyncio.sleep(failure.duration_s)
                engine.slow_down(1.0)
            else:
                engine.stall(failure.duration_s)

        self.failures += [
            asyncio.create_task(fail_engine(failure), name=f"failure-{number}")
            for number, failure in enumerate(failures)
        ]

    async def sync(self, policy_version: int) -> tuple[list[str], list[str]]:
        """Send weights of `policy_version` to all engines that are awake, concurrently.

        Returns:
            Ids of the engines that have the weights, and ids of the engines that died.
        """
        engines = self.list_awake()
        found = await asyncio.gather(*(self.send_weights(e, policy_version) for e in engines), return_exceptions=True)
        synced, dead = [], []
        for engine, result in zip(engines, found, strict=True):
            if isinstance(result, EngineDiedError):
                dead.append(engine.engine_id)
            elif isinstance(result, BaseException):
                raise result
            else:
                synced.append(engine.engine_id)
        return synced, dead

    async def send_weights(self, engine: InferenceEngine, policy_version: int) -> None:
        """Send the weights of a policy version to an engine."""
        await engine.update_weights(
            WeightUpdate(policy_version=policy_version, manifest=(), transport="simulated", handle=None)
        )

    def sum_totals(self) -> BatchTotals:
        """Return the summed work of all engines so far, including engines that died."""
        result = BatchTotals()
        for engine in self._made:
            for name in BatchTotals.__slots__:
                setattr(result, name, getattr(result, name) + getattr(engine.totals, name))
        return result

    def list_ids_by_width(self) -> dict[int, list[str]]:
        """Return the ids of the engines of each width, in order."""
        found: dict[int, list[str]] = {}
        for engine_id, width in self._widths.items():
            found.setdefault(width, []).append(engine_id)
        return found

    def sum_busy_device_s(self) -> float:
        """Return the seconds in which devices were busy with steps of an engine, summed over the devices."""
        return sum(self._widths[engine.engine_id] * engine.totals.busy_s for engine in self._made)


class SimulatedReward:
    """A simulated `roll.protocols.Reward`: scoring takes simulated time, and the workload decides correctness."""

    def __init__(self, workload: Workload, num_workers: int | None) -> None:
        self._workload = workload
        self._slots: AbstractAsyncContextManager[object] = (
            asyncio.Semaphore(num_workers) if num_workers else nullcontext()
        )

    async def __call__(self, rollout: Rollout) -> RewardResult:
        duration = self._workload.get_reward_s(rollout)
        if duration:
            async with self._slots:
                await asyncio.sleep(duration)
        right = self._workload.is_correct(rollout)
        return RewardResult(value=float(right), correct=right, duration_s=duration)


class SimulatedRenderer:
    """A `roll.rollout.loops.Renderer` that returns dummy tokens."""

    def decode_final_text(self, token_ids: IntArray, context: IntArray) -> str:
        return self.decode(token_ids)

    def decode(self, token_ids: IntArray) -> str:
        return ""

    drops_tool_results = False

    def escape_special_tokens(self, text: str) -> str:
        return text

    def tokenize_follow_up(self, observation: str) -> IntArray:
        return np.ones(1, np.int32)

    def render_text(self, messages: Sequence[Message], tools: Sequence[object] = ()) -> str:
        return ""

    def encode(self, text: str) -> EncodedText:
        return EncodedText(np.ones(1, np.int32))

    def parse_answer(self, answer: IntArray, context: IntArray, stops: Collection[int] = ()) -> tuple[str, bool]:
        return "", True

    def encode_suffix(self, text: str, has_end_token: bool) -> EncodedText | None:
        return EncodedText(np.ones(1, np.int32))


class SimulatedTrainer:
    """Simulates the policy's trainer: its work takes simulated time.

    Args:
        config: The simulation.
        model: The trained model.
        device: Device of the trainer.
        workload: The workload, which may specify durations.
    """

    def __init__(self, config: SimulationConfig, model: Model, device: Device, workload: Workload) -> None:
        self._training = config.training
        self._further_overhead_s = (config.training.num_updates - 1) * config.training.overhead_s
        """Overhead of a step's updates after the first one."""
        self._num_devices = config.placement.num_training_devices
        self._switch_s = config.placement.switch_s
        self._model = model
        given = config.training.efficiency
        self._device = device if given is None else device.model_copy(update={"training_efficiency": given})
        self._workload = workload

    async def update(self, step: int, groups: Iterable[Group]) -> None:
        """Run the update of step `step`, with the gradients of `groups` and of all previously accumulated groups."""
        await asyncio.sleep(self._compute_duration_s(step, self._list_lengths(groups)) + self._further_overhead_s)

    async def onload(self, states: Sequence[StateKind]) -> None:
        """Move the devices from the engines to the trainer, which takes half of the switch time."""
        await asyncio.sleep(self._switch_s / 2)

    async def offload(self, states: Sequence[StateKind]) -> None:
        """Return the devices to the engines, which takes half of the switch time."""
        await asyncio.sleep(self._switch_s / 2)

    async def accumulate(self, step: int, groups: Iterable[Group]) -> None:
        """Compute the gradients of `groups` for the update of step `step`."""
        seconds = self._compute_duration_s(step, self._list_lengths(groups))
        await asyncio.sleep(max(0.0, seconds - self._training.overhead_s))

    def _list_lengths(self, groups: Iterable[Group]) -> list[int]:
        """Return, for each rollout, the number of tokens that the trainer processes."""
        shared = self._training.share_prefix
        return [
            len(rollout.token_ids) + (len(group.draw.token_ids) if not index or not shared else 0)
            for group in groups
            for index, rollout in enumerate(group.scored_rollouts)
        ]

    def _compute_duration_s(self, step: int, lengths: Sequence[int]) -> float:
        """Return the duration of an update.

        Args:
            step: Number of the step.
            lengths: Tokens of each sample, including the prompt.
        """
        given = self._workload.get_training_s(step)
        if given is not None:
            return given
        total = sum(lengths)
        if not total:
            return 0.0
        mean = sum(length * length for length in lengths) / total
        training, ranks = self._training, self._num_devices
        seconds = compute_train_s(self._model, self._device, ranks, total, mean, passes=training.passes)
        if self._model.num_experts:
            # Collectives overlap with the computation, so the longer of the two counts.
            traffic_s = compute_expert_traffic_s(
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
    """A `roll.rollout.loops.RolloutLoop` that simulates turns with the latencies of an environment.

    Args:
        config: Turns and their latencies.
        workload: The workload, which provides the latencies.
    """

    def __init__(self, config: EnvironmentLatencyConfig, workload: Workload) -> None:
        self._config = config
        self._workload = workload
        self._num_playing = 0
        self._waiting: list[asyncio.Future[None]] = []
        """Futures of the rollouts that wait for the others, with `lockstep`."""
        self._observation = build_observation(config.observation_tokens)

    async def __call__(
        self, draw: PromptDraw, index: int, first_request: GenerationRequest, generate: Generate, renderer: Renderer
    ) -> Rollout:
        context = draw.token_ids
        generations: list[Generation] = []
        self._num_playing += 1
        try:
            for turn in range(self._config.num_turns):
                if turn:
                    context = np.concatenate([context, generations[-1].token_ids, self._observation])
                generations.append(await generate(build_next_request(first_request, context, turn)))
                await self._wait_for_group()
                await asyncio.sleep(self._workload.get_turn_s(draw.draw_id, index, turn))
                await self._wait_for_group()
        finally:
            self._num_playing -= 1
            self._release_group()
        return join_turns(draw, index, generations, [self._observation] * (len(generations) - 1), (), renderer)

    async def _wait_for_group(self) -> None:
        """Wait until all other running rollouts also wait; return immediately if `lockstep` is off."""
        if not self._config.lockstep:
            return
        arrival = asyncio.get_running_loop().create_future()
        self._waiting.append(arrival)
        self._release_group()
        try:
            await arrival
        except asyncio.CancelledError:
            if arrival in self._waiting:
                self._waiting.remove(arrival)
            raise

    def _release_group(self) -> None:
        if len(self._waiting) == self._num_playing:
            for arrival in self._waiting:
                arrival.set_result(None)
            self._waiting = []


def build_turns(config: SimulationConfig, workload: Workload) -> RolloutLoop | None:
    """Return the rollout loop that simulates the environments of a workload; `None` if it has none.

    With `lockstep`, the rollouts of a domain wait for each other.
    """
    if not config.domains:
        return EnvironmentTurns(config.environment, workload) if config.environment is not None else None
    environments = {name: domain.environment or config.environment for name, domain in config.domains.items()}
    if not any(environments.values()):
        return None
    one_turn = EnvironmentLatencyConfig(num_turns=1, latency=FixedDistribution(value=0.0))
    loops = {name: EnvironmentTurns(each or one_turn, workload) for name, each in environments.items()}

    async def run_turns(
        draw: PromptDraw, index: int, first_request: GenerationRequest, generate: Generate, renderer: Renderer
    ) -> Rollout:
        return await loops[draw.prompt.domain](draw, index, first_request, generate, renderer)

    return run_turns

"""Simulate a recorded run: the same prompts, lengths and latencies on simulated hardware, with another schedule.

    recording ─► RecordedWork ─► RecordedWorkload ─► SimulatedEngine, SimulatedReward, SimulatedTrainer
                                      └─────────────► RecordedTurns (rollouts of several turns)

A rollout is identified by its draw and its index, a request also by its turn. A rollout that the recorded run did not
finish gets the length of a random answer to the same prompt or, if there is none, to any prompt. The selection depends
only on the seed and the request, like every random quantity of a simulation.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np

from roll.config.simulation import SimulationConfig
from roll.errors import ConfigError
from roll.pipelines.recording.files import Recording
from roll.pipelines.recording.recorded_work import RecordedWork
from roll.rollout.loops import Generate, Renderer, RolloutLoop, join_turns
from roll.simulation.workload import DOMAIN, Workload, count_remaining_tokens, hash_text
from roll.types import TRAIN, Generation, GenerationRequest, Prompt, PromptDraw, Rollout, RolloutId, Turn

__all__ = ["RecordedTurns", "RecordedWorkload", "build_recorded_loop", "build_workload"]

T = TypeVar("T")
_LENGTH, _REWARD, _VERDICT, _PROMPT, _TURNS = range(101, 106)


def build_workload(config: SimulationConfig, seed: int) -> Workload:
    """Return the recorded workload if the simulation has a recording, otherwise a random workload.

    Raises:
        ConfigError: The recording has no completed answer.
        DataError: The recording cannot be read.
    """
    if config.recording is None:
        return Workload(config, seed)
    recording = Recording.open(Path(config.recording))
    steps = range(recording.first_step, recording.last_step + 1)
    recording.check(steps)
    return RecordedWorkload(config, seed, RecordedWork.from_steps(map(recording.read, steps)))


class RecordedWorkload(Workload):
    """A `Workload` that returns the recorded lengths, latencies and verdicts of a run.

    Args:
        config: The simulation; its distributions are not used, except for an update's `training.duration` if it is set.
        seed: Seed for everything that was not recorded.
        work: Lengths, latencies and verdicts that were recorded.
    """

    def __init__(self, config: SimulationConfig, seed: int, work: RecordedWork) -> None:
        super().__init__(config, seed)
        self.work = work
        self._given_training = config.training.duration is not None
        self._first_draw = min(work.prompt_tokens, default=0)
        self._by_draw: dict[int, list[int]] = defaultdict(list)
        self._indices: dict[int, list[int]] = defaultdict(list)
        for rollout_id, tokens in work.answers.items():
            if rollout_id.purpose == TRAIN:
                self._by_draw[rollout_id.draw_id].append(tokens)
                self._indices[rollout_id.draw_id].append(rollout_id.index)
        self._lengths = sorted(length for lengths in self._by_draw.values() for length in lengths)
        self._prompts = sorted(work.prompt_tokens.values())
        self._latencies = sorted(reward.duration_s for reward in work.rewards.values())
        if not self._lengths:
            raise ConfigError(f"recording '{config.recording}' has no completed answer: record a longer run.")

    @property
    def sync_s(self) -> float:
        """Median duration of a weight sync."""
        return median(self.work.sync_s.values())

    @property
    def has_turns(self) -> bool:
        """True if any rollout had several turns."""
        return bool(self.work.tokens_between_turns)

    def draw(self, draw_id: int) -> PromptDraw:
        """Return the recorded prompt with the number `draw_id`, counted from the first recorded prompt."""
        recorded = draw_id + self._first_draw
        length = self.work.prompt_tokens.get(recorded)
        if length is None:
            length = self._choose(self._prompts, _PROMPT, recorded)
        tokens = np.full(length, recorded + 1, np.int32)
        prompt = Prompt(uid=f"{DOMAIN}/{recorded}", domain=DOMAIN, messages=())
        return PromptDraw(draw_id=recorded, prompt=prompt, token_ids=tokens)

    def count_answer_tokens(self, request: GenerationRequest) -> int:
        """Return the number of tokens that a request generates; an answer that was truncated in the recording keeps its
        recorded length.
        """
        total = self.work.tokens.get(request.request_id)
        if total is None:
            place = int(request.token_ids[0]) - 1, hash_text(request.request_id)
            total = self._choose(self._by_draw.get(place[0]) or self._lengths, _LENGTH, *place)
        return count_remaining_tokens(total, request)

    def find_matching_index(self, draw_id: int, index: int) -> int:
        """Return `index` if this rollout was recorded, otherwise the index of a recorded rollout of the same prompt
        draw.

        The seed determines the choice. If no rollout of the draw was recorded, `index` is returned.
        """
        known = self._indices.get(draw_id, [])
        return index if index in known or not known else self._choose(known, _TURNS, draw_id, index)

    def get_reward_s(self, rollout: Rollout) -> float:
        """Return the recorded scoring time of a rollout; for an unrecorded rollout, a random recorded time."""
        recorded = self.work.rewards.get(rollout.rollout_id)
        if recorded is not None:
            return recorded.duration_s
        return self._choose(self._latencies, _REWARD, rollout.draw_id, rollout.index) if self._latencies else 0.0

    def is_correct(self, rollout: Rollout) -> bool:
        """Return the recorded verdict; for an unrecorded rollout, the verdict of a recorded rollout of the same prompt.

        If no rollout of the prompt was recorded, the verdict is sampled as in a random workload.
        """
        recorded = self.work.rewards.get(rollout.rollout_id)
        if recorded is None:
            indices = self._indices.get(rollout.draw_id, [])
            others = (replace(rollout.rollout_id, index=index) for index in indices)
            known = [found for other in others if (found := self.work.rewards.get(other)) is not None]
            if not known:
                return super().is_correct(rollout)
            recorded = self._choose(known, _VERDICT, rollout.draw_id, rollout.index)
        return recorded.correct if recorded.correct is not None else recorded.value > 0

    def get_training_s(self, step: int) -> float | None:
        """Return the recorded duration of the update of `step`; the median for steps that were not recorded.

        If `training.duration` is configured, the duration is sampled from it instead.
        """
        recorded = self.work.train_s
        if self._given_training or not recorded:
            return super().get_training_s(step)
        return recorded.get(min(recorded) + step - 1, median(recorded.values()))

    def _choose(self, values: list[T], *key: int) -> T:
        """Return one of `values`; the choice depends only on the seed and `key`."""
        return values[min(int(self._draw_uniform(*key) * len(values)), len(values) - 1)]


class RecordedTurns:
    """A `roll.rollout.loops.RolloutLoop` that replays recorded turns, with the environment's recorded latencies between
    them.

    An unrecorded rollout has the turns of a recorded rollout of the same prompt or, if there is none, a single turn.

    Args:
        workload: The recorded work.
    """

    def __init__(self, workload: RecordedWorkload) -> None:
        self._workload = workload

    async def __call__(
        self, draw: PromptDraw, index: int, first_request: GenerationRequest, generate: Generate, renderer: Renderer
    ) -> Rollout:
        work = self._workload.work
        own = RolloutId(purpose=TRAIN, draw_id=draw.draw_id, index=index)
        source = replace(own, index=self._workload.find_matching_index(draw.draw_id, index))
        between = work.tokens_between_turns.get(source, ())
        said = [np.ones(len(tokens), np.int32) for tokens in between]
        context, position = draw.token_ids, 0
        generations: list[Generation] = []
        turns: list[Turn] = []
        for turn in range(len(between) + 1):
            request = first_request
            if turn:
                await asyncio.sleep(work.environment_s.get(source.request_id(turn), 0.0))
                context = np.concatenate([context, generations[-1].token_ids, said[turn - 1]])
                position = turns[-1].end + len(said[turn - 1])
                request = replace(first_request, request_id=own.request_id(turn), token_ids=context)
            generations.append(await generate(request))
            turns.append(Turn(start=position, end=position + len(generations[-1].token_ids)))
        return join_turns(draw, index, generations, said, tuple(turns), renderer)


def build_recorded_loop(workload: Workload) -> RolloutLoop | None:
    """Return the rollout loop of a recorded workload with turns; `None` for other workloads."""
    return RecordedTurns(workload) if isinstance(workload, RecordedWorkload) and workload.has_turns else None

"""Sample the prompts, lengths and latencies of a simulated run as functions of the seed and a key.

All tokens of a simulated prompt are its draw id plus one, so that an engine can distinguish prompts; a generated token
is 0, so the zeros at the end of a resumed request are the tokens of its partial answer.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from roll.config.simulated_domains import SimulatedDomain
from roll.config.simulation import SimulationConfig
from roll.simulation import draws
from roll.types import GenerationRequest, IntArray, Prompt, PromptDraw, Rollout

__all__ = ["DOMAIN", "Workload", "count_remaining_tokens", "hash_text"]

DOMAIN = "simulated"
"""Domain of all prompts of a workload without `domains`."""
Key: TypeAlias = int
Quantiles: TypeAlias = Callable[[float], float]

_PROMPT, _ANSWER, _REWARD, _SOLVE_RATE, _VERDICT, _TURN, _TRAINING, _DOMAIN = range(1, 9)


class Workload:
    """Samples the random quantities of a simulated run: prompts, lengths, latencies and correctness.

    Args:
        config: The simulation.
        seed: Seed of this run.
    """

    def __init__(self, config: SimulationConfig, seed: int) -> None:
        self.seed = seed
        domains = config.domains or {DOMAIN: SimulatedDomain()}
        self.domains = list(domains)
        self._weights = list(accumulate(each.weight for each in domains.values()))
        """Cumulative weights of the domains."""
        self._prompt_lengths = [
            (each.prompt_tokens or config.prompt_tokens).quantile_function() for each in domains.values()
        ]
        self._answer_lengths = [
            (each.answer_tokens or config.answer_tokens).quantile_function() for each in domains.values()
        ]
        environments = [each.environment or config.environment for each in domains.values()]
        self._turn_latencies: list[Quantiles] = [
            each.latency.quantile_function() if each is not None else lambda u: 0.0 for each in environments
        ]
        self._correlation = config.answer_correlation
        self._growth = config.answer_growth
        self._num_prompts = config.num_steps * config.rollout.prompts_per_step
        self._reward = config.reward.latency.quantile_function()
        self._solve_rate = config.reward.solve_rate.quantile_function()
        self._training = config.training.duration.quantile_function() if config.training.duration else None

    def draw(self, draw_id: int) -> PromptDraw:
        """Return a prompt draw with the id `draw_id` and a random prompt length."""
        index = self._choose_domain(draw_id)
        domain = self.domains[index]
        length = max(1, round(self._prompt_lengths[index](self._draw_uniform(_PROMPT, draw_id))))
        tokens = np.full(length, draw_id + 1, np.int32)
        return PromptDraw(
            draw_id=draw_id, prompt=Prompt(uid=f"{domain}/{draw_id}", domain=domain, messages=()), token_ids=tokens
        )

    def _choose_domain(self, draw_id: int) -> int:
        """Return the index of the domain of a draw."""
        if len(self.domains) == 1:
            return 0
        place = self._draw_uniform(_DOMAIN, draw_id) * self._weights[-1]
        return min(bisect_right(self._weights, place), len(self.domains) - 1)

    def count_answer_tokens(self, request: GenerationRequest) -> int:
        """Return the number of tokens that a request generates, at least 1; it depends on the request's id."""
        tokens = request.token_ids
        shared = self._draw_uniform(_PROMPT, int(tokens[0]), _ANSWER)
        own = self._draw_uniform(_ANSWER, hash_text(request.request_id))
        factor = self._growth ** ((int(tokens[0]) - 1) / self._num_prompts)
        answer = self._answer_lengths[self._choose_domain(int(tokens[0]) - 1)]
        total = round(factor * answer(draws.correlate(shared, own, self._correlation)))
        return count_remaining_tokens(total, request)

    def get_reward_s(self, rollout: Rollout) -> float:
        """Return the random scoring time of a rollout, in seconds."""
        return self._reward(self._draw_uniform(_REWARD, rollout.draw_id, rollout.index))

    def is_correct(self, rollout: Rollout) -> bool:
        """Return whether the rollout solves its prompt; each prompt has its own solve rate."""
        rate = self._solve_rate(self._draw_uniform(_SOLVE_RATE, rollout.draw_id))
        return self._draw_uniform(_VERDICT, rollout.draw_id, rollout.index) < rate

    def get_turn_s(self, draw_id: int, index: int, turn: int) -> float:
        """Return the environment's latency after a turn, in seconds."""
        return self._turn_latencies[self._choose_domain(draw_id)](self._draw_uniform(_TURN, draw_id, index, turn))

    def get_training_s(self, step: int) -> float | None:
        """Return the duration of the update of `step`, in seconds; `None` if `training.duration` is not configured."""
        return None if self._training is None else self._training(self._draw_uniform(_TRAINING, step))

    def _draw_uniform(self, *key: Key) -> float:
        return draws.draw_uniform(self.seed, *key)


def count_remaining_tokens(total: int, request: GenerationRequest) -> int:
    """Return the number of tokens of an answer that a resumed request still has to generate; at least 1."""
    tokens = request.token_ids
    if tokens[-1] == 0:
        total -= len(tokens) - 1 - int(np.flatnonzero(tokens)[-1])
    return max(1, total)


def hash_text(text: str) -> Key:
    """Return a hash of a string that is stable across processes, for use as a random seed key."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def build_observation(num_tokens: int) -> IntArray:
    """Return `num_tokens` placeholder tokens as an environment's observation between two turns."""
    return np.ones(num_tokens, np.int32)

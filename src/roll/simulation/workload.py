"""Prompts, lengths and latencies of a simulated run, all functions of the seed and of their key.

All tokens of a simulated prompt are its draw id plus one, so that an engine can distinguish prompts; a generated token
is 0, so the zeros at the end of a resumed request are the tokens that it already has of its answer.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np

from roll.config.simulation import SimulationConfig
from roll.simulation import draws
from roll.types import GenerationRequest, IntArray, Prompt, PromptDraw, Rollout

__all__ = ["DOMAIN", "Workload", "key_of", "num_remaining_tokens"]

DOMAIN = "simulated"
Key: TypeAlias = int

_PROMPT, _ANSWER, _REWARD, _SOLVE_RATE, _VERDICT, _TURN, _TRAINING = range(1, 8)


class Workload:
    """The random quantities of a run.

    Args:
        config: the simulation.
        seed: seed of this run.
    """

    def __init__(self, config: SimulationConfig, seed: int) -> None:
        self.seed = seed
        self._prompt = config.prompt_tokens.quantile()
        self._answer = config.answer_tokens.quantile()
        self._correlation = config.answer_correlation
        self._reward = config.reward.latency.quantile()
        self._solve_rate = config.reward.solve_rate.quantile()
        self._turn = config.environment.latency.quantile() if config.environment else lambda u: 0.0
        self._training = config.training.duration.quantile() if config.training.duration else None

    def draw(self, draw_id: int) -> PromptDraw:
        """Return the prompt with this draw id."""
        length = max(1, round(self._prompt(self._uniform(_PROMPT, draw_id))))
        tokens = np.full(length, draw_id + 1, np.int32)
        return PromptDraw(
            draw_id=draw_id, prompt=Prompt(uid=f"{DOMAIN}/{draw_id}", domain=DOMAIN, messages=()), token_ids=tokens
        )

    def answer_tokens(self, request: GenerationRequest) -> int:
        """Return the number of tokens still to be generated, at least 1; the request's id identifies the answer."""
        tokens = request.token_ids
        shared = self._uniform(_PROMPT, int(tokens[0]), _ANSWER)
        own = self._uniform(_ANSWER, key_of(request.request_id))
        total = round(self._answer(draws.correlated(shared, own, self._correlation)))
        return num_remaining_tokens(total, request)

    def reward_s(self, rollout: Rollout) -> float:
        """Return how long scoring a rollout takes, in seconds."""
        return self._reward(self._uniform(_REWARD, rollout.draw_id, rollout.index))

    def is_correct(self, rollout: Rollout) -> bool:
        """Return whether the rollout solves its prompt; each prompt has its own solve rate."""
        rate = self._solve_rate(self._uniform(_SOLVE_RATE, rollout.draw_id))
        return self._uniform(_VERDICT, rollout.draw_id, rollout.index) < rate

    def turn_s(self, draw_id: int, index: int, turn: int) -> float:
        """Return how long the environment takes after a turn, in seconds."""
        return self._turn(self._uniform(_TURN, draw_id, index, turn))

    def training_s(self, step: int) -> float | None:
        """Return the duration of a step's update, if a distribution defines it."""
        return None if self._training is None else self._training(self._uniform(_TRAINING, step))

    def _uniform(self, *key: Key) -> float:
        return draws.uniform_of(self.seed, *key)


def num_remaining_tokens(total: int, request: GenerationRequest) -> int:
    """Return how many of an answer's `total` tokens a request does not have yet; at least 1."""
    tokens = request.token_ids
    if tokens[-1] == 0:
        total -= len(tokens) - 1 - int(np.flatnonzero(tokens)[-1])
    return max(1, total)


def key_of(text: str) -> Key:
    """Hash a text to a number, for the keys of random quantities."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def observation(num_tokens: int) -> IntArray:
    """Return an environment's observation between two turns, with `num_tokens` tokens."""
    return np.ones(num_tokens, np.int32)

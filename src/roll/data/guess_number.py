"""Prompts of a small multi-turn task: guess a number, with the hints `higher` and `lower`."""

from __future__ import annotations

from roll.config.data import GuessNumberData
from roll.data.conversations import build_messages
from roll.data.source import PromptList
from roll.types import EnvironmentSettings, Prompt

__all__ = ["build_guess_number_prompts", "build_question", "compute_binary_search"]

_MAX_LISTED = 9


def build_guess_number_prompts(config: GuessNumberData, domain: str, seed: int) -> tuple[PromptList, PromptList]:
    """Build one prompt per secret number; training and evaluation use the same prompts.

    All prompts have the same text, so no answer can be memorized: the policy learns the first guess, and the meaning of
    `higher` and `lower`.
    """
    del seed
    sides = (domain, f"{domain}/held_out")
    training, held_out = (
        PromptList(
            _build_prompt(config, domain, f"{side}/{secret}", secret) for secret in range(1, config.max_number + 1)
        )
        for side in sides
    )
    return training, held_out


def build_question(max_number: int) -> str:
    """Build the game's question. It lists all numbers if there are few, so that small models can solve the task."""
    if max_number > _MAX_LISTED:
        return f"Pick a number from 1 to {max_number}. Answer with a number."
    numbers = [str(n) for n in range(1, max_number + 1)]
    return f"Pick one: {', '.join(numbers[:-1])} or {numbers[-1]}. Answer with a number."


def compute_binary_search(max_number: int, num_turns: int, secret: int) -> tuple[str, ...]:
    """Compute at most `num_turns` guesses of an expert that uses binary search."""
    low, high = 1, max_number
    guesses: list[str] = []
    for _ in range(num_turns):
        guess = (low + high) // 2
        guesses.append(str(guess))
        if guess == secret:
            break
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
    return tuple(guesses)


def _build_prompt(config: GuessNumberData, domain: str, uid: str, secret: int) -> Prompt:
    assert config.environment_call is not None
    name, options = config.environment_call
    text = build_question(config.max_number)
    return Prompt(
        uid=uid,
        domain=domain,
        messages=build_messages(text, config.system_prompt, config.prompt_template),
        expert=compute_binary_search(config.max_number, config.num_turns, secret) if config.demonstrations else (),
        turns=config.turns,
        environment=EnvironmentSettings(name=name, options={**options, "secret": secret}),
    )

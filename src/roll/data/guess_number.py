"""A small task of several turns: guess a number, with `higher` and `lower` as hints."""

from __future__ import annotations

from roll.config.data import GuessNumberData
from roll.data.conversations import messages_of
from roll.data.source import PromptList
from roll.types import EnvironmentSettings, Prompt

__all__ = ["guess_number_prompts", "halving_guesses", "question"]

_MOST_LISTED = 9


def guess_number_prompts(config: GuessNumberData, domain: str, seed: int) -> tuple[PromptList, PromptList]:
    """Return one prompt per secret number, the same for training and evaluation.

    All prompts have the same text, so no answer can be memorized: the policy learns the first guess, and the meaning of
    `higher` and `lower`.
    """
    del seed
    sides = (domain, f"{domain}/held_out")
    training, held_out = (
        PromptList(_prompt(config, domain, f"{side}/{secret}", secret) for secret in range(1, config.max_number + 1))
        for side in sides
    )
    return training, held_out


def question(max_number: int) -> str:
    """Return the game's question; few numbers are listed, which even small models understand as a choice."""
    if max_number > _MOST_LISTED:
        return f"Pick a number from 1 to {max_number}. Answer with a number."
    numbers = [str(n) for n in range(1, max_number + 1)]
    return f"Pick one: {', '.join(numbers[:-1])} or {numbers[-1]}. Answer with a number."


def halving_guesses(max_number: int, num_turns: int, secret: int) -> tuple[str, ...]:
    """Return an expert's guesses: always the middle of the remaining interval, rounded down."""
    low, high = 1, max_number
    guesses: list[str] = []
    for _ in range(num_turns):
        guess = (low + high) // 2
        guesses.append(str(guess))
        if guess == secret:
            break
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
    return tuple(guesses)


def _prompt(config: GuessNumberData, domain: str, uid: str, secret: int) -> Prompt:
    assert config.environment_call is not None
    name, options = config.environment_call
    text = question(config.max_number)
    return Prompt(
        uid=uid,
        domain=domain,
        messages=messages_of(text, config.system_prompt, config.prompt_template),
        expert=halving_guesses(config.max_number, config.num_turns, secret) if config.demonstrations else (),
        turns=config.turns,
        environment=EnvironmentSettings(name=name, options={**options, "secret": secret}),
    )

"""Episodes of scripted players for a warm start: they teach the format of an answer, but not how to win.

data: [{source: python, function: "examples/environments/players.py:episodes", options: {environment: …}}]
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from roll.envs import make
from roll.envs.tools import with_tools

FIRST_SEED = 1_000_000
"""The first seed; training and evaluation use much smaller seeds."""


def episodes(
    environment: str,
    player: str = "chance",
    count: int = 64,
    num_turns: int = 4,
    options: Mapping[str, Any] | None = None,
    tools: Sequence[Any] = (),
    tool_format: str = "xml",
    system_prompt: str | None = None,
    stepwise: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield conversations of a scripted player.

    Args:
        environment: The id of the environment.
        player: `chance`, `hints` (GuessTheNumber-v0-easy), `forward` (FrozenLake) or `calculator`.
        count: The number of episodes.
        num_turns: The maximum number of turns of an episode.
        options: The arguments of the environment.
        tools: The tools of the player.
        tool_format: The format of tool calls.
        system_prompt: The system message of every conversation.
        stepwise: Whether every turn is a separate conversation, as with the history `stepwise` without its task.
    """
    env: Any = make(environment, options)
    if tools:
        env = with_tools(env, tools, tool_format=tool_format)
    before = [{"role": "system", "content": system_prompt}] if system_prompt else []
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        observation, info = env.reset(seed=seed)
        messages, act = list(before), PLAYERS[player](env, random.Random(seed))
        for _ in range(num_turns):
            action = act(observation)
            role = "tool" if info.get("use_tool") else "user"
            messages += [{"role": role, "content": observation}, {"role": "assistant", "content": action}]
            if stepwise:
                yield {"messages": messages}
                messages = list(before)
            observation, _, terminated, truncated, info = env.step(action)
            if terminated or truncated:
                break
        if not stepwise:
            yield {"messages": messages}


def _chance(env: Any, rng: random.Random) -> Any:
    """Return a player that makes random allowed moves."""
    del rng
    return lambda observation: env.sample_random_action()


def _hints(env: Any, rng: random.Random) -> Any:
    """Return a player that follows the hints in one of three turns, and guesses a random number otherwise."""
    open_numbers = set(range(1, 11))

    def act(observation: str) -> str:
        for guess, hint in re.findall(r"guessed (\d+), and my number is (higher|lower)", observation):
            open_numbers.difference_update(range(1, int(guess) + 1) if hint == "higher" else range(int(guess), 11))
        return f"\\boxed{{{rng.choice(sorted(open_numbers))}}}" if rng.random() < 1 / 3 else env.sample_random_action()

    return act


def _forward(env: Any, rng: random.Random) -> Any:
    """Return a player that moves right or down in one of three turns, and in a random direction otherwise."""

    def act(observation: str) -> str:
        del observation
        return f"\\boxed{{{rng.choice(('right', 'down'))}}}" if rng.random() < 1 / 3 else env.sample_random_action()

    return act


def _calculator(env: Any, rng: random.Random) -> Any:
    """Return a player that calls the calculator, with a random operation in two of three episodes."""

    def act(observation: str) -> str:
        if "<result>" in observation:
            return f"\\boxed{{{observation.split()[1]}}}"
        asked = re.search(r"What is (.*)\?", observation)
        assert asked is not None
        numbers = re.findall(r"\d+", asked[1])
        wrong = f"{rng.choice(numbers)} {rng.choice('+-*')} {rng.choice(numbers)}"
        return f"<calculator>{asked[1] if rng.random() < 1 / 3 else wrong}</calculator>"

    return act


PLAYERS = {"chance": _chance, "hints": _hints, "forward": _forward, "calculator": _calculator}

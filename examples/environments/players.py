"""Episodes of scripted players, to learn from before reinforcement learning: what an answer looks like, not how to win.

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
"""Far from the seeds of training and evaluation."""


def episodes(
    environment: str,
    player: str = "chance",
    count: int = 64,
    num_turns: int = 4,
    options: Mapping[str, Any] | None = None,
    tools: Sequence[Any] = (),
    form: str = "xml",
    system_prompt: str | None = None,
    stepwise: bool = False,
) -> Iterator[dict[str, Any]]:
    """Conversations.

    Args:
        environment: its id.
        player: `chance`, `hints` (GuessTheNumber-v0-easy), `forward` (FrozenLake) or `calculator`.
        count: episodes.
        num_turns: of each, at most.
        options: arguments of the environment.
        tools: that the player has.
        form: how these are called.
        system_prompt: before every conversation.
        stepwise: every turn is a conversation of its own, as the history `stepwise` without its task shows it.
    """
    env: Any = make(environment, options)
    if tools:
        env = with_tools(env, tools, form=form)
    before = [{"role": "system", "content": system_prompt}] if system_prompt else []
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        observation, info = env.reset(seed=seed)
        messages, act = list(before), PLAYERS[player](env, random.Random(seed))
        for _ in range(num_turns):
            action = act(observation)
            says = "tool" if info.get("use_tool") else "user"
            messages += [{"role": says, "content": observation}, {"role": "assistant", "content": action}]
            if stepwise:
                yield {"messages": messages}
                messages = list(before)
            observation, _, terminated, truncated, info = env.step(action)
            if terminated or truncated:
                break
        if not stepwise:
            yield {"messages": messages}


def _chance(env: Any, rng: random.Random) -> Any:
    """Any allowed move."""
    del rng
    return lambda observation: env.sample_random_action()


def _hints(env: Any, rng: random.Random) -> Any:
    """Guesses what the hints leave open in one turn of three; else any number."""
    open_numbers = set(range(1, 11))

    def act(observation: str) -> str:
        for guess, hint in re.findall(r"guessed (\d+), and my number is (higher|lower)", observation):
            open_numbers.difference_update(range(1, int(guess) + 1) if hint == "higher" else range(int(guess), 11))
        return f"\\boxed{{{rng.choice(sorted(open_numbers))}}}" if rng.random() < 1 / 3 else env.sample_random_action()

    return act


def _forward(env: Any, rng: random.Random) -> Any:
    """Goes right or down in one turn of three; else anywhere."""

    def act(observation: str) -> str:
        del observation
        return f"\\boxed{{{rng.choice(('right', 'down'))}}}" if rng.random() < 1 / 3 else env.sample_random_action()

    return act


def _calculator(env: Any, rng: random.Random) -> Any:
    """Has the calculator work out what is asked in one episode of three; else something else of the same numbers."""

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

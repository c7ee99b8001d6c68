"""Household tasks in words, in the manner of ALFWorld (arXiv 2010.03768), with ROLL's own generator.

go to R · open R · close R · take O from R · put O in R · use R · clean O with R · heat O with R · cool O with R
examine R · look · inventory
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from roll.envs.base import Started, Stepped
from roll.envs.worlds.house import KINDS, TASKS, TOOLS, House, Task, furnished
from roll.envs.worlds.world import FORMAT_ERROR, World, chosen

__all__ = ["Household"]

_LONGEST_COMMAND = 200


@dataclass(eq=False)
class Household(World):
    """Reward 1 when the task is done, and no other; −0.1 for a command that is not valid now.

    `info["admissible"]` has all valid commands.

    Args:
        tasks: Kinds of tasks, from `TASKS`; all six by default.
        max_turns: Number of turns after which the episode is truncated.
    """

    tasks: Collection[str] | None = None
    max_turns: int = 50

    def __post_init__(self) -> None:
        self._tasks = chosen("tasks", self.tasks, TASKS)
        if self.max_turns < 1:
            raise ValueError(f"max_turns is at least 1, got {self.max_turns}")

    def reset(self, seed: int | None = None) -> Started:
        """See `Env`."""
        self.begin(seed)
        self._house, self._task = furnished(self.random, self.random.choice(self._tasks))
        self._turn = 0
        places = ", ".join(sorted(self._house.holds))
        text = f"You are in the middle of a room. Around you: {places}.\nYour task: {self._task.text}"
        return f"{text}\nAnswer with one command on the last line.", self._info()

    def step(self, action: str) -> Stepped:
        """See `Env`."""
        self._turn += 1
        command = _command(action)
        admissible = self._house.commands()
        if command not in admissible:
            observation, reward = "Nothing happens.", FORMAT_ERROR
        else:
            observation, reward = self._house.carried_out(command), 0.0
        done = self._task.done(self._house)
        reward = 1.0 if done else reward
        return observation, reward, done, not done and self._turn >= self.max_turns, self._info()

    def _info(self) -> dict[str, Any]:
        house = self._house
        state = (self._task.text, house.place, sorted(house.opened), house.carried, sorted(house.marks.items()))
        lying = [(name, sorted(house.holds[name])) for name in sorted(house.seen)]
        return {"state": repr((state, lying)), "admissible": house.commands(), "task": self._task.kind}

    def sample_random_action(self) -> str:
        """Return a random valid command."""
        return self.chance.choice(self._house.commands())

    def solution(self) -> list[str]:
        """Return an expert's commands, with full knowledge of the house."""
        return plan(self._house, self._task)


def plan(house: House, task: Task) -> list[str]:
    """Return commands that fetch each wanted thing, treat it, and bring it to its goal."""
    commands: list[str] = []
    opened, at = set(house.opened), house.place

    def go(place: str) -> None:
        nonlocal at
        if at == place:
            return
        at = place
        commands.append(f"go to {place}")
        if house.kind(place) in KINDS["closed"] and place not in opened:
            commands.append(f"open {place}")
            opened.add(place)

    things = [
        thing for thing, place in house.where().items() if house.kind(thing) == task.thing and place != task.target
    ]
    target = task.target
    for thing in sorted(things)[: task.count]:
        place = house.where()[thing]
        go(place)
        commands.append(f"take {thing} from {place}")
        if task.treatment in TOOLS:
            tool = next(name for name in house.holds if house.kind(name) == TOOLS[task.treatment])
            go(tool)
            commands.append(f"{task.treatment} {thing} with {tool}")
        go(target)
        commands.append(f"use {target}" if task.treatment == "light" else f"put {thing} in {target}")
    return commands


def _command(action: str) -> str:
    """Return the last non-empty line, in lower case with single spaces, without a list mark in front."""
    lines = [line for line in action[-2_000:].splitlines() if line.strip()]
    words = lines[-1][:_LONGEST_COMMAND].lower().strip(" .>`*").split() if lines else []
    return " ".join(words).replace(" on ", " in ").replace(" into ", " in ")

"""Household tasks in words, in the style of ALFWorld (arXiv 2010.03768), with a generator of ROLL.

go to R · open R · close R · take O from R · put O in R · use R · clean O with R · heat O with R · cool O with R
examine R · look · inventory
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from roll.envs.base import ResetResult, StepResult
from roll.envs.worlds.house import OBJECTS, TASKS, TREATMENT_FURNITURE, House, Task, generate_room
from roll.envs.worlds.world import FORMAT_ERROR_REWARD, World, check_names

__all__ = ["Household"]

_MAX_COMMAND_LENGTH = 200


@dataclass(eq=False)
class Household(World):
    """A household task. The reward is 1 when the task is done, −0.1 for each invalid command, and 0 otherwise.

    `info["admissible"]` lists all commands that are valid in the current state.

    Args:
        tasks: Types of tasks, from `TASKS`; all six by default.
        max_turns: Number of turns after which the episode is truncated.
    """

    tasks: Collection[str] | None = None
    max_turns: int = 50

    def __post_init__(self) -> None:
        self._tasks = check_names("tasks", self.tasks, TASKS)
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {self.max_turns}")

    def reset(self, seed: int | None = None) -> ResetResult:
        """See `Env`."""
        self.begin(seed)
        self._house, self._task = generate_room(self.random, self.random.choice(self._tasks))
        self._turn = 0
        places = ", ".join(sorted(self._house.contents))
        text = f"You are in the middle of a room. Around you: {places}.\nYour task: {self._task.text}"
        return f"{text}\nAnswer with one command on the last line.", self._build_info()

    def step(self, action: str) -> StepResult:
        """See `Env`."""
        self._turn += 1
        command = _parse_command(action)
        admissible = self._house.list_commands()
        if command not in admissible:
            observation, reward = "Nothing happens.", FORMAT_ERROR_REWARD
        else:
            observation, reward = self._house.run_command(command), 0.0
        done = self._task.is_done(self._house)
        reward = 1.0 if done else reward
        return observation, reward, done, not done and self._turn >= self.max_turns, self._build_info()

    def _build_info(self) -> dict[str, Any]:
        house = self._house
        state = (
            self._task.text,
            house.place,
            sorted(house.open_furniture),
            house.carried_thing,
            sorted(house.marks.items()),
        )
        lying = [(name, sorted(house.contents[name])) for name in sorted(house.searched_furniture)]
        return {"state": repr((state, lying)), "admissible": house.list_commands(), "task": self._task.kind}

    def sample_random_action(self) -> str:
        """Return a random valid command."""
        return self.action_random.choice(self._house.list_commands())

    def solution(self) -> list[str]:
        """Return an expert's commands, with full knowledge of the house."""
        return make_plan(self._house, self._task)


def make_plan(house: House, task: Task) -> list[str]:
    """Return commands that fetch each required object, clean, heat or cool it if required, and move it to its goal."""
    commands: list[str] = []
    opened, at = set(house.open_furniture), house.place

    def go(place: str) -> None:
        nonlocal at
        if at == place:
            return
        at = place
        commands.append(f"go to {place}")
        if house.get_kind(place) in OBJECTS["closed"] and place not in opened:
            commands.append(f"open {place}")
            opened.add(place)

    things = [
        thing
        for thing, place in house.locate_things().items()
        if house.get_kind(thing) == task.thing and place != task.target
    ]
    target = task.target
    for thing in sorted(things)[: task.count]:
        place = house.locate_things()[thing]
        go(place)
        commands.append(f"take {thing} from {place}")
        if task.treatment in TREATMENT_FURNITURE:
            tool = next(name for name in house.contents if house.get_kind(name) == TREATMENT_FURNITURE[task.treatment])
            go(tool)
            commands.append(f"{task.treatment} {thing} with {tool}")
        go(target)
        commands.append(f"use {target}" if task.treatment == "light" else f"put {thing} in {target}")
    return commands


def _parse_command(action: str) -> str:
    """Return the command in the last non-empty line, in lower case and with single spaces.

    Surrounding periods, backticks, `>` and `*` are removed; `on` and `into` become `in`, as in the commands.
    """
    lines = [line for line in action[-2_000:].splitlines() if line.strip()]
    words = lines[-1][:_MAX_COMMAND_LENGTH].lower().strip(" .>`*").split() if lines else []
    return " ".join(words).replace(" on ", " in ").replace(" into ", " in ")

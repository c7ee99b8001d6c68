"""A conversation with a simulated user who wants to book a table, and answers questions about it.

The user is a script, or any function of the conversation, for example one that calls a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from roll.envs.base import StepResult, map_result
from roll.envs.worlds.world import FORMAT_ERROR_REWARD, World
from roll.user_code import load_function

__all__ = ["SLOTS", "Booking", "UserSimulator"]

UserSimulator: TypeAlias = Callable[[Sequence[Mapping[str, str]]], Any]
"""Returns the user's next message from the messages so far (the persona as `system`, the assistant's messages as
`user`, the user's messages as `assistant`).

It may be `async`. Its exceptions are infrastructure failures.
"""

SLOTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "food": (("italian", "indian", "chinese", "french", "thai"), ("food", "cuisine", "eat", "kind of restaurant")),
    "area": (("north", "south", "east", "west", "centre"), ("area", "where", "part of town", "location")),
    "people": (("2", "3", "4", "5", "6"), ("how many", "people", "guests", "persons")),
    "day": (("monday", "tuesday", "friday", "saturday", "sunday"), ("day", "when", "date")),
    "time": (("17:00", "18:00", "19:00", "20:00"), ("time", "when", "o'clock", "hour")),
    "price": (("cheap", "moderate", "expensive"), ("price", "budget", "expensive", "cheap")),
}
"""Topics of a wish: possible values, and words with which an assistant asks for the topic."""
_ENTRY_PATTERN = re.compile(r"(\w{1,16})\s{0,4}=\s{0,4}([\w:]{1,16})")
_MAX_MESSAGE_LENGTH = 4_000
BOOKING_PREFIX = "book("


@dataclass(eq=False)
class Booking(World):
    """The assistant asks for the user's wishes, then writes `book(food=thai, day=friday, …)`. The reward is the
    fraction of wishes that the booking meets.

    A booking that cannot be parsed gives −0.1.

    Args:
        num_wishes: Number of the user's wishes, 2 to 6.
        num_told: Number of wishes in the user's first message.
        user: `script`, a function (`UserSimulator`), or the path of a function: `file.py:function`.
        max_turns: Number of turns after which the episode is truncated.
    """

    num_wishes: int = 4
    num_told: int = 1
    user: str | UserSimulator = "script"
    max_turns: int = 10

    def __post_init__(self) -> None:
        wishes, told = self.num_wishes, self.num_told
        if not 2 <= wishes <= len(SLOTS) or not 0 <= told <= wishes or self.max_turns < 1:
            raise ValueError(
                f"num_wishes must be from 2 to {len(SLOTS)}, num_told from 0 to num_wishes, max_turns at least 1; "
                f"got {wishes}, {told} and {self.max_turns}"
            )
        user = self.user
        if user != "script" and isinstance(user, str):
            user = load_function(user, "simulated user")
        self._user: UserSimulator | None = None if isinstance(user, str) else user

    def reset(self, seed: int | None = None) -> Any:
        """See `Env`; returns a coroutine if the user is an async function."""
        self.begin(seed)
        names = self.random.sample(list(SLOTS), self.num_wishes)
        self._wishes = {name: self.random.choice(SLOTS[name][0]) for name in names}
        self._told = set(names[: self.num_told])
        self._turn = 0
        wishes = ", ".join(f"{name}: {value}" for name, value in self._wishes.items())
        persona = (
            f"You want a restaurant's table: {wishes}. You talk to an assistant. Say only what you are asked for, in "
            "one short sentence, and never write a booking yourself."
        )
        self._messages = [{"role": "system", "content": persona}]
        opening = " ".join(["I would like to book a table.", *map(self._state_wish, sorted(self._told))])
        self._messages.append({"role": "assistant", "content": opening})
        known = ", ".join(SLOTS)
        text = (
            f"You book tables. A user may care for {self.num_wishes} of: {known}. Ask what you need, then answer with "
            f"book(name=value, ...).\nUser: {opening}"
        )
        return text, self._build_info()

    def _state_wish(self, name: str) -> str:
        return f"The {name} should be {self._wishes[name]}."

    def step(self, action: str) -> Any:
        """See `Env`; returns a coroutine if the user is an async function."""
        self._turn += 1
        action = action[:_MAX_MESSAGE_LENGTH]
        if BOOKING_PREFIX in action:
            return self._judge_booking(action)
        self._messages.append({"role": "user", "content": action})
        words = self._answer_question(action) if self._user is None else self._user(tuple(self._messages))
        return map_result(words, self._finish_turn)

    def _finish_turn(self, words: object) -> StepResult:
        text = str(words)[:_MAX_MESSAGE_LENGTH]
        self._messages.append({"role": "assistant", "content": text})
        return f"User: {text}", 0.0, False, self._turn >= self.max_turns, self._build_info()

    def _answer_question(self, action: str) -> str:
        """Return the user's answer to the assistant's question. It covers at most two of the mentioned topics."""
        question = action.casefold()
        named = [name for name, (_, words) in SLOTS.items() if any(word in question for word in words)][:2]
        if not named:
            return "I do not understand. What do you want to know?"
        self._told |= set(named) & set(self._wishes)
        return " ".join(self._state_wish(n) if n in self._wishes else f"I do not care about the {n}." for n in named)

    def _judge_booking(self, action: str) -> StepResult:
        start = action.rfind(BOOKING_PREFIX) + len(BOOKING_PREFIX)
        entries = dict(_ENTRY_PATTERN.findall(action[start:].partition(")")[0].casefold()))
        right = sum(entries.get(name) == value for name, value in self._wishes.items())
        info: dict[str, Any] = {"state": "booked", "correct": right == len(self._wishes)}
        if not entries:
            return "That is not a booking.", FORMAT_ERROR_REWARD, True, False, info
        return f"{right} of {len(self._wishes)} wishes met.", right / len(self._wishes), True, False, info

    def _build_info(self) -> dict[str, Any]:
        return {"state": repr([m["content"] for m in self._messages[1:]])}

    def sample_random_action(self) -> str:
        """Return a random question, or a booking with random values."""
        if self.action_random.random() < 0.7:
            return f"What {self.action_random.choice(list(SLOTS))} would you like?"
        values = {name: self.action_random.choice(options) for name, (options, _) in SLOTS.items()}
        return f"book({', '.join(f'{name}={value}' for name, value in values.items())})"

    def solution(self) -> list[str]:
        """Return an expert's questions and booking."""
        questions = [f"What {name} would you like?" for name in self._wishes if name not in self._told]
        return [*questions, f"book({', '.join(f'{name}={value}' for name, value in self._wishes.items())})"]

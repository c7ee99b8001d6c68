"""Families of terminal tasks: each is a function that generates a random task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from roll.envs.worlds.terminal_tasks.finding import FINDING
from roll.envs.worlds.terminal_tasks.programs import PROGRAMS
from roll.envs.worlds.terminal_tasks.settings import SETTINGS
from roll.envs.worlds.terminal_tasks.task import Check, Task
from roll.envs.worlds.terminal_tasks.text import TEXT

__all__ = ["FAMILIES", "Check", "Task"]

FAMILIES: Mapping[str, Callable[[Random], Task]] = {**FINDING, **TEXT, **SETTINGS, **PROGRAMS}

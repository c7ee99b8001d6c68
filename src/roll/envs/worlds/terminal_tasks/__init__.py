"""Families of terminal tasks: each is a function that generates a random task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from roll.envs.worlds.terminal_tasks.files import FILE_TASKS
from roll.envs.worlds.terminal_tasks.programs import PROGRAM_TASKS
from roll.envs.worlds.terminal_tasks.settings import SETTINGS_TASKS
from roll.envs.worlds.terminal_tasks.task import Check, Task
from roll.envs.worlds.terminal_tasks.text import TEXT_TASKS

__all__ = ["FAMILIES", "Check", "Task"]

FAMILIES: Mapping[str, Callable[[Random], Task]] = {**FILE_TASKS, **TEXT_TASKS, **SETTINGS_TASKS, **PROGRAM_TASKS}

"""Terminal tasks: files in the sandbox, a goal, and hidden checks that are never in the sandbox.

A check reads a file or runs a command, and the result is compared outside the sandbox. Therefore nothing in the sandbox
reveals the expected result, and no program of the model can determine whether a check passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

__all__ = ["ANSWER_FILE", "Check", "Task", "draw_words", "expect_answer", "expect_file", "expect_output"]

ANSWER_FILE = "answer.txt"


@dataclass(frozen=True, kw_only=True)
class Check:
    """The expected content of a file, or the expected output of a command, without leading and trailing whitespace."""

    expected: str
    path: str = ""
    command: str = ""
    """Bash code; a check has either a path or a command."""
    stdin: str = ""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A terminal task. Paths are relative to the home directory."""

    text: str
    files: Mapping[str, str | bytes]
    checks: Sequence[Check]
    """Checks that must all pass."""
    solution: str
    """Bash code that solves the task."""


def expect_file(path: str, expected: object) -> Check:
    """Return a check that the file has this content."""
    return Check(path=path, expected=str(expected))


def expect_answer(expected: object) -> Check:
    """Return a check that `answer.txt` has this content."""
    return expect_file(ANSWER_FILE, expected)


def expect_output(command: str, expected: object, stdin: str = "") -> Check:
    """Return a check that the command prints this text."""
    return Check(command=command, expected=str(expected), stdin=stdin)


_WORDS = (
    *("amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "hazel", "ivory", "jasper", "kelp", "lilac"),
    *("maple", "nectar", "olive", "pearl", "quartz", "raven", "sable", "topaz", "umber", "violet", "willow", "zinc"),
)


def draw_words(random: Random, count: int) -> list[str]:
    """Return `count` distinct random words."""
    return random.sample(_WORDS, count)

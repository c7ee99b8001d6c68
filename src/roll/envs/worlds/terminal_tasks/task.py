"""What a terminal task is: files that are there, what is wanted, and hidden checks that are never in the sandbox.

A check reads a file, or runs a command, and what comes of it is compared outside. So nothing that a model finds in its
sandbox tells what is expected, and nothing that it leaves there decides whether it was right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

__all__ = ["ANSWER", "Check", "Task", "answer", "holds", "prints", "words"]

ANSWER = "answer.txt"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A file's content, or what a command prints, without white space at its ends."""

    expected: str
    path: str = ""
    command: str = ""
    """Bash text; one of the two."""
    stdin: str = ""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task. Paths are below the home."""

    text: str
    files: Mapping[str, str | bytes]
    checks: Sequence[Check]
    """All of them must hold."""
    solution: str
    """Bash text that does it."""


def holds(path: str, expected: object) -> Check:
    """Return a check that the file has this content."""
    return Check(path=path, expected=str(expected))


def answer(expected: object) -> Check:
    """Return a check that `answer.txt` has this content."""
    return holds(ANSWER, expected)


def prints(command: str, expected: object, stdin: str = "") -> Check:
    """Return a check that the command prints this text."""
    return Check(command=command, expected=str(expected), stdin=stdin)


_WORDS = (
    *("amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "hazel", "ivory", "jasper", "kelp", "lilac"),
    *("maple", "nectar", "olive", "pearl", "quartz", "raven", "sable", "topaz", "umber", "violet", "willow", "zinc"),
)


def words(random: Random, count: int) -> list[str]:
    """Return different random words."""
    return random.sample(_WORDS, count)

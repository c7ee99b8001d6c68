"""What is learnt from without generating anything: conversations, plain texts, and answers that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.types.messages import Message

__all__ = ["Conversation", "Example", "ExampleDraw"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Chat messages, or a plain text."""

    messages: tuple[Message, ...] = ()
    num_given: int = 0
    """Of the messages, the first so many only say what is asked; of the others, the assistant's are to be learnt."""
    untrained: frozenset[int] = frozenset()
    """Places of further messages of the assistant's that are context only."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """As `Prompt.tools`."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """As `Prompt.template_kwargs`."""
    text: str | None = None
    """In place of messages: of a plain text, every token is to be learnt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One row of a data set, as its source states it."""

    uid: str
    """Stable across runs and machines: `<source>/<key>`."""
    domain: str
    """Metrics are kept per domain."""
    conversations: tuple[Conversation, ...]
    """One; or the two of a pair, the preferred one first, which ask for the same."""
    preferred: bool | None = None
    """Of a single answer, whether it is wanted; `None` where nothing says so."""
    target: float | None = None
    """By how much the preferred answer of a pair is better (its margin), or a single answer's score."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further columns; plain data only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleDraw:
    """An example taken from the data for one use. The ledger records what became of it."""

    draw_id: int
    """0, 1, 2, … in draw order over the whole run."""
    example: Example
    position: int
    """Where its domain's stream stood: what is needed to draw it again."""

    @property
    def uid(self) -> str:
        """Of the example."""
        return self.example.uid

"""Examples for offline training: conversations, plain texts, and compared answers."""

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
    """Number of leading messages that are the prompt; assistant messages among the others are trained."""
    untrained: frozenset[int] = frozenset()
    """Indices of other assistant messages that are context only."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """See `Prompt.tools`."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """See `Prompt.template_kwargs`."""
    text: str | None = None
    """A plain text instead of messages; every token is trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One row of a data set, as its source provides it."""

    uid: str
    """Stable across runs and machines: `<source>/<key>`."""
    domain: str
    """Metrics are kept per domain."""
    conversations: tuple[Conversation, ...]
    """One conversation; or the two of a pair, the preferred one first, with the same prompt."""
    preferred: bool | None = None
    """Whether a single answer is desirable; `None` if it is not labeled."""
    target: float | None = None
    """Margin of a pair, or score of a single answer."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other columns; plain data only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleDraw:
    """An example drawn from the data for one use. The ledger records its fate."""

    draw_id: int
    """0, 1, 2, … in draw order over the whole run."""
    example: Example
    position: int
    """Position of its domain's stream, which is needed to draw it again."""

    @property
    def uid(self) -> str:
        """UID of the example."""
        return self.example.uid

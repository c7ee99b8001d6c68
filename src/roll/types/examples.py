"""Examples for offline training: conversations, plain text, and preference pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.types.messages import Message

__all__ = ["Conversation", "Example", "ExampleDraw"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Chat messages, or plain text."""

    messages: tuple[Message, ...] = ()
    num_prompt_messages: int = 0
    """Number of leading messages that form the prompt; later assistant messages are trained on."""
    untrained_messages: frozenset[int] = frozenset()
    """Indices of assistant messages after the prompt that are not trained on."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the functions that the assistant may call, for the chat template."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the chat template, such as `enable_thinking`."""
    text: str | None = None
    """Plain text instead of messages; all of its tokens are trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One row of a data set, in the format of its source."""

    uid: str
    """ID of the example, `<source>/<key>`, stable across runs and machines."""
    domain: str
    """Domain of the example; metrics are reported per domain."""
    conversations: tuple[Conversation, ...]
    """One conversation; for a pair, two with the same prompt, the preferred one first."""
    preferred: bool | None = None
    """True if a single answer is desirable; `None` if it is not labeled."""
    target: float | None = None
    """Margin of a pair, or score of a single answer."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other columns; plain data only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleDraw:
    """An example, sampled from the data for one use; the data ledger records the outcome."""

    draw_id: int
    """Index of the draw in the run: 0, 1, 2, …"""
    example: Example
    position: int
    """Position in its domain's stream, from which the example can be drawn again."""

    @property
    def uid(self) -> str:
        """UID of the example."""
        return self.example.uid

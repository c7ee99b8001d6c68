"""Build the history of an episode: the messages of earlier turns in the model's context.

    full                p  a₁ o₁  a₂ o₂  a₃ o₃          p: prompt, aᵢ: answers, oᵢ: the environment's replies
    thinking_stripped   p  b₁ o₁  b₂ o₂  b₃ o₃          bᵢ: aᵢ without its thinking
    window of 1         p+o₂  a₃ o₃                     p+o: one message, so that roles keep alternating
    stepwise            p+o₃                            a window of 0
    summary             p+s+o₂  a₃ o₃                   s: the model's summary of everything before o₂

The functions depend only on messages; `dialogue` decides whether the new tokens extend the last context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar

from roll.types import Content, History, Message, join_content, map_text

__all__ = [
    "TOOL_MESSAGE_FORMATS",
    "Exchange",
    "ToolMessageFormat",
    "append_text",
    "build_history_messages",
    "find_longest_fitting",
    "join_contents",
    "shorten_messages",
    "strip_thinking",
]

ToolMessageFormat: TypeAlias = Literal["written", "calls", "user"]
TOOL_MESSAGE_FORMATS: tuple[ToolMessageFormat, ...] = ("written", "calls", "user")
"""Formats in which a template receives tool calls and replies: `written` passes calls as the text that the model wrote,
`calls` as a list, which some templates require, and `user` passes replies as user messages, for templates without tool
support."""
T = TypeVar("T")
_THINK_START, _THINK_END = "<think>", "</think>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """A model's answer, and the environment's replies."""

    answer: Message
    """The model's text, including tool calls."""
    replies: tuple[Message, ...]
    calls: tuple[Mapping[str, Any], ...] = ()
    """Parsed tool calls, see `Message`."""

    def to_format(self, tool_format: ToolMessageFormat) -> Exchange:
        """Return the exchange with tool calls and tool replies in `tool_format`; see `TOOL_MESSAGE_FORMATS`.

        An exchange without tool replies is returned unchanged.
        """
        if tool_format == "written" or not any(reply.role == "tool" for reply in self.replies):
            return self
        if tool_format == "calls" and self.calls:
            return replace(self, answer=Message(role="assistant", content="", tool_calls=self.calls))
        return replace(self, replies=(Message(role="user", content=join_contents(self.replies)),))


def build_history_messages(history: History, prompt: Sequence[Message], exchanges: Sequence[Exchange]) -> list[Message]:
    """Return the messages in the context of the model's next answer.

    Args:
        history: Selects the earlier turns in the context.
        prompt: Messages at the beginning of the episode or, after a summary, of the restarted context.
        exchanges: Exchanges since `prompt`, in order.
    """
    if history.kind == "thinking_stripped":
        exchanges = [Exchange(answer=_strip_message_thinking(each.answer), replies=each.replies) for each in exchanges]
    kept = {"window": history.turns, "stepwise": 0}.get(history.kind, len(exchanges))
    if kept < len(exchanges):
        first = len(exchanges) - kept
        replies = join_contents(exchanges[first - 1].replies)
        prompt, exchanges = append_text(prompt, replies, keep_task=history.keep_task), exchanges[first:]
    return [*prompt, *(message for exchange in exchanges for message in (exchange.answer, *exchange.replies))]


def join_contents(messages: Iterable[Message]) -> Content:
    """Join the contents of all messages."""
    return join_content([message.content for message in messages])


def append_text(prompt: Sequence[Message], text: Content, *, keep_task: bool = True) -> list[Message]:
    """Return the prompt with text appended to its last message.

    Without `keep_task`, all messages except system messages are replaced with one user message, the text.

    >>> [message] = append_text([Message(role="user", content="Guess.")], "Higher.")
    >>> message.content
    'Guess.\\n\\nHigher.'
    """
    if keep_task and prompt:
        last = replace(prompt[-1], content=join_content([prompt[-1].content, text]))
        return [*prompt[:-1], last]
    return [*(message for message in prompt if message.role == "system"), Message(role="user", content=text)]


def strip_thinking(text: str) -> str:
    """Return the text after the last thinking section; an empty string if that section never ends.

    >>> strip_thinking("<think>Two and two.</think>Four.")
    'Four.'
    """
    _, closed, rest = text.rpartition(_THINK_END)
    return (rest if closed else text).partition(_THINK_START)[0].lstrip("\n")


def _strip_message_thinking(answer: Message) -> Message:
    return replace(answer, content=strip_thinking(answer.text))


def shorten_messages(replies: Iterable[Message], limit: int) -> tuple[Message, ...]:
    """Shorten messages to about `limit` characters each; a note replaces the middle of longer messages."""
    return tuple(
        replace(reply, content=map_text(reply.content, lambda text: _remove_middle(text, limit))) for reply in replies
    )


def find_longest_fitting(
    build: Callable[[int], T], measure: Callable[[T], int], *, max_limit: int, max_size: int
) -> T | None:
    """Return `build(limit)` for nearly the largest limit whose result fits; `None` if not even `build(0)` fits.

    Args:
        build: Builds a result for a character limit.
        measure: Returns the size of a result, in tokens.
        max_limit: The largest character limit to try.
        max_size: The maximum size of a result, in tokens.
    """
    limit, found = max_limit, build(max_limit)
    if measure(found) <= max_size:
        return found
    least = build(0)
    spare = max_size - measure(least)
    while spare >= 0 and limit > 0:
        # Each attempt tokenizes a context, so the next limit is estimated from the tokens per character of the last
        # result instead of found by bisection.
        shown = measure(found) - measure(least)
        limit = min(limit - max(limit // 20, 1), limit * spare // max(shown, 1))
        found = build(limit)
        if measure(found) <= max_size:
            return found
    return None


def _remove_middle(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    note = f"\n[{len(text) - limit} characters left out]\n"
    return f"{text[:head]}{note}{text[len(text) - tail :]}"

"""The messages of an episode's earlier turns that the model is shown.

    full                p  a₁ o₁  a₂ o₂  a₃ o₃          p: prompt, aᵢ: answers, oᵢ: the environment's replies
    thinking_stripped   p  b₁ o₁  b₂ o₂  b₃ o₃          bᵢ: aᵢ without its thinking
    window of 1         p+o₂  a₃ o₃                     p+o: one message, so that roles keep alternating
    stepwise            p+o₃                            a window of 0
    summary             p+s+o₂  a₃ o₃                   s: the model's summary of everything before o₂

Pure functions of messages; `dialogue` decides whether their tokens extend the context that the engine saw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar

from roll.types import Content, History, Message, joined_content, with_texts

__all__ = [
    "TOOL_FORMS",
    "Exchange",
    "ToolForm",
    "find_longest_fitting",
    "history_messages",
    "join_contents",
    "shorten_messages",
    "with_text",
    "without_thinking",
]

ToolForm: TypeAlias = Literal["written", "calls", "user"]
TOOL_FORMS: tuple[ToolForm, ...] = ("written", "calls", "user")
"""How a template gets tool calls and replies: calls as the model wrote them; as a list, which some templates require;
and replies as user messages, for templates without tool support."""
T = TypeVar("T")
_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """An answer, and the replies to it."""

    answer: Message
    """The model's text, including tool calls."""
    replies: tuple[Message, ...]
    calls: tuple[Mapping[str, Any], ...] = ()
    """Parsed tool calls, see `Message`."""

    def to_format(self, form: ToolForm) -> Exchange:
        """Return the exchange with its tool calls and replies converted to another form."""
        if form == "written" or not any(reply.role == "tool" for reply in self.replies):
            return self
        if form == "calls" and self.calls:
            return replace(self, answer=Message(role="assistant", content="", tool_calls=self.calls))
        return replace(self, replies=(Message(role="user", content=join_contents(self.replies)),))


def history_messages(history: History, prompt: Sequence[Message], exchanges: Sequence[Exchange]) -> list[Message]:
    """Return the messages that the next answer follows.

    Args:
        history: How much of the episode is shown.
        prompt: Messages with which the episode began, or continues after a summary.
        exchanges: Exchanges since then, in order.
    """
    if history.kind == "thinking_stripped":
        exchanges = [Exchange(answer=_strip_thinking(one.answer), replies=one.replies) for one in exchanges]
    kept = {"window": history.turns, "stepwise": 0}.get(history.kind, len(exchanges))
    if kept < len(exchanges):
        first = len(exchanges) - kept
        replies = join_contents(exchanges[first - 1].replies)
        prompt, exchanges = with_text(prompt, replies, keep_task=history.keep_task), exchanges[first:]
    return [*prompt, *(message for one in exchanges for message in (one.answer, *one.replies))]


def join_contents(messages: Iterable[Message]) -> Content:
    """Return the contents of messages joined into one."""
    return joined_content([message.content for message in messages])


def with_text(prompt: Sequence[Message], said: Content, *, keep_task: bool = True) -> list[Message]:
    """Return the prompt with a text appended to its last message, or replacing all but the system message.

    >>> [asked] = with_text([Message(role="user", content="Guess.")], "Higher.")
    >>> asked.content
    'Guess.\\n\\nHigher.'
    """
    if keep_task and prompt:
        last = replace(prompt[-1], content=joined_content([prompt[-1].content, said]))
        return [*prompt[:-1], last]
    return [*(message for message in prompt if message.role == "system"), Message(role="user", content=said)]


def without_thinking(text: str) -> str:
    """Return the text after the last thinking section; empty if that section never ends.

    >>> without_thinking("<think>Two and two.</think>Four.")
    'Four.'
    """
    _, closed, rest = text.rpartition(_CLOSE)
    return (rest if closed else text).partition(_OPEN)[0].lstrip("\n")


def _strip_thinking(answer: Message) -> Message:
    return replace(answer, content=without_thinking(answer.text))


def shorten_messages(replies: Iterable[Message], limit: int) -> tuple[Message, ...]:
    """Shorten messages to about `limit` characters each; a note replaces the middle of a longer text."""
    return tuple(
        replace(reply, content=with_texts(reply.content, lambda text: _cut_middle(text, limit))) for reply in replies
    )


def find_longest_fitting(make: Callable[[int], T], size: Callable[[T], int], *, most: int, room: int) -> T | None:
    """Return the result of `make` for nearly the largest number of characters that fits; `None` if even 0 does not fit.

    Each attempt tokenizes a context, so the next limit is estimated from the size of the last attempt.

    Args:
        make: Function from a character limit to a result.
        size: Function from a result to its size in tokens.
        most: Largest character limit to try.
        room: Largest size, in tokens.
    """
    limit, found = most, make(most)
    if size(found) <= room:
        return found
    least = make(0)
    spare = room - size(least)
    while spare >= 0 and limit > 0:
        shown = size(found) - size(least)
        limit = min(limit - max(limit // 20, 1), limit * spare // max(shown, 1))
        found = make(limit)
        if size(found) <= room:
            return found
    return None


def _cut_middle(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    note = f"\n[{len(text) - limit} characters left out]\n"
    return f"{text[:head]}{note}{text[len(text) - tail :]}"

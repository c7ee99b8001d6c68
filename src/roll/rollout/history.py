"""What the model is shown of an episode's earlier turns: messages, from the prompt and what was said since.

    full                p  a₁ o₁  a₂ o₂  a₃ o₃          p: prompt, aᵢ: answers, oᵢ: what the environment said to them
    thinking_stripped   p  b₁ o₁  b₂ o₂  b₃ o₃          bᵢ: aᵢ without its thinking
    window of 1         p+o₂  a₃ o₃                     p+o: one message, so that roles go on alternating
    stepwise            p+o₃                            a window of 0
    summary             p+s+o₂  a₃ o₃                   s: what the model wrote of all before o₂

Pure functions. Whether the tokens that these messages become go on from what the engine saw is not their business.
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
    "history_messages",
    "joined_said",
    "longest_fitting",
    "shortened",
    "with_said",
    "without_thinking",
]

ToolForm: TypeAlias = Literal["written", "calls", "user"]
TOOL_FORMS: tuple[ToolForm, ...] = ("written", "calls", "user")
"""How a template is shown tools' calls and replies: calls as the model wrote them; as a list, which some ask for; and
replies as if a user said them, for templates that know no tools."""
T = TypeVar("T")
_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """An answer, and what was said to it."""

    answer: Message
    """In the model's own words, tools' calls among them."""
    replies: tuple[Message, ...]
    calls: tuple[Mapping[str, Any], ...] = ()
    """As they were understood, see `Message`."""

    def in_form(self, form: ToolForm) -> Exchange:
        """The same with its tools' calls and replies in another form."""
        if form == "written" or not any(reply.role == "tool" for reply in self.replies):
            return self
        if form == "calls" and self.calls:
            return replace(self, answer=Message(role="assistant", content="", tool_calls=self.calls))
        return replace(self, replies=(Message(role="user", content=joined_said(self.replies)),))


def history_messages(history: History, prompt: Sequence[Message], exchanges: Sequence[Exchange]) -> list[Message]:
    """The conversation that the next answer follows.

    Args:
        history: how much of it is shown.
        prompt: with which the episode began, or goes on after a summary.
        exchanges: since then, in order.
    """
    if history.kind == "thinking_stripped":
        exchanges = [Exchange(answer=_stripped(one.answer), replies=one.replies) for one in exchanges]
    kept = {"window": history.turns, "stepwise": 0}.get(history.kind, len(exchanges))
    if kept < len(exchanges):
        first = len(exchanges) - kept
        heard = joined_said(exchanges[first - 1].replies)
        prompt, exchanges = with_said(prompt, heard, keep_task=history.keep_task), exchanges[first:]
    return [*prompt, *(message for one in exchanges for message in (one.answer, *one.replies))]


def joined_said(messages: Iterable[Message]) -> Content:
    """Return what messages say, as one content."""
    return joined_content([message.content for message in messages])


def with_said(prompt: Sequence[Message], said: Content, *, keep_task: bool = True) -> list[Message]:
    """Return the prompt with what was said behind its last message, or in place of all but its system's.

    >>> [asked] = with_said([Message(role="user", content="Guess.")], "Higher.")
    >>> asked.content
    'Guess.\\n\\nHigher.'
    """
    if keep_task and prompt:
        last = replace(prompt[-1], content=joined_content([prompt[-1].content, said]))
        return [*prompt[:-1], last]
    return [*(message for message in prompt if message.role == "system"), Message(role="user", content=said)]


def without_thinking(text: str) -> str:
    """What stands behind a text's last thinking; nothing where it never stopped to think.

    >>> without_thinking("<think>Two and two.</think>Four.")
    'Four.'
    """
    _, closed, rest = text.rpartition(_CLOSE)
    return (rest if closed else text).partition(_OPEN)[0].lstrip("\n")


def _stripped(answer: Message) -> Message:
    return replace(answer, content=without_thinking(answer.text))


def shortened(replies: Iterable[Message], limit: int) -> tuple[Message, ...]:
    """Messages of which none has much more than `limit` characters: the middle of a longer one gives way to a note."""
    return tuple(
        replace(reply, content=with_texts(reply.content, lambda text: _middle_out(text, limit))) for reply in replies
    )


def longest_fitting(make: Callable[[int], T], size: Callable[[T], int], *, most: int, room: int) -> T | None:
    """What is made of as many characters as there is room for, or nearly; `None` where there is none even for 0.

    Each attempt tokenises a context, so how many characters fit is told by what the last one came to.

    Args:
        make: of texts of so many characters each.
        size: of what was made, in tokens.
        most: characters.
        room: the largest size.
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


def _middle_out(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    note = f"\n[{len(text) - limit} characters left out]\n"
    return f"{text[:head]}{note}{text[len(text) - tail :]}"

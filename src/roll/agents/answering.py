"""Code that the endpoint's dialects share: from a conversation to answers, as a whole or as a stream of parts.

    body ─ dialect ─► Conversation ─ `converse` ─► answers ─┬─ dialect ─► object
                                                            └─ `streamed`: parts of them ─ dialect ─► events

A dialect only defines a vendor's format of requests and answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from roll.agents.contexts import Conversation
from roll.agents.refusals import Refusal
from roll.agents.session import Answer, Session
from roll.agents.tool_calls import ToolCall
from roll.agents.wire import chat_message, function_call
from roll.types import Message

__all__ = ["Part", "Piece", "Reply", "assistant", "blocks", "converse", "streamed", "usage"]

MOST_PIECES = 16
"""Most pieces of a streamed answer's text."""
SHORTEST_PIECE = 16
"""Fewest characters of a piece."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stream, as it is sent."""

    data: bytes
    answer: Answer | None = None
    """The answer that the piece belongs to."""
    num_characters: int | None = None
    """Characters of the answer's text that are sent once this piece is; `None` if only its end is known."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of a route: one object, or a stream."""

    body: Mapping[str, Any] | None = None
    stream: Iterator[Piece] | None = None
    answers: Sequence[Answer] = ()
    """All answers of the reply."""


@dataclass(frozen=True, slots=True)
class Part:
    """One event of a streamed answer. An answer is a sequence of blocks, and a text block has several parts."""

    kind: Literal["begin", "reasoning", "text begins", "text", "text ends", "call", "end"]
    block: int = 0
    """The block's index: first the reasoning, then the text, then tool calls, as far as the answer has them."""
    text: str = ""
    """The text of the reasoning, or a piece of the answer's text."""
    call: ToolCall | None = None
    sent: int | None = None
    """See `Piece.num_characters`."""


async def converse(
    session: Session, conversation: Conversation, *, n: int = 1, max_tokens: int | None = None, stop: Sequence[str] = ()
) -> list[Answer]:
    """Return answers to a conversation, and remember them for when the conversation continues.

    Raises:
        Refusal: The request is rejected.
    """
    contexts = session.contexts
    if conversation.demands and not session.tells_demands:
        field, demand = conversation.demands[0]
        message = (
            f"{field} cannot be enforced: what is trained must be the policy's own distribution. Set "
            f'rollout.agent.format_constraints to `prompt` to pass it to the model as text ("{demand[:80]}"), or leave '
            f"{field} out."
        )
        raise Refusal(400, "unsupported_parameter", message, field=field)
    for field, demand in conversation.demands:
        said = f"agents send {field}, which cannot be enforced: the model is told of it in words"
        session.notes.add(f"demand {field}", f"{said} ('{demand[:80]}').")
    context = contexts.of_conversation(conversation)
    offered = [*conversation.tools, *conversation.deferred_tools]
    answers = await session.ask(context, n=n, max_tokens=max_tokens, stop=stop, tools=offered)
    for answer in answers:
        contexts.remember(conversation, assistant(answer), context, answer.call.token_ids, answer.stopped_by)
    return answers


def assistant(answer: Answer) -> Message:
    """Return an answer as a message, for the conversation to continue from."""
    calls = [function_call(call.call_id, call.name, call.arguments) for call in answer.tool_calls]
    return chat_message("assistant", answer.text, tool_calls=calls)


def blocks(answer: Answer) -> list[ToolCall | str]:
    """Return the answer's text, unless it is empty and there are tool calls, and its tool calls."""
    return [*([answer.text] if answer.text or not answer.tool_calls else []), *answer.tool_calls]


def usage(answers: Sequence[Answer]) -> tuple[int, int]:
    """Return the numbers of tokens of the context and of the answers."""
    return len(answers[0].call.context), sum(len(answer.call.token_ids) for answer in answers)


# ---- streams


def streamed(answer: Answer, write: Callable[[Part], Iterable[bytes]]) -> Iterator[Piece]:
    """Return an answer as parts of a stream, each in a dialect's form."""
    return (Piece(data, answer, part.sent) for part in _parts(answer) for data in write(part))


def _parts(answer: Answer) -> Iterator[Part]:
    yield Part("begin", sent=0)
    if answer.reasoning:
        yield Part("reasoning", text=answer.reasoning)
    plain = not answer.reasoning and not answer.tool_calls
    for place, block in enumerate(blocks(answer), start=bool(answer.reasoning)):
        if isinstance(block, ToolCall):
            yield Part("call", place, call=block)
            continue
        yield Part("text begins", place, sent=0 if plain else None)
        size = max(SHORTEST_PIECE, -(-len(block) // MOST_PIECES))
        for begin in range(0, len(block), size):
            piece = block[begin : begin + size]
            yield Part("text", place, piece, sent=begin + len(piece) if plain else None)
        yield Part("text ends", place)
    yield Part("end")

"""Generation of answers for all API formats of the endpoint, as complete responses or as streams.

    body ─ dialect ─► Conversation ─ `answer_conversation` ─► answers ─┬─ dialect ─► object
                                                            └─ `stream_answer`: events ─ dialect ─► server-sent events

A module such as `openai_chat` (a "dialect" above) only defines a vendor's format of requests and responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from roll.agents.contexts import Conversation
from roll.agents.request_errors import RequestError
from roll.agents.session import Answer, Session
from roll.agents.tool_calls import ToolCall
from roll.agents.wire import build_chat_message, build_function_call
from roll.types import Message

__all__ = [
    "AnswerEvent",
    "Reply",
    "StreamChunk",
    "answer_conversation",
    "build_assistant_message",
    "count_usage",
    "list_blocks",
    "stream_answer",
]

MAX_TEXT_PARTS = 16
"""Maximum number of parts into which a streamed answer's text is split."""
MIN_TEXT_PART_LENGTH = 16
"""Minimum number of characters in a part of the text."""


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """Bytes that are sent to a stream in one write."""

    data: bytes
    answer: Answer | None = None
    """The answer to which the bytes belong."""
    num_characters: int | None = None
    """Number of characters of the answer's text that are sent after these bytes; `None`: the whole text."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The response to a request: one JSON object (`body`) or a stream."""

    body: Mapping[str, Any] | None = None
    stream: Iterator[StreamChunk] | None = None
    answers: Sequence[Answer] = ()
    """All answers of the reply."""


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """One event of a streamed answer. An answer is a sequence of blocks; a text block has several events."""

    kind: Literal["begin", "reasoning", "text begins", "text", "text ends", "call", "end"]
    block: int = 0
    """Index of the block; the blocks of an answer are its reasoning, its text and its tool calls, in this order."""
    text: str = ""
    """The text of the reasoning, or a piece of the answer's text."""
    call: ToolCall | None = None
    num_characters: int | None = None
    """Number of characters of the answer's text that are sent after this event; `None`: the whole text."""


async def answer_conversation(
    session: Session, conversation: Conversation, *, n: int = 1, max_tokens: int | None = None, stop: Sequence[str] = ()
) -> list[Answer]:
    """Generate answers to a conversation, and record them, so that a continued conversation reuses their tokens.

    Args:
        session: The session.
        conversation: The conversation.
        n: Number of answers.
        max_tokens: Maximum number of tokens in each answer; the session's limits apply too.
        stop: Strings that end an answer.

    Raises:
        RequestError: The request is rejected.
    """
    contexts = session.contexts
    if conversation.format_constraints and not session.constraints_as_text:
        field, instruction = conversation.format_constraints[0]
        message = (
            f"{field} cannot be enforced, because training requires samples from the policy's own distribution. Set "
            "rollout.agent.format_constraints to `prompt` to pass the constraint to the model as text "
            f'("{instruction[:80]}"), or remove {field}.'
        )
        raise RequestError(400, "unsupported_parameter", message, field=field)
    for field, instruction in conversation.format_constraints:
        said = f"agents send {field}, which cannot be enforced: the constraint is passed to the model as text"
        session.warnings.warn_once(f"constraint {field}", f"{said} ('{instruction[:80]}').")
    conversation = await session.store_images(conversation)
    context = contexts.build_context(conversation)
    offered = [*conversation.tools, *conversation.deferred_tools]
    answers = await session.generate_answers(
        context.token_ids, media=context.media, n=n, max_tokens=max_tokens, stop=stop, tools=offered
    )
    for answer in answers:
        contexts.record_answer(
            conversation, build_assistant_message(answer), context, answer.call.token_ids, answer.stopped_by
        )
    return answers


def build_assistant_message(answer: Answer) -> Message:
    """Return an answer as an assistant message of the conversation."""
    calls = [build_function_call(call.call_id, call.name, call.arguments) for call in answer.tool_calls]
    return build_chat_message("assistant", answer.text, tool_calls=calls)


def list_blocks(answer: Answer) -> list[ToolCall | str]:
    """Return the answer's text followed by its tool calls; an empty text is omitted if there are tool calls."""
    return [*([answer.text] if answer.text or not answer.tool_calls else []), *answer.tool_calls]


def count_usage(answers: Sequence[Answer]) -> tuple[int, int]:
    """Return the number of prompt tokens, which all answers share, and the total number of generated tokens."""
    return len(answers[0].call.context), sum(len(answer.call.token_ids) for answer in answers)


# ---- streams


def stream_answer(answer: Answer, write: Callable[[AnswerEvent], Iterable[bytes]]) -> Iterator[StreamChunk]:
    """Split an answer into events, and yield a chunk for each byte string that `write` returns for an event."""
    return (
        StreamChunk(data, answer, event.num_characters) for event in _split_into_events(answer) for data in write(event)
    )


def _split_into_events(answer: Answer) -> Iterator[AnswerEvent]:
    yield AnswerEvent("begin", num_characters=0)
    if answer.reasoning:
        yield AnswerEvent("reasoning", text=answer.reasoning)
    plain = not answer.reasoning and not answer.tool_calls
    for place, block in enumerate(list_blocks(answer), start=bool(answer.reasoning)):
        if isinstance(block, ToolCall):
            yield AnswerEvent("call", place, call=block)
            continue
        yield AnswerEvent("text begins", place, num_characters=0 if plain else None)
        size = max(MIN_TEXT_PART_LENGTH, -(-len(block) // MAX_TEXT_PARTS))
        for begin in range(0, len(block), size):
            piece = block[begin : begin + size]
            yield AnswerEvent("text", place, piece, num_characters=begin + len(piece) if plain else None)
        yield AnswerEvent("text ends", place)
    yield AnswerEvent("end")

"""Compute the engine's context of a request: the model's own tokens, wherever the request repeats an earlier answer.

    messages ── the longest prefix that ends with an earlier answer? ──► its context + its tokens + the text after it
         └────── none ────────────────────────────────────────────────► a fresh rendering

An answer is matched by all messages before it, the tools, its text (without spaces around it) and its tool calls. An
answer that a stop text ended may be the start of a message, to which the agent has added text. So the context of an
agent that returns its history unchanged extends the engine's tokens exactly. If the agent changes its history, the
template renders the changed history.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from pydantic_core import to_json

from roll.agents.fitting import fitted_text
from roll.agents.refusals import Refusal
from roll.agents.tool_calls import ToolFormat, plainly
from roll.data import ChatRenderer
from roll.errors import DataError
from roll.types import IntArray, Message, content_key, joined_content, with_texts

__all__ = ["Contexts", "Conversation"]

_MARK = "\ue000answer\ue001"
"""A placeholder for an answer if only the text after it is needed; of private-use characters, which no text has."""
BYTES_PER_TOKEN = 16
"""Bytes per token of the engine's context; a longer request is rejected before it is tokenized: tokenizing takes a
second per few MB, in which no other agent is answered."""
BYTES_PER_ESTIMATED_TOKEN = 4
"""Bytes per token, to estimate the size of a request that is too long to be tokenized."""


@dataclass(frozen=True, slots=True)
class _Known:
    """An earlier answer, with its context."""

    context: IntArray
    token_ids: IntArray


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The content of a request, independent of the vendor's format."""

    messages: Sequence[Message]
    """Messages as chat templates take them: with `tool_calls`, or with `tool_call_id` for a tool's result."""
    tools: Sequence[Mapping[str, Any]] = ()
    """`{"type": "function", "function": {"name", "description", "parameters"}}`"""
    deferred_tools: Sequence[Mapping[str, Any]] = ()
    """Tools that can be called too, but that the model sees only in a message."""
    demands: Sequence[tuple[str, str]] = ()
    """Fields that constrain the answer's format, with instructions for the model. They are not part of a history."""

    @cached_property
    def _hashed(self) -> tuple[dict[int, tuple[bytes, bytes]], xxhash.xxh3_128]:
        state = xxhash.xxh3_128(to_json(self.tools) if self.tools else b"")
        answers: dict[int, tuple[bytes, bytes]] = {}
        for place, message in enumerate(self.messages):
            before = state.digest() if message.role == "assistant" else b""
            state.update(_message_bytes(message))
            if before:
                answers[place] = (before, state.digest())
        return answers, state

    @property
    def answers(self) -> dict[int, tuple[bytes, bytes]]:
        """Indices of earlier answers, with two digests: of the tools and all messages before the answer, and including
        it.
        """
        return self._hashed[0]

    @property
    def digest(self) -> bytes:
        """Return the digest of the tools and all messages."""
        return self._hashed[1].digest()

    def digest_with(self, answer: Message) -> bytes:
        """Return the digest of the tools, all messages, and an answer to them."""
        state = self._hashed[1].copy()
        state.update(_message_bytes(answer))
        return state.digest()


class Contexts:
    """The contexts of one session.

    Args:
        renderer: Renderer of the policy's tokenizer.
        ends: Tokens that end an answer.
        tool_format: The model's format of tool calls.
        max_context: Longest context of the engine, in tokens.
    """

    def __init__(
        self, renderer: ChatRenderer, *, ends: Sequence[int], tool_format: ToolFormat, max_context: int
    ) -> None:
        self._renderer = renderer
        self._ends = tuple(ends)
        self._end_texts = [renderer.decode_raw(np.array([end])) for end in self._ends]
        self._plain = tool_format in ("plain", "none")
        self._max_bytes = BYTES_PER_TOKEN * max_context
        self._answers: dict[bytes, _Known] = {}
        self._stopped: dict[bytes, dict[str, _Known]] = {}
        """Answers that a stop text ended, including that text, by the digest of the messages before them."""
        self._calls: dict[str, Mapping[str, Any]] = {}
        """Tool calls of the answers in their original form, by ID."""
        self._texts: dict[str, IntArray] = {}

    def of_conversation(self, conversation: Conversation) -> IntArray:
        """Return token IDs up to the start of the answer, shape [C].

        Raises:
            Refusal: The template rejects the conversation, or it is far too long.
        """
        self._bound(_num_bytes(conversation), "messages")
        conversation = self._restored(conversation)
        messages = [self._harmless(message) for message in _with_demands(conversation)]
        try:
            for place, (before, digest) in reversed(conversation.answers.items()):
                if place + 1 == len(messages):
                    continue
                known, added = self._known(messages[place], before, digest)
                if known is None:
                    continue
                answer, *following = self._said(messages[place:], ())
                ended = self._is_end(known.token_ids[-1:])
                try:
                    tail = self._after(answer, following, ended, self._tools(conversation), added)
                except DataError:
                    if added:
                        continue
                    raise
                return np.concatenate([known.context, known.token_ids, tail]).astype(np.int32, copy=False)
            said = self._said(messages, conversation.tools)
            return self._renderer.tokens(fitted_text(self._renderer, said, self._tools(conversation)))
        except DataError as error:
            raise Refusal(400, "invalid_request", str(error), field="messages") from error

    def count(self, conversation: Conversation) -> int:
        """Return the number of tokens of the model's input; an estimate if the conversation is far too long.

        Raises:
            Refusal: The template rejects the conversation.
        """
        num_bytes = _num_bytes(conversation)
        if num_bytes > self._max_bytes:
            return num_bytes // BYTES_PER_ESTIMATED_TOKEN
        return len(self.of_conversation(conversation))

    def of_text(self, text: str) -> IntArray:
        """Return the token IDs of a text to be continued, shape [C].

        Raises:
            Refusal: The text is empty or far too long.
        """
        self._bound(len(text.encode()), "prompt")
        known = max((seen for seen in self._texts if text.startswith(seen)), key=len, default="")
        rest = self._renderer.piece(text[len(known) :], first=not known)
        ids = np.concatenate([self._texts[known], rest]).astype(np.int32, copy=False) if known else rest
        if not len(ids):
            raise Refusal(400, "invalid_request", "the prompt is empty: send some text.", field="prompt")
        return ids

    def remember(
        self,
        conversation: Conversation,
        answer: Message,
        context: IntArray,
        token_ids: IntArray,
        stopped_by: str | None = None,
    ) -> None:
        """Record the answer to a conversation, and the stop text that ended it, if any."""
        restored, known = self._restored(conversation), _Known(context, token_ids)
        self._answers[restored.digest_with(answer)] = known
        if stopped_by is not None and not answer.tool_calls:
            said = (answer.text + stopped_by).lstrip()
            self._stopped.setdefault(restored.digest, {})[said] = known
        for call in answer.tool_calls:
            self._calls[call["id"]] = call

    def _known(self, message: Message, before: bytes, digest: bytes) -> tuple[_Known | None, str]:
        """Return the answer that a message equals or starts with, and the text that the agent added to it."""
        known = self._answers.get(digest)
        if known is not None or message.tool_calls or before not in self._stopped:
            return known, ""
        text = message.text.lstrip()
        begun = max((said for said in self._stopped[before] if text.startswith(said)), key=len, default=None)
        return (None, "") if begun is None else (self._stopped[before][begun], text[len(begun) :])

    def _restored(self, conversation: Conversation) -> Conversation:
        """Return the conversation with its tool calls in their original form.

        Agents send a call back with the tool's default arguments filled in. Calls are matched by their ID. A call in
        which the agent changed an argument that the model wrote stays as the agent sent it.
        """
        if not self._calls:
            return conversation
        return replace(conversation, messages=[self._as_given(message) for message in conversation.messages])

    def _as_given(self, message: Message) -> Message:
        given = tuple(self._given(call) for call in message.tool_calls)
        return message if given == message.tool_calls else replace(message, tool_calls=given)

    def _given(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        known = self._calls.get(call["id"])
        if known is None:
            return call
        mine, theirs = (each["function"]["arguments"] for each in (known, call))
        if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
            return call
        same = all(name in theirs and theirs[name] == value for name, value in mine.items())
        return known if same else call

    def remember_text(self, text: str, context: IntArray, token_ids: IntArray) -> None:
        """Record a continued text; `text` is all of it, as the agent received it."""
        if self._is_end(token_ids[-1:]):
            token_ids = token_ids[:-1]  # the end token is not part of the text
        if text:
            self._texts[text] = np.concatenate([context, token_ids]).astype(np.int32, copy=False)

    def _after(
        self, answer: Message, following: Sequence[Message], ended: bool, tools: Sequence[Any], added: str = ""
    ) -> IntArray:
        """Return the token IDs from an answer's last token to the start of the next answer.

        Args:
            answer: The assistant's message.
            following: The messages after it.
            ended: Whether the answer has its end token; otherwise the end token is part of the returned IDs.
            tools: Tools for the template.
            added: Text that the agent appended to the answer.

        Raises:
            DataError: The template rejects the conversation, or nothing in its text ends an answer.
        """
        renderer = self._renderer
        if not renderer.has_template:
            return renderer.piece("\n\n".join([added, *(message.text for message in following), ""]))
        question = Message(role="user", content="a")
        text = fitted_text(renderer, [question, _marked(answer, added), *following], tools)
        begin = text.rfind(_MARK)
        places = [(place, end) for end in self._end_texts if (place := text.find(end, begin)) >= 0]
        if begin < 0 or not places:
            raise DataError("the model's chat template does not say where an answer ends once a conversation goes on.")
        place, end = min(places)
        return renderer.piece(text[begin + len(_MARK) if added else place + len(end) * ended :])

    def _is_end(self, last: IntArray) -> bool:
        return bool(len(last)) and int(last[0]) in self._ends

    def _bound(self, num_bytes: int, field: str) -> None:
        if num_bytes > self._max_bytes:
            raise Refusal(
                400,
                "context_length_exceeded",
                f"{num_bytes} bytes are more than the model's context holds: send fewer.",
                field=field,
            )

    def _harmless(self, message: Message) -> Message:
        """Return a message in which nothing that an agent passes on (pages, files, results) begins another message."""
        if message.role == "assistant":
            return message
        return replace(message, content=with_texts(message.content, self._renderer.escape_special_tokens))

    def _said(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
        return plainly(messages, tools) if self._plain else list(messages)

    def _tools(self, conversation: Conversation) -> Sequence[Any]:
        return () if self._plain else conversation.tools


def _num_bytes(conversation: Conversation) -> int:
    return len(to_json([[message.to_dict() for message in conversation.messages], conversation.tools]))


def _marked(answer: Message, added: str) -> Message:
    """Return the answer with a mark near its end: in its text, and in its last tool call, as some templates drop the
    text.
    """
    marked = replace(answer, content=_MARK + added)
    if answer.tool_calls:
        *before, last = answer.tool_calls
        named = {**last, "function": {**last["function"], "name": _MARK}}
        marked = replace(marked, tool_calls=(*before, named))
    return marked


def _with_demands(conversation: Conversation) -> Sequence[Message]:
    """Return the messages, with the demands on the answer appended to the last one."""
    *before, last = conversation.messages
    told = joined_content([last.content, *(words for _, words in conversation.demands)])
    return [*before, replace(last, content=told)] if conversation.demands else conversation.messages


def _message_bytes(message: Message) -> bytes:
    """Return the bytes that identify a message; lengths keep a part of one message from passing for another."""
    role, content = message.role, content_key(message.content)
    said = content.strip() if role == "assistant" else content
    calls = ""
    if message.tool_calls:
        named = [[call["function"]["name"], call["function"]["arguments"]] for call in message.tool_calls]
        calls = json.dumps(named, sort_keys=True)
    reply_to = message.tool_call_id or ""
    return f"{role} {len(said)} {len(calls)} {len(reply_to)} {said}{calls}{reply_to}".encode()

"""Token IDs of an agent's conversation, in which earlier answers keep the tokens that the model generated.

    messages ── the longest prefix that ends with an earlier answer? ──► its context + its tokens + the text after it
         └────── none ────────────────────────────────────────────────► a fresh rendering

An assistant message is recognized as an earlier answer by the tools, all messages before it, its text (stripped of
whitespace) and its tool calls. If a stop string ended the answer, the message may also be the answer with text that
the agent added. Therefore, if an agent returns its history unchanged, its context extends the engine's tokens exactly.
If the agent changes its history, the template renders the changed history.
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

from roll.agents.request_errors import RequestError
from roll.agents.template_adaptation import render_text
from roll.agents.tool_calls import ToolFormat, render_tools_as_text
from roll.data import ChatRenderer
from roll.errors import DataError
from roll.types import EncodedText, IntArray, Message, get_content_key, join_content, join_encoded, map_text

__all__ = ["ContextBuilder", "Conversation"]

_ANSWER_PLACEHOLDER = "\ue000answer\ue001"
"""A placeholder for an answer if only the text after it is needed; its private-use characters occur in no real text."""
BYTES_PER_TOKEN = 16
"""A request with more bytes than this per token of the engine's context is rejected without tokenizing it: tokenizing
a few MB takes a second, during which no other agent is answered."""
BYTES_PER_ESTIMATED_TOKEN = 4
"""Bytes per token, to estimate the number of tokens of a request that is too long to tokenize."""


@dataclass(frozen=True, slots=True)
class _RecordedAnswer:
    """The tokens of an earlier answer and of its context."""

    context: EncodedText
    token_ids: IntArray

    @property
    def encoded(self) -> EncodedText:
        """The token IDs of the context and of the answer, and the spans of the context's images."""
        ids = np.concatenate([self.context.token_ids, self.token_ids]).astype(np.int32, copy=False)
        return EncodedText(ids, self.context.media)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The content of a request, independent of the vendor's format."""

    messages: Sequence[Message]
    """Messages in the form of chat templates; tool results have a `tool_call_id`."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools for the template: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    deferred_tools: Sequence[Mapping[str, Any]] = ()
    """Further tools that the model may call; they are not rendered as tools, but described in a message."""
    format_constraints: Sequence[tuple[str, str]] = ()
    """Fields of the request that constrain the answer's format, each with an instruction for the model. They apply to
    this answer only, so they are not part of the history."""

    @cached_property
    def _digests(self) -> tuple[dict[int, tuple[bytes, bytes]], xxhash.xxh3_128]:
        state = xxhash.xxh3_128(to_json(self.tools) if self.tools else b"")
        answers: dict[int, tuple[bytes, bytes]] = {}
        for place, message in enumerate(self.messages):
            before = state.digest() if message.role == "assistant" else b""
            state.update(_encode_message(message))
            if before:
                answers[place] = (before, state.digest())
        return answers, state

    @property
    def answer_digests(self) -> dict[int, tuple[bytes, bytes]]:
        """Two digests of each assistant message, by message index.

        The first digest covers the tools and all messages before the assistant message; the second also covers the
        message.
        """
        return self._digests[0]

    @property
    def digest(self) -> bytes:
        """The digest of the tools and all messages."""
        return self._digests[1].digest()

    def compute_digest_with(self, answer: Message) -> bytes:
        """Return the digest of the tools, all messages and `answer`."""
        state = self._digests[1].copy()
        state.update(_encode_message(answer))
        return state.digest()


class ContextBuilder:
    """Builds the contexts of one session from its conversations and from the tokens of its earlier answers.

    Args:
        renderer: Renderer of the policy's tokenizer.
        end_token_ids: Token IDs that end an answer.
        tool_format: The model's format of tool calls.
        max_context: Maximum context length of the engine, in tokens.
    """

    def __init__(
        self, renderer: ChatRenderer, *, end_token_ids: Sequence[int], tool_format: ToolFormat, max_context: int
    ) -> None:
        self._renderer = renderer
        self._ends = tuple(end_token_ids)
        self._end_texts = [renderer.decode_raw(np.array([end])) for end in self._ends]
        self._plain = tool_format in ("plain", "none")
        self._max_bytes = BYTES_PER_TOKEN * max_context
        self._answers: dict[bytes, _RecordedAnswer] = {}
        self._stopped: dict[bytes, dict[str, _RecordedAnswer]] = {}
        """Answers that a stop string ended, by the digest of the messages before them and by their text."""
        self._calls: dict[str, Mapping[str, Any]] = {}
        """Tool calls of the answers in their original form, by ID."""
        self._texts: dict[str, IntArray] = {}

    def build_context(self, conversation: Conversation) -> EncodedText:
        """Return the token IDs of the conversation, up to the start of the next answer, and the spans of its images.

        Raises:
            RequestError: The template rejects the conversation, or the conversation is far too long.
        """
        self._check_size(_count_bytes(conversation), "messages")
        conversation = self._restore_tool_calls(conversation)
        messages = [self._escape_special_tokens(message) for message in _append_format_constraints(conversation)]
        try:
            for place, (before, digest) in reversed(conversation.answer_digests.items()):
                if place + 1 == len(messages):
                    continue
                known, added = self._find_answer(messages[place], before, digest)
                if known is None:
                    continue
                answer, *following = self._prepare_messages(messages[place:], ())
                ended = self._starts_with_end_token(known.token_ids[-1:])
                try:
                    tail = self._render_after_answer(answer, following, ended, self._select_tools(conversation), added)
                except DataError:
                    if added:
                        continue
                    raise
                return join_encoded(known.encoded, tail)
            said = self._prepare_messages(messages, conversation.tools)
            return self._renderer.encode(render_text(self._renderer, said, self._select_tools(conversation)))
        except DataError as error:
            raise RequestError(400, "invalid_request", str(error), field="messages") from error

    def count_tokens(self, conversation: Conversation) -> int:
        """Return the number of tokens in the model's input, or an estimate if the conversation greatly exceeds the
        limit.

        Raises:
            RequestError: The template rejects the conversation.
        """
        num_bytes = _count_bytes(conversation)
        if num_bytes > self._max_bytes:
            return num_bytes // BYTES_PER_ESTIMATED_TOKEN
        return len(self.build_context(conversation).token_ids)

    def build_text_context(self, text: str) -> IntArray:
        """Return the token IDs of a text prompt for `/v1/completions`, shape [C].

        Raises:
            RequestError: The text is empty or far too long.
        """
        self._check_size(len(text.encode()), "prompt")
        # Tokenizing the whole text again could merge tokens across the border of the engine's earlier answer.
        text = self._escape_images(text)
        known = max((seen for seen in self._texts if text.startswith(seen)), key=len, default="")
        rest = self._renderer.tokenize(text[len(known) :], add_special_tokens=not known)
        ids = np.concatenate([self._texts[known], rest]).astype(np.int32, copy=False) if known else rest
        if not len(ids):
            raise RequestError(400, "invalid_request", "the prompt must not be empty.", field="prompt")
        return ids

    def record_answer(
        self,
        conversation: Conversation,
        answer: Message,
        context: EncodedText,
        token_ids: IntArray,
        stopped_by: str | None = None,
    ) -> None:
        """Record the answer to a conversation; `stopped_by` is the stop string that ended it, if any."""
        restored, known = self._restore_tool_calls(conversation), _RecordedAnswer(context, token_ids)
        self._answers[restored.compute_digest_with(answer)] = known
        if stopped_by is not None and not answer.tool_calls:
            said = (answer.text + stopped_by).lstrip()
            self._stopped.setdefault(restored.digest, {})[said] = known
        for call in answer.tool_calls:
            self._calls[call["id"]] = call

    def _find_answer(self, message: Message, prefix_digest: bytes, digest: bytes) -> tuple[_RecordedAnswer | None, str]:
        """Return the earlier answer that `message` repeats (or `None`), and the text that the agent appended to it.

        Args:
            message: An assistant message of the request.
            prefix_digest: The digest of the tools and the messages before it.
            digest: The digest that also includes the message.
        """
        known = self._answers.get(digest)
        if known is not None or message.tool_calls or prefix_digest not in self._stopped:
            return known, ""
        text = message.text.lstrip()
        begun = max((said for said in self._stopped[prefix_digest] if text.startswith(said)), key=len, default=None)
        return (None, "") if begun is None else (self._stopped[prefix_digest][begun], text[len(begun) :])

    def _restore_tool_calls(self, conversation: Conversation) -> Conversation:
        """Return the conversation with each tool call as the model wrote it.

        Some agents send a call back with the tool's default arguments filled in. Calls are matched by their ID. If the
        agent changed an argument that the model wrote, the call stays as the agent sent it.
        """
        if not self._calls:
            return conversation
        return replace(conversation, messages=[self._restore_message(message) for message in conversation.messages])

    def _restore_message(self, message: Message) -> Message:
        given = tuple(self._restore_call(call) for call in message.tool_calls)
        return message if given == message.tool_calls else replace(message, tool_calls=given)

    def _restore_call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        known = self._calls.get(call["id"])
        if known is None:
            return call
        written, sent = (each["function"]["arguments"] for each in (known, call))
        if not isinstance(written, Mapping) or not isinstance(sent, Mapping):
            return call
        same = all(name in sent and sent[name] == value for name, value in written.items())
        return known if same else call

    def record_text(self, text: str, context: IntArray, token_ids: IntArray) -> None:
        """Record a completion's tokens; `text` is the prompt followed by the completion that the agent received."""
        if self._starts_with_end_token(token_ids[-1:]):
            token_ids = token_ids[:-1]  # the end token is not part of the text
        text = self._escape_images(text)
        if text:
            self._texts[text] = np.concatenate([context, token_ids]).astype(np.int32, copy=False)

    def _render_after_answer(
        self,
        answer: Message,
        following: Sequence[Message],
        has_end_token: bool,
        tools: Sequence[Any],
        appended: str = "",
    ) -> EncodedText:
        """Return the token IDs between the end of an answer's own tokens and the start of the next answer.

        Args:
            answer: The assistant's message.
            following: The messages after the answer.
            has_end_token: Whether the answer's tokens include the end token; otherwise the returned IDs begin with it.
            tools: Tools for the template.
            appended: Text that the agent appended to the answer.

        Raises:
            DataError: The template rejects the conversation, or writes no end token after an answer.
        """
        renderer = self._renderer
        if not renderer.has_template:
            return renderer.encode_fragment("\n\n".join([appended, *(message.text for message in following), ""]))
        # Any user message will do: the text after the placeholder does not depend on the messages before it.
        question = Message(role="user", content="a")
        text = render_text(renderer, [question, _replace_with_placeholder(answer, appended), *following], tools)
        begin = text.rfind(_ANSWER_PLACEHOLDER)
        places = [(place, end) for end in self._end_texts if (place := text.find(end, begin)) >= 0]
        if begin < 0 or not places:
            raise DataError(
                "the model's chat template does not end assistant messages within a conversation with an end-of-turn "
                "token."
            )
        place, end = min(places)
        return renderer.encode_fragment(
            text[begin + len(_ANSWER_PLACEHOLDER) if appended else place + len(end) * has_end_token :]
        )

    def _starts_with_end_token(self, token_ids: IntArray) -> bool:
        return bool(len(token_ids)) and int(token_ids[0]) in self._ends

    def _escape_images(self, text: str) -> str:
        """Escape the model's image tokens in the prompt of a completion, which has no images."""
        media = self._renderer.media
        return text if media is None else media.escape(text)

    def _check_size(self, num_bytes: int, field: str) -> None:
        if num_bytes > self._max_bytes:
            raise RequestError(
                400,
                "context_length_exceeded",
                f"the text has {num_bytes} bytes, which exceeds the model's context length: send a shorter "
                "conversation.",
                field=field,
            )

    def _escape_special_tokens(self, message: Message) -> Message:
        """Escape special tokens so that a tool's text cannot begin a new message; keep assistant messages unchanged."""
        if message.role == "assistant":
            return message
        return replace(message, content=map_text(message.content, self._renderer.escape_special_tokens))

    def _prepare_messages(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
        return render_tools_as_text(messages, tools) if self._plain else list(messages)

    def _select_tools(self, conversation: Conversation) -> Sequence[Any]:
        return () if self._plain else conversation.tools


def _count_bytes(conversation: Conversation) -> int:
    return len(to_json([[message.to_dict() for message in conversation.messages], conversation.tools]))


def _replace_with_placeholder(answer: Message, appended: str) -> Message:
    """Replace the answer's text with a placeholder followed by `appended`, to find the answer's end in rendered text.

    The name of the last tool call is replaced too, since some templates drop the text of an answer with tool calls.
    """
    marked = replace(answer, content=_ANSWER_PLACEHOLDER + appended)
    if answer.tool_calls:
        *before, last = answer.tool_calls
        named = {**last, "function": {**last["function"], "name": _ANSWER_PLACEHOLDER}}
        marked = replace(marked, tool_calls=(*before, named))
    return marked


def _append_format_constraints(conversation: Conversation) -> Sequence[Message]:
    """Append any instructions for the answer's format to the last message, and return all messages."""
    *before, last = conversation.messages
    told = join_content([last.content, *(words for _, words in conversation.format_constraints)])
    return [*before, replace(last, content=told)] if conversation.format_constraints else conversation.messages


def _encode_message(message: Message) -> bytes:
    """Encode a message for hashing; part lengths are included, so different messages have different encodings."""
    role, content = message.role, get_content_key(message.content)
    said = content.strip() if role == "assistant" else content
    calls = ""
    if message.tool_calls:
        named = [[call["function"]["name"], call["function"]["arguments"]] for call in message.tool_calls]
        calls = json.dumps(named, sort_keys=True)
    reply_to = message.tool_call_id or ""
    return f"{role} {len(said)} {len(calls)} {len(reply_to)} {said}{calls}{reply_to}".encode()

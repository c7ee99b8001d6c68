"""Token-exact chat rendering: messages to the token IDs of the model's training format, and token IDs back to text."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.data.beginning import TextBeginning
from roll.data.decoding import Decoder, backend
from roll.data.harmless import boundaries, escape_special
from roll.data.reasoning import ReasoningFormat
from roll.data.shown import check_shown
from roll.data.templates import PROBE, TODAY, ChatTemplate, Tool, refusals
from roll.data.turns import Render, SpecialTokens, ends_only_last, find_turns, thinking_modes, tokenize
from roll.errors import DataError
from roll.types import BoolArray, IntArray, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TODAY", "ChatRenderer", "Tool"]


class ChatRenderer:
    """Renders through the tokenizer's own chat template.

    A tokenizer without a template belongs to a base model: its prompts are the messages' texts, a blank line between
    them, with the tokenizer's own special tokens and nothing added.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self.has_template = bool(self._template.source)
        self._special = SpecialTokens(tokenizer)
        self._backend = backend(tokenizer)
        self._decoder = Decoder(tokenizer, self._special, self._template.source)
        self._beginning = TextBeginning(tokenizer)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> IntArray:
        """Return the token IDs of the conversation, up to the start of the assistant's answer, shape [P].

        Args:
            messages: The conversation.
            tools: JSON schemas of the functions that the model may call.
            template_kwargs: Further variables of the template, such as `enable_thinking`.

        Raises:
            DataError: The template rejects the conversation (some models have no system role, for instance).
        """
        return self.tokens(self.text(messages, tools, template_kwargs))

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text that `render` tokenizes.

        Raises:
            DataError: See `render`.
        """
        if self.has_template:
            return self._template.render(messages, tools=tools, **(template_kwargs or {}))
        return _joined(messages, self.decode_raw(np.array([self.end_token])) if _answered(messages) else "")

    def tokens(self, text: str) -> IntArray:
        """Return the token IDs of a text that `text` returned, shape [P]."""
        return self.piece(text, first=not self.has_template)

    def parse_answer(self, answer: IntArray, after: IntArray, stops: Collection[int] = ()) -> tuple[str, bool]:
        """Return the text of an answer, with special tokens, and whether an end token, which the text lacks, ended it.

        Args:
            answer: Token IDs, shape [T].
            after: Token IDs before the answer, shape [C]: some tokenizers write a space only after another token.
            stops: IDs that end an answer, in addition to the special tokens.
        """
        ended = bool(len(answer)) and (int(answer[-1]) in stops or self._special.has(self.decode_raw(answer[-1:])))
        body, anchor = answer[: len(answer) - ended], after[-1:]
        before, whole = (
            self.decode_raw(anchor),
            self.decode_raw(np.concatenate([anchor, body])),
        )
        return (whole[len(before) :] if whole.startswith(before) else self.decode_raw(body)), ended

    def suffix_ids(self, text: str, ended: bool) -> IntArray | None:
        """Return the token IDs behind an answer, shape [N]; `None` if no special token separates them from the answer.

        Args:
            text: The template's text from the end of the answer's content on, with the end of its message.
            ended: Whether the answer already has the end token, which the returned IDs then leave out.
        """
        end = self._special.beginning(text)
        if end is None:
            return None
        ids = self.piece(text)
        return ids[ended:] if len(ids) and self.decode_raw(ids[:1]) == end else None

    @property
    def drops_tools(self) -> bool:
        """Whether the template drops a tool's result without an error."""
        return self._template.drops_tools

    @cached_property
    def takes_late_system(self) -> bool:
        """Whether the template renders a later system message in its place."""
        asked = Message(role="user", content="a")
        answer = PROBE[::-1]
        late = Message(role="system", content=PROBE)
        for messages in ([asked, late], [asked, Message(role="assistant", content=answer), late, asked]):
            try:
                text = self.text(messages)
            except DataError:
                return False
            if text.count(PROBE) != 1 or text.find(answer) > text.find(PROBE):
                return False
        return True

    def decode_raw(self, token_ids: IntArray) -> str:
        """Return the text, special tokens included, as the model wrote it."""
        return self._decoder.decode_raw(token_ids)

    def piece(self, text: str, *, first: bool = False) -> IntArray:
        """Return the token IDs of a text, shape [N]; only the `first` piece gets the tokenizer's begin tokens."""
        if not text.isascii():
            text = text.encode(errors="replace").decode()  # tokenizers reject unpaired surrogates
        if self._backend is not None:
            ids = self._backend.encode(text, add_special_tokens=first).ids
        else:
            ids = self._tokenizer(text, add_special_tokens=first, verbose=False)["input_ids"]
        return np.asarray(self._beginning.once(text, ids) if first else ids, dtype=np.int32)

    def escape_special_tokens(self, text: str) -> str:
        """Return foreign text that cannot end a message or begin one of another role: the model reads `< |im_end|>`."""
        return text if self._boundaries is None else escape_special(text, self._boundaries)

    @cached_property
    def _boundaries(self) -> re.Pattern[str] | None:
        written, asked = "", Message(role="user", content="a")
        answered = Message(role="assistant", content="b")
        for messages in ([Message(role="system", content="c"), asked], [asked, answered, asked]):
            with suppress(DataError):
                written += self.text(messages)
        return boundaries(self._tokenizer, written)

    @property
    def vocabulary(self) -> int:
        """Number of tokens of the tokenizer."""
        return len(self._tokenizer)

    @property
    def template(self) -> str:
        """The text of the chat template; empty without one."""
        template = getattr(self._tokenizer, "chat_template", None)
        return template if isinstance(template, str) else ""

    def check_shown(
        self, messages: Sequence[Message], tools: Sequence[Tool], template_kwargs: Mapping[str, Any]
    ) -> None:
        """Check that the template shows all of a conversation; see `roll.data.shown`.

        Raises:
            DataError: The template leaves out a part.
        """
        check_shown(self._template, messages, tools, template_kwargs)

    def conversation(
        self,
        messages: Sequence[Message],
        num_given: int = 0,
        *,
        untrained: Collection[int] = (),
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[IntArray, BoolArray]:
        """Return the token IDs of a whole conversation, and the loss mask of the assistant's tokens, shape [L] each.

        The mask covers the content of the assistant's turns and their end tokens, never a header or text between turns;
        see `roll.data.turns`.

        Args:
            messages: The conversation.
            num_given: Number of leading messages that are context only.
            untrained: Indices of further messages that are context only.
            tools: JSON schemas of the functions that the model may call.
            template_kwargs: Further variables of the template, such as `enable_thinking`.

        Raises:
            DataError: The template rejects the conversation, leaves out a part of an answer, or changes the last one.
        """
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        places = [i for i in answers if i >= num_given and i not in untrained]
        self.check_shown(messages, tools, template_kwargs or {})
        if not self.has_template:
            return self._without_template(messages, places)
        given = dict(template_kwargs or {})
        render: Render = partial(self._template.render, tools=tools, **given)
        modes = [mode for mode in thinking_modes(self._template.source) if not mode.keys() & given.keys()]
        text, turns = find_turns(messages, places, render, self._special, modes=modes, extra_ends=self._extra_ends)
        marked = self._template.render_marked(messages, tools, **given)
        if marked is not None:  # some marks leave out the token that ends the turn
            marked = [self._special.extended(text, span) for span in marked]
        with refusals(messages):
            ids, mask = tokenize(self._tokenizer, text, turns, marked)
        if turns and not mask.any():
            raise DataError(
                "the model's chat template marks no token of the assistant's answers as generated "
                "(`{% generation %}`), so no token would be trained: correct its marks, or remove all of them."
            )
        return ids, mask

    @cached_property
    def _extra_ends(self) -> int:
        return ends_only_last(self._template.render, self._special)

    def plain(self, text: str) -> tuple[IntArray, BoolArray]:
        """Return the token IDs of a text with the tokenizer's special and end tokens, shape [L], and the loss mask."""
        ids = self._beginning.once(text, self._tokenizer(text, verbose=False)["input_ids"])
        end = self.end_token
        ids += [end] if ids[-1:] != [end] else []
        mask = np.ones(len(ids), np.bool_)
        mask[:1] = False  # no token precedes it
        return np.asarray(ids, np.int32), mask

    @property
    def end_token(self) -> int:
        """The token that ends a text.

        Raises:
            DataError: The tokenizer has no such token.
        """
        end = self._tokenizer.eos_token_id
        if end is None:
            raise DataError("the model's tokenizer has no token that ends a text (`eos_token`): choose another model.")
        return int(end)

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab()))

    def special_in(self, text: str) -> str | None:
        """Return the first special token that occurs in the text, which the tokenizer would take for the real one."""
        return self._special.first(text)

    def _without_template(self, messages: Sequence[Message], places: Sequence[int]) -> tuple[IntArray, BoolArray]:
        """Return token IDs and loss mask without a template: texts joined as `render`, `answer` and `follow_up` do."""
        ids: list[IntArray] = []
        is_trained: list[bool] = []
        first = next(i for i, message in enumerate(messages) if message.role == "assistant")
        ids.append(self.render(messages[:first]))
        is_trained.append(False)
        for i in range(first, len(messages)):
            answers = messages[i].role == "assistant"
            content = messages[i].text
            ids.append(self.answer(content) if answers else self.follow_up(content))
            is_trained.append(i in places)
        mask = np.repeat(is_trained, [len(part) for part in ids])
        mask[:1] = False
        return np.concatenate(ids), mask

    def answer(self, text: str) -> IntArray:
        """Return the token IDs of an answer as the model would write it, with the token that ends its message.

        Raises:
            DataError: The template begins an assistant's message differently once there is one.
        """
        if not self.has_template:
            ids = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self.end_token]
            return np.asarray(ids, dtype=np.int32)
        asked = Message(role="user", content="a")
        try:
            ids, mask = self.conversation([asked, Message(role="assistant", content=text)])
        except DataError as error:
            raise DataError(
                f"a demonstration cannot be put into the model's tokens: {error} The answer was {text[:60]!r}."
            ) from error
        return ids[mask]

    def follow_up(self, observation: str) -> IntArray:
        """Return the token IDs between two answers, up to the start of the second one.

        They follow the last token of the first message (its stop token, which the model wrote itself).

        Raises:
            DataError: The template rejects a second turn, or changes the turns before it.
        """
        if not self.has_template:
            return np.asarray(
                self._tokenizer(f"\n\n{observation}\n\n", add_special_tokens=False)["input_ids"], dtype=np.int32
            )
        before = [Message(role="user", content="a"), Message(role="assistant", content="b")]
        head = self.piece(self._template.render(before, False)).tolist()
        full = self.piece(self._template.render([*before, Message(role="user", content=observation)])).tolist()
        special = set(self._tokenizer.all_special_ids)
        ends = [i for i, token in enumerate(head) if token in special]
        if full[: len(head)] != head or not ends:
            raise DataError(
                "the model's chat template renders earlier messages differently when a conversation goes on, so turns "
                "cannot be joined token by token: choose a model whose template neither drops nor changes them."
            )
        return np.asarray(full[ends[-1] + 1 :], dtype=np.int32)

    def decode(self, token_ids: IntArray) -> str:
        """Return the text, without special tokens except those that mark reasoning and tool calls."""
        return self._decoder.decode(token_ids)

    def final_text(self, token_ids: IntArray, context: IntArray) -> str:
        """Return the part of an answer after the model's reasoning; empty if that never ends: see `Decoder`."""
        return self._decoder.final_text(token_ids, context)

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The format of the model's reasoning, if its template or its tokenizer shows one."""
        return self._decoder.reasoning


def _joined(messages: Sequence[Message], end: str) -> str:
    """Return the conversation without a template: texts joined as `answer` and `follow_up` do."""
    text = ""
    for answers, block in groupby(messages, lambda message: message.role == "assistant"):
        contents = [message.text for message in block]
        if answers:
            text += "".join(content + end for content in contents)
        else:
            asked = "\n\n".join(contents)
            text += f"\n\n{asked}\n\n" if text else asked
    return text


def _answered(messages: Sequence[Message]) -> bool:
    return any(message.role == "assistant" for message in messages)

"""Chat rendering through the model's chat template: messages to exact token IDs, and token IDs back to text."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.data.bos import BosDeduplicator
from roll.data.decoding import Decoder, get_rust_backend
from roll.data.media_text import MediaText
from roll.data.reasoning import ReasoningFormat
from roll.data.special_token_escaping import compile_delimiters, escape_special
from roll.data.template_check import check_fully_rendered
from roll.data.templates import TEMPLATE_DATE, ChatTemplate, Tool, supports_late_system, translate_errors
from roll.data.turns import RenderFn, SpecialTokens, count_extra_ends, find_turns, list_thinking_modes, tokenize
from roll.errors import DataError
from roll.types import BoolArray, EncodedText, IntArray, Message, shift_media

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.models.multimodal import MediaInputs

__all__ = ["TEMPLATE_DATE", "ChatRenderer", "Tool"]


class ChatRenderer:
    """Renders conversations with the tokenizer's chat template.

    A tokenizer without a template belongs to a base model: its prompts are the text of the messages, separated by blank
    lines, with only the special tokens that the tokenizer adds.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, media: MediaText | None = None) -> None:
        self._tokenizer = tokenizer
        self.media = media
        """Renders images; `None` for a text-only model."""
        self._template = ChatTemplate(tokenizer, None if media is None else media.escape)
        self.has_template = bool(self._template.source)
        self._special = SpecialTokens(tokenizer)
        self._backend = get_rust_backend(tokenizer)
        self._decoder = Decoder(tokenizer, self._special, self._template.source)
        self._beginning = BosDeduplicator(tokenizer)

    @property
    def media_inputs(self) -> MediaInputs | None:
        """The run's images, processed for the model; `None` for a text-only model."""
        return None if self.media is None else self.media.inputs

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> IntArray:
        """Render a conversation to token IDs, up to the start of the assistant's answer, shape [P].

        Args:
            messages: The conversation.
            tools: JSON schemas of the functions that the model may call.
            template_kwargs: Additional variables of the template, such as `enable_thinking`.

        Raises:
            DataError: The template rejects the conversation, for instance because the model has no system role.
        """
        return self.tokenize_rendered(self.render_text(messages, tools, template_kwargs))

    def render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation to text, up to the start of the assistant's answer.

        Raises:
            DataError: The template rejects the conversation.
        """
        if self.has_template:
            text = self._template.render(messages, tools=tools, **(template_kwargs or {}))
            return text if self.media is None else self.media.mark(text, messages)
        return _join_texts(messages, self.decode_raw(np.array([self.end_token_id])) if _has_answer(messages) else "")

    def tokenize_rendered(self, text: str) -> IntArray:
        """Tokenize the output of `render_text`; return the token IDs, shape [P]."""
        return self.encode(text).token_ids

    def encode(self, text: str) -> EncodedText:
        """Return the token IDs of a rendered text, with the spans of its images; see `MediaText.encode`."""
        tokenize = partial(self.tokenize, add_special_tokens=not self.has_template)
        return EncodedText(tokenize(text)) if self.media is None else self.media.encode(text, tokenize)

    def encode_fragment(self, text: str) -> EncodedText:
        """Tokenize a part of a rendered text without adding a BOS token; return the token IDs and the image spans."""
        return EncodedText(self.tokenize(text)) if self.media is None else self.media.encode(text, self.tokenize)

    def parse_answer(self, answer: IntArray, context: IntArray, stops: Collection[int] = ()) -> tuple[str, bool]:
        """Return the text of an answer without its end token, and whether it has an end token.

        Other special tokens are kept.

        Args:
            answer: Token IDs of the answer, shape [T].
            context: Token IDs before the answer, shape [C]: some tokenizers decode a leading space only after another
                token.
            stops: IDs that end an answer, in addition to the special tokens.
        """
        has_end_token = bool(len(answer)) and (
            int(answer[-1]) in stops or self._special.is_special_token(self.decode_raw(answer[-1:]))
        )
        # Decoded after the previous token, because SentencePiece drops the space before a text's first token.
        body, anchor = answer[: len(answer) - has_end_token], context[-1:]
        before, whole = self.decode_raw(anchor), self.decode_raw(np.concatenate([anchor, body]))
        return (whole[len(before) :] if whole.startswith(before) else self.decode_raw(body)), has_end_token

    def encode_suffix(self, text: str, has_end_token: bool) -> EncodedText | None:
        """Tokenize the rendered text after an answer, with the spans of its images.

        The result is `None` if no special token separates the text from the answer.

        Args:
            text: The rendered text after the answer's content, including the end of its message.
            has_end_token: Whether the answer already has the end token; the returned IDs then start after it.
        """
        end = self._special.find_at_start(text)
        if end is None:
            return None
        # Without a special token in between, a token could cross the border of the answer.
        ids, media = self.encode_fragment(text)
        if not len(ids) or self.decode_raw(ids[:1]) != end:
            return None
        return EncodedText(ids[has_end_token:], shift_media(media, -int(has_end_token)))

    @property
    def drops_tool_results(self) -> bool:
        """True if the template silently drops tool results."""
        return self._template.drops_tool_results

    @cached_property
    def supports_late_system(self) -> bool:
        """True if the template accepts system messages after the first message, and renders them in place."""
        return supports_late_system(self.render_text)

    def decode_raw(self, token_ids: IntArray) -> str:
        """Decode token IDs with all special tokens, as the model generated them."""
        return self._decoder.decode_raw(token_ids)

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> IntArray:
        """Tokenize a text, shape [N]; special tokens such as BOS are added only if `add_special_tokens` is true."""
        if not text.isascii():
            text = text.encode(errors="replace").decode()  # tokenizers reject unpaired surrogates
        if self._backend is not None:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return np.asarray(self._beginning.remove_duplicate(text, ids) if add_special_tokens else ids, dtype=np.int32)

    def escape_special_tokens(self, text: str) -> str:
        """Escape message delimiters in untrusted text: `<|im_end|>` becomes `< |im_end|>`, which is not a delimiter."""
        return text if self._delimiters is None else escape_special(text, self._delimiters)

    @cached_property
    def _delimiters(self) -> re.Pattern[str] | None:
        written, asked = "", Message(role="user", content="a")
        answered = Message(role="assistant", content="b")
        for messages in ([Message(role="system", content="c"), asked], [asked, answered, asked]):
            with suppress(DataError):
                written += self.render_text(messages)
        return compile_delimiters(self._tokenizer, written)

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens of the tokenizer."""
        return len(self._tokenizer)

    @property
    def template(self) -> str:
        """The chat template; empty if the tokenizer has none."""
        template = getattr(self._tokenizer, "chat_template", None)
        return template if isinstance(template, str) else ""

    def check_fully_rendered(
        self, messages: Sequence[Message], tools: Sequence[Tool], template_kwargs: Mapping[str, Any]
    ) -> None:
        """Check that the template renders all of a conversation; see `roll.data.template_check`.

        Raises:
            DataError: The template leaves out a part of the conversation.
        """
        check_fully_rendered(self._template, messages, tools, template_kwargs)

    def tokenize_conversation(
        self,
        messages: Sequence[Message],
        num_prompt_messages: int = 0,
        *,
        untrained_messages: Collection[int] = (),
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[IntArray, BoolArray]:
        """Tokenize a whole conversation; return its token IDs and the loss mask of the assistant's tokens, [L] each.

        The mask covers the content of the assistant's turns and their end tokens, never a header or text between turns;
        see `roll.data.turns`.

        Args:
            messages: The conversation.
            num_prompt_messages: Number of leading messages that are context only.
            untrained_messages: Indices of later messages that are context only.
            tools: JSON schemas of the functions that the model may call.
            template_kwargs: Additional variables of the template, such as `enable_thinking`.

        Raises:
            DataError: The template rejects the conversation, omits a part of an answer, or changes the last answer.
        """
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        indices = [i for i in answers if i >= num_prompt_messages and i not in untrained_messages]
        self.check_fully_rendered(messages, tools, template_kwargs or {})
        if not self.has_template:
            return _tokenize_texts(self, messages, indices)
        given = dict(template_kwargs or {})
        render: RenderFn = partial(self._template.render, tools=tools, **given)
        modes = [mode for mode in list_thinking_modes(self._template.source) if not mode.keys() & given.keys()]
        text, turns = find_turns(
            messages, indices, render, self._special, modes=modes, num_extra_ends=self._num_extra_ends
        )
        marked = self._template.find_generated_spans(messages, tools, **given)
        if marked is not None:  # some marks leave out the token that ends the turn
            marked = [self._special.extend_span(text, span) for span in marked]
        with translate_errors(messages):
            ids, mask = tokenize(self._tokenizer, text, turns, marked)
        if turns and not mask.any():
            raise DataError(
                "the model's chat template has `{% generation %}` blocks, but they contain no assistant tokens, so "
                "there would be no tokens to train on: correct these blocks, or remove them."
            )
        return ids, mask

    @cached_property
    def _num_extra_ends(self) -> int:
        return count_extra_ends(self._template.render, self._special)

    def tokenize_plain(self, text: str) -> tuple[IntArray, BoolArray]:
        """Tokenize plain text, adding special tokens and the end token; return token IDs and loss mask, [L] each."""
        ids = self._beginning.remove_duplicate(text, self._tokenizer(text, verbose=False)["input_ids"])
        end = self.end_token_id
        ids += [end] if ids[-1:] != [end] else []
        mask = np.ones(len(ids), np.bool_)
        mask[:1] = False  # no token precedes it
        return np.asarray(ids, np.int32), mask

    @property
    def end_token_id(self) -> int:
        """ID of the tokenizer's EOS token.

        Raises:
            DataError: The tokenizer has no EOS token.
        """
        end = self._tokenizer.eos_token_id
        if end is None:
            raise DataError("the model's tokenizer has no EOS token (`eos_token`): choose another model.")
        return int(end)

    @cached_property
    def longest_token_length(self) -> int:
        """Length of the longest token in characters, or in bytes for a byte-level BPE vocabulary."""
        return max(map(len, self._tokenizer.get_vocab()))

    def find_special_token(self, text: str) -> str | None:
        """Return the first special token that occurs in the text; `None` if there is none."""
        return self._special.find_first(text)

    def tokenize_answer(self, text: str) -> IntArray:
        """Tokenize an answer as the model would generate it, with the token that ends the message.

        Raises:
            DataError: The template renders the start of an assistant's message differently from its generation prompt.
        """
        if not self.has_template:
            ids = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self.end_token_id]
            return np.asarray(ids, dtype=np.int32)
        asked = Message(role="user", content="a")
        try:
            ids, mask = self.tokenize_conversation([asked, Message(role="assistant", content=text)])
        except DataError as error:
            raise DataError(
                f"a demonstration cannot be tokenized as the model's answer: {error} The answer was {text[:60]!r}."
            ) from error
        return ids[mask]

    def tokenize_follow_up(self, observation: str) -> IntArray:
        """Tokenize an observation between two answers, up to the start of the second answer.

        The token IDs start after the end token of the first answer, which the model generates itself.

        Raises:
            DataError: The template rejects a second turn, or changes the turns before it.
        """
        if not self.has_template:
            return np.asarray(
                self._tokenizer(f"\n\n{observation}\n\n", add_special_tokens=False)["input_ids"], dtype=np.int32
            )
        before = [Message(role="user", content="a"), Message(role="assistant", content="b")]
        head = self.tokenize(self._template.render(before, False)).tolist()
        full = self.tokenize(self._template.render([*before, Message(role="user", content=observation)])).tolist()
        special = set(self._tokenizer.all_special_ids)
        ends = [i for i, token in enumerate(head) if token in special]
        if full[: len(head)] != head or not ends:
            raise DataError(
                "the model's chat template renders earlier messages differently when a conversation continues, so "
                "turns cannot be joined token by token: choose a model whose template neither drops nor changes them."
            )
        return np.asarray(full[ends[-1] + 1 :], dtype=np.int32)

    def decode(self, token_ids: IntArray) -> str:
        """Decode token IDs without special tokens, except those that mark reasoning and tool calls."""
        return self._decoder.decode(token_ids)

    def decode_final_text(self, token_ids: IntArray, context: IntArray) -> str:
        """Decode the part of an answer after the model's reasoning; empty if the reasoning never ends."""
        return self._decoder.decode_final_text(token_ids, context)

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The format of the model's reasoning; `None` if it cannot be derived from the template or the tokenizer."""
        return self._decoder.reasoning


def _join_texts(messages: Sequence[Message], end: str) -> str:
    """Join the messages of a conversation to text, for a tokenizer without a template.

    Each answer is followed by `end`; other messages are separated by blank lines.
    """
    text = ""
    for answers, block in groupby(messages, lambda message: message.role == "assistant"):
        contents = [message.text for message in block]
        if answers:
            text += "".join(content + end for content in contents)
        else:
            asked = "\n\n".join(contents)
            text += f"\n\n{asked}\n\n" if text else asked
    return text


def _has_answer(messages: Sequence[Message]) -> bool:
    return any(message.role == "assistant" for message in messages)


def _tokenize_texts(
    renderer: ChatRenderer, messages: Sequence[Message], indices: Sequence[int]
) -> tuple[IntArray, BoolArray]:
    """Return token IDs of a conversation without a template, and a loss mask of the messages at `indices`."""
    ids: list[IntArray] = []
    is_trained: list[bool] = []
    first = next(i for i, message in enumerate(messages) if message.role == "assistant")
    ids.append(renderer.render(messages[:first]))
    is_trained.append(False)
    for i in range(first, len(messages)):
        answers = messages[i].role == "assistant"
        content = messages[i].text
        ids.append(renderer.tokenize_answer(content) if answers else renderer.tokenize_follow_up(content))
        is_trained.append(i in indices)
    mask = np.repeat(is_trained, [len(part) for part in ids])
    mask[:1] = False
    return np.concatenate(ids), mask

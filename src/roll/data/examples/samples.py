"""Builds training samples from examples: token IDs, truncated to the context, with the fields that losses need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roll.config.examples import TooLongHandling
from roll.data.chat import ChatRenderer
from roll.errors import DataError
from roll.types import (
    BoolArray,
    Conversation,
    ExampleDraw,
    IntArray,
    MediaSpan,
    TrainingSample,
    build_sequence_key,
    iter_texts,
)

__all__ = ["TOO_LONG_REASON", "SampleBuilder", "UnusableExample", "truncate_tokens"]

TOO_LONG_REASON = "too long"
LONG_TEXT_CHARACTERS = 1_000_000
"""Number of characters above which the length of a text is checked before it is tokenized."""
TokenizedConversation = tuple[IntArray, BoolArray, tuple[MediaSpan, ...]]
"""Token IDs and whether the loss counts each, shape [L] each, and the spans of images."""


class UnusableExample(DataError):
    """An example cannot be trained on; `reason` is the same for all examples with the same problem."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleBuilder:
    """Converts examples to samples."""

    renderer: ChatRenderer
    max_tokens: int | None = None
    """Maximum context length, in tokens; `None` for no limit."""
    score_at_end: bool = False
    """If True, append an end token as the only loss token; a value head scores the answer at this token."""

    def build_samples(
        self, draw: ExampleDraw, too_long: TooLongHandling = "refuse"
    ) -> tuple[tuple[TrainingSample, ...], bool]:
        """Build one sample per conversation, all in one loss unit; also return whether a sample was truncated.

        Raises:
            UnusableExample: The example is too long, has no trained token, or the template cannot render it.
        """
        example = draw.example
        rendered, cut = self._render(example.conversations, too_long)
        shared = _compute_shared_prefix_length(rendered)
        if self.score_at_end:
            rendered = [_append_end_token(ids, self.renderer.end_token_id, media) for ids, _, media in rendered]
        pair = len(rendered) == 2
        samples = tuple(
            TrainingSample(
                sample_id=f"{draw.draw_id}.{side}" if pair else str(draw.draw_id),
                unit=draw.draw_id,
                prefix_length=shared,
                token_ids=ids,
                loss_mask=mask,
                media=media,
                domain=example.domain,
                preferred=side == 0 if pair else example.preferred,
                target=example.target,
            )
            for side, (ids, mask, media) in enumerate(rendered)
        )
        return samples, cut

    def _render(
        self, conversations: tuple[Conversation, ...], too_long: TooLongHandling
    ) -> tuple[list[TokenizedConversation], bool]:
        """Render each conversation to tokens; also return whether a conversation was truncated to the context length.

        Raises:
            UnusableExample: The template rejects a conversation, or it is too long and must not be truncated.
        """
        limit = None if self.max_tokens is None else self.max_tokens - self.score_at_end
        if limit is not None and too_long != "cut":
            self._reject_oversized(conversations, limit)
        try:
            rendered = [self._tokenize(conversation) for conversation in conversations]
        except DataError as error:
            raise UnusableExample("rejected by the chat template", str(error)) from error
        if len(rendered) == 2 and conversations[0].text is not None:
            common = _compute_common_prefix(rendered)  # the common prefix of a plain-text pair is its prompt
            rendered = [(ids, mask & (np.arange(len(ids)) >= common), media) for ids, mask, media in rendered]
        longest = max(len(ids) for ids, *_ in rendered)
        cut = limit is not None and longest > limit
        if cut:
            message = f"the example has {longest:,} tokens, but the context length is {limit:,}"
            if too_long != "cut":
                raise UnusableExample(TOO_LONG_REASON, f"{message}: shorten it, or set `too_long` to cut or skip.")
            rendered = [truncate_tokens(*tokens, limit) for tokens in rendered]
            if not all(mask.any() for _, mask, _ in rendered):
                raise UnusableExample(
                    TOO_LONG_REASON, f"{message}, and the prompt alone fills it: there is no space for the answer."
                )
        keys = [build_sequence_key(ids, media) for ids, _, media in rendered]
        if len(keys) == 2 and np.array_equal(keys[0], keys[1]):
            raise UnusableExample("identical answers", "both answers have the same tokens, so they cannot be compared.")
        if not self.score_at_end and not all(mask.any() for _, mask, _ in rendered):
            raise UnusableExample(
                "nothing to learn",
                "the example has only one token, but training requires at least two: make it longer.",
            )
        return rendered, cut

    def _reject_oversized(self, conversations: tuple[Conversation, ...], limit: int) -> None:
        """Raise an error if a text has too many characters for the context, before it is tokenized."""
        # Tokenizing the longest lines would take a minute.
        longest = max(map(_count_characters, conversations))
        if longest > LONG_TEXT_CHARACTERS and longest > limit * self.renderer.longest_token_length:
            raise UnusableExample(
                TOO_LONG_REASON,
                f"the example has {longest:,} characters, but the context length is {limit:,} tokens: split the "
                "example, or set `too_long` to cut or skip.",
            )

    def _tokenize(self, conversation: Conversation) -> TokenizedConversation:
        if conversation.text is not None:
            return (*self.renderer.tokenize_plain(conversation.text), ())
        ids, mask = self.renderer.tokenize_conversation(
            conversation.messages,
            conversation.num_prompt_messages,
            untrained_messages=conversation.untrained_messages,
            tools=conversation.tools,
            template_kwargs=conversation.template_kwargs,
        )
        if self.renderer.media is None or not any(message.media for message in conversation.messages):
            return ids, mask, ()
        return self.renderer.media.expand_conversation(ids, mask, conversation.messages)


def _count_characters(conversation: Conversation) -> int:
    texts = (text for message in conversation.messages for text in iter_texts(message.content))
    return len(conversation.text or "") + sum(map(len, texts))


def _compute_shared_prefix_length(rendered: list[TokenizedConversation]) -> int:
    """Compute the number of tokens that both conversations of a pair share before the first trained token.

    The result is 0 for a single conversation.
    """
    if len(rendered) == 1:
        return 0
    return min([_compute_common_prefix(rendered), *(int(np.argmax(mask)) for _, mask, _ in rendered)])


def _compute_common_prefix(rendered: list[TokenizedConversation]) -> int:
    """Compute the length of the common prefix of a pair's conversations, in tokens."""
    a, b = (build_sequence_key(ids, media) for ids, _, media in rendered)
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def truncate_tokens(
    ids: IntArray, mask: BoolArray, media: tuple[MediaSpan, ...], limit: int | None
) -> TokenizedConversation:
    """Truncate tokens, loss mask and media to `limit` tokens; an image that would be split is removed.

    Args:
        ids: Tokens [L].
        mask: Loss mask of the tokens [L].
        media: Spans of media in the tokens.
        limit: Maximum number of tokens; `None` for no limit.
    """
    if limit is None:
        return ids, mask, media
    length = next((span.start for span in media if span.start < limit < span.end), limit)
    return ids[:length], mask[:length], tuple(span for span in media if span.end <= length)


def _append_end_token(ids: IntArray, end: int, media: tuple[MediaSpan, ...]) -> TokenizedConversation:
    mask = np.zeros(len(ids) + 1, np.bool_)
    mask[-1] = True
    return np.append(ids, np.int32(end)).astype(np.int32), mask, media

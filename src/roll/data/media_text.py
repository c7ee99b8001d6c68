"""Media in rendered text: each medium is marked by its digest, and the mark is expanded to the medium's tokens.

    chat template    user\\nLook: <image>\\n           the template writes the model's placeholder
    text             user\\nLook: [3f9c…]\\n           identical text means identical media
    token ids        user\\nLook: f f f f …\\n         and the spans of the media in them

If the text of a message itself contains a placeholder, a space after its first character escapes it, like other special
tokens in untrusted text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from roll.errors import DataError
from roll.models.multimodal.processor import describe_kinds
from roll.types import BoolArray, EncodedText, IntArray, MediaSpan, Message

if TYPE_CHECKING:
    from roll.models.multimodal import MediaInputs

__all__ = ["MediaText", "count_media_tokens"]

# Noncharacters of Unicode, which no text contains; tokenizers never see them.
_MEDIA_MARK_PATTERN = re.compile("\ufdd0([0-9a-f]+)\ufdd1")


def count_media_tokens(media: Iterable[MediaSpan], inputs: MediaInputs | None) -> int:
    """Return the number of feature tokens of the distinct media.

    Each medium passes through its tower only once, even if it occurs several times.

    Args:
        media: Spans of media; spans with identical digests are counted once.
        inputs: The processed media of the run; `None` if it has none.
    """
    digests = {span.digest for span in media}
    return 0 if inputs is None else sum(inputs.get_without_inputs(digest).num_features for digest in digests)


class MediaText:
    """Marks media in rendered text, and expands them to tokens.

    Args:
        inputs: The processed media of the run.
    """

    def __init__(self, inputs: MediaInputs) -> None:
        self.inputs = inputs
        self._placeholders = inputs.processor.placeholders
        self._kinds = {placeholder: kind for kind, placeholder in self._placeholders.items()}
        longest_first = sorted(self._kinds, key=len, reverse=True)
        self._placeholder = re.compile("|".join(map(re.escape, longest_first)))
        tokens = sorted(inputs.processor.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, tokens)))

    def escape(self, text: str) -> str:
        """Escape the model's tokens for media in the text of a message.

        >>> MediaText(inputs).escape("a <image> tag")
        'a < image> tag'
        """
        return self._special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    def mark(self, text: str, messages: Sequence[Message]) -> str:
        """Replace the template's placeholders in a rendered text by a mark for each medium of the messages.

        Raises:
            DataError: The placeholders that the template wrote do not match the media of the messages, in order.
        """
        media = [part for message in messages for part in message.media]
        written = [self._kinds[found] for found in self._placeholder.findall(text)]
        wanted = [part.kind for part in media]
        if written != wanted:
            raise DataError(
                f"the messages have {describe_kinds(wanted)}, but the model's chat template wrote placeholders for "
                f"{describe_kinds(written)}: choose a model whose template writes one for each."
            )
        digests = iter(part.digest for part in media)
        return self._placeholder.sub(lambda _: f"\ufdd0{next(digests)}\ufdd1", text)

    def encode(self, text: str, tokenize: Callable[[str], IntArray]) -> EncodedText:
        """Tokenize a text, and expand each mark to the tokens of its medium.

        Args:
            text: The text, with marks of media.
            tokenize: Tokenizes a text without marks.

        Raises:
            DataError: A medium is not in the run's store, or the processor rejects it.
        """
        digests = _MEDIA_MARK_PATTERN.findall(text)
        if not digests:
            return EncodedText(tokenize(text))
        return self.expand(
            tokenize(_MEDIA_MARK_PATTERN.sub(lambda mark: self._get_placeholder(mark[1]), text)), digests
        )

    def expand(self, token_ids: IntArray, digests: Sequence[str]) -> EncodedText:
        """Expand each placeholder token to the tokens of its medium."""
        media = {digest: self.inputs.get_without_inputs(digest) for digest in digests}
        return EncodedText(*self.inputs.processor.expand(token_ids, digests, media))

    def expand_conversation(
        self, token_ids: IntArray, mask: BoolArray, messages: Sequence[Message]
    ) -> tuple[IntArray, BoolArray, tuple[MediaSpan, ...]]:
        """Expand the media in a conversation's tokens and loss mask; media tokens are excluded from the loss."""
        encoded = self.expand(token_ids, [part.digest for message in messages for part in message.media])
        is_text = np.ones(len(encoded.token_ids), np.bool_)
        for span in encoded.media:
            is_text[span.start : span.end] = False
        expanded = np.zeros(len(encoded.token_ids), np.bool_)
        expanded[is_text] = mask[~np.isin(token_ids, list(self.inputs.processor.placeholder_ids.values()))]
        return encoded.token_ids, expanded, encoded.media

    def _get_placeholder(self, digest: str) -> str:
        return self._placeholders[self.inputs.get_without_inputs(digest).kind]

"""Which tokens of a whole conversation its assistant would have written: found in the text that the template renders.

    template ──► text ──► where each assistant's turn begins and ends ──► one tokenisation, cut at these places

A turn is what the model writes after the generation prompt: the content, as the template puts it, and the special token
that ends it. A turn that the template renders otherwise once the conversation goes on (some drop earlier reasoning) is
not what the model would have written there: it is context only.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.errors import DataError
from roll.types import BoolArray, IntArray, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["SpecialTokens", "marked_turns", "prefix_turns", "tokenized"]

Span = tuple[int, int]
"""First character, and the one after the last."""


class SpecialTokens:
    """The model's special tokens as they are spelt in texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        names = {str(token) for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
        self._names = {name for name in names if name}
        self._lengths = sorted({len(name) for name in self._names}, reverse=True)
        # some tokenizers have thousands, which one expression for all would try at every `<`
        self._beginnings = re.compile("|".join({re.escape(name[:3]) for name in self._names}) or r"(?!)")

    def first(self, text: str) -> str | None:
        """The first one in the text."""
        return next((text[begin:end] for begin, end in self._found(text, 0)), None)

    def has(self, text: str) -> bool:
        """Whether the text is a special token."""
        return text in self._names

    def beginning(self, text: str) -> str | None:
        """The one with which the text begins."""
        return next((text[:length] for length in self._lengths if text[:length] in self._names), None)

    def end_of_turn(self, text: str, begin: int, limit: int, content: str) -> int | None:
        """Where the first one ends that follows this content, whatever the template's spaces; `None` if none does.

        Args:
            begin: where the turn begins.
            limit: where that token may begin at the latest.
        """
        wanted = _squeezed(content)
        for start, end in self._found(text, begin):
            if start > limit:
                return None
            if wanted in _squeezed(text[begin:start]):
                return end
        return None

    def _found(self, text: str, begin: int) -> Iterator[Span]:
        """Where each one begins and ends; of several that begin at a place, the longest."""
        while (found := self._beginnings.search(text, begin)) is not None:
            start = found.start()
            names = (text[start : start + length] for length in self._lengths)
            length = len(next((name for name in names if name in self._names), ""))
            if length:
                yield start, start + length
            begin = start + max(length, 1)


def prefix_turns(
    messages: Sequence[Message],
    num_given: int,
    render: Callable[[Sequence[Message], bool], str],
    special: SpecialTokens,
) -> tuple[str, list[Span]]:
    """The conversation's text, and the turns to learn: each begins where a rendering up to it ends.

    Args:
        render: messages, and whether the generation prompt follows, to text.

    Raises:
        DataError: the last turn is not what the model would write.
    """
    text = render(messages, False)
    turns: list[Span] = []
    places = [i for i in range(num_given, len(messages)) if messages[i]["role"] == "assistant"]
    for i in places:
        head = render(messages[:i], True)
        so_far = text if i == len(messages) - 1 else render(messages[: i + 1], False)
        follows = so_far.startswith(head)
        end = special.end_of_turn(so_far, len(head), len(so_far), messages[i]["content"]) if follows else None
        if end is not None and text.startswith(so_far[:end]):
            turns.append((len(head), end))
        elif i == places[-1]:
            raise DataError(_why(text, head, messages[i], end))
    return text, turns


def marked_turns(
    text: str,
    spans: Sequence[Span],
    contents: Sequence[str],
    header: str,
    special: SpecialTokens,
) -> list[Span]:
    """The turns to learn, where the template marks what its assistant generates.

    Args:
        spans: what is marked, one for each of `contents`.
        contents: of the assistant's messages to learn.
        header: the generation prompt, which some templates mark as well.
    """
    turns: list[Span] = []
    for (begin, end), content in zip(spans, contents, strict=True):
        if header and text.startswith(header, begin):
            begin += len(header)
        last = special.end_of_turn(text, begin, end, content)
        if last is not None and not (header and header in text[begin:last]):  # else it marks what was asked as well
            turns.append((begin, last))
    return turns


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _why(text: str, head: str, message: Message, end: int | None) -> str:
    beginning = repr(message["content"][:60])
    if not text.startswith(head):
        what = f"begins an assistant's message differently once there is one (after {head[-30:]!r})"
    elif end is None:
        what = "leaves out a part of the assistant's text, or ends it without a special token"
    else:
        what = "changes earlier messages as the conversation goes on"
    return (
        f"the model's chat template {what}, so the tokens that the model would write cannot be told: leave such "
        f"conversations out, or choose a model whose template keeps them (the answer was {beginning})."
    )


def tokenized(tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[Span]) -> tuple[IntArray, BoolArray]:
    """[L] ids of a rendered text, and [L] which of them are in one of the spans.

    A token that would reach over the border of a span is cut there, as it is when the model writes after a prompt.
    """
    borders = sorted({border for span in spans for border in span if 0 < border < len(text)})
    ids, starts = _pieces(tokenizer, text, borders)
    mask = np.zeros(len(ids), np.bool_)
    for begin, end in spans:
        mask[bisect_left(starts, begin) : bisect_left(starts, end)] = True
    mask[:1] = False
    return np.asarray(ids, np.int32), mask


def _pieces(tokenizer: PreTrainedTokenizerBase, text: str, borders: Sequence[int]) -> tuple[list[int], list[int]]:
    """Ids, and where each one's text begins; no token reaches over a border."""
    encoded = _encoded(tokenizer, text)
    starts = [start for start, _ in encoded["offset_mapping"]]
    ends = [end for _, end in encoded["offset_mapping"]]
    crossed = [b for b in borders if (k := bisect_left(starts, b)) and ends[k - 1] > b]
    if not crossed:
        return list(encoded["input_ids"]), starts
    ids: list[int] = []
    places: list[int] = []
    for begin, end in pairwise([0, *crossed, len(text)]):
        piece = _encoded(tokenizer, text[begin:end])
        ids += piece["input_ids"]
        places += [begin + start for start, _ in piece["offset_mapping"]]
    return ids, places


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> Any:
    """Without the tokenizer's own warning of long texts: what is too long is said with its row."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    if "offset_mapping" not in encoded:
        raise DataError(
            "the model's tokenizer, which is written in Python, cannot say where its tokens stand in a text: choose a "
            "model that has a tokenizer.json."
        )
    return encoded

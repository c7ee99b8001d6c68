"""From examples to training samples: rendered, cut to the context, and what a loss needs to know of them."""

from __future__ import annotations

import numpy as np

from roll.config.examples import TooLong
from roll.data.chat import ChatRenderer
from roll.errors import DataError
from roll.types import BoolArray, Conversation, ExampleDraw, IntArray, TrainingSample

__all__ = ["SkippedExample", "samples_of"]


class SkippedExample(DataError):
    """An example that is left out, as its source's settings say; `reason` is for the ledger."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def samples_of(
    draw: ExampleDraw,
    renderer: ChatRenderer,
    max_tokens: int | None = None,
    too_long: TooLong = "refuse",
    *,
    score_at_end: bool = False,
) -> tuple[TrainingSample, ...]:
    """One sample for each conversation of the example, all of one unit.

    Args:
        draw: the example.
        renderer: of the model's template.
        max_tokens: of the context; `None` for no limit.
        too_long: what becomes of more tokens than that.
        score_at_end: one token, the one that ends a text, is put after everything, and the loss counts it alone: there
            a value head sees the whole answer.

    Raises:
        SkippedExample: it is too long, and such examples are left out.
        DataError: it is too long, or the template cannot render it.
    """
    example = draw.example
    limit = None if max_tokens is None else max_tokens - score_at_end
    rendered = [_rendered(conversation, renderer) for conversation in example.conversations]
    if len(rendered) == 2 and example.conversations[0].text is not None:
        common = _common(rendered)  # of two plain texts, this is what both answer
        rendered = [(ids, mask & (np.arange(len(ids)) >= common)) for ids, mask in rendered]
    longest = max(len(ids) for ids, _ in rendered)
    if limit is not None and longest > limit:
        message = f"example '{example.uid}' has {longest:,} tokens, but the context takes {limit:,}"
        if too_long == "skip":
            raise SkippedExample("too long", message)
        if too_long == "refuse":
            raise DataError(f"{message}: shorten or remove it, raise the context, or set its source's too_long.")
        rendered = [(ids[:limit], mask[:limit]) for ids, mask in rendered]
        if not all(mask.any() for _, mask in rendered):
            raise DataError(f"{message}, and what is asked fills it: nothing of the answer is left to learn.")
    shared = _shared_prefix(rendered)
    if score_at_end:
        rendered = [_with_end(ids, renderer.end_token) for ids, _ in rendered]
    pair = len(rendered) == 2
    return tuple(
        TrainingSample(
            sample_id=f"{draw.draw_id}.{side}" if pair else str(draw.draw_id),
            unit=draw.draw_id,
            prefix_length=shared,
            token_ids=ids,
            loss_mask=mask,
            attachments=example.attachments,
            preferred=side == 0 if pair else example.preferred,
            target=example.target,
        )
        for side, (ids, mask) in enumerate(rendered)
    )


def _rendered(conversation: Conversation, renderer: ChatRenderer) -> tuple[IntArray, BoolArray]:
    if conversation.text is not None:
        return renderer.plain(conversation.text)
    return renderer.conversation(conversation.messages, conversation.num_given)


def _shared_prefix(rendered: list[tuple[IntArray, BoolArray]]) -> int:
    """Tokens that both sides of a pair begin with and none of which is learnt; 0 for one alone."""
    if len(rendered) == 1:
        return 0
    common = _common(rendered)
    return min([common, *(int(np.argmax(mask)) for _, mask in rendered)])


def _common(rendered: list[tuple[IntArray, BoolArray]]) -> int:
    """Tokens that both sides begin with."""
    (a, _), (b, _) = rendered
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _with_end(ids: IntArray, end: int) -> tuple[IntArray, BoolArray]:
    mask = np.zeros(len(ids) + 1, np.bool_)
    mask[-1] = True
    return np.append(ids, np.int32(end)).astype(np.int32), mask

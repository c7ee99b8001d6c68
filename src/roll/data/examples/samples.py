"""Build training samples from examples: rendered, truncated to the context, with the fields of each loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roll.config.examples import TooLong
from roll.data.chat import ChatRenderer
from roll.errors import DataError
from roll.types import BoolArray, Conversation, ExampleDraw, IntArray, TrainingSample

__all__ = ["TOO_LONG", "Rendering", "UnusableExample"]

TOO_LONG = "too long"
LONG = 1_000_000
"""Number of characters above which texts are checked before they are tokenized."""
Tokens = tuple[IntArray, BoolArray]
"""Token IDs, and whether the loss counts each, shape [L] each."""


class UnusableExample(DataError):
    """An example that cannot be trained on; `reason` is the same for all examples with the same problem."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """Converts examples to samples."""

    renderer: ChatRenderer
    max_tokens: int | None = None
    """Longest context, in tokens; `None` for no limit."""
    score_at_end: bool = False
    """Whether to append one end token, which alone counts for the loss: there a value head sees the whole answer."""

    def samples(self, draw: ExampleDraw, too_long: TooLong = "refuse") -> tuple[tuple[TrainingSample, ...], bool]:
        """Return one sample per conversation of the example, all of one unit; and whether an answer was truncated.

        Raises:
            UnusableExample: The example is too long, has no trained token, or the template cannot render it.
        """
        example = draw.example
        rendered, cut = self._rendered(example.conversations, too_long)
        shared = _shared_prefix(rendered)
        if self.score_at_end:
            rendered = [_with_end(ids, self.renderer.end_token) for ids, _ in rendered]
        pair = len(rendered) == 2
        samples = tuple(
            TrainingSample(
                sample_id=f"{draw.draw_id}.{side}" if pair else str(draw.draw_id),
                unit=draw.draw_id,
                prefix_length=shared,
                token_ids=ids,
                loss_mask=mask,
                domain=example.domain,
                preferred=side == 0 if pair else example.preferred,
                target=example.target,
            )
            for side, (ids, mask) in enumerate(rendered)
        )
        return samples, cut

    def _rendered(self, conversations: tuple[Conversation, ...], too_long: TooLong) -> tuple[list[Tokens], bool]:
        """Return the tokens of each conversation within the context, and whether some are truncated."""
        limit = None if self.max_tokens is None else self.max_tokens - self.score_at_end
        if limit is not None and too_long != "cut":
            self._reject_oversized(conversations, limit)
        try:
            rendered = [self._tokens(conversation) for conversation in conversations]
        except DataError as error:
            raise UnusableExample("refused by the chat template", str(error)) from error
        if len(rendered) == 2 and conversations[0].text is not None:
            common = _common(rendered)  # both plain texts answer this prefix
            rendered = [(ids, mask & (np.arange(len(ids)) >= common)) for ids, mask in rendered]
        longest = max(len(ids) for ids, _ in rendered)
        cut = limit is not None and longest > limit
        if cut:
            message = f"it has {longest:,} tokens, but the context takes {limit:,}"
            if too_long != "cut":
                raise UnusableExample(
                    TOO_LONG, f"{message}: shorten it, or say what becomes of such examples (`too_long`: cut or skip)."
                )
            rendered = [(ids[:limit], mask[:limit]) for ids, mask in rendered]
            if not all(mask.any() for _, mask in rendered):
                raise UnusableExample(TOO_LONG, f"{message}, and what is asked fills it: nothing is left to learn.")
        if len(rendered) == 2 and np.array_equal(rendered[0][0], rendered[1][0]):
            raise UnusableExample("equal sides", "both answers are the same tokens, so nothing tells them apart.")
        if not self.score_at_end and not all(mask.any() for _, mask in rendered):
            raise UnusableExample("nothing to learn", "no token of it comes after another: make it longer.")
        return rendered, cut

    def _reject_oversized(self, conversations: tuple[Conversation, ...], limit: int) -> None:
        """Reject texts that cannot fit, whatever their tokens are: tokenizing the longest lines would take a minute."""
        longest = max(len(c.text or "") + sum(len(m.text) for m in c.messages) for c in conversations)
        if longest > LONG and longest > limit * self.renderer.longest_token:
            raise UnusableExample(
                TOO_LONG,
                f"it has {longest:,} characters, but the context takes {limit:,} tokens: split it, or say what becomes "
                "of such examples (`too_long`: cut or skip).",
            )

    def _tokens(self, conversation: Conversation) -> Tokens:
        if conversation.text is not None:
            return self.renderer.plain(conversation.text)
        return self.renderer.conversation(
            conversation.messages,
            conversation.num_given,
            untrained=conversation.untrained,
            tools=conversation.tools,
            template_kwargs=conversation.template_kwargs,
        )


def _shared_prefix(rendered: list[Tokens]) -> int:
    """Return the length of the shared untrained prefix of a pair, in tokens; 0 for one side alone."""
    if len(rendered) == 1:
        return 0
    return min([_common(rendered), *(int(np.argmax(mask)) for _, mask in rendered)])


def _common(rendered: list[Tokens]) -> int:
    """Return the length of the common prefix of both sides, in tokens."""
    (a, _), (b, _) = rendered
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _with_end(ids: IntArray, end: int) -> Tokens:
    mask = np.zeros(len(ids) + 1, np.bool_)
    mask[-1] = True
    return np.append(ids, np.int32(end)).astype(np.int32), mask

"""Data mixing: resumable streams of prompts or examples from several sources, each sampled without replacement.

    source A ── shuffled per epoch ──┐
    source B ── shuffled per epoch ──┼── mixed by weight, exact in the long run ──► draw 0, 1, 2, …
    source C ── shuffled per epoch ──┘

Invariants: draw n depends only on the settings, not on the grouping of draws into calls; within an epoch of a source
every item is drawn once; the state consists of a few numbers and no content.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from roll.data.cells import BadRow
from roll.errors import CheckpointError
from roll.protocols import Items
from roll.types import EncodedText, IntArray, Prompt, PromptDraw

__all__ = ["PromptStream", "WeightedSource", "WeightedStream"]


T = TypeVar("T")
D = TypeVar("D")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedSource(Generic[T]):
    """A source, with its domain and its weight in the mix."""

    domain: str
    items: Items[T]
    weight: float = 1.0
    fingerprint: str = ""
    """Digest that is identical for the same items in the same order."""


class WeightedStream(ABC, Generic[T, D]):
    """Draws items of type `T` for training; a subclass converts each to a draw of type `D`.

    Args:
        sources: At least one source; each has at least one item, and the domains differ.
        seed: Seed of the shuffling.
    """

    size_name: ClassVar[str]
    """Key of a source's number of items in the state."""

    def __init__(self, sources: Sequence[WeightedSource[T]], seed: int) -> None:
        assert sources, "a stream needs a source"
        self._sources = list(sources)
        self._seed = seed
        self._num_drawn = [0] * len(sources)
        self._num_repeated = [0] * len(sources)
        self._orders: dict[int, tuple[int, IntArray]] = {}

    @abstractmethod
    def _draw(self, draw_id: int, item: T, position: int) -> D:
        """Convert an item to a draw."""

    @property
    def num_items(self) -> int:
        """Number of distinct items over all sources."""
        return sum(len(source.items) for source in self._sources)

    @property
    def num_drawn(self) -> int:
        """Number of draws so far; this is also the ID of the next draw."""
        return sum(self._num_drawn) + sum(self._num_repeated)

    @property
    def next_domain(self) -> str:
        """Domain of the next draw, unless the caller requests a specific domain."""
        return self._sources[self._find_next_source()].domain

    def peek(self, count: int) -> list[T]:
        """Return the first `count` items of the first source, in the order of the source, without drawing them."""
        items = self._sources[0].items
        return [items[i] for i in range(min(count, len(items)))]

    def get_first_by_domain(self) -> dict[str, T]:
        """Return the first item of every source by domain, without drawing it."""
        return {source.domain: source.items[0] for source in self._sources}

    def sample_by_domain(self, count: int) -> dict[str, list[T]]:
        """Return up to `count` items per domain, evenly spread over the domain's source, without drawing them."""
        items: dict[str, list[T]] = {}
        for source in self._sources:
            size = len(source.items)
            chosen = range(size) if size <= count else [place * size // count for place in range(count)]
            items[source.domain] = [source.items[index] for index in chosen]
        return items

    def draw(self, count: int, domain: str | None = None) -> list[D]:
        """Draw the next `count` items, only from `domain` if it is given.

        Raises:
            DataError: An item cannot be used.
        """
        return [self._draw_next(domain) for _ in range(count)]

    def redraw(self, draw_id: int, domain: str, position: int) -> D:
        """Reconstruct an earlier draw from its ID, its domain and its position in the domain's stream.

        Raises:
            CheckpointError: No source has this domain.
        """
        which = self._find_source_index(domain)
        if which is None:
            raise CheckpointError(
                _describe_change(
                    f"prompt {draw_id} was sampled from domain '{domain}', but no source has this domain now"
                )
            )
        return self._draw_at(draw_id, which, position)

    def repeat(self, domain: str, position: int) -> D:
        """Draw the item at a position of a domain's stream again, with the next draw ID; no source advances.

        Raises:
            CheckpointError: No source has this domain.
        """
        draw = self.redraw(self.num_drawn, domain, position)
        self._num_repeated[self._get_source_index(domain)] += 1
        return draw

    def find_position(self, domain: str, item_index: int) -> int:
        """Return the position in the first epoch at which the item `item_index` of a domain's source is drawn."""
        which = self._get_source_index(domain)
        return int(np.flatnonzero(self._get_order(which, 0) == item_index)[0])

    def _get_source_index(self, domain: str) -> int:
        which = self._find_source_index(domain)
        assert which is not None, f"no source has the domain {domain}"
        return which

    def _draw_next(self, domain: str | None) -> D:
        which = self._find_next_source() if domain is None else self._get_source_index(domain)
        draw = self._draw_at(self.num_drawn, which, self._num_drawn[which])
        self._num_drawn[which] += 1
        return draw

    def _find_source_index(self, domain: str) -> int | None:
        return next((i for i, source in enumerate(self._sources) if source.domain == domain), None)

    def _draw_at(self, draw_id: int, source_index: int, position: int) -> D:
        source = self._sources[source_index]
        epoch, offset = divmod(position, len(source.items))
        return self._draw(draw_id, source.items[int(self._get_order(source_index, epoch)[offset])], position)

    def _find_next_source(self) -> int:
        """Return the index of the source for the next draw: the source that is furthest below its fraction of all
        draws.

        If several sources are equally far below their fractions, return the first of these sources.
        """
        total = sum(source.weight for source in self._sources)
        due = self.num_drawn + 1
        counts = zip(self._sources, self._num_drawn, self._num_repeated, strict=True)
        # Exact shares instead of random choices: the mix of a short run does not depend on chance.
        lag = [source.weight / total * due - drawn - repeated for source, drawn, repeated in counts]
        return max(range(len(lag)), key=lambda i: (round(lag[i], 9), -i))

    def _get_order(self, source_index: int, epoch: int) -> IntArray:
        """Compute the shuffled order of a source in an epoch; the order of the current epoch is cached."""
        kept = self._orders.get(source_index)
        if kept is None or kept[0] != epoch:
            source = self._sources[source_index]
            # Seeded by the domain's name, so that adding or removing another source does not change this one's order.
            digest = hashlib.blake2b(f"{self._seed}/{source.domain}/{epoch}".encode(), digest_size=8).digest()
            order = np.random.default_rng(int.from_bytes(digest, "big")).permutation(len(source.items))
            self._orders[source_index] = (epoch, order.astype(np.int32))
        return self._orders[source_index][1]

    def state(self) -> dict[str, Any]:
        """Return the stream's position as plain data with a few values per source."""
        return {
            source.domain: {"num_drawn": drawn, "num_repeated": repeated, **self._get_settings(source)}
            for source, drawn, repeated in zip(self._sources, self._num_drawn, self._num_repeated, strict=True)
        }

    def _get_settings(self, source: WeightedSource[T]) -> dict[str, Any]:
        """Return the settings of a source that must not change when a run is resumed, by name."""
        return {
            self.size_name: len(source.items),
            "weight": source.weight,
            "seed": self._seed,
            "fingerprint": source.fingerprint,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the position of the stream from the result of `state`.

        Raises:
            CheckpointError: The sources, their content, their weights, or the seed differ from the checkpoint.
        """
        here = {source.domain: self._get_settings(source) for source in self._sources}
        if set(here) != set(state):
            raise CheckpointError(
                _describe_change(f"it had the sources {_format_names(state)}, now there are {_format_names(here)}")
            )
        for domain, settings in here.items():
            for name, value in settings.items():
                if state[domain].get(name) != value:
                    before = state[domain].get(name)
                    raise CheckpointError(
                        _describe_change(f"{name} of source '{domain}' was {before!r} and is {value!r}")
                    )
        self._num_drawn = [int(state[source.domain]["num_drawn"]) for source in self._sources]
        self._num_repeated = [int(state[source.domain].get("num_repeated", 0)) for source in self._sources]


class PromptStream(WeightedStream[Prompt, PromptDraw]):
    """Draws prompts for training.

    Args:
        sources: See `WeightedStream`.
        render: Renders a prompt to its token IDs.
        seed: Seed of the shuffling.
        max_prompt_tokens: Maximum length of a prompt; a longer prompt is rejected when it is drawn. `None` for no
            limit.
    """

    size_name = "num_prompts"

    def __init__(
        self,
        sources: Sequence[WeightedSource[Prompt]],
        render: Callable[[Prompt], EncodedText],
        seed: int,
        *,
        max_prompt_tokens: int | None = None,
    ) -> None:
        super().__init__(sources, seed)
        self._render = render
        self._max_prompt_tokens = max_prompt_tokens

    def _draw(self, draw_id: int, item: Prompt, position: int) -> PromptDraw:
        encoded = render_and_check(item, self._render, self._max_prompt_tokens)
        return PromptDraw(
            draw_id=draw_id, prompt=item, token_ids=encoded.token_ids, media=encoded.media, position=position
        )


def _format_names(sources: dict[str, Any]) -> str:
    return ", ".join(f"'{name}'" for name in sources)


def _describe_change(label: str) -> str:
    return (
        f"the data changed since the checkpoint: {label}. Resume with the data as it was, or start a new run from the "
        "checkpoint's model."
    )


def render_and_check(
    prompt: Prompt, render: Callable[[Prompt], EncodedText], max_prompt_tokens: int | None
) -> EncodedText:
    """Render a prompt, and check its length.

    Raises:
        DataError: The prompt is longer than `max_prompt_tokens`.
    """
    encoded = render(prompt)
    num_tokens = len(encoded.token_ids)
    if max_prompt_tokens is not None and num_tokens > max_prompt_tokens:
        raise BadRow(
            "too long",
            f"prompt '{prompt.uid}' has {num_tokens} tokens, but the context leaves {max_prompt_tokens} for prompts"
            ": shorten or remove it, lower rollout.max_new_tokens, or raise inference.max_context.",
        )
    return encoded

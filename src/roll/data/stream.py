"""Streams of prompts or examples: several sources mixed by weight, each sampled without replacement, resumable
anywhere.

    source A ── shuffled per epoch ──┐
    source B ── shuffled per epoch ──┼── shares by weight, exact in the long run ──► draw 0, 1, 2, …
    source C ── shuffled per epoch ──┘

Invariants: draw n depends only on the settings, not on the grouping of draws into calls; within an epoch of a source
every item comes once; the state is a few numbers, never content.
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
from roll.types import IntArray, Prompt, PromptDraw

__all__ = ["PromptStream", "WeightedSource", "WeightedStream"]


T = TypeVar("T")
D = TypeVar("D")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedSource(Generic[T]):
    """A source, its name, and its share."""

    domain: str
    items: Items[T]
    weight: float = 1.0
    fingerprint: str = ""
    """Equal for equal items in equal order."""


class WeightedStream(ABC, Generic[T, D]):
    """Draws items for training; a subclass defines the type of a draw (`D`, of an item `T`).

    Args:
        sources: At least one source, each with an item; names differ.
        seed: Seed of the shuffling.
    """

    size_name: ClassVar[str]
    """Name of the number of a source's items in the state."""

    def __init__(self, sources: Sequence[WeightedSource[T]], seed: int) -> None:
        assert sources, "a stream needs a source"
        self._sources = list(sources)
        self._seed = seed
        self._num_drawn = [0] * len(sources)
        self._num_repeated = [0] * len(sources)
        self._orders: dict[int, tuple[int, IntArray]] = {}

    @abstractmethod
    def _draw(self, draw_id: int, item: T, position: int) -> D:
        """Return the item as a draw."""

    @property
    def num_items(self) -> int:
        """Number of different items over all sources."""
        return sum(len(source.items) for source in self._sources)

    @property
    def num_drawn(self) -> int:
        """Number of draws so far, which is the next draw's ID."""
        return sum(self._num_drawn) + sum(self._num_repeated)

    @property
    def next_domain(self) -> str:
        """Domain of the next draw, unless the caller requests another."""
        return self._sources[self._most_behind()].domain

    def peek(self, count: int) -> list[T]:
        """Return the first `count` items of the first source, in the source's own order; draws nothing."""
        items = self._sources[0].items
        return [items[i] for i in range(min(count, len(items)))]

    def first_of_each(self) -> dict[str, T]:
        """Return the first item of every source by its domain; draws nothing."""
        return {source.domain: source.items[0] for source in self._sources}

    def some_of_each(self, count: int) -> dict[str, list[T]]:
        """Return at most `count` items of every source, evenly spread over it, by its domain; draws nothing."""
        found: dict[str, list[T]] = {}
        for source in self._sources:
            size = len(source.items)
            chosen = range(size) if size <= count else [place * size // count for place in range(count)]
            found[source.domain] = [source.items[index] for index in chosen]
        return found

    def draw(self, count: int, domain: str | None = None) -> list[D]:
        """Return the next `count` draws; only from `domain`, if it is given.

        Raises:
            DataError: An item cannot be used.
        """
        return [self._next(domain) for _ in range(count)]

    def redraw(self, draw_id: int, domain: str, position: int) -> D:
        """Return an item that was drawn before, by the domain and position of its draw.

        Raises:
            CheckpointError: No source has this domain.
        """
        which = self._which(domain)
        if which is None:
            raise CheckpointError(_changed(f"draw {draw_id} was of the domain '{domain}', which no source has now"))
        return self._at(draw_id, which, position)

    def repeat(self, domain: str, position: int) -> D:
        """Return the next draw with an item that was drawn before; no source advances.

        Raises:
            CheckpointError: No source has this domain.
        """
        draw = self.redraw(self.num_drawn, domain, position)
        self._num_repeated[self._index(domain)] += 1
        return draw

    def position_of(self, domain: str, item: int) -> int:
        """Return the position of a source's item in its first epoch, from its index in the source."""
        which = self._index(domain)
        return int(np.flatnonzero(self._order(which, 0) == item)[0])

    def _index(self, domain: str) -> int:
        which = self._which(domain)
        assert which is not None, f"no source has the domain {domain}"
        return which

    def _next(self, domain: str | None) -> D:
        which = self._most_behind() if domain is None else self._index(domain)
        draw = self._at(self.num_drawn, which, self._num_drawn[which])
        self._num_drawn[which] += 1
        return draw

    def _which(self, domain: str) -> int | None:
        return next((i for i, source in enumerate(self._sources) if source.domain == domain), None)

    def _at(self, draw_id: int, which: int, position: int) -> D:
        source = self._sources[which]
        epoch, offset = divmod(position, len(source.items))
        return self._draw(draw_id, source.items[int(self._order(which, epoch)[offset])], position)

    def _most_behind(self) -> int:
        """Return the index of the source that is furthest below its share of the next total (the first, on a tie)."""
        total = sum(source.weight for source in self._sources)
        due = self.num_drawn + 1
        counts = zip(self._sources, self._num_drawn, self._num_repeated, strict=True)
        lag = [source.weight / total * due - drawn - repeated for source, drawn, repeated in counts]
        return max(range(len(lag)), key=lambda i: (round(lag[i], 9), -i))

    def _order(self, which: int, epoch: int) -> IntArray:
        """Return the source's shuffled order in this epoch; cached for the current epoch."""
        kept = self._orders.get(which)
        if kept is None or kept[0] != epoch:
            source = self._sources[which]
            digest = hashlib.blake2b(f"{self._seed}/{source.domain}/{epoch}".encode(), digest_size=8).digest()
            order = np.random.default_rng(int.from_bytes(digest, "big")).permutation(len(source.items))
            self._orders[which] = (epoch, order.astype(np.int32))
        return self._orders[which][1]

    def state(self) -> dict[str, Any]:
        """Return the stream's position as plain data, a few values per source."""
        return {
            source.domain: {"num_drawn": drawn, "num_repeated": repeated, **self._settings(source)}
            for source, drawn, repeated in zip(self._sources, self._num_drawn, self._num_repeated, strict=True)
        }

    def _settings(self, source: WeightedSource[T]) -> dict[str, Any]:
        """Return the settings that determine the item at a position."""
        return {
            self.size_name: len(source.items),
            "weight": source.weight,
            "seed": self._seed,
            "fingerprint": source.fingerprint,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state` returned.

        Raises:
            CheckpointError: The sources, their content, their weights, or the seed differ from the state's.
        """
        here = {source.domain: self._settings(source) for source in self._sources}
        if set(here) != set(state):
            raise CheckpointError(_changed(f"it had the sources {_names(state)}, now there are {_names(here)}"))
        for domain, settings in here.items():
            for name, value in settings.items():
                if state[domain].get(name) != value:
                    before = state[domain].get(name)
                    raise CheckpointError(_changed(f"{name} of source '{domain}' was {before!r} and is {value!r}"))
        self._num_drawn = [int(state[source.domain]["num_drawn"]) for source in self._sources]
        self._num_repeated = [int(state[source.domain].get("num_repeated", 0)) for source in self._sources]


class PromptStream(WeightedStream[Prompt, PromptDraw]):
    """Draws prompts for training.

    Args:
        sources: See `WeightedStream`.
        render: Renders a prompt to its token IDs.
        seed: Seed of the shuffling.
        max_prompt_tokens: Longest prompt; a longer one is rejected when it is drawn; `None` for no limit.
    """

    size_name = "num_prompts"

    def __init__(
        self,
        sources: Sequence[WeightedSource[Prompt]],
        render: Callable[[Prompt], IntArray],
        seed: int,
        *,
        max_prompt_tokens: int | None = None,
    ) -> None:
        super().__init__(sources, seed)
        self._render = render
        self._max_prompt_tokens = max_prompt_tokens

    def _draw(self, draw_id: int, item: Prompt, position: int) -> PromptDraw:
        token_ids = render_checked(item, self._render, self._max_prompt_tokens)
        return PromptDraw(draw_id=draw_id, prompt=item, token_ids=token_ids, position=position)


def _names(sources: dict[str, Any]) -> str:
    return ", ".join(f"'{name}'" for name in sources)


def _changed(what: str) -> str:
    return (
        f"the data changed since the checkpoint: {what}. Resume with the data as it was, or start a new run from the "
        "checkpoint's model."
    )


def render_checked(prompt: Prompt, render: Callable[[Prompt], IntArray], max_prompt_tokens: int | None) -> IntArray:
    """Render a prompt and check its length.

    Raises:
        DataError: The prompt is longer than `max_prompt_tokens`.
    """
    token_ids = render(prompt)
    if max_prompt_tokens is not None and len(token_ids) > max_prompt_tokens:
        raise BadRow(
            "too long",
            f"prompt '{prompt.uid}' has {len(token_ids)} tokens, but the context leaves {max_prompt_tokens} for prompts"
            ": shorten or remove it, lower rollout.max_new_tokens, or raise inference.max_context.",
        )
    return token_ids

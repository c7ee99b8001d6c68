"""What the controller asks of rewards and of data."""

from __future__ import annotations

from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

from roll.types import Prompt, RewardResult, Rollout

__all__ = ["Draw", "Items", "PromptSource", "Reward"]

Item_co = TypeVar("Item_co", covariant=True)


@runtime_checkable
class Reward(Protocol):
    """Scores a rollout. A wrong answer gets a low value; an exception means that *we* failed."""

    async def __call__(self, rollout: Rollout) -> RewardResult: ...


class Draw(Protocol):
    """One use of something in the data, as the ledger knows it."""

    @property
    def draw_id(self) -> int: ...

    @property
    def uid(self) -> str:
        """Of what was drawn, the same whenever it is drawn again."""
        ...


@runtime_checkable
class Items(Protocol[Item_co]):
    """A finite, ordered, indexable set of prompts or examples; order and content depend on its settings alone."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item_co: ...


PromptSource: TypeAlias = Items[Prompt]

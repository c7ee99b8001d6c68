"""The controller's interfaces to rewards and data."""

from __future__ import annotations

from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

from roll.types import Prompt, RewardResult, Rollout

__all__ = ["Draw", "Items", "PromptSource", "Reward"]

Item_co = TypeVar("Item_co", covariant=True)


@runtime_checkable
class Reward(Protocol):
    """Scores a rollout. An incorrect answer gets a low value; an exception means an infrastructure error."""

    async def __call__(self, rollout: Rollout) -> RewardResult: ...


class Draw(Protocol):
    """One sampled prompt or example, as the ledger records it."""

    @property
    def draw_id(self) -> int: ...

    @property
    def uid(self) -> str:
        """UID of the prompt or example; all draws of one prompt share it."""
        ...


@runtime_checkable
class Items(Protocol[Item_co]):
    """A finite sequence of prompts or examples; order and content depend only on its settings."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item_co: ...


PromptSource: TypeAlias = Items[Prompt]

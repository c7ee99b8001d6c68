"""What `roll check` finds out about a run: collected by a pipeline's check, shown by `rendering`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roll.cluster.devices import Placement
    from roll.config.estimate import DiskUse, JudgeEngines, RoleMemory
    from roll.config.run import RunConfig
    from roll.models import ModelDescription
    from roll.preflight.machine import Machine
    from roll.types import Prompt

__all__ = ["Report", "RewardTrial"]


@dataclass(frozen=True, kw_only=True)
class RewardTrial:
    """A domain's reward on an answer that is right and on one that is wrong.

    Where the prompt has no reference answer, `right` is empty: then these are any two texts.
    """

    domain: str
    right: str
    right_value: float
    wrong: str
    wrong_value: float

    @property
    def tells_apart(self) -> bool:
        """Whether the right answer, where one is known, is worth more."""
        return not self.right or self.right_value > self.wrong_value


@dataclass(kw_only=True)
class Report:
    """What was found; `None` where a problem stands in the way."""

    config: RunConfig
    method: str
    """How it learns and for how long, in a few words."""
    machine: Machine
    engine_kind: str | None = None
    placement: Placement | None = None
    hands_over: bool = False
    """Whether engines and trainers take turns to use the memory of devices that they share."""
    model: ModelDescription | None = None
    critic: ModelDescription | None = None
    """The critics' backbone, where it is not the policy's."""
    judge: JudgeEngines | None = None
    """The run's own judge, where there is one on this machine."""
    longest_prompt: int | None = None
    max_context: int | None = None
    """Tokens after a prompt, at most: all answers, and what an environment says between them."""
    sample: tuple[Prompt, str, int] | None = None
    """A prompt, how the model sees it, and its tokens."""
    examples: dict[str, Prompt] = field(default_factory=dict)
    """By domain, a training prompt."""
    num_held_out: int = 0
    train_prompts: dict[str, int] = field(default_factory=dict)
    batch: list[str] = field(default_factory=list)
    """How a step and the run divide, in words."""
    memory: list[RoleMemory] = field(default_factory=list)
    step_s: float | None = None
    """Seconds of a step on this machine, where they could be measured."""
    disk: DiskUse | None = None
    free_disk_bytes: int | None = None
    layout: list[str] = field(default_factory=list)
    """What ranks hold and send in a step, in words, where that was tried."""
    trials: list[RewardTrial] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What stops the run."""
    notes: list[str] = field(default_factory=list)
    """What does not, but should be known."""

    def __str__(self) -> str:
        from roll.preflight.rendering import render

        return render(self)

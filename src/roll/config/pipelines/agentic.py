"""The configuration of reinforcement learning in environments, over many turns."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import field_validator, model_validator

from roll.config.base import Section, option
from roll.config.data import EnvironmentData
from roll.config.reinforcing import ReinforcingConfig

__all__ = ["CONFIG", "AgenticConfig", "CurriculumConfig"]


class CurriculumConfig(Section):
    """Which environments are drawn more often: those that are solved half of the time, where most is to be learnt."""

    num_episodes: int = option(64, "Episodes of an environment over which its success rate is averaged, about.", ge=1)
    least_share: float = option(
        0.1, "What an environment that always or never succeeds keeps of its weight.", gt=0, le=1
    )


class AgenticConfig(ReinforcingConfig):
    """Reinforcement learning in environments: games, tools, worlds, or classes of your own."""

    pipeline: Literal["agentic"] = option("agentic", "Which pipeline runs.")
    environments: list[EnvironmentData] = option(
        ...,
        "Where episodes are played; several are mixed by weight within every step.",
        min_length=1,
        examples=[[{"environment": "game:GuessTheNumber-v0-easy", "num_turns": 4}]],
    )
    curriculum: CurriculumConfig | None = option(
        None, "Let success rates decide how the environments are mixed, beside their weights."
    )

    @field_validator("environments")
    @classmethod
    def _named_apart(cls, entries: list[EnvironmentData]) -> list[EnvironmentData]:
        names = [entry.domain or entry.environment.rpartition("/")[2] for entry in entries]
        entries = [entry.model_copy(update={"domain": name}) for entry, name in zip(entries, names, strict=True)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"several environments are called {twice}: give each its own `domain`")
        return entries

    @model_validator(mode="after")
    def _as_far_as_it_goes(self) -> Self:
        if self.tracking.record_rollouts:
            raise ValueError(
                "tracking.record_rollouts keeps rollouts for `roll replay`, which cannot replay a run of the pipeline "
                "agentic: set it to false"
            )
        if self.curriculum is not None:
            if self.rollout.scheduling.domain_quotas:
                raise ValueError(
                    "curriculum changes how environments are mixed, but rollout.scheduling.domain_quotas keeps that as "
                    "it is: remove the one or the other"
                )
            if len(self.environments) == 1:
                raise ValueError("curriculum mixes environments, but there is one alone: remove it, or add others")
        return self

    @property
    def data(self) -> list[EnvironmentData]:  # type: ignore[override]
        """See `GeneratingConfig`."""
        return self.environments


CONFIG = AgenticConfig

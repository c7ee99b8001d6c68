"""The configuration of reinforcement learning in environments, over many turns."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import field_validator, model_validator

from roll.config.base import Section, option
from roll.config.data import EnvironmentData
from roll.config.reinforcing import ReinforcingConfig

__all__ = ["CONFIG", "AgenticConfig", "AnchorsConfig", "CurriculumConfig"]


class CurriculumConfig(Section):
    """Which environments are drawn more often: those that are solved half of the time, since they teach most."""

    num_episodes: int = option(64, "Episodes of an environment over which its success rate is averaged, about.", ge=1)
    min_share: float = option(0.1, "What an environment that always or never succeeds keeps of its weight.", gt=0, le=1)


class AnchorsConfig(Section):
    """Groups that begin in the middle of a successful episode: its first turns are replayed, and the policy continues.

    This is IPA's chunk-level initialized resampling (arXiv 2512.24873). The replayed turns are context, imitated once
    for each group according to `algorithm.imitation`. An environment must repeat an episode for the same seed and
    actions.
    """

    type: Literal["parallel", "rollback"] = option(
        "parallel",
        "`parallel`: at several boundaries between turns side by side (parallelised initialisation). `rollback`: "
        "before the last turn first, and a turn earlier each time that most rollouts succeed from there (sequential "
        "rollback), at last from the beginning.",
    )
    share: float = option(
        0.5, "Of an environment's groups, as many begin at anchors, once it has successful episodes.", gt=0, le=1
    )
    placement: Literal["even", "random"] = option(
        "even", "`parallel`: evenly spread `num_anchors` boundaries, or any, drawn at random."
    )
    num_anchors: int = option(4, "`parallel` and `even`: how many of each episode, at most.", ge=1)
    passed_at: float = option(
        0.75,
        "No more groups begin at an anchor once this share of the last `num_rollouts` rollouts from it succeeded.",
        gt=0,
        le=1,
    )
    num_rollouts: int = option(8, "Rollouts over which success from an anchor is measured.", ge=1)
    rare_below: float = option(
        0.5, "A success is kept where at most this share of its group, begun at the prompt, succeeded.", gt=0, le=1
    )
    num_kept: int = option(
        32, "Successful episodes that are kept of each environment, at most; the oldest gives way.", ge=1
    )
    demonstrations: str | None = option(
        None,
        'JSONL file of successful episodes to begin with, each `{"seed": …, "actions": ["…", …]}`, with '
        '`"environment"` where there are several; seeds are those of training episodes.',
        examples=["demonstrations.jsonl"],
    )


class AgenticConfig(ReinforcingConfig):
    """Reinforcement learning in environments: games, tools, worlds, or your own classes."""

    pipeline: Literal["agentic"] = option("agentic", "Which pipeline runs.")
    environments: list[EnvironmentData] = option(
        ...,
        "Where episodes are played; several are mixed by weight within every step.",
        min_length=1,
        examples=[[{"environment": "game:GuessTheNumber-v0-easy", "num_turns": 4}]],
    )
    curriculum: CurriculumConfig | None = option(
        None, "Let success rates decide how the environments are mixed, in addition to their weights."
    )

    anchors: AnchorsConfig | None = option(
        None, "Let groups begin in the midst of successful episodes, where success is rare."
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
        if self.rollout.agent is not None:
            raise ValueError(
                "rollout.agent plays in ROLL's place, and no environment would be opened: remove it, or train the "
                "agent with `pipeline: rlvr` and prompts in `data`"
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

    @model_validator(mode="after")
    def _between_turns(self) -> Self:
        if self.anchors is None:
            return self
        if all(entry.num_turns == 1 for entry in self.environments):
            raise ValueError(
                "anchors lie between turns, but every environment has num_turns 1: raise it, or remove anchors"
            )
        if self.rollout.loop:
            raise ValueError(
                "anchors replay turns of episodes that ROLL plays itself, but rollout.loop plays them: remove the one "
                "or the other"
            )
        return self

    @property
    def has_demonstrations(self) -> bool:
        """See `ReinforcingConfig`."""
        return self.anchors is not None or super().has_demonstrations

    @property
    def data(self) -> list[EnvironmentData]:  # type: ignore[override]
        """See `GeneratingConfig`."""
        return self.environments


CONFIG = AgenticConfig

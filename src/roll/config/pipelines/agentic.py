"""The configuration of reinforcement learning in environments, over many turns."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import field_validator, model_validator

from roll.config.base import Section, option
from roll.config.data import EnvironmentData
from roll.config.reinforcement_run import ReinforcementRunConfig

__all__ = ["AgenticConfig", "AnchorsConfig", "CurriculumConfig"]


class CurriculumConfig(Section):
    """A curriculum: environments in which about half of the episodes succeed are sampled most often."""

    num_episodes: int = option(
        64, "Approximate number of episodes of an environment over which the success rate is averaged.", ge=1
    )
    min_share: float = option(
        0.1,
        "Fraction of its weight that an environment keeps if its episodes always succeed or never succeed.",
        gt=0,
        le=1,
    )


class AnchorsConfig(Section):
    """Groups that begin in the middle of a successful episode: its first turns are replayed, then the policy continues.

    This is IPA's chunk-level initialized resampling (arXiv 2512.24873). The replayed turns are context, and are
    imitated once for each group according to `algorithm.imitation`. An environment must repeat an episode for the same
    seed and actions.
    """

    type: Literal["parallel", "rollback"] = option(
        "parallel",
        "`parallel`: groups begin at several boundaries between turns concurrently (parallelized initialization). "
        "`rollback`: groups first begin before the last turn, and one turn earlier whenever most rollouts succeed from "
        "there (sequential rollback), finally at the prompt.",
    )
    share: float = option(
        0.5,
        "Fraction of an environment's groups that begin at anchors, once the environment has successful episodes.",
        gt=0,
        le=1,
    )
    placement: Literal["even", "random"] = option(
        "even", "`parallel`: whether anchors are `num_anchors` evenly spaced boundaries, or drawn from all boundaries."
    )
    num_anchors: int = option(4, "`parallel` and `even`: maximum number of anchors per episode.", ge=1)
    passed_at: float = option(
        0.75,
        "Success rate over the last `num_rollouts` rollouts from an anchor, at or above which no more groups "
        "begin there.",
        gt=0,
        le=1,
    )
    num_rollouts: int = option(8, "Number of rollouts over which success from an anchor is measured.", ge=1)
    rare_below: float = option(
        0.5,
        "The successful episodes of a group that began at the prompt are kept only if the group's success rate is at "
        "most this value.",
        gt=0,
        le=1,
    )
    num_kept: int = option(
        32, "Maximum number of kept episodes per environment; the oldest one is dropped first.", ge=1
    )
    demonstrations: str | None = option(
        None,
        'JSONL file of successful initial episodes, each `{"seed": …, "actions": ["…", …]}`, with `"environment"` if '
        "there are several environments. The seeds must be those of training episodes.",
        examples=["demonstrations.jsonl"],
    )


class AgenticConfig(ReinforcementRunConfig):
    """Reinforcement learning in environments: games, tools, worlds, or your own classes."""

    pipeline: Literal["agentic"] = option("agentic", "Name of the pipeline.")
    environments: list[EnvironmentData] = option(
        ...,
        "Environments in which episodes are played. If there are several, every step mixes them by weight.",
        min_length=1,
        examples=[[{"environment": "game:GuessTheNumber-v0-easy", "num_turns": 4}]],
    )
    curriculum: CurriculumConfig | None = option(
        None, "Curriculum: environments are mixed by success rates, in addition to weights."
    )
    anchors: AnchorsConfig | None = option(
        None, "Anchors: groups may begin inside successful episodes, for tasks in which success is rare."
    )

    @field_validator("environments")
    @classmethod
    def _name_domains(cls, entries: list[EnvironmentData]) -> list[EnvironmentData]:
        names = [entry.domain or entry.environment.rpartition("/")[2] for entry in entries]
        entries = [entry.model_copy(update={"domain": name}) for entry, name in zip(entries, names, strict=True)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"environment names must be unique, got duplicates: {twice}. Set a different `domain` for each "
                "environment"
            )
        return entries

    @model_validator(mode="after")
    def _reject_unsupported_keys(self) -> Self:
        if self.tracking.record_rollouts:
            raise ValueError(
                "tracking.record_rollouts is not supported with the pipeline agentic, because `roll replay` does not "
                "support this pipeline: set record_rollouts to false"
            )
        if self.rollout.agent is not None:
            raise ValueError(
                "rollout.agent generates whole rollouts, so no environment would be used: remove rollout.agent, or "
                "train the agent with `pipeline: rlvr` and prompts in `data`"
            )
        if self.curriculum is not None:
            if self.rollout.scheduling.domain_quotas:
                raise ValueError(
                    "curriculum and rollout.scheduling.domain_quotas cannot be combined, because quotas fix the "
                    "mixture of environments: remove one of the two"
                )
            if len(self.environments) == 1:
                raise ValueError(
                    "curriculum requires at least two environments, got one: remove curriculum, or add environments"
                )
        return self

    @model_validator(mode="after")
    def _check_anchors(self) -> Self:
        if self.anchors is None:
            return self
        if all(entry.num_turns == 1 for entry in self.environments):
            raise ValueError(
                "anchors require num_turns >= 2, but every environment has num_turns 1: raise num_turns, or remove "
                "anchors"
            )
        if self.rollout.loop:
            raise ValueError("anchors are not supported with a custom rollout.loop: remove anchors, or rollout.loop")
        return self

    @property
    def has_demonstrations(self) -> bool:
        """True if there may be demonstrations to imitate: from the data, or from anchors."""
        return self.anchors is not None or super().has_demonstrations

    @property
    def data(self) -> list[EnvironmentData]:  # type: ignore[override]
        """The environments, which are the prompt sources of this pipeline."""
        return self.environments

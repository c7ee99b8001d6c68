"""What every run has in its configuration, whichever pipeline it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from roll.config.alarms import AlarmsConfig
from roll.config.base import Section, option
from roll.config.cluster import ClusterConfig
from roll.config.model import ModelConfig
from roll.config.operations import CheckpointConfig, TrackingConfig
from roll.errors import ConfigError

__all__ = ["RunConfig"]

S = TypeVar("S")


class RunConfig(Section):
    """The base of every pipeline's configuration, which adds sections of its own."""

    pipeline: str = option(..., "Which pipeline runs.")
    name: str = option(
        ...,
        "Name of the run and of its directory.",
        examples=["my-run"],
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    )
    output_dir: str = option("runs", "Directory that holds the run directories.", min_length=1)
    seed: int = option(0, "Seed of everything that is random.", ge=0)
    model: ModelConfig = option(..., "The model to train.", examples=["smollm2-135m-instruct"])
    checkpoint: CheckpointConfig = option(CheckpointConfig(), "When checkpoints are saved, and which are kept.")
    cluster: ClusterConfig = option(ClusterConfig(), "Where roles run.")
    tracking: TrackingConfig = option(TrackingConfig(), "What is recorded.")
    alarms: AlarmsConfig = option(AlarmsConfig(), "When a run warns or stops.")

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Show what a pipeline adds after `model`: files and pages tell first what is trained, then how it is kept."""
        names = list(RunConfig.model_fields)
        before, after = names[: names.index("model") + 1], names[names.index("model") + 1 :]
        own = [name for name in cls.model_fields if name not in names]
        cls.__pydantic_fields__ = {name: cls.model_fields[name] for name in (*before, *own, *after)}
        cls.model_rebuild(force=True)

    def section(self, name: str, kind: type[S]) -> S:
        """A section that only some pipelines have.

        Raises:
            ConfigError: this pipeline has none, or this configuration leaves it out.
        """
        found = getattr(self, name, None)
        if isinstance(found, kind):
            return found
        raise ConfigError(
            f"'{self.name}' runs the pipeline {self.pipeline} and has no section `{name}`, which this needs."
        )

    @property
    def run_dir(self) -> Path:
        """Directory that this run writes to."""
        return Path(self.output_dir) / self.name

"""The configuration of each pipeline: one module per pipeline, with its sections and their constraints.

Each module exports its class as `CONFIG`; to add a pipeline, add a module and a line here. A user-defined pipeline is a
class in a user's file, selected by `pipeline: path/to/file.py:Class`.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

from roll.config.run import RunConfig
from roll.errors import ConfigError, find_raise_location, one_line_error
from roll.extensions import ExtensibleRegistry
from roll.process_environment import prepare_environment
from roll.user_code import check_call, load_function

__all__ = ["DEFAULT_PIPELINE", "PIPELINES", "PipelineRegistry"]

T = TypeVar("T")

_FUNCTION_ARGUMENTS = {
    "check": ("config",),
    "open": ("config", "session"),
    "facts": ("config", "at"),
    "evaluate": ("config",),
}
"""Arguments of the functions of a user-defined pipeline."""


class PipelineRegistry(ExtensibleRegistry[T]):
    """A registry that maps pipeline names to one part of each pipeline, such as its configuration class.

    Args:
        entries: import paths of the part, by pipeline name.
        part: attribute of a user-defined pipeline that contains the part; `None` for the whole pipeline.
    """

    def __init__(self, entries: dict[str, str], part: str | None) -> None:
        super().__init__("pipeline", entries, group="roll.pipelines")
        self._part = part

    def get(self, name: str) -> T:
        """Import and return this part of a pipeline.

        Raises:
            ConfigError: the pipeline does not exist, cannot be imported or built, or lacks this part.
        """
        if name in self._entries:
            return super().get(name)
        own = _build_user_pipeline(self.path(name))
        return cast(T, own if self._part is None else getattr(own, self._part))


def _build_user_pipeline(path: str) -> Any:
    """Import a user-defined pipeline class, check its members, and return an instance."""
    prepare_environment()  # its file imports torch
    factory = load_function(path, "pipeline")
    check_call(factory, f"pipeline '{path}'")
    try:
        pipeline = factory()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"pipeline '{path}' cannot be created ({find_raise_location(error)}): {one_line_error(error)}"
        ) from error
    if missing := [part for part in ("config", "state", *_FUNCTION_ARGUMENTS) if not hasattr(pipeline, part)]:
        raise ConfigError(
            f"pipeline '{path}' does not define {', '.join(missing)}: docs/python.md describes each member."
        )
    if not (isinstance(pipeline.config, type) and issubclass(pipeline.config, RunConfig)):
        raise ConfigError(f"pipeline '{path}': its `config` must be a subclass of roll.config.run.RunConfig.")
    for part, arguments in _FUNCTION_ARGUMENTS.items():
        check_call(getattr(pipeline, part), f"pipeline '{path}': {part}", *arguments)
    return pipeline


PIPELINES: PipelineRegistry[type[RunConfig]] = PipelineRegistry(
    {
        "agentic": "roll.config.pipelines.agentic:AgenticConfig",
        "diffusion": "roll.config.pipelines.diffusion:DiffusionConfig",
        "distill": "roll.config.pipelines.distill:DistillConfig",
        "preference_online": "roll.config.pipelines.preference_online:PreferenceOnlineConfig",
        "distill_offline": "roll.config.pipelines.distill_offline:DistillOfflineConfig",
        "rejection_sampling": "roll.config.pipelines.rejection_sampling:RejectionSamplingConfig",
        "reward_model": "roll.config.pipelines.reward_model:RewardModelConfig",
        "rlvr": "roll.config.pipelines.rlvr:RLVRConfig",
        "preference": "roll.config.pipelines.preference:PreferenceConfig",
        "sft": "roll.config.pipelines.sft:SFTConfig",
    },
    part="config",
)
DEFAULT_PIPELINE = "rlvr"
"""Pipeline of a file without the key `pipeline`."""

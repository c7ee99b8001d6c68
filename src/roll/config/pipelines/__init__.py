"""One module for each pipeline: the sections that its configuration is composed of, and what they must agree on.

Each module exports its class as `CONFIG`; a new pipeline is a new module and a line here.
"""

from roll.config.run import RunConfig
from roll.registry import Registry

__all__ = ["DEFAULT_PIPELINE", "PIPELINES"]

PIPELINES: Registry[type[RunConfig]] = Registry(
    "pipeline",
    {
        "agentic": "roll.config.pipelines.agentic:CONFIG",
        "distill": "roll.config.pipelines.distill:CONFIG",
        "preference_online": "roll.config.pipelines.preference_online:CONFIG",
        "distill_offline": "roll.config.pipelines.distill_offline:CONFIG",
        "rejection_sampling": "roll.config.pipelines.rejection_sampling:CONFIG",
        "reward_model": "roll.config.pipelines.reward_model:CONFIG",
        "rlvr": "roll.config.pipelines.rlvr:CONFIG",
        "preference": "roll.config.pipelines.preference:CONFIG",
        "sft": "roll.config.pipelines.sft:CONFIG",
    },
)
DEFAULT_PIPELINE = "rlvr"
"""Of files that do not say."""

"""The configuration of supervised fine-tuning."""

from __future__ import annotations

from typing import Literal

from roll.config.base import option
from roll.config.supervised import SupervisedConfig

__all__ = ["SFTConfig"]


class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning on the assistant's messages."""

    pipeline: Literal["sft"] = option("sft", "Name of the pipeline.")

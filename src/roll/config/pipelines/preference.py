"""The configuration of preference learning."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from roll.config.base import option
from roll.config.preference import PreferenceSection
from roll.config.supervised import SupervisedConfig

__all__ = ["CONFIG", "PreferenceConfig"]


class PreferenceConfig(SupervisedConfig):
    """Preferences: the model learns to prefer the answers that people or a judge preferred."""

    pipeline: Literal["preference"] = option("preference", "Which pipeline runs.")
    preference: PreferenceSection = option(PreferenceSection(), "How preferences become a loss.")

    @model_validator(mode="after")
    def _reference_can_be_said(self) -> Self:
        if self.preference.reference == "adapters" and self.model.lora is None:
            raise ValueError("preference.reference `adapters` needs adapters: set model.lora, or take `kept`")
        if not self.preference.method.compares_pairs and self.training.examples_per_step < 2:
            raise ValueError(
                "kto compares each answer with those to other prompts of its batch: raise training.examples_per_step"
            )
        return self

    def with_model(self, path: str) -> Self:
        """See `RunConfig.with_model`: the measured model is compared with the one from which its training started."""
        reference = self.preference.reference_model or self.model.path
        other = super().with_model(path)
        if not self.preference.method.uses_reference:
            return other
        section = self.preference.model_copy(update={"reference": "precomputed", "reference_model": reference})
        return other.model_copy(update={"preference": section})


CONFIG = PreferenceConfig

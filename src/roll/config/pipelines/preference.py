"""The configuration of preference learning."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from roll.config.base import option
from roll.config.preference import PreferenceSection
from roll.config.supervised import SupervisedConfig

__all__ = ["PreferenceConfig"]


class PreferenceConfig(SupervisedConfig):
    """Preference training: the model learns to prefer the answers that humans or a judge preferred."""

    pipeline: Literal["preference"] = option("preference", "Name of the pipeline.")
    preference: PreferenceSection = option(PreferenceSection(), "Preference loss.")

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        if self.preference.reference == "adapters" and self.model.lora is None:
            raise ValueError(
                "`preference.reference: adapters` requires LoRA adapters: set model.lora, or preference.reference to "
                "`precomputed`"
            )
        if not self.preference.method.compares_pairs and self.training.examples_per_step < 2:
            raise ValueError(
                "kto requires training.examples_per_step >= 2, because every batch must contain answers to different "
                "prompts"
            )
        return self

    def with_model(self, path: str) -> Self:
        """Return the configuration with the model in `path`; the reference remains the initial model."""
        reference = self.preference.reference_model or self.model.path
        other = super().with_model(path)
        if not self.preference.method.uses_reference:
            return other
        section = self.preference.model_copy(update={"reference": "precomputed", "reference_model": reference})
        return other.model_copy(update={"preference": section})

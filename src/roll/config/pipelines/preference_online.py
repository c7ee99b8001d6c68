"""The configuration of preference learning from fresh rollouts."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from roll.config.base import Section, option
from roll.config.cluster import RoleDevices
from roll.config.online import OnlineConfig
from roll.config.preference import PreferenceLossSection

__all__ = ["PairingSection", "PreferenceOnlineConfig"]


class PairingSection(Section):
    """Pairing of a prompt's rollouts by their rewards, which may be a judge's verdicts."""

    type: Literal["best_worst", "all"] = option(
        "best_worst",
        "`best_worst`: one pair of the best and the worst rollout; ties go to the first. `all`: every two rollouts "
        "whose rewards differ.",
    )
    min_difference: float = option(0.0, "Minimum difference between the rewards of a pair.", ge=0)


class PreferenceOnlineConfig(OnlineConfig):
    """Online preference training: the policy learns to prefer its answers with the higher reward."""

    pipeline: Literal["preference_online"] = option("preference_online", "Name of the pipeline.")
    preference: PreferenceLossSection = option(PreferenceLossSection(), "Preference loss.")
    pairing: PairingSection = option(PairingSection(), "Pairing of rollouts.")

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if not self.preference.method.compares_pairs:
            raise ValueError(
                f"preference.type {self.preference.type} is not supported, because it learns from single answers "
                "instead of pairs: use dpo or another pairwise method"
            )
        if self.rollout.group_size < 2:
            raise ValueError(f"rollout.group_size must be >= 2 to form pairs, got {self.rollout.group_size}")
        return self

    def describe_missing_role(self, role: str) -> str:
        """Describe why a role in the device mapping does not exist in this run, and a remedy."""
        if role == "reference":
            if not self.preference.method.uses_reference:
                return f"preference.type {self.preference.type} does not use a reference: remove the key"
            return "with model.lora, the reference is the policy without its adapters: remove the key"
        return super().describe_missing_role(role)

    @property
    def has_reference_role(self) -> bool:
        """True if the reference model is a separate role."""
        return self.preference.method.uses_reference and self.model.lora is None

    @property
    def roles(self) -> dict[str, RoleDevices]:
        """The roles of this run by name, including the reference if it is a separate role."""
        mapping, roles = self.cluster.device_mapping, super().roles
        if self.has_reference_role:
            roles["reference"] = RoleDevices(kind="trainer", devices=mapping.reference or mapping.actor_train)
        return roles

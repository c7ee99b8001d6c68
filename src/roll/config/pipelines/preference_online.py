"""The configuration of preference learning from fresh rollouts."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from roll.config.base import Section, option
from roll.config.cluster import RoleDevices
from roll.config.online import OnlineConfig
from roll.config.preference import PreferenceLossSection

__all__ = ["CONFIG", "PairingSection", "PreferenceOnlineConfig"]


class PairingSection(Section):
    """Which rollouts of a prompt are compared, by the rewards of their source (which may be a judge's verdicts)."""

    type: Literal["best_worst", "all"] = option(
        "best_worst", "The best with the worst, of equal ones the first; or every two that differ."
    )
    min_difference: float = option(0.0, "Of the rewards of a pair; with less it is left out.", ge=0)


class PreferenceOnlineConfig(OnlineConfig):
    """Online preferences: the policy learns to prefer those of its own answers with the higher reward."""

    pipeline: Literal["preference_online"] = option("preference_online", "Which pipeline runs.")
    preference: PreferenceLossSection = option(PreferenceLossSection(), "How preferences become a loss.")
    pairing: PairingSection = option(PairingSection(), "Which rollouts are compared.")

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if not self.preference.method.compares_pairs:
            raise ValueError(
                f"preference.type {self.preference.type} learns from single answers, but rollouts are compared in "
                "pairs: take dpo, or another method for pairs"
            )
        if self.rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size is {self.rollout.group_size}, but a pair needs two rollouts of a prompt: raise it"
            )
        return self

    def missing_role_message(self, role: str) -> str:
        """See `RunConfig.missing_role_message`."""
        if role == "reference":
            if not self.preference.method.uses_reference:
                return f"preference.type {self.preference.type} needs no reference: remove it"
            return "with model.lora the reference is the policy without its adapters: remove it"
        return super().missing_role_message(role)

    @property
    def starts_reference(self) -> bool:
        """Whether the reference model is a separate role."""
        return self.preference.method.uses_reference and self.model.lora is None

    @property
    def roles(self) -> dict[str, RoleDevices]:
        """See `RunConfig.roles`."""
        mapping, roles = self.cluster.device_mapping, super().roles
        if self.starts_reference:
            roles["reference"] = RoleDevices(kind="trainer", devices=mapping.reference or mapping.actor_train)
        return roles


CONFIG = PreferenceOnlineConfig

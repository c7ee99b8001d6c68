"""Corrections for tokens that the engine computed differently, or that an older policy sampled."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import Section, option

__all__ = ["CorrectionConfig"]

Level = Literal["token", "chunk", "sequence", "geometric"]


class CorrectionConfig(Section):
    """A constant factor w for tokens that the engine computed differently (mismatch) or an older policy sampled
    (staleness).

    The factor is clipped at `upper`; tokens whose factor is outside [mask_low, mask_high] are dropped. Truncation,
    masks and veto at every level correct what `corrects` names.
    """

    corrects: Literal["both", "mismatch", "staleness"] = option(
        "both",
        "`both`: w = old/rollout, mismatch and staleness together. `mismatch`: w = behavior/rollout, engine against "
        "trainer under the policy version that sampled the token. `staleness`: w = old/behavior, the trainer's policy "
        "before the update against that version. The last two keep `snapshots`.",
    )
    snapshots: bool = option(
        False,
        "Keep the trained weights of the last ⌈async_ratio⌉ policy versions in main memory, and score stale tokens "
        "under the version that sampled it: `train_inference/…` then measures mismatch and staleness apart, exactly. "
        "Costs a forward pass over its rollouts for each older version in a batch. On with `corrects` mismatch or "
        "staleness, and with ratio.against behavior.",
    )
    level: Level = option(
        "token",
        "Of each token; `chunk`: geometric mean over a chunk's (turn's) tokens; `sequence`: product over a sequence's; "
        "`geometric`: geometric mean over a sequence's.",
    )
    upper: float | None = option(
        2.0, "The factor is truncated at this; null leaves the factor out, and masks alone remain.", gt=0
    )
    mask_low: float | None = option(None, "Tokens whose factor is below are left out.", ge=0)
    mask_high: float | None = option(None, "Tokens whose factor is above are left out.", gt=0)
    veto: float | None = option(
        None, "A sequence with a token whose own factor is below this is left out as a whole.", gt=0, lt=1
    )

    @model_validator(mode="after")
    def _ordered(self) -> CorrectionConfig:
        if self.mask_low is not None and self.mask_high is not None and self.mask_low > self.mask_high:
            raise ValueError(f"mask_low {self.mask_low} exceeds mask_high {self.mask_high}: every token is left out")
        return self

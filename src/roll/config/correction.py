"""Importance sampling corrections for engine mismatch and stale tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import Section, option

__all__ = ["CorrectionConfig"]

CorrectionLevel = Literal["token", "chunk", "sequence", "geometric"]


class CorrectionConfig(Section):
    """Importance sampling correction for train-inference mismatch and staleness: a weight w of each token, without a
    gradient.

    The importance weight is truncated at `upper`; tokens whose weight is outside [mask_low, mask_high] are masked out.
    `corrects` selects the importance weight; truncation, masks and veto apply to it at every `level`.
    """

    corrects: Literal["both", "mismatch", "staleness"] = option(
        "both",
        "What the importance weight w corrects. `both`: mismatch and staleness, w = old / rollout. "
        "`mismatch`: the difference between trainer and engine under the policy version that sampled the token, w = "
        "behavior / rollout. `staleness`: the difference between the policy before the update and the version that "
        "sampled the token, both in the trainer, w = old / behavior. `mismatch` and `staleness` need `snapshots`.",
    )
    snapshots: bool = option(
        False,
        "Whether to keep the trained weights of the last ⌈async_ratio⌉ policy versions in host memory, and to "
        "compute each stale token's log-prob under the version that sampled it. The metrics `train_inference/…` then "
        "measure mismatch and staleness separately and exactly. Each older version in a batch needs one forward pass "
        "over its rollouts. Snapshots are always on with `corrects: mismatch`, `corrects: staleness` and "
        "`ratio.against: behavior`.",
    )
    level: CorrectionLevel = option(
        "token",
        "Level of the importance weight. `token`: one weight per token. `chunk`: geometric mean over the tokens of a "
        "chunk (turn). `sequence`: product over the tokens of a sequence. `geometric`: geometric mean over the tokens "
        "of a sequence.",
    )
    upper: float | None = option(
        2.0,
        "Upper bound at which the importance weight is truncated (TIS). `null` sets the weight to 1, so only the masks "
        "apply.",
        gt=0,
    )
    mask_low: float | None = option(None, "Tokens whose importance weight is below this value are masked.", ge=0)
    mask_high: float | None = option(None, "Tokens whose importance weight is above this value are masked.", gt=0)
    veto: float | None = option(
        None, "If the importance weight of any token is below this value, the whole sequence is masked.", gt=0, lt=1
    )

    @model_validator(mode="after")
    def _check_mask_bounds(self) -> CorrectionConfig:
        if self.mask_low is not None and self.mask_high is not None and self.mask_low > self.mask_high:
            raise ValueError(
                f"mask_low must be <= mask_high, got {self.mask_low} and {self.mask_high}: every token would be "
                "masked out"
            )
        return self

"""The parts of an algorithm; `AlgorithmConfig` combines them, and a preset selects them."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import FUNCTION, Section, option, path_option

__all__ = [
    "AdvantageConfig",
    "CreditConfig",
    "CriticConfig",
    "EntropyConfig",
    "FilterConfig",
    "ImitationConfig",
    "KLConfig",
    "RatioConfig",
    "RewardShapingConfig",
    "UpdateConfig",
    "WeightConfig",
]


class RewardShapingConfig(Section):
    """Changes to a rollout's reward before advantages; the recorded reward stays as the verifier returned it.

    An environment's rewards of single turns are scaled; all other changes apply to the rest of the reward.
    """

    scale: float = option(1.0, "The reward is multiplied by this.", gt=0)
    shift: float = option(0.0, "Then this is added.")
    clip: float | None = option(None, "Then it is clipped to ± this.", gt=0)
    overlong_buffer: int = option(
        0,
        "Soft overlong penalty (DAPO): over the last N tokens before max_new_tokens, the penalty grows from 0 to "
        "`overlong_penalty`; 0 switches it off.",
        unit="tokens",
        ge=0,
    )
    overlong_penalty: float = option(1.0, "Largest soft overlong penalty.", ge=0)
    format_penalty: float = option(
        0.0, "Subtracted where the answer did not end, or the verifier found no answer in it.", ge=0
    )


class AdvantageConfig(Section):
    """From rewards to a weight per token: (reward - mean) / std, then returns, then whitening, then clipping."""

    estimator: Literal["outcome", "token", "turn", "chunk", "anchor_state", "gae"] = option(
        "outcome",
        "`outcome`: one value per rollout. `token`: discounted sum of the rewards after each token. `turn`: discounted "
        "sum of the rewards after each turn (ReBN). `chunk`: the rollout's one value, discounted by the turns that "
        "follow (IPA). `anchor_state`: episode plus step advantage (GiGPO). "
        "`gae`: generalised advantage estimation with a critic.",
    )
    mean: Literal["none", "group", "batch", "running", "leave_one_out", "length_weighted", "greedy"] = option(
        "group",
        "What is subtracted from a reward: nothing, the mean of its group, of the batch, of the run so far; of the "
        "group's other rollouts (RLOO); of the group weighted by length (OPO); the reward of a greedy answer (ReMax).",
    )
    std: Literal["none", "group", "batch", "running"] = option(
        "group", "What the difference is divided by: nothing, or a standard deviation over the group, batch or run."
    )
    per_domain: bool = option(True, "Take means and deviations of `batch` and `running` for each domain on its own.")
    gamma: float = option(1.0, "Discount per token, or per turn where the estimator has turns.", ge=0, le=1)
    gae_lambda: float = option(0.95, "GAE's lambda; 1 is the Monte Carlo return.", ge=0, le=1)
    step_weight: float = option(1.0, "GiGPO: weight of the step advantage relative to the episode's.", ge=0)
    whiten: Literal["none", "token", "turn"] = option(
        "none", "Finally take mean 0 and deviation 1 over all tokens, or all turns, of the batch."
    )
    clip: float | None = option(None, "Finally clip to ± this.", gt=0)
    function: str | None = path_option(
        None,
        "Your own estimator instead of all of the above: `package.module:function` or `path/to/file.py:function`.",
        examples=["examples/algorithms/median_baseline.py:advantages"],
        pattern=FUNCTION,
    )


class RatioConfig(Section):
    """The ratio of new to old probability that the gate uses."""

    level: Literal["token", "chunk", "sequence", "sequence_token"] = option(
        "token",
        "Of each token; of each chunk (turn) or sequence as a whole; `sequence_token`: the sequence's value with each "
        "token's own gradient (GSPO-token).",
    )
    reduce: Literal["geometric", "product"] = option(
        "geometric", "A chunk's or sequence's ratio: geometric mean of its tokens' ratios, or their product."
    )
    against: Literal["old", "rollout", "behavior"] = option(
        "old",
        "Denominator: `old`: the policy before the update as the trainer computes it, so that the ratio holds the "
        "update alone. `behavior`: the policy version that sampled each token, as the trainer computes it: staleness "
        "too (keeps snapshots, see `correction.snapshots`). `rollout`: the engine's: staleness and mismatch too.",
    )
    max_token_log_ratio: float | None = option(
        None,
        "Before a sequence's mean is taken, a token's log-ratio may move the objective up by at most this (GMPO).",
        gt=0,
    )


class KLConfig(Section):
    """A penalty on the distance from the reference model; with coefficient 0 it is off and no reference is loaded."""

    coefficient: float = option(0.0, "Weight of the penalty.", ge=0)
    estimator: Literal["k1", "k2", "k3", "absolute", "full"] = option(
        "k3",
        "Estimator of the divergence per token (Schulman 2020); `full`: the exact sum over the vocabulary. `k1` is for "
        "the reward: in the loss its gradient is 0 on average, so that it holds nothing back.",
    )
    place: Literal["loss", "reward"] = option(
        "loss",
        "In the loss, with a gradient of its own; or subtracted from the reward, before baseline and scaling: an "
        "answer's sum from its one reward, a turn's from its turn's, or each token's from that token's. Filters do not "
        "see it.",
    )
    target: float | None = option(
        None, "Adapt the coefficient so that the divergence comes to this (Ziegler 2019).", gt=0
    )
    horizon: int = option(10_000, "Rollouts over which the coefficient adapts.", unit="rollouts", ge=1)

    @model_validator(mode="after")
    def _computable(self) -> KLConfig:
        if self.estimator == "full" and self.place == "reward":
            raise ValueError("estimator full works only in the loss: set place: loss, or estimator: k1")
        if self.target is not None and self.coefficient == 0:
            raise ValueError(
                "target adapts the coefficient, which is 0: set coefficient to a value to start from, such as 0.1"
            )
        return self


class EntropyConfig(Section):
    """An entropy bonus, exact over the vocabulary; with coefficient 0 it is off and costs nothing."""

    coefficient: float = option(0.0, "Weight of the bonus.", ge=0)
    drop_divergent: float = option(
        0.0, "Share of tokens, those on whose value the critics differ most, that get no bonus (AsyPPO).", ge=0, lt=1
    )


class FilterConfig(Section):
    """Which groups and rollouts are trained."""

    skip_zero_variance: bool = option(
        True,
        "Leave out groups whose rewards are all equal: they say nothing. What is left out is counted.",
    )
    metric: Literal["reward", "accuracy"] = option(
        "reward",
        "What a group is judged by, above and below. `reward`: the reward that is trained, shaped by "
        "`algorithm.reward` but before a KL penalty. `accuracy`: the verifier's verdict, 1 or 0, whatever the reward "
        "is; without a verdict the reward as it was given (DAPO).",
    )
    min_mean: float | None = option(None, "Leave out groups whose mean reward is not above this.")
    max_mean: float | None = option(None, "Leave out groups whose mean reward is not below this.")
    min_std: float | None = option(
        None, "Leave out groups whose (population) standard deviation is not above this.", ge=0
    )
    drop_unfinished: bool = option(False, "Leave out rollouts that were cut off (overlong filtering).")
    keep: Literal["all", "positive", "best", "worst", "extremes"] = option(
        "all",
        "Rollouts of a group that are trained: all, those with a positive reward (RAFT), the `keep_num` best, worst, "
        "or best and worst; always by the reward that is trained.",
    )
    keep_num: int = option(2, "How many `best`, `worst` or `extremes` (of each end) keep.", ge=1)
    top_variance: float = option(
        1.0, "Share of groups that are trained: those with the largest deviation of reward (StarPO-S).", gt=0, le=1
    )
    refill: bool = option(
        False, "Draw more prompts until prompts_per_step groups pass the filters (dynamic sampling, DAPO)."
    )
    max_refills: int = option(3, "Groups drawn instead of others, at most, as a multiple of prompts_per_step.", ge=1)

    @property
    def leaves_groups_out(self) -> bool:
        """Whether any filter can drop a whole group."""
        bounds = (self.min_mean, self.max_mean, self.min_std)
        some = self.skip_zero_variance or self.drop_unfinished or self.keep == "positive"
        return some or any(bound is not None for bound in bounds)

    @model_validator(mode="after")
    def _satisfiable(self) -> FilterConfig:
        if self.min_mean is not None and self.max_mean is not None and self.min_mean >= self.max_mean:
            raise ValueError(f"min_mean {self.min_mean:g} is not below max_mean {self.max_mean:g}: no group would pass")
        return self


class WeightConfig(Section):
    """Factors on the advantages of whole rollouts, rescaled to mean 1."""

    difficulty: bool = option(False, "0.5 + 1.5 x (1 - mean accuracy of the group): harder prompts count more.")
    length: bool = option(False, "1.5 - length / longest: shorter answers count more.")


class ImitationConfig(Section):
    """Demonstrations from the data (`expert_key`), or turns replayed for a group (`anchors` of the pipeline
    `agentic`), as further rollouts of their prompts.

    They are part of no baseline and no filter, and do not train the critic: a demonstration's tokens have the objective
    weight x G log pi, where G is its own (shaped) reward, discounted per turn if the estimator has turns. A
    demonstration without a positive reward is dropped.
    """

    weight: float = option(1.0, "IPA's lambda_IL: factor on a demonstration's tokens; 0 leaves all out.", ge=0)
    when: Literal["always", "unsolved"] = option(
        "always",
        "`always`: with every prompt that has a demonstration. `unsolved`: only where no rollout of the policy "
        "got as much reward as it.",
    )


class UpdateConfig(Section):
    """How often a batch is used; with more than one update, old log-probs are computed first and kept fixed."""

    num_minibatches: int = option(1, "Parts of a step's batch, with an optimiser step each.", ge=1)
    num_epochs: int = option(1, "Passes over the batch.", ge=1)


class CriticConfig(Section):
    """The value model of `estimator: gae`; not loaded with other estimators."""

    model: str | None = path_option(None, "Its backbone; by default the policy's initial model.")
    num_critics: int = option(
        1, "Several learn from disjoint shares of every group's rollouts, and their mean counts (AsyPPO).", ge=1
    )
    learning_rate: float = option(1e-5, "Peak learning rate.", gt=0)
    value_clip: float | None = option(None, "A value's update counts only up to ± this from the old value.", gt=0)
    warmup_steps: int = option(0, "First steps in which critics alone are trained.", unit="steps", ge=0)
    num_epochs: int = option(1, "Passes over each batch.", ge=1)
    shared: bool = option(
        False,
        "One value head on the policy's own network instead of a model of its own: it learns in the policy's updates.",
    )
    coefficient: float = option(
        0.1, "`shared`: weight of the value loss relative to the policy loss; both update the shared network.", gt=0
    )
    head_learning_rate: float = option(
        1e-4,
        "`shared`: peak learning rate of the head, which begins at 0; its network has training.learning_rate.",
        gt=0,
    )
    drop_agreed: float = option(
        0.0, "Share of tokens, those on whose value the critics agree most, whose advantage becomes 0 (AsyPPO).", ge=0,
        lt=1,
    )  # fmt: skip


class CreditConfig(Section):
    """Advantages weighted by how much the model's own attention uses a token: arXiv 2510.13554."""

    type: Literal["none", "local", "global", "coupled"] = option(
        "none",
        "`local`: tokens where attention jumps far back (WAAD). `global`: tokens that later ones attend to (FAI). "
        "`coupled`: both.",
    )
    amplification: float = option(1.5, "Factor on the advantages of chosen tokens.", ge=1)
    share: float = option(0.4, "Share of each answer's tokens that is chosen.", gt=0, le=1)
    window: int = option(10, "Distances count up to this in WAAD.", unit="tokens", ge=1)
    horizon_start: int = option(
        10, "FAI counts attention from tokens that are at least this much later.", unit="tokens", ge=1
    )
    horizon_end: int = option(
        100, "FAI counts attention from tokens that are at most this much later.", unit="tokens", ge=1
    )
    introduction: int = option(3, "`coupled`: how many tokens back an anchor's introduction is looked for.", ge=1)
    back_share: float = option(0.5, "`coupled`: share of an anchor's amplification that goes to it.", ge=0, le=1)
    calm_quantile: float = option(
        0.5, "`coupled`: only an anchor whose WAAD is at most this quantile of its answer's shares.", ge=0, le=1
    )
    jump_quantile: float = option(
        0.6, "`coupled`: an introduction's jump in WAAD is at least this quantile of its answer's.", ge=0, le=1
    )

    @model_validator(mode="after")
    def _a_range(self) -> CreditConfig:
        if self.horizon_start > self.horizon_end:
            raise ValueError(f"horizon_start {self.horizon_start} exceeds horizon_end {self.horizon_end}")
        return self

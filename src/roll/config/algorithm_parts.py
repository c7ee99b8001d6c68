"""The parts of an algorithm; `AlgorithmConfig` combines them, and a preset selects them."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import FUNCTION_PATTERN, Section, option, path_option

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
    """Reward shaping before advantages are computed; the recorded reward is not shaped.

    An environment's rewards for single turns are only scaled; all other changes apply to the rest of the reward.
    """

    scale: float = option(1.0, "Scale factor for the reward.", gt=0)
    shift: float = option(0.0, "Constant that is added after scaling.")
    clip: float | None = option(None, "Clip range c: the shifted reward is clipped to [-c, c].", gt=0)
    overlong_buffer: int = option(
        0,
        "Soft overlong penalty (DAPO): over the last N tokens before `rollout.max_new_tokens`, the penalty grows "
        "from 0 to `overlong_penalty`. 0 disables the penalty.",
        unit="tokens",
        ge=0,
    )
    overlong_penalty: float = option(1.0, "Maximum of the soft overlong penalty.", ge=0)
    format_penalty: float = option(
        0.0, "Penalty for an answer that was truncated, or in which the verifier found no answer.", ge=0
    )


class AdvantageConfig(Section):
    """The advantage of every token: (reward - mean) / std, then returns, then whitening, then clipping."""

    estimator: Literal["outcome", "token", "turn", "chunk", "anchor_state", "gae"] = option(
        "outcome",
        "How advantages are estimated. `outcome`: one value per rollout. `token`: discounted sum of the rewards "
        "after each token. `turn`: discounted sum of the rewards after each turn (ReBN). `chunk`: the rollout's "
        "value, discounted by the number of turns that follow (IPA). `anchor_state`: the episode's advantage plus "
        "the step's advantage (GiGPO). `gae`: generalized advantage estimation with a critic.",
    )
    mean: Literal["none", "group", "batch", "running", "leave_one_out", "length_weighted", "greedy"] = option(
        "group",
        "Baseline that is subtracted from a reward. `group`, `batch`, `running`: mean over the group, the "
        "batch, or the run so far. `leave_one_out`: mean over the group's other rollouts (RLOO). "
        "`length_weighted`: mean over the group, weighted by length (OPO). `greedy`: reward of a greedy answer "
        "(ReMax). `none`: no baseline.",
    )
    std: Literal["none", "group", "batch", "running"] = option(
        "group",
        "Standard deviation that normalizes (reward - baseline). `group`, `batch`, `running`: over the group, "
        "the batch, or the run so far. `none`: no scaling.",
    )
    per_domain: bool = option(
        True,
        "Whether the means and standard deviations of `batch` and `running` are computed separately for each domain.",
    )
    gamma: float = option(1.0, "Discount factor per token, or per turn for estimators on turns.", ge=0, le=1)
    gae_lambda: float = option(0.95, "GAE's lambda; 1 is the Monte Carlo return.", ge=0, le=1)
    step_weight: float = option(1.0, "GiGPO: weight of the step advantage relative to the episode advantage.", ge=0)
    whiten: Literal["none", "token", "turn"] = option(
        "none",
        "Whether advantages are whitened (mean 0, standard deviation 1) over all tokens or over all turns of the "
        "batch.",
    )
    clip: float | None = option(None, "Bound on the absolute value of an advantage, after whitening.", gt=0)
    function: str | None = path_option(
        None,
        "A user-defined estimator, which replaces the other keys: `package.module:function` or "
        "`path/to/file.py:function`.",
        examples=["examples/algorithms/median_baseline.py:advantages"],
        pattern=FUNCTION_PATTERN,
    )


class RatioConfig(Section):
    """The importance ratio of the surrogate objective: a token's new probability divided by its old probability."""

    level: Literal["token", "chunk", "sequence", "sequence_token"] = option(
        "token",
        "Level of the ratio. `token`, `chunk`, `sequence`: one value per token, per chunk (turn) or per sequence. "
        "`sequence_token`: the sequence's value with the gradient of each token (GSPO-token).",
    )
    reduce: Literal["geometric", "product"] = option(
        "geometric",
        "How the ratio of a chunk or sequence is computed: as the geometric mean or the product of its tokens' ratios.",
    )
    against: Literal["old", "rollout", "behavior"] = option(
        "old",
        "Denominator of the ratio. `old`: the trainer's probabilities under the policy before the update; the ratio "
        "covers only the update. `behavior`: the trainer's probabilities under the policy version that sampled each "
        "token; the ratio also covers staleness and needs snapshots (see `correction.snapshots`). `rollout`: the "
        "engine's probabilities; the ratio also covers staleness and mismatch.",
    )
    max_token_log_ratio: float | None = option(
        None,
        "Clip range of a token's log-ratio, in the direction that increases the objective, before the mean over a "
        "sequence (GMPO).",
        gt=0,
    )


class KLConfig(Section):
    """KL penalty relative to the reference model, which is not loaded if the coefficient is 0."""

    coefficient: float = option(0.0, "Weight of the penalty.", ge=0)
    estimator: Literal["k1", "k2", "k3", "absolute", "full"] = option(
        "k3",
        "Estimator of the divergence per token (Schulman 2020). `full`: the exact sum over the vocabulary. Use `k1` "
        "only with `apply_to: reward`, because in the loss its gradient is 0 in expectation.",
    )
    apply_to: Literal["loss", "reward"] = option(
        "loss",
        "`loss`: the penalty is a term of the loss. `reward`: the penalty is subtracted from the reward before "
        "baseline and scaling. It is summed over each answer or each turn, or applied per token, depending on the "
        "level of the rewards. Filters ignore the penalty.",
    )
    target: float | None = option(
        None,
        "Target divergence. The coefficient adapts to reach it (Ziegler 2019). `null`: the coefficient is constant.",
        gt=0,
    )
    horizon: int = option(10_000, "Number of rollouts over which the coefficient adapts.", unit="rollouts", ge=1)

    @model_validator(mode="after")
    def _check_combinations(self) -> KLConfig:
        if self.estimator == "full" and self.apply_to == "reward":
            raise ValueError("`estimator: full` works only in the loss: set `apply_to: loss`, or `estimator: k1`")
        if self.target is not None and self.coefficient == 0:
            raise ValueError("target requires an initial coefficient above 0, such as 0.1, got 0")
        return self


class EntropyConfig(Section):
    """Entropy bonus, exact over the vocabulary; not computed if the coefficient is 0."""

    coefficient: float = option(0.0, "Weight of the bonus.", ge=0)
    drop_divergent: float = option(
        0.0,
        "Fraction of tokens that get no bonus: the tokens with the largest disagreement of the critics (AsyPPO).",
        ge=0,
        lt=1,
    )


class FilterConfig(Section):
    """Filters that select the groups and rollouts to train on."""

    skip_zero_variance: bool = option(
        True,
        "Whether to drop groups whose rewards are all equal, because their advantages are 0. With a KL penalty, set "
        "this to `false` to apply the penalty also to prompts that the policy always solves.",
    )
    metric: Literal["reward", "accuracy"] = option(
        "reward",
        "Value by which groups are filtered. `reward`: the reward shaped by `algorithm.reward`, before a KL "
        "penalty. `accuracy`: the verifier's verdict, 1 or 0, independent of the reward; if there is no verdict, the "
        "reward before shaping (DAPO).",
    )
    min_mean: float | None = option(None, "Drop groups whose mean is not above this value.")
    max_mean: float | None = option(None, "Drop groups whose mean is not below this value.")
    min_std: float | None = option(
        None, "Drop groups whose (population) standard deviation is not above this value.", ge=0
    )
    drop_unfinished: bool = option(False, "Whether to drop truncated rollouts (overlong filtering).")
    keep: Literal["all", "positive", "best", "worst", "extremes"] = option(
        "all",
        "Rollouts of a group to train on, selected by the shaped reward. `all`: all rollouts. `positive`: those with "
        "a positive reward (RAFT). `best`: the `keep_num` best. `worst`: the `keep_num` worst. `extremes`: the "
        "`keep_num` best and the `keep_num` worst.",
    )
    keep_num: int = option(
        2, "Number of rollouts that `best` or `worst` keeps; `extremes` keeps twice this number.", ge=1
    )
    top_variance: float = option(
        1.0, "Fraction of groups to train on, those with the largest standard deviation (StarPO-S).", gt=0, le=1
    )
    refill: bool = option(
        False,
        "Whether to sample more prompts until prompts_per_step groups pass the filters (dynamic sampling, DAPO).",
    )
    max_refills: int = option(3, "Maximum number of replacement groups, as a multiple of prompts_per_step.", ge=1)

    @property
    def can_drop_groups(self) -> bool:
        """True if any filter can drop a whole group."""
        bounds = (self.min_mean, self.max_mean, self.min_std)
        some = self.skip_zero_variance or self.drop_unfinished or self.keep == "positive"
        return some or any(bound is not None for bound in bounds)

    @model_validator(mode="after")
    def _check_bounds(self) -> FilterConfig:
        if self.min_mean is not None and self.max_mean is not None and self.min_mean >= self.max_mean:
            raise ValueError(
                f"min_mean must be < max_mean, got {self.min_mean:g} and {self.max_mean:g}: no group would pass"
            )
        return self


class WeightConfig(Section):
    """Weights that multiply the advantages of rollouts. They are normalized to mean 1."""

    difficulty: bool = option(
        False, "Whether harder prompts have larger weights: 0.5 + 1.5 x (1 - mean accuracy of the group)."
    )
    length: bool = option(
        False, "Whether shorter answers have larger weights: 1.5 - length / length of the longest answer."
    )


class ImitationConfig(Section):
    """Training on demonstrations from the data (`expert_key`), or on turns that are replayed for a group (`anchors` of
    the pipeline `agentic`), as additional rollouts.

    Demonstrations are excluded from baselines and filters, and do not train the critic. The objective of a
    demonstration's tokens is weight x G log pi, where G is the demonstration's (shaped) reward, discounted per turn if
    the estimator works on turns. A demonstration without a positive reward is dropped.
    """

    weight: float = option(
        1.0, "Weight of the demonstrations' tokens in the loss (lambda_IL of IPA); 0 drops all demonstrations.", ge=0
    )
    when: Literal["always", "unsolved"] = option(
        "always",
        "When a demonstration is imitated. `always`: for every prompt that has one. `unsolved`: only if no rollout "
        "of the policy reaches the demonstration's reward.",
    )


class UpdateConfig(Section):
    """Number of updates from each batch. With more than one update, the old log-probs are computed once, before the
    first update.
    """

    num_minibatches: int = option(
        1, "Number of mini-batches into which a step's batch is split, each with one optimizer step.", ge=1
    )
    num_epochs: int = option(1, "Number of passes over the batch.", ge=1)


class CriticConfig(Section):
    """Value models (critics) for `advantage.estimator: gae`; they are not loaded with other estimators."""

    model: str | None = path_option(None, "Backbone of the critics; by default the policy's initial model.")
    num_critics: int = option(
        1,
        "Number of critics. Several critics are trained on disjoint parts of every group's rollouts, and the mean of "
        "their values is used (AsyPPO).",
        ge=1,
    )
    learning_rate: float = option(1e-5, "Peak learning rate.", gt=0)
    value_clip: float | None = option(
        None, "Clip range of a value around the old value, as in PPO implementations; `null` disables clipping.", gt=0
    )
    warmup_steps: int = option(0, "Number of initial steps in which only the critics are trained.", unit="steps", ge=0)
    num_epochs: int = option(1, "Number of passes over each batch.", ge=1)
    shared: bool = option(
        False,
        "Whether the critic is a value head on the policy's network instead of a separate model. The head is trained "
        "in the policy's updates.",
    )
    coefficient: float = option(
        0.1, "`shared`: weight of the value loss relative to the policy loss; both update the shared network.", gt=0
    )
    head_learning_rate: float = option(
        1e-4,
        "`shared`: peak learning rate of the head, which is initialized with 0; the network itself uses "
        "training.learning_rate.",
        gt=0,
    )
    drop_agreed: float = option(
        0.0,
        "Fraction of tokens whose advantage is set to 0: the tokens with the smallest disagreement of the critics "
        "(AsyPPO).",
        ge=0,
        lt=1,
    )


class CreditConfig(Section):
    """Advantages weighted by the model's attention to each token (arXiv 2510.13554)."""

    type: Literal["none", "local", "global", "coupled"] = option(
        "none",
        "Which tokens are amplified. `local`: tokens at which attention jumps far back (measured by WAAD); a phrase "
        "begins there. `global`: anchors, which are the tokens that later tokens attend to most (measured by FAI). "
        "`coupled`: both; an anchor inside a phrase shares its amplification with its introduction, which is the "
        "token that begins the phrase.",
    )
    amplification: float = option(1.5, "Factor on the advantages of amplified tokens.", ge=1)
    share: float = option(0.4, "Fraction of each answer's tokens that is amplified.", gt=0, le=1)
    window: int = option(10, "Distance at which WAAD truncates larger attention distances.", unit="tokens", ge=1)
    horizon_start: int = option(
        10, "Minimum distance of later tokens whose attention FAI includes.", unit="tokens", ge=1
    )
    horizon_end: int = option(
        100, "Maximum distance of later tokens whose attention FAI includes.", unit="tokens", ge=1
    )
    introduction_window: int = option(
        3, "`coupled`: number of tokens before an anchor that are searched for its introduction.", ge=1
    )
    introduction_share: float = option(
        0.5, "`coupled`: fraction of an anchor's amplification that moves to its introduction.", ge=0, le=1
    )
    waad_quantile: float = option(
        0.5,
        "`coupled`: an anchor shares its amplification if its WAAD is at most this quantile of the answer's "
        "WAAD values.",
        ge=0,
        le=1,
    )
    jump_quantile: float = option(
        0.6,
        "`coupled`: a token is treated as an introduction if its jump in WAAD is at least this quantile of the "
        "answer's jumps.",
        ge=0,
        le=1,
    )

    @model_validator(mode="after")
    def _check_horizon(self) -> CreditConfig:
        if self.horizon_start > self.horizon_end:
            raise ValueError(f"horizon_start must be <= horizon_end, got {self.horizon_start} and {self.horizon_end}")
        return self

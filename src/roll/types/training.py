"""Inputs and outputs of trainers: samples, batches, the needs of losses, and the results of steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias, TypeVar

from roll.errors import DataError
from roll.types.arrays import BoolArray, FloatArray, IntArray
from roll.types.media import MediaSpan, check_spans

__all__ = [
    "AttentionRange",
    "AttentionStatistics",
    "BatchCounts",
    "Divergence",
    "ForwardBackwardResult",
    "ForwardOptions",
    "LossRequirements",
    "OptimParams",
    "OptimResult",
    "OutputName",
    "Outputs",
    "StepResult",
    "TopLogprobs",
    "TrainingBatch",
    "TrainingSample",
]

T = TypeVar("T")

OutputName: TypeAlias = Literal["logprobs", "values", "attention", "top_logprobs", "experts"]
Outputs: TypeAlias = Collection[OutputName]
"""Outputs of a trainer's forward pass, for every sample: `logprobs` [L] of its tokens, `values` [L] of the states
before the loss tokens, `attention` as `AttentionStatistics`, `top_logprobs` as `TopLogprobs`, `experts` as
`TrainingSample.experts`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRange:
    """Range of token distances that attention statistics include; see `roll.algorithms.credit`."""

    window: int
    """Window of WAAD, to which greater distances are clamped."""
    horizon: tuple[int, int]
    """Range of distances that FAI includes: the first and the last distance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """Divergence of the policy p from a teacher q, over the whole vocabulary."""

    kind: Literal["reverse", "forward", "jsd"] = "reverse"
    """KL(p || q), KL(q || p), or beta KL(q || r) + (1 - beta) KL(p || r) with r = (1 - beta) p + beta q."""
    beta: float = 0.5
    """Beta of `jsd`, between 0 and 1; near 0, `jsd` is beta times `forward`, near 1, it is 1 - beta times `reverse`."""
    temperature: float | None = None
    """Temperature of both distributions; `None` means the temperature of the batch."""

    def __post_init__(self) -> None:
        if self.kind == "jsd" and not 0 < self.beta < 1:
            raise ValueError(
                f"beta of the divergence `jsd` must be > 0 and < 1, got {self.beta}: use the divergence `forward` "
                "instead of 0, or `reverse` instead of 1"
            )
        if self.temperature is not None and self.temperature <= 0:
            raise ValueError(f"the divergence's temperature must be > 0, got {self.temperature}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRequirements:
    """Inputs that a loss needs in addition to the network's predictions; known before the forward pass."""

    entropy: bool = False
    """Entropy of the policy's distributions over the vocabulary."""
    full_kl: bool = False
    """KL divergence of the policy's distributions from the reference's."""
    values: bool = False
    """Values of a value head on the policy's network, with returns and, if samples have them, old values."""
    attention: AttentionRange | None = None
    """Attention statistics of every sequence, over this range."""
    divergence: Divergence | None = None
    """Divergence of the policy's distributions from a teacher that the trainer has loaded."""
    top_logprobs: bool = False
    """The policy's log-probs of the tokens of `TrainingSample.teacher_top`."""
    whole_units: bool = False
    """True if all samples of a unit must be in one micro-batch, because the loss compares them."""
    whole_sequences: bool = False
    """True if all samples of a sequence must be in one micro-batch, because the loss may pool over the sequence's
    tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionStatistics:
    """Attention statistics of a sample's tokens: see `roll.algorithms.credit`. Values before the answer are 0."""

    waad: FloatArray
    """[L] windowed average attention distance of the local heads, in tokens."""
    fai: FloatArray
    """[L] future attention influence in the global heads, 0 … 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopLogprobs:
    """Top-k token IDs and log-probs of a model, such as a teacher, at a sample's loss tokens; 0 at all other tokens."""

    token_ids: IntArray
    """Shape [L, k]."""
    logprobs: FloatArray
    """[L, k] log-probs under the whole distribution over the vocabulary, descending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSample:
    """One flat token sequence for the trainer. All arrays are [L], aligned with `token_ids`.

    Every sample has the fields up to `positions`; the other fields are columns that some losses need. Entry i of a
    log-prob array belongs to token i, given tokens 0 … i-1. Entry 0 is never trained on.
    """

    sample_id: str
    unit: int
    """Index of the sample's unit: the rollouts of a group, or the two answers of a pair. The trainer computes the
    common prefix of a unit's samples only once. See `LossRequirements.whole_units`."""
    sequence: str = ""
    """Key that the samples of one sequence share; they are adjacent in their batch. A rollout whose history was
    rewritten has several samples. If empty, the sample is a whole sequence. See `LossRequirements.whole_sequences`."""
    prefix_length: int = 0
    """Length of the context before the sample's generated tokens."""
    token_ids: IntArray
    loss_mask: BoolArray
    """True for loss tokens: tokens that the policy sampled or imitates."""
    target_ids: IntArray | None = None
    """Tokens to predict instead of `token_ids`: entry i is predicted from tokens 0 … i-1. `None` means `token_ids`."""
    media: tuple[MediaSpan, ...] = ()
    """Media spans in `token_ids`; empty for text."""
    positions: IntArray | FloatArray | None = None
    """[L] or [3, L] position ids of the rotary embedding; `None` means 0, 1, 2, … as for text. Only videos have
    fractional positions."""
    domain: str = ""
    """Domain of the sample's example."""
    advantages: FloatArray | None = None
    rollout_logprobs: FloatArray | None = None
    """Log-probs of the engine; 0 outside `loss_mask`."""
    old_logprobs: FloatArray | None = None
    """Log-probs of the trainer before the update; `None` if they equal the log-probs at the first update."""
    behavior_logprobs: FloatArray | None = None
    """Log-probs of the trainer under the policy version that sampled each token; NaN if that version is the policy
    before the update, or is unknown. `None` means NaN everywhere."""
    ref_logprobs: FloatArray | None = None
    policy_versions: IntArray | None = None
    chunk_ids: IntArray | None = None
    """Turn of the rollout that a token belongs to, ascending; -1 outside `loss_mask`. `None` means a single turn."""
    entropy_mask: BoolArray | None = None
    """True for tokens with an entropy bonus; `None` means all tokens."""
    max_length: int = 1
    """Largest number of tokens after this prompt, over all turns; for constant-length aggregation."""
    expert: bool = False
    """True if the sample is a demonstration, which is imitated regardless of the ratio."""
    returns: FloatArray | None = None
    """Critic's target for the state before each token."""
    old_values: FloatArray | None = None
    """Critic's value before the update."""
    preferred: bool | None = None
    """True if the answer is the better one of a pair, or a desirable single answer."""
    target: float | None = None
    """Margin of its pair, or target score of a reward model."""
    teacher_logprobs: FloatArray | None = None
    """Log-probs of the teacher."""
    teacher_top: TopLogprobs | None = None
    """Top-k tokens of the teacher."""
    teacher: int = 0
    """Index of the teacher for the divergence in a loss, if the trainer has several teachers."""
    attention: AttentionStatistics | None = None
    """Attention statistics of the policy before the update. If `None`, the forward pass of the update computes them if
    a loss needs them."""
    experts: IntArray | None = None
    """[L, layers, k] int8 or int16: experts that MoE routers chose for each token in the pass before the update or in
    the engine, to be replayed; -1 means the router's own choice."""

    def __post_init__(self) -> None:
        for name in _TOKEN_ALIGNED_FIELDS:
            values = getattr(self, name)
            if values is not None and len(values) != len(self.token_ids):
                raise DataError(
                    f"sample '{self.sample_id}' has {len(self.token_ids)} tokens, but {name} has {len(values)} "
                    "entries: every array of a sample must have one entry per token."
                )
        check_spans(self.media, len(self.token_ids), f"sample '{self.sample_id}'")
        if self.positions is not None and self.positions.shape not in ((len(self),), (3, len(self))):
            raise DataError(
                f"sample '{self.sample_id}' has {len(self)} tokens, but positions have the shape "
                f"{self.positions.shape}: the shape must be [L] or [3, L]."
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def predicted_ids(self) -> IntArray:
        """The tokens to predict: `target_ids` if given, else `token_ids`."""
        return self.token_ids if self.target_ids is None else self.target_ids


_TOKEN_ALIGNED_FIELDS = (
    "loss_mask",
    "target_ids",
    "advantages",
    "rollout_logprobs",
    "old_logprobs",
    "behavior_logprobs",
    "ref_logprobs",
    "policy_versions",
    "chunk_ids",
    "entropy_mask",
    "returns",
    "old_values",
    "teacher_logprobs",
    "experts",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCounts:
    """Counts over all samples of one optimizer update; losses are divided by these counts."""

    num_tokens: float
    """Number of loss tokens."""
    num_expert_tokens: float = 0.0
    """Number of loss tokens in demonstrations."""
    num_sequences: float = 0.0
    """Number of sequences with a loss token."""
    num_units: float = 0.0
    """Number of units (groups, pairs) with a loss token."""
    num_preferred: float = 0.0
    """Number of preferred sequences with a loss token."""
    num_preferred_tokens: float = 0.0
    """Number of loss tokens of preferred samples."""

    def __add__(self, other: BatchCounts) -> BatchCounts:
        """Return the summed counts of two batches, which must not share sequences or units."""
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return BatchCounts(**sums)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBatch:
    """The samples of one optimizer update, or a part of them, over all ranks."""

    samples: tuple[TrainingSample, ...]
    temperature: float = 1.0
    """Log-probs are computed from `logits / temperature`, as in sampling."""
    held: frozenset[int] | None = None
    """Indices of the samples whose arrays are complete on this rank; the others have placeholders. `None` means all.
    See `roll.training.packing.division`."""

    @property
    def held_samples(self) -> list[TrainingSample]:
        """Samples whose arrays are complete."""
        return [sample for i, sample in enumerate(self.samples) if self.held is None or i in self.held]

    @property
    def num_loss_tokens(self) -> int:
        """Number of loss tokens in the whole batch."""
        return int(sum(int(s.loss_mask.sum()) for s in self.samples))

    @property
    def num_expert_tokens(self) -> int:
        """Number of loss tokens of demonstrations in the whole batch."""
        return int(sum(int(s.loss_mask.sum()) for s in self.samples if s.expert))

    @property
    def sequences(self) -> list[list[int]]:
        """Indices of the samples of each sequence; sequences are in the order of their first samples."""
        places: dict[str | int, list[int]] = {}
        for i, sample in enumerate(self.samples):
            places.setdefault(sample.sequence or i, []).append(i)
        return list(places.values())

    def expand_to_samples(self, values: Sequence[T]) -> list[T]:
        """Expand one value per sequence to one value per sample, in the order of samples."""
        known = {i: one for own, one in zip(self.sequences, values, strict=True) for i in own}
        return [known[i] for i in range(len(self.samples))]

    @property
    def num_sequences(self) -> int:
        """Number of sequences with at least one loss token, in the whole batch."""
        return len({s.sequence or i for i, s in enumerate(self.samples) if s.loss_mask.any()})

    @property
    def num_units(self) -> int:
        """Number of loss units with at least one loss token, in the whole batch."""
        return len({s.unit for s in self.samples if s.loss_mask.any()})

    @property
    def num_preferred(self) -> int:
        """Number of preferred sequences with at least one loss token, in the whole batch."""
        return len({s.sequence or i for i, s in enumerate(self.samples) if s.preferred and s.loss_mask.any()})

    @property
    def num_preferred_tokens(self) -> int:
        """Number of loss tokens of preferred samples in the whole batch."""
        return int(sum(int(s.loss_mask.sum()) for s in self.samples if s.preferred))

    @property
    def counts(self) -> BatchCounts:
        """Counts of an optimizer update that trains only on this batch."""
        return BatchCounts(
            num_tokens=float(self.num_loss_tokens),
            num_expert_tokens=float(self.num_expert_tokens),
            num_sequences=float(self.num_sequences),
            num_units=float(self.num_units),
            num_preferred=float(self.num_preferred),
            num_preferred_tokens=float(self.num_preferred_tokens),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimParams:
    """Optimizer settings of one update; `None` means the configured value. A trainer may support only some of them."""

    learning_rate: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    epsilon: float | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardOptions:
    """Options of a trainer's forward pass without a loss."""

    attention: AttentionRange | None = None
    """Token distances for the output `attention`; see `roll.algorithms.credit`."""
    num_top: int | None = None
    """Number of most likely tokens, k, in the output `top_logprobs`."""
    adapter: bool = True
    """If False, LoRA adapters are disabled, so the result is that of the policy before training."""
    version: int | None = None
    """Policy version of the weight snapshot to compute with; by default the current weights are used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBackwardResult:
    """Results of the forward passes of a batch."""

    loss: float
    """The batch's contribution to the loss; the contributions of all batches of an update add up to its loss."""
    num_tokens: int
    """Number of tokens in the forward pass; a shared prefix is counted once."""
    num_loss_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    maxima: Mapping[str, float] = field(default_factory=dict)
    """Maxima of metrics over the batch; `metrics` has the sums. See `LossOutputs`."""
    logprobs: tuple[FloatArray, ...] = ()
    """[L] per sample, from the forward pass before the update; empty for a back-end that does not return them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimResult:
    """Results of an optimizer update."""

    grad_norm: float
    """Global norm of the scaled gradient, before clipping."""
    learning_rate: float
    stepped: bool
    """False if the loss or the gradient is not finite: weights, optimizer and schedule are then unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult(ForwardBackwardResult):
    """Results of a training step: the forward and backward passes of a batch, and one update."""

    grad_norm: float = 0.0
    """Global norm of the gradient, before clipping."""
    learning_rate: float = 0.0
    stepped: bool = False
    """False if there is no loss token or a gradient is not finite: weights, optimizer and schedule are then
    unchanged."""
    timings_s: Mapping[str, float] = field(default_factory=dict)

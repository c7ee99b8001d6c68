"""The nouns of ROLL: every record that crosses a room or a process.

Records are frozen and keyword-only. Arrays are NumPy, one entry per token, aligned with `token_ids`; shapes use

    P  prompt tokens          T  generated tokens of one rollout        L = P + T  tokens of a training sample

A prompt is *drawn* (`PromptDraw`, with an id that the data ledger follows), attempted `group_size` times (`Rollout`s of
one `Group`), and each scored rollout becomes a `TrainingSample`. Control never rides in data.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int32]
FloatArray: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
FinishReason: TypeAlias = Literal["stop", "length", "abort"]
TRAIN, EXPERT = "train", "expert"
"""Purposes (`RolloutId.purpose`) of the rollouts that a step trains, and of demonstrations."""
Output: TypeAlias = Literal["logprobs", "values", "attention"]
Outputs: TypeAlias = Collection[Output]
"""What a trainer's forward pass says of every sample: `logprobs` [L] of its tokens, `values` [L] of the states before
the tokens that the loss counts, `attention` as `AttentionStatistics`."""


class Message(TypedDict):
    """One chat message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSettings:
    """Which environment a prompt's rollouts act in; name and options are those of `roll.envs.make`."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Plain data only."""
    seed: int | None = None
    """Of the episode, given to `reset`; `None` where the options say all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A task, as its source states it."""

    uid: str
    """Stable across runs and machines: `<source>/<key>`."""
    domain: str
    """Metrics and sampling quotas are kept per domain."""
    messages: tuple[Message, ...]
    answer: str = ""
    """What the verifier compares with; empty where a reward needs none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Anything else a reward wants; plain data only."""
    expert: tuple[str, ...] = ()
    """What an expert answered, turn by turn; empty where there is no demonstration."""
    environment: EnvironmentSettings | None = None
    """What speaks between two answers; `None`: a rollout is one answer."""
    turns: int = 1
    """Answers of one rollout, at most."""
    attachments: tuple[Any, ...] = ()
    """Multimodal inputs (pixel values with their grid, …), which text-only code does not look at; empty for text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptDraw:
    """A prompt taken from the data for one use. The ledger records what became of it."""

    draw_id: int
    """0, 1, 2, … in draw order over the whole run."""
    prompt: Prompt
    token_ids: IntArray
    """[P] the prompt rendered through the model's chat template, generation prompt included."""
    position: int = -1
    """Where its domain's stream stood: what is needed to draw it again; -1 for one that no stream drew."""


class Fate(StrEnum):
    """What became of a draw."""

    IN_FLIGHT = "in_flight"
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    EXPIRED = "expired"
    """Given up unseen: too old, or redundant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How an engine samples. `logprobs` it returns are under this distribution."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy; log-probs are then those of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    choices: tuple[int, ...] = ()
    """Only these tokens may be sampled, and `Generation.choice_logprobs` weighs them; empty: every token may."""
    seed: int | None = None
    """Of this request alone, so a re-issued request does not depend on its neighbours' randomness."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One call of the model: tokens in, tokens out."""

    request_id: str
    token_ids: IntArray
    """[P]"""
    sampling: SamplingParams
    priority: int = 0
    """Lower runs first where an engine must choose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What an engine made of a request; partial when `finish_reason` is `abort`."""

    request_id: str
    token_ids: IntArray
    """[T] includes the stop token that ended it."""
    logprobs: FloatArray
    """[T] of the sampled tokens, under the sampling distribution."""
    policy_versions: IntArray
    """[T] the policy version that made each token."""
    finish_reason: FinishReason
    engine_id: str = ""
    choice_logprobs: FloatArray | None = None
    """[T, choices] of every token in `SamplingParams.choices`, among these alone; `None` where there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutId:
    """Names one rollout of a run. Its text, such as `train-3.1`, is for engines, files and people alone."""

    purpose: str
    """What its prompt was drawn for (`SamplingPlan.purpose`): `train`, `eval`, …"""
    draw_id: int
    index: int

    def __str__(self) -> str:
        return f"{self.purpose}-{self.draw_id}.{self.index}"

    def request_id(self, turn: int = 0) -> str:
        """What engines call its request for a turn, counted from 0."""
        return f"{self}.t{turn}" if turn else str(self)


class RolloutStatus(StrEnum):
    """How an attempt ended."""

    COMPLETED = "completed"
    """Generated and scored; the score may be 0."""
    INFRA_ERROR = "infra_error"
    """We failed it: never a reward of 0, never in a baseline, always counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """A verifier's judgement of one rollout."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Each part's own value before weighting, by name; every one becomes a metric."""
    verdict: str = ""
    """In a word, for people: `correct`, `wrong`, `unfinished`, `no answer`."""
    correct: bool | None = None
    """Whether the task was solved, for accuracy; `None` where that has no meaning."""
    decisions: Mapping[str, bool] = field(default_factory=dict)
    """What each part that decides says of the task, by name; where they differ, one of them errs."""
    timed_out: tuple[str, ...] = ()
    """Parts whose verifier took longer than it may, by name: such an answer counts as wrong, unjudged."""
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What the policy wrote between two interactions with an environment."""

    start: int
    end: int
    """Its tokens are `token_ids[start:end]` of the rollout; those between turns are the environment's."""
    reward: float = 0.0
    """Of the environment, for this turn alone: part of the rollout's reward, whose rest comes with the last turn."""
    state: str = ""
    """Names the state in which the turn began: equal texts, equal states. Empty where states mean nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One attempt at a prompt."""

    draw_id: int
    index: int
    """0 … group_size - 1 within its group."""
    purpose: str = TRAIN
    """See `RolloutId`; whoever asked a loop for the rollout sets it."""
    prompt: Prompt
    prompt_token_ids: IntArray
    """[P]"""
    token_ids: IntArray
    """[T]"""
    logprobs: FloatArray
    """[T] `rollout_logprobs`: the engine's, under the sampling distribution."""
    policy_versions: IntArray
    """[T]"""
    finish_reason: FinishReason
    text: str
    """`token_ids` decoded without special tokens; for verifiers and people, never for training."""
    status: RolloutStatus = RolloutStatus.COMPLETED
    cause: str = ""
    """Of an `infra_error`."""
    reward: RewardResult | None = None
    engine_id: str = ""
    turns: tuple[Turn, ...] = ()
    """In order; empty: all of `token_ids` is one turn."""
    expert: bool = False
    """Not the policy's own: to be imitated. Its `logprobs` are 0."""

    @property
    def spans(self) -> tuple[Turn, ...]:
        """Its turns, also where it has only the one."""
        return self.turns or (Turn(start=0, end=len(self.token_ids)),)

    @property
    def rollout_id(self) -> RolloutId:
        """Unique in the run."""
        return RolloutId(purpose=self.purpose, draw_id=self.draw_id, index=self.index)

    @property
    def sample_id(self) -> str:
        """Unique among those of its purpose: of its training sample, and in tables of rollouts."""
        return f"{self.draw_id}.{self.index}"

    @property
    def finished(self) -> bool:
        """Whether the model ended its answer itself."""
        return self.finish_reason == "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All attempts at one drawn prompt."""

    draw: PromptDraw
    rollouts: tuple[Rollout, ...]

    @property
    def scored(self) -> tuple[Rollout, ...]:
        """The rollouts that have a reward; what infrastructure failed is left out."""
        return tuple(r for r in self.rollouts if r.status is RolloutStatus.COMPLETED and r.reward is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRange:
    """How far apart tokens are whose attention counts, in tokens: see `roll.algorithms.credit`."""

    window: int
    """Of WAAD: greater distances count as this."""
    horizon: tuple[int, int]
    """Of FAI: tokens so much later count, first and last included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a loss needs of the trainer beside its predictions; known before the forward pass."""

    entropy: bool = False
    """Of the policy's distributions over the vocabulary."""
    full_kl: bool = False
    """Their divergence from the reference's."""
    values: bool = False
    """Of a value head on the policy's network, with their returns and, where samples have them, the old values."""
    attention: AttentionRange | None = None
    """What the policy's attention says of every sequence, over this range."""
    whole_units: bool = False
    """All samples of a unit in one micro-batch, however long they are: the loss compares them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionStatistics:
    """What a policy's attention says of a sample's tokens: see `roll.algorithms.credit`. 0 before the answer."""

    waad: FloatArray
    """[L] windowed average attention distance of the local heads, in tokens."""
    fai: FloatArray
    """[L] future attention influence in the global heads, 0 … 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSample:
    """One flat token sequence for the trainer. All arrays are [L], aligned with `token_ids`.

    Every sample has the fields up to `attachments`; the others are columns that some losses need. Entry i of a log-prob
    array belongs to token i, given tokens 0 … i-1. Entry 0 is never trained on.
    """

    sample_id: str
    unit: int
    """Samples of one unit belong together: the rollouts of a group, the two answers of a pair. Those that begin with
    the same `prefix_length` tokens share them, computed once by the trainer. See `Needs.whole_units`."""
    prefix_length: int = 0
    token_ids: IntArray
    loss_mask: BoolArray
    """True where the loss counts the token: the policy sampled it, or is to imitate it."""
    attachments: tuple[Any, ...] = ()
    """As `Prompt.attachments`."""
    advantages: FloatArray | None = None
    rollout_logprobs: FloatArray | None = None
    """The engine's; 0 outside `loss_mask`."""
    old_logprobs: FloatArray | None = None
    """The trainer's before the update; `None` means: equal to the current ones at the first update."""
    ref_logprobs: FloatArray | None = None
    policy_versions: IntArray | None = None
    chunk_ids: IntArray | None = None
    """Which turn of the rollout a token belongs to, ascending; -1 outside `loss_mask`. `None`: all are one."""
    entropy_mask: BoolArray | None = None
    """Where an entropy bonus is paid; `None`: everywhere."""
    max_length: int = 1
    """Most tokens that the policy can write after this prompt, over all turns; for constant-length aggregation."""
    expert: bool = False
    """To be imitated, whatever the ratio."""
    returns: FloatArray | None = None
    """What a critic should say of the state before each token."""
    old_values: FloatArray | None = None
    """What it said before the update."""
    attention: AttentionStatistics | None = None
    """Of the policy before the update; `None` means: taken in the update's own forward pass where a loss asks."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBatch:
    """All samples of one optimiser step, over all ranks, with the counts that normalise the loss."""

    samples: tuple[TrainingSample, ...]
    temperature: float = 1.0
    """Log-probs are taken of `logits / temperature`, so that they are those of the sampling distribution."""

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that the loss counts, in the whole batch."""
        return int(sum(int(s.loss_mask.sum()) for s in self.samples))

    @property
    def num_sequences(self) -> int:
        """Samples with at least one token that the loss counts, in the whole batch."""
        return sum(bool(s.loss_mask.any()) for s in self.samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What an optimiser step did."""

    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    num_tokens: int
    """Tokens that went through the network (shared prefixes once)."""
    num_loss_tokens: int
    stepped: bool
    """False where gradients were not finite: weights, optimiser and schedule stayed as they were."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    maxima: Mapping[str, float] = field(default_factory=dict)
    """Of what the loss reports: sums and maxima over the batch. See `LossOutputs`."""
    logprobs: tuple[FloatArray, ...] = ()
    """Per sample [L], taken in the forward pass before the update; empty for a back-end that does not return them."""
    timings_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor of a weight sync, in the names of the HF checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """`bfloat16`, `float32`, … as torch spells it."""

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """An offer of weights to an engine: what will come, and how to fetch it."""

    policy_version: int
    manifest: tuple[TensorSpec, ...]
    transport: str
    """Name of the transport that the engine opens with `handle`."""
    handle: Any
    """Transport's own plain data (a shared-memory name, a process group's address, …)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightReceipt:
    """An engine's confirmation of an update."""

    engine_id: str
    policy_version: int
    checksums: Mapping[str, int]
    """By tensor name, 64 bits, of the bytes that the engine received and applied; the controller compares them with
    the sender's."""
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """How busy an engine is."""

    num_running: int
    num_waiting: int
    kv_used: float
    """Share of the KV cache in use, 0 … 1."""
    capacity: int
    """Requests it can run at once."""
    num_steps: int | None = None
    """Decoding steps that it has made since it started: what shows that it works. `None`: it does not count them, so
    that nobody can tell whether it hangs."""

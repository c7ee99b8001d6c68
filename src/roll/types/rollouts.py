"""Prompts, draws, rollouts and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

from roll.types.arrays import FloatArray, IntArray
from roll.types.generation import FinishReason
from roll.types.media import MediaSpan
from roll.types.messages import Message

__all__ = [
    "EXPERT",
    "TRAIN",
    "Anchor",
    "Branch",
    "DrawOutcome",
    "EnvironmentHost",
    "EnvironmentSettings",
    "Group",
    "History",
    "HistoryKind",
    "Prompt",
    "PromptDraw",
    "RewardResult",
    "Rollout",
    "RolloutId",
    "RolloutStatus",
    "Trajectory",
    "Turn",
]

EnvironmentHost: TypeAlias = Literal["loop", "pool", "sandbox", "http"]
TRAIN, EXPERT = "train", "expert"
"""Values of `RolloutId.purpose`: rollouts that a step trains on, and demonstrations."""


HistoryKind: TypeAlias = Literal["full", "window", "thinking_stripped", "stepwise", "summary"]


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The rule that selects earlier turns for the model's context; see `roll.config.episodes`."""

    kind: HistoryKind = "full"
    turns: int = 0
    """Number of turns in the window."""
    keep_task: bool = True
    """True if the prompt is kept when earlier turns are dropped."""
    summary_tokens: int = 256
    summary_request: str = ""
    train_summary: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSettings:
    """The environment of a prompt's rollouts; `name` and `options` are the arguments of `roll.envs.make`."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Plain data only."""
    seed: int | None = None
    """Seed of the episode, passed to `reset`; `None` if the options determine the episode."""
    history: History | None = None
    """The rule that selects earlier turns for the model's context; `None` uses the run's configuration."""
    opening: str = ""
    """Template of the first user message, in which `{prompt}` is replaced by the first observation; the prompt then
    contains only earlier messages. Empty if the prompt already contains the environment's task."""
    wrappers: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """Name (in `roll.envs.wrappers`) and options of each wrapper of the environment, the innermost first."""
    tools: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `roll.envs.tools.with_tools`; empty without tools."""
    host: EnvironmentHost | None = None
    """Where the environment runs. If `None`, built-in environments run in the event loop, and others in the worker
    pool."""
    url: str = ""
    """URL of the environment server, for the host `http`."""
    reset_time_limit_s: float = 60.0
    """Timeout of `reset`, after which the episode fails."""
    step_time_limit_s: float = 30.0
    """Timeout of `step`, after which the episode fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One task, as read from its source."""

    uid: str
    """ID of the prompt, `<source>/<key>`, stable across runs and machines."""
    domain: str
    """Domain of the prompt; metrics and sampling quotas are per domain."""
    messages: tuple[Message, ...]
    answer: str = ""
    """Reference answer for the verifier; empty if the reward needs none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other data for rewards; plain data only."""
    expert: tuple[str, ...] = ()
    """Answers of the expert's demonstration, one per turn; empty without a demonstration."""
    environment: EnvironmentSettings | None = None
    """Environment of the rollouts. If `None`, a rollout is a single answer."""
    turns: int = 1
    """Largest number of answers in one rollout."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the functions that the model may call, for the chat template."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the chat template, such as `enable_thinking`."""
    text: str | None = None
    """Plain text from the source, instead of messages. It may already include the chat template."""

    @property
    def prefill(self) -> str:
        """Start of the answer, which the model continues: the last message if it is from the assistant, otherwise
        empty.
        """
        return self.messages[-1].text if self.messages and self.messages[-1].role == "assistant" else ""

    @property
    def input_messages(self) -> tuple[Message, ...]:
        """All messages except the start of the answer (`prefill`), if there is one."""
        return self.messages[:-1] if self.messages and self.messages[-1].role == "assistant" else self.messages


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptDraw:
    """A prompt, sampled from the data for one group; the data ledger records the outcome."""

    draw_id: int
    """Index of the draw in the run: 0, 1, 2, …"""
    prompt: Prompt
    token_ids: IntArray
    """[P] tokens of the prompt rendered with the model's chat template, including the generation prompt."""
    position: int = -1
    """Position in its domain's stream, from which the prompt can be drawn again; -1 if it is not from a stream."""
    media: tuple[MediaSpan, ...] = ()
    """Media spans in `token_ids`; empty for text."""
    anchor: Anchor | None = None
    """Anchor at which all rollouts of the group begin. If `None`, they begin at the prompt."""

    @property
    def uid(self) -> str:
        """UID of the prompt."""
        return self.prompt.uid


class DrawOutcome(StrEnum):
    """The outcome of a sampled prompt or example, as recorded in the data ledger."""

    IN_FLIGHT = "in_flight"
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    EXPIRED = "expired"
    """Dropped without training, because the draw was too stale or redundant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutId:
    """The ID of a rollout, unique in the run.

    Its string form, such as `train-3.1`, is used only in engine requests, in files and for display.
    """

    purpose: str
    """Purpose of the sampling plan (`SamplingPlan.purpose`): `train`, `eval`, …"""
    draw_id: int
    index: int

    def __str__(self) -> str:
        return f"{self.purpose}-{self.draw_id}.{self.index}"

    def request_id(self, turn: int = 0) -> str:
        """Return the ID of the rollout's engine request for a turn, counted from 0."""
        return f"{self}.t{turn}" if turn else str(self)


class RolloutStatus(StrEnum):
    """Final status of a rollout."""

    COMPLETED = "completed"
    """Generated and scored; the score may be 0."""
    INFRA_ERROR = "infra_error"
    """Failed because of an infrastructure error; it has no reward and is excluded from baselines, but is counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """A verifier's judgment of one rollout."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Unweighted value of each reward component, by name; each becomes a metric."""
    verdict: str = ""
    """Human-readable verdict: `correct`, `wrong`, `unfinished`, `no answer`."""
    correct: bool | None = None
    """True if the task was solved (for the accuracy); `None` if the reward does not decide correctness."""
    decisions: Mapping[str, bool] = field(default_factory=dict)
    """Correctness according to each deciding component, by name. If components disagree, one of them is incorrect."""
    timed_out: tuple[str, ...] = ()
    """Names of components whose verifier timed out, so that the answer is treated as incorrect."""
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The tokens of one answer of the policy, between two environment steps."""

    start: int
    end: int
    """The turn's tokens are `token_ids[start:end]` of the rollout; tokens between turns come from the environment."""
    reward: float = 0.0
    """Environment reward for this turn, included in the rollout's reward; the remainder is assigned to the last
    turn."""
    state: str = ""
    """Key of the state in which the turn began: equal keys mean equal states. Empty if states are not comparable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """A point at which a rollout's history was rewritten by a sliding window, by removing thinking, or by a summary.

    A branch extends to the start of the next branch, or to the rollout's last token.
    """

    start: int
    """Start of a turn: `token_ids[start:]` of the rollout follow `context`, not the tokens before them."""
    context: IntArray
    """[C] context exactly as the engine received it."""
    media: tuple[MediaSpan, ...] = ()
    """Media spans in `context`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """A successful episode; new rollouts can continue from one of its turns. Fields are as in `Rollout`."""

    uid: str
    """UID of the episode's prompt."""
    prompt_token_ids: IntArray
    token_ids: IntArray
    turns: tuple[Turn, ...]
    branches: tuple[Branch, ...] = ()
    reward: float
    """Reward of the whole episode."""
    prompt_media: tuple[MediaSpan, ...] = ()
    media: tuple[MediaSpan, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """A point between two turns of an earlier episode. Rollouts replay the turns before it and continue from there."""

    trajectory: Trajectory
    num_turns: int
    """Number of replayed turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One attempt at a prompt."""

    draw_id: int
    index: int
    """0 … group_size - 1 within its group."""
    purpose: str = TRAIN
    """Purpose of the sampling plan, as in `RolloutId`; set by the caller of the rollout loop."""
    prompt: Prompt
    prompt_token_ids: IntArray
    """[P] tokens of the prompt; with `replayed` turns, the whole context of the first turn that is not replayed."""
    token_ids: IntArray
    """Tokens after the prompt, shape [T]."""
    logprobs: FloatArray
    """[T] `rollout_logprobs`: log-probs of the engine, under the sampling distribution."""
    policy_versions: IntArray
    """[T] policy version that sampled each token."""
    finish_reason: FinishReason
    text: str
    """Decoded `token_ids`, for verifiers and display, without special tokens except those of reasoning and tool
    calls."""
    final_text: str | None = None
    """`text` without reasoning; empty if the reasoning never ends. If `None`, the tags in `text` mark the reasoning."""
    status: RolloutStatus = RolloutStatus.COMPLETED
    cause: str = ""
    """Cause of an `infra_error`."""
    reward: RewardResult | None = None
    engine_id: str = ""
    turns: tuple[Turn, ...] = ()
    """Turns in order. If empty, all of `token_ids` is one turn."""
    branches: tuple[Branch, ...] = ()
    """Branches in order; before the first branch, a turn's context is the prompt and all tokens before the turn."""
    replayed: tuple[Turn, ...] = ()
    """Replayed turns of an earlier episode (`PromptDraw.anchor`), with positions in that episode's tokens. The reward
    covers the whole episode, including these turns. Only the later turns are trained on."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts of events during the rollout; each becomes a metric. Counts of 0 are left out."""
    experts: tuple[IntArray, ...] = ()
    """Experts chosen by MoE routers, as in `Generation`: one array per context, for the context and the tokens after
    it; empty if not recorded."""
    expert: bool = False
    """True if the rollout is a demonstration. The policy then imitates it, and its `logprobs` are 0."""
    prompt_media: tuple[MediaSpan, ...] = ()
    """Media spans in `prompt_token_ids`."""
    media: tuple[MediaSpan, ...] = ()
    """Media spans in `token_ids`; spans in a rewritten context are in its branch."""

    @property
    def spans(self) -> tuple[Turn, ...]:
        """All turns, or a single turn with all tokens if `turns` is empty."""
        return self.turns or (Turn(start=0, end=len(self.token_ids)),)

    @property
    def contexts(self) -> tuple[tuple[int, IntArray], ...]:
        """Contexts that the engine received: for each context, its start in `token_ids`, and its tokens."""
        rewritten = [(branch.start, branch.context) for branch in self.branches]
        if rewritten and rewritten[0][0] == 0:  # before the first turn
            return tuple(rewritten)
        return ((0, self.prompt_token_ids), *rewritten)

    @property
    def context_media(self) -> tuple[tuple[MediaSpan, ...], ...]:
        """Media spans in each of `contexts`."""
        rewritten = tuple(branch.media for branch in self.branches)
        return rewritten if self.branches and self.branches[0].start == 0 else (self.prompt_media, *rewritten)

    @property
    def rollout_id(self) -> RolloutId:
        """ID that is unique in the run."""
        return RolloutId(purpose=self.purpose, draw_id=self.draw_id, index=self.index)

    @property
    def sample_id(self) -> str:
        """ID of the rollout's training sample, also used in rollout tables; unique among rollouts of one purpose."""
        return f"{self.draw_id}.{self.index}"

    @property
    def is_finished(self) -> bool:
        """True if the model ended the answer itself, so that the answer was not truncated."""
        return self.finish_reason == "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All attempts at one drawn prompt."""

    draw: PromptDraw
    rollouts: tuple[Rollout, ...]

    @property
    def scored_rollouts(self) -> tuple[Rollout, ...]:
        """Rollouts that completed and have a reward."""
        return tuple(r for r in self.rollouts if r.status is RolloutStatus.COMPLETED and r.reward is not None)

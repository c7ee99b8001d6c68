"""From prompts to groups: what is drawn, what engines are asked and answer, and what comes of it."""

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
    "EnvironmentHost",
    "EnvironmentSettings",
    "Fate",
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
"""Purposes (`RolloutId.purpose`) of the rollouts that a step trains, and of demonstrations."""


HistoryKind: TypeAlias = Literal["full", "window", "thinking_stripped", "stepwise", "summary"]


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What the model sees of earlier turns; see `roll.config.episodes`."""

    kind: HistoryKind = "full"
    turns: int = 0
    """That a window keeps."""
    keep_task: bool = True
    """Whether the prompt stays where earlier turns do not."""
    summary_tokens: int = 256
    summary_request: str = ""
    train_summary: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSettings:
    """Which environment a prompt's rollouts act in; name and options are those of `roll.envs.make`."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Plain data only."""
    seed: int | None = None
    """Of the episode, given to `reset`; `None` where the options say all of it."""
    history: History | None = None
    """What the model sees of earlier turns; `None`: what the run's configuration says for all."""
    opening: str = ""
    """How the first user message is made of the first observation, which `{prompt}` stands for; the prompt then holds
    what comes before it. Empty where the prompt already says what the environment asks."""
    wrappers: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """Around it, by the names of `roll.envs.wrappers` and with their options, the first one innermost."""
    tools: Mapping[str, Any] = field(default_factory=dict)
    """What the model may use in it: the arguments of `roll.envs.tools.with_tools`; empty without tools."""
    host: EnvironmentHost | None = None
    """Where it runs; `None`: a shipped one in the loop, a user's own in the pool."""
    url: str = ""
    """Of its server, for the host `http`."""
    reset_time_limit_s: float = 60.0
    """Beyond it an episode that does not begin is given up."""
    step_time_limit_s: float = 30.0
    """Beyond it an episode whose `step` does not return is given up."""


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
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the functions that the model is told of, as chat templates take them."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, such as `enable_thinking`."""
    text: str | None = None
    """What its source has in place of messages, where that is a text alone: it may be rendered already."""

    @property
    def prefill(self) -> str:
        """The beginning of the answer, where the last message is the assistant's: the model continues it."""
        return self.messages[-1].text if self.messages and self.messages[-1].role == "assistant" else ""

    @property
    def asked(self) -> tuple[Message, ...]:
        """The messages that an answer follows: all but the beginning of the answer itself."""
        return self.messages[:-1] if self.messages and self.messages[-1].role == "assistant" else self.messages


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
    media: tuple[MediaSpan, ...] = ()
    """Where media stand in `token_ids`; empty for text, as in all records."""
    anchor: Anchor | None = None
    """At which all its rollouts begin; `None`: at the prompt."""

    @property
    def uid(self) -> str:
        """Of the prompt."""
        return self.prompt.uid


class Fate(StrEnum):
    """What became of a draw."""

    IN_FLIGHT = "in_flight"
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    EXPIRED = "expired"
    """Given up unseen: too old, or redundant."""


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
        """Return the id of the rollout's engine request for a turn, counted from 0."""
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
class Branch:
    """Where a rollout's history was rewritten: a window slid, thinking was stripped, a summary took its place.

    It reaches to where the next branch starts, or to the rollout's last token.
    """

    start: int
    """Where a turn begins: `token_ids[start:]` of the rollout follow `context`, not the tokens before them."""
    context: IntArray
    """[C] exactly as the engine saw it."""
    media: tuple[MediaSpan, ...] = ()
    """Where media stand in `context`, which has its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """A successful episode, for others to begin in its midst; its arrays, turns and branches are those of `Rollout`."""

    uid: str
    """Of its prompt."""
    prompt_token_ids: IntArray
    token_ids: IntArray
    turns: tuple[Turn, ...]
    branches: tuple[Branch, ...] = ()
    reward: float
    """Of the whole."""
    prompt_media: tuple[MediaSpan, ...] = ()
    media: tuple[MediaSpan, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """Between two turns of an earlier episode, where rollouts begin: its first turns are replayed to them."""

    trajectory: Trajectory
    num_turns: int
    """That are replayed."""


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
    """[P] of the prompt; with `replayed` turns, all that the engine saw before the first turn of its own."""
    token_ids: IntArray
    """[T]"""
    logprobs: FloatArray
    """[T] `rollout_logprobs`: the engine's, under the sampling distribution."""
    policy_versions: IntArray
    """[T]"""
    finish_reason: FinishReason
    text: str
    """`token_ids` decoded, for verifiers and people; of special tokens, it has those that mark reasoning and calls."""
    final_text: str | None = None
    """`text` without reasoning; empty where a thought never ends; `None`: not known, the marks in `text` decide."""
    status: RolloutStatus = RolloutStatus.COMPLETED
    cause: str = ""
    """Of an `infra_error`."""
    reward: RewardResult | None = None
    engine_id: str = ""
    turns: tuple[Turn, ...] = ()
    """In order; empty: all of `token_ids` is one turn."""
    branches: tuple[Branch, ...] = ()
    """In order; before the first, and where there is none, a turn's context is the prompt and all tokens before it."""
    replayed: tuple[Turn, ...] = ()
    """Turns of an earlier episode with which it began (`PromptDraw.anchor`), in that one's tokens. The reward is of the
    whole episode, these included; what is learnt from is what came after them."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What happened while it was made, and how often; each becomes a metric. What did not happen is left out."""
    experts: tuple[IntArray, ...] = ()
    """As in `Generation`, for each of `contexts` and the tokens that follow it; empty where it was not recorded."""
    expert: bool = False
    """Not the policy's own: to be imitated. Its `logprobs` are 0."""
    prompt_media: tuple[MediaSpan, ...] = ()
    """Where media stand in `prompt_token_ids`."""
    media: tuple[MediaSpan, ...] = ()
    """Where media stand in `token_ids`; those of a rewritten context are its branch's."""

    @property
    def spans(self) -> tuple[Turn, ...]:
        """Its turns, also where it has only the one."""
        return self.turns or (Turn(start=0, end=len(self.token_ids)),)

    @property
    def contexts(self) -> tuple[tuple[int, IntArray], ...]:
        """All that the engine saw before what it wrote: where it begins to count in `token_ids`, and its tokens."""
        rewritten = [(branch.start, branch.context) for branch in self.branches]
        if rewritten and rewritten[0][0] == 0:  # before the first turn
            return tuple(rewritten)
        return ((0, self.prompt_token_ids), *rewritten)

    @property
    def context_media(self) -> tuple[tuple[MediaSpan, ...], ...]:
        """Where media stand in each of `contexts`."""
        rewritten = tuple(branch.media for branch in self.branches)
        return rewritten if self.branches and self.branches[0].start == 0 else (self.prompt_media, *rewritten)

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

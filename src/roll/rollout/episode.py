"""Episodes: conversations with an environment, token-exact even if the chat template rewrites earlier turns.

    prompt ─► context ─► model ─► tokens of a turn ─► env.step ─► observation ─┐
                 ▲                                                             │
                 └── `Dialogue`: extends the context that the engine saw, or a `Branch` begins

Invariants:
    - a turn's tokens are those that the engine sampled, after the context that the engine was given;
    - every answer of the model is in the rollout once, except summaries that are not trained;
    - a request and its answer together fit into the context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from roll.data.reasoning import answer_of
from roll.envs.base import Started
from roll.envs.hosting import EnvHosts
from roll.envs.sanitize import check_consumed
from roll.errors import DataError
from roll.rollout.dialogue import Dialogue, NextContext
from roll.rollout.history import find_longest_fitting, shorten_messages, with_text, without_thinking
from roll.rollout.loops import Generate, Renderer, RolloutLoop, join_turns, next_turn, single_answer
from roll.rollout.replaying import ReplayedPart, build_replay_error, check_replay, replay_generate
from roll.types import (
    Anchor,
    Branch,
    Content,
    Generation,
    GenerationRequest,
    History,
    IntArray,
    Message,
    Prompt,
    PromptDraw,
    Rollout,
    Turn,
    text_of,
    with_texts,
)

__all__ = ["EpisodePlan", "loop_for", "play", "with_first_observation"]

CHARS_PER_TOKEN = 16
"""A text with more characters than this times the context's tokens is cut before it is tokenized."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodePlan:
    """How the episodes of a run are played; see `roll.config.episodes`."""

    max_context: int | None = None
    """Limit on the tokens of a context and its answer; `None` for no limit."""
    history: History = field(default_factory=History)
    """Default for prompts whose environment does not set a history."""
    long_observations: Literal["cut", "end"] = "cut"
    min_answer_tokens: int = 1


def loop_for(prompt: Prompt, hosts: EnvHosts | None = None, plan: EpisodePlan | None = None) -> RolloutLoop:
    """Return the loop that makes a prompt's rollouts unless the user configured another one.

    Args:
        prompt: The prompt; one with an environment is played as an episode.
        hosts: Where environments run.
        plan: How episodes are played.
    """
    if prompt.environment is None:
        return single_answer
    return partial(play, hosts=hosts, plan=plan) if hosts or plan else play


async def play(
    draw: PromptDraw,
    index: int,
    first: GenerationRequest,
    generate: Generate,
    renderer: Renderer,
    *,
    hosts: EnvHosts | None = None,
    plan: EpisodePlan | None = None,
) -> Rollout:
    """Play an episode with the prompt's environment until the environment or the model ends it or the turn limit is
    reached.

    An answer that was cut off ends the episode: the model did not finish its turn. A context without room for another
    answer also ends it; the finish reason is then `context`.

    If the draw has an anchor, the turns before the anchor are replayed first, with the recorded answers instead of the
    model's. After the anchor, the replayed turns are context (`Rollout.replayed`).

    Raises:
        ReplayError: The environment's observations, rewards or states differ from the recorded ones.
    """
    settings, anchor = draw.prompt.environment, draw.anchor
    assert settings is not None, "`loop_for` plays only prompts with an environment"
    plan, hosts = plan or EpisodePlan(), hosts or EnvHosts()
    async with hosts.open(settings) as env:
        observation, info = await env.reset(settings.seed)
        if settings.opening:
            draw = with_first_observation(draw, (observation, info), renderer, plan)
            first = replace(first, token_ids=draw.token_ids)
        dialogue = Dialogue(
            renderer=renderer,
            history=settings.history or plan.history,
            prompt=draw.prompt.messages,
            context=draw.token_ids,
            tools=draw.prompt.tools,
            stops=first.sampling.stop_token_ids,
        )
        if anchor is not None:
            generate = replay_generate(anchor, generate)
        episode = _Episode(draw=draw, first=first, generate=generate, plan=plan, dialogue=dialogue)
        for turn in range(1, draw.prompt.turns + 1):
            state = str(info.get("state", ""))
            if anchor is not None and turn == anchor.num_turns + 1:
                episode.begin_at_anchor(anchor, state)
            answer = await episode.ask()
            if answer.finish_reason != "stop":
                episode.note_turn(answer, state=state)
                break
            observation, reward, ended, cut_off, info = await env.step(_action(answer, dialogue, renderer))
            episode.note_turn(answer, reward=reward, state=state)
            over = ended or cut_off or turn == draw.prompt.turns
            replies = [] if over else _to_replies(observation, info, renderer)
            for reply in replies:
                check_consumed(reply.content, settings.name)
            if over or not await episode.receive_replies(replies, info.get("tool_calls") or ()):
                break
    if anchor is not None and not episode.begun:
        raise build_replay_error(draw.prompt, anchor, f"it ends after {turn} of {anchor.num_turns} turns")
    return episode.build_rollout(index)


def _action(answer: Generation, dialogue: Dialogue, renderer: Renderer) -> str:
    """Return the answer's text; an unfinished thought that the prompt began gets an opening `<think>` tag."""
    said = renderer.decode(answer.token_ids)
    unmarked = not renderer.final_text(answer.token_ids, dialogue.context) and answer_of(said)
    return f"<think>\n{said}" if unmarked else said


def with_first_observation(draw: PromptDraw, begun: Started, renderer: Renderer, plan: EpisodePlan) -> PromptDraw:
    """Return the draw with the environment's first observation as its prompt; the middle of an observation that is too
    long is cut.

    Args:
        draw: A draw of a prompt with an environment.
        begun: First observation and info; if the info has `tools`, the chat template lists them for the model.
        renderer: Renderer of the model.
        plan: How episodes are played.

    Raises:
        DataError: The prompt does not fit even with a cut observation, or the template does not support tools.
    """
    assert draw.prompt.environment is not None
    opening = draw.prompt.environment.opening
    check_consumed(begun[0], draw.prompt.environment.name)
    observation, info = renderer.escape_special_tokens(text_of(begun[0])), begun[1]
    if tools := tuple(info.get("tools") or ()):
        draw = replace(draw, prompt=replace(draw.prompt, tools=tools))
        if renderer.text(draw.prompt.messages, tools) == renderer.text(draw.prompt.messages):
            raise DataError(
                "the chat template of this model does not show tools: choose another tool_calls.form, such as xml or "
                "json."
            )

    def asked(limit: int) -> PromptDraw:
        (said,) = shorten_messages([Message(role="user", content=observation)], limit)
        last = Message(role="user", content=opening.replace("{prompt}", said.text))
        messages = (*draw.prompt.messages[:-1], last)
        token_ids = renderer.tokens(renderer.text(messages, draw.prompt.tools))
        return replace(draw, prompt=replace(draw.prompt, messages=messages), token_ids=token_ids)

    if plan.max_context is None:
        return asked(len(observation))
    found = find_longest_fitting(
        asked,
        lambda tried: len(tried.token_ids),
        most=min(len(observation), CHARS_PER_TOKEN * plan.max_context),
        room=plan.max_context - plan.min_answer_tokens,
    )
    if found is None:
        raise DataError(
            f"the first observation of '{draw.prompt.uid}' leaves no room for an answer in a context of "
            f"{plan.max_context} tokens: raise inference.max_context, or shorten the system prompt."
        )
    return found


@dataclass(eq=False, kw_only=True)
class _Episode:
    """The state and the recorded turns of an episode in progress."""

    draw: PromptDraw
    first: GenerationRequest
    generate: Generate
    plan: EpisodePlan
    dialogue: Dialogue
    full: bool = False
    """Whether the episode ended because the context is full."""
    counts: Counter[str] = field(default_factory=Counter)
    begun: bool = False
    """Whether the replay has ended."""
    _replayed: tuple[Turn, ...] = ()
    _num_requests: int = 0
    _generations: list[Generation] = field(default_factory=list)
    _between: list[IntArray] = field(default_factory=list)
    _turns: list[Turn] = field(default_factory=list)
    _branches: list[Branch] = field(default_factory=list)
    _position: int = 0
    """Number of tokens recorded so far."""

    # ---- generation

    async def ask(self, most: int | None = None) -> Generation:
        """Generate the model's answer to the context, within the token limit and the room in the context.

        Args:
            most: Token limit of a summary. By default, the limit is the run's, and room is reserved for requesting a
                summary.
        """
        wanted = most or self.first.sampling.max_new_tokens
        budget = wanted
        if self.plan.max_context is not None:
            room = self.plan.max_context - len(self.dialogue.context)
            budget = min(wanted, room if most else max(room - self._reserve, 1))
        request = next_turn(self.first, self.dialogue.context, self._num_requests, budget)
        self._num_requests += 1
        answer = await self.generate(request)
        self.full = answer.finish_reason == "length" and budget < wanted
        self.dialogue.record_answer(answer.token_ids)
        return answer

    # ---- observations

    async def receive_replies(self, replies: Sequence[Message], calls: Sequence[Mapping[str, Any]]) -> bool:
        """Add the environment's replies to the next context; return False if there is no room for an answer.

        If the history is a summary and room is short, the model writes a summary first. Replies that are still too long
        are cut, or end the episode.
        """
        limit = CHARS_PER_TOKEN * (self.plan.max_context or 0)
        too_long = self.plan.max_context is not None and max(len(reply.text) for reply in replies) > limit
        following = None if too_long else self.dialogue.next_context(replies, calls)
        short = following is None or self._num_missing_tokens(following, self.first.sampling.max_new_tokens) > 0
        if self.dialogue.history.kind == "summary" and short:
            if not await self._summarize():
                return self._end()
            following = None if too_long else self.dialogue.next_context(replies, calls)
        if following is None or self._num_missing_tokens(following) > 0:
            following = self._cut(replies, calls, limit) if self.plan.long_observations == "cut" else None
        if following is None:
            return self._end()
        self._take(following)
        return True

    def _cut(self, replies: Sequence[Message], calls: Sequence[Mapping[str, Any]], limit: int) -> NextContext | None:
        """Return the next context with the replies cut to fit; `None` if it does not fit even without their text."""
        assert self.plan.max_context is not None
        following = find_longest_fitting(
            lambda limit: self.dialogue.next_context(shorten_messages(replies, limit), calls),
            self._num_missing_tokens,
            most=min(limit, max(len(reply.text) for reply in replies)),
            room=0,
        )
        self.counts["observations_cut"] += following is not None
        return following

    async def _summarize(self) -> bool:
        """Let the model summarize the episode and restart the context from the summary; return False without room."""
        history, renderer = self.dialogue.history, self.dialogue.renderer
        asking = self.dialogue.next_context([Message(role="user", content=history.summary_request)])
        if self.plan.max_context is not None and len(asking.token_ids) >= self.plan.max_context:
            return False
        if history.train_summary:
            self._record(asking)
        self.dialogue.advance(asking)
        answer = await self.ask(history.summary_tokens)
        if history.train_summary:
            self.note_turn(answer)
        self.counts["summaries"] += 1
        said = without_thinking(renderer.decode(answer.token_ids))
        self.dialogue.restart_context(with_text(self.draw.prompt.messages, f"What happened so far: {said}"))
        return answer.finish_reason != "abort"

    @property
    def _reserve(self) -> int:
        """Tokens that are reserved for requesting and writing a summary."""
        history, renderer = self.dialogue.history, self.dialogue.renderer
        if history.kind != "summary":
            return 0
        asked = renderer.text([Message(role="user", content=history.summary_request)])
        return history.summary_tokens + len(renderer.tokens(asked))

    def _num_missing_tokens(self, following: NextContext, answer_tokens: int | None = None) -> int:
        """Return by how many tokens the context is too long for an answer of `answer_tokens`, by default the least."""
        if self.plan.max_context is None:
            return 0
        least = min(self.plan.min_answer_tokens, self.first.sampling.max_new_tokens)
        return len(following.token_ids) + (answer_tokens or least) + self._reserve - self.plan.max_context

    def _end(self) -> Literal[False]:
        self.full = True
        return False

    # ---- recording

    def begin_at_anchor(self, anchor: Anchor, state: str) -> None:
        """Check the replayed turns against the record, and turn them into context.

        Raises:
            ReplayError: The replay differs from the record.
        """
        said = zip((answer.token_ids for answer in self._generations), self._between, strict=True)
        played = ReplayedPart(
            prompt_token_ids=self.draw.token_ids,
            tokens=[part for pair in said for part in pair],
            turns=self._turns,
            branches=self._branches,
            state=state,
        )
        check_replay(self.draw.prompt, anchor, played)
        prompt = replace(self.draw.prompt, turns=self.draw.prompt.turns - anchor.num_turns)
        self.draw = replace(self.draw, prompt=prompt, token_ids=self.dialogue.context)
        self.begun, self._replayed, self._position = True, tuple(self._turns), 0
        self._generations, self._between, self._turns, self._branches = [], [], [], []
        self.counts.clear()

    def _take(self, following: NextContext) -> None:
        self._record(following)
        self.dialogue.advance(following)

    def _record(self, following: NextContext) -> None:
        """Record the context that the next turn follows."""
        added = following.added
        if added is None:
            self._branches.append(Branch(start=self._position, context=following.token_ids))
        self._between.append(np.zeros(0, np.int32) if added is None else added)
        self._position += len(self._between[-1])

    def note_turn(self, answer: Generation, *, reward: float = 0.0, state: str = "") -> None:
        """Record an answer as a turn to train on."""
        end = self._position + len(answer.token_ids)
        self._turns.append(Turn(start=self._position, end=end, reward=reward, state=state))
        self._generations.append(answer)
        self._position = end

    def build_rollout(self, index: int) -> Rollout:
        """Build the rollout of the finished episode."""
        turns, branches = tuple(self._turns), tuple(self._branches)
        found = join_turns(self.draw, index, self._generations, self._between, turns, self.dialogue.renderer, branches)
        self.counts += Counter(contexts_rewritten=len(self._branches), contexts_full=int(self.full))
        return replace(
            found,
            finish_reason="context" if self.full else found.finish_reason,
            replayed=self._replayed,
            counts={name: self.counts[name] for name in sorted(self.counts) if self.counts[name]},
        )


def _to_replies(observation: Content, info: Mapping[str, Any], renderer: Renderer) -> list[Message]:
    """Convert an observation to messages of a tool (`use_tool`, as in GEM), of several tools (`tool_results`), or of a
    user.

    Texts are escaped so that they cannot imitate the boundaries of another message or of the model's own: see
    `ChatRenderer.harmless`.
    """
    results = info.get("tool_results") or [{"content": observation}]
    role = "tool" if info.get("tool_results") or info.get("use_tool") else "user"
    said = [Message.from_dict({**one, "role": role}) for one in results]
    return [replace(one, content=with_texts(one.content, renderer.escape_special_tokens)) for one in said]

"""Episodes: conversations with an environment, token-exact even if the chat template rewrites earlier turns.

    prompt ─► context ─► model ─► tokens of a turn ─► env.step ─► observation ─┐
                 ▲                                                             │
                 └── `Dialogue`: extends the context that the engine saw, or a `Branch` begins

Invariants:
    - a turn's tokens are the tokens that the engine sampled for the context of its request;
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

from roll.data.reasoning import extract_answer
from roll.envs.hosting import EnvHosts
from roll.rollout.dialogue import Dialogue, NextContext
from roll.rollout.episode_replay import ReplayedTurns, build_replay_error, build_replay_generate, check_replay
from roll.rollout.episode_start import MAX_CHARS_PER_TOKEN, EpisodePlan, add_first_observation
from roll.rollout.history import append_text, find_longest_fitting, shorten_messages, strip_thinking
from roll.rollout.loops import Generate, Renderer, RolloutLoop, build_next_request, generate_single_answer, join_turns
from roll.types import (
    Anchor,
    Branch,
    Content,
    EncodedText,
    Generation,
    GenerationRequest,
    IntArray,
    MediaSpan,
    Message,
    Prompt,
    PromptDraw,
    Rollout,
    Turn,
    count_characters,
    map_text,
    shift_media,
)

__all__ = ["choose_loop", "play_episode"]


def choose_loop(prompt: Prompt, hosts: EnvHosts | None = None, plan: EpisodePlan | None = None) -> RolloutLoop:
    """Return the default rollout loop: `play_episode` for a prompt with an environment, else `generate_single_answer`.

    Args:
        prompt: The prompt.
        hosts: Hosts that run environments.
        plan: Settings of episodes.
    """
    if prompt.environment is None:
        return generate_single_answer
    return partial(play_episode, hosts=hosts, plan=plan) if hosts or plan else play_episode


async def play_episode(
    draw: PromptDraw,
    index: int,
    first_request: GenerationRequest,
    generate: Generate,
    renderer: Renderer,
    *,
    hosts: EnvHosts | None = None,
    plan: EpisodePlan | None = None,
) -> Rollout:
    """Run an episode with the prompt's environment, until the environment ends it or the turn limit is reached.

    The episode also ends after a truncated answer, and with the finish reason `context` if the context has no room for
    another answer.

    If the draw has an anchor, the turns before the anchor are replayed first with the recorded answers; they are then
    part of the context (`Rollout.replayed`).

    Raises:
        ReplayError: The environment's observations, rewards or states differ from the recorded ones.
    """
    settings, anchor = draw.prompt.environment, draw.anchor
    assert settings is not None, "`choose_loop` plays only prompts with an environment"
    plan, hosts = plan or EpisodePlan(), hosts or EnvHosts()
    async with hosts.open(settings) as env:
        observation, info = await hosts.store_images(await env.reset(settings.seed), settings.name)
        if settings.opening:
            draw = add_first_observation(draw, (observation, info), renderer, plan)
            first_request = replace(first_request, token_ids=draw.token_ids, media=draw.media)
        dialogue = Dialogue(
            renderer=renderer,
            history=settings.history or plan.history,
            prompt=draw.prompt.messages,
            context=draw.token_ids,
            media=draw.media,
            tools=draw.prompt.tools,
            stops=first_request.sampling.stop_token_ids,
        )
        if anchor is not None:
            generate = build_replay_generate(anchor, generate)
        episode = _Episode(draw=draw, first=first_request, generate=generate, plan=plan, dialogue=dialogue)
        for turn in range(1, draw.prompt.turns + 1):
            state = str(info.get("state", ""))
            if anchor is not None and turn == anchor.num_turns + 1:
                episode.begin_at_anchor(anchor, state)
            answer = await episode.generate_answer()
            if answer.finish_reason != "stop":
                episode.record_turn(answer, state=state)
                break
            stepped = await env.step(_parse_action(answer, dialogue, renderer))
            observation, reward, ended, cut_off, info = await hosts.store_images(stepped, settings.name)
            episode.record_turn(answer, reward=reward, state=state)
            over = ended or cut_off or turn == draw.prompt.turns
            replies = [] if over else _convert_observation(observation, info, renderer)
            if over or not await episode.receive_replies(replies, info.get("tool_calls") or ()):
                break
    if anchor is not None and not episode.has_begun:
        raise build_replay_error(draw.prompt, anchor, f"the episode ends after {turn} of {anchor.num_turns} turns")
    return episode.build_rollout(index)


def _parse_action(answer: Generation, dialogue: Dialogue, renderer: Renderer) -> str:
    """Return the answer's text, with a leading `<think>` tag if the prompt opened a thinking section that the answer
    does not end.
    """
    text = renderer.decode(answer.token_ids)
    # Without the tag, an environment would mistake a tool call or a move inside the thought for the model's action.
    unmarked = not renderer.decode_final_text(answer.token_ids, dialogue.context) and extract_answer(text)
    return f"<think>\n{text}" if unmarked else text


@dataclass(eq=False, kw_only=True)
class _Episode:
    """The state of an episode in progress, and its recorded turns."""

    draw: PromptDraw
    first: GenerationRequest
    generate: Generate
    plan: EpisodePlan
    dialogue: Dialogue
    is_full: bool = False
    """True if the episode ended because the context is full."""
    counts: Counter[str] = field(default_factory=Counter)
    has_begun: bool = False
    """True if the turns before the anchor have been replayed; False if the draw has no anchor."""
    _replayed: tuple[Turn, ...] = ()
    _num_requests: int = 0
    _generations: list[Generation] = field(default_factory=list)
    _inter_turn_tokens: list[IntArray] = field(default_factory=list)
    """Tokens between the turns, such as observations."""
    _turns: list[Turn] = field(default_factory=list)
    _branches: list[Branch] = field(default_factory=list)
    _media: list[MediaSpan] = field(default_factory=list)
    """Images between the turns, with positions in the rollout's tokens."""
    _position: int = 0
    """Number of tokens recorded so far."""

    # ---- generation

    async def generate_answer(self, max_tokens: int | None = None) -> Generation:
        """Generate the model's answer to the context, within the token limit and the room in the context.

        Args:
            max_tokens: Token limit of the answer if it is a summary. By default, the answer is a turn: the run's limit
                applies, and room for a later summary is reserved.
        """
        wanted = max_tokens or self.first.sampling.max_new_tokens
        budget = wanted
        if self.plan.max_context is not None:
            room = self.plan.max_context - len(self.dialogue.context)
            budget = min(wanted, room if max_tokens else max(room - self._num_reserved_tokens, 1))
        context, media = self.dialogue.context, self.dialogue.media
        request = build_next_request(self.first, context, self._num_requests, budget, media)
        self._num_requests += 1
        answer = await self.generate(request)
        self.is_full = answer.finish_reason == "length" and budget < wanted
        self.dialogue.record_answer(answer.token_ids)
        return answer

    # ---- observations

    async def receive_replies(self, replies: Sequence[Message], calls: Sequence[Mapping[str, Any]]) -> bool:
        """Add the environment's replies to the next context; return False if there is no room for an answer.

        If the history is a summary and little room is left, the model first generates a summary. Replies that are still
        too long are truncated; if they do not fit even then, the episode ends.
        """
        # A text that is far too long is cut before it is tokenized, which would block the event loop of all engines.
        limit = MAX_CHARS_PER_TOKEN * (self.plan.max_context or 0)
        too_long = (
            self.plan.max_context is not None and max(count_characters(reply.content) for reply in replies) > limit
        )
        next_context = None if too_long else self.dialogue.build_next_context(replies, calls)
        short = next_context is None or self._count_missing_tokens(next_context, self.first.sampling.max_new_tokens) > 0
        if self.dialogue.history.kind == "summary" and short:
            if not await self._summarize():
                return self._mark_full()
            next_context = None if too_long else self.dialogue.build_next_context(replies, calls)
        if next_context is None or self._count_missing_tokens(next_context) > 0:
            next_context = (
                self._truncate_replies(replies, calls, limit) if self.plan.long_observations == "cut" else None
            )
        if next_context is None:
            return self._mark_full()
        self._continue_with(next_context)
        return True

    def _truncate_replies(
        self, replies: Sequence[Message], calls: Sequence[Mapping[str, Any]], limit: int
    ) -> NextContext | None:
        """Return the next context with each reply truncated to at most `limit` characters, or fewer if necessary.

        Return `None` if the context is too long even without the text of the replies.
        """
        assert self.plan.max_context is not None
        next_context = find_longest_fitting(
            lambda limit: self.dialogue.build_next_context(shorten_messages(replies, limit), calls),
            self._count_missing_tokens,
            max_limit=min(limit, max(count_characters(reply.content) for reply in replies)),
            max_size=0,
        )
        self.counts["observations_cut"] += next_context is not None
        return next_context

    async def _summarize(self) -> bool:
        """Request a summary of the episode from the model, and restart the context from the summary.

        Return False if the context has no room for a summary, or the summary was aborted.
        """
        history, renderer = self.dialogue.history, self.dialogue.renderer
        asking = self.dialogue.build_next_context([Message(role="user", content=history.summary_request)])
        if self.plan.max_context is not None and len(asking.token_ids) >= self.plan.max_context:
            return False
        if history.train_summary:
            self._record(asking)
        self.dialogue.advance(asking)
        answer = await self.generate_answer(history.summary_tokens)
        if history.train_summary:
            self.record_turn(answer)
        self.counts["summaries"] += 1
        summary = strip_thinking(renderer.decode(answer.token_ids))
        self.dialogue.restart_context(append_text(self.draw.prompt.messages, f"What happened so far: {summary}"))
        return answer.finish_reason != "abort"

    @property
    def _num_reserved_tokens(self) -> int:
        """Number of tokens that are reserved for requesting and generating a summary; 0 if the history has no
        summary."""
        history, renderer = self.dialogue.history, self.dialogue.renderer
        if history.kind != "summary":
            return 0
        request = renderer.render_text([Message(role="user", content=history.summary_request)])
        return history.summary_tokens + len(renderer.encode(request).token_ids)

    def _count_missing_tokens(self, next_context: NextContext, answer_tokens: int | None = None) -> int:
        """Return the number of tokens by which `next_context` and an answer exceed the limit; 0 or less if they fit.

        The answer has `answer_tokens` tokens, by default the minimum; room for a summary is also reserved.
        """
        if self.plan.max_context is None:
            return 0
        least = min(self.plan.min_answer_tokens, self.first.sampling.max_new_tokens)
        return (
            len(next_context.token_ids) + (answer_tokens or least) + self._num_reserved_tokens - self.plan.max_context
        )

    def _mark_full(self) -> Literal[False]:
        self.is_full = True
        return False

    # ---- recording

    def begin_at_anchor(self, anchor: Anchor, state: str) -> None:
        """Check that the replayed turns and the environment's state match the record, and move the turns to the prompt.

        Raises:
            ReplayError: The replay differs from the record.
        """
        pairs = zip((answer.token_ids for answer in self._generations), self._inter_turn_tokens, strict=True)
        replay = ReplayedTurns(
            prompt_token_ids=self.draw.token_ids,
            prompt_media=self.draw.media,
            media=tuple(self._media),
            tokens=[part for pair in pairs for part in pair],
            turns=self._turns,
            branches=self._branches,
            state=state,
        )
        check_replay(self.draw.prompt, anchor, replay)
        # From now on the episode is like any other with a longer prompt, so the trainer needs no anchors. Only the
        # reward, which scores the whole episode, reads `Rollout.replayed`.
        prompt = replace(self.draw.prompt, turns=self.draw.prompt.turns - anchor.num_turns)
        self.draw = replace(self.draw, prompt=prompt, token_ids=self.dialogue.context, media=self.dialogue.media)
        self.has_begun, self._replayed, self._position = True, tuple(self._turns), 0
        self._generations, self._inter_turn_tokens, self._turns, self._branches, self._media = [], [], [], [], []
        self.counts.clear()

    def _continue_with(self, next_context: NextContext) -> None:
        self._record(next_context)
        self.dialogue.advance(next_context)

    def _record(self, next_context: NextContext) -> None:
        """Record the tokens before the next turn, or a branch if the turn's context does not extend the previous
        context.
        """
        added = next_context.added or EncodedText(np.zeros(0, np.int32))
        if next_context.added is None:
            branch = Branch(start=self._position, context=next_context.token_ids, media=next_context.media)
            self._branches.append(branch)
        self._inter_turn_tokens.append(added.token_ids)
        self._media += shift_media(added.media, self._position)
        self._position += len(added.token_ids)

    def record_turn(self, answer: Generation, *, reward: float = 0.0, state: str = "") -> None:
        """Record an answer as a turn to train on."""
        end = self._position + len(answer.token_ids)
        self._turns.append(Turn(start=self._position, end=end, reward=reward, state=state))
        self._generations.append(answer)
        self._position = end

    def build_rollout(self, index: int) -> Rollout:
        """Build the rollout of the finished episode."""
        turns, branches, renderer = tuple(self._turns), tuple(self._branches), self.dialogue.renderer
        rollout = join_turns(
            self.draw, index, self._generations, self._inter_turn_tokens, turns, renderer, branches, tuple(self._media)
        )
        self.counts += Counter(contexts_rewritten=len(self._branches), contexts_full=int(self.is_full))
        return replace(
            rollout,
            finish_reason="context" if self.is_full else rollout.finish_reason,
            replayed=self._replayed,
            counts={name: self.counts[name] for name in sorted(self.counts) if self.counts[name]},
        )


def _convert_observation(observation: Content, info: Mapping[str, Any], renderer: Renderer) -> list[Message]:
    """Convert an observation to messages: one tool message (`use_tool`, as in GEM), several (`tool_results`), or a user
    message.
    """
    results = info.get("tool_results") or [{"content": observation}]
    role = "tool" if info.get("tool_results") or info.get("use_tool") else "user"
    messages = [Message.from_dict({**result, "role": role}) for result in results]
    # Escaped, so that control tokens in an observation cannot imitate the boundaries of a message.
    return [replace(each, content=map_text(each.content, renderer.escape_special_tokens)) for each in messages]

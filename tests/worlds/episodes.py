"""Episodes without a model: an engine that says what it is told to, and an environment that does the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll.data import ChatRenderer
from roll.rollout.episode import play_episode
from roll.rollout.episode_start import EpisodePlan
from roll.types import (
    Anchor,
    EnvironmentSettings,
    Generation,
    GenerationRequest,
    History,
    Message,
    Prompt,
    PromptDraw,
    Rollout,
    SamplingParams,
)

__all__ = ["MAX_NEW_TOKENS", "SUMMARY_TOKENS", "Engine", "Script", "check_exact", "run_episode"]

MAX_NEW_TOKENS, SUMMARY_TOKENS = 40, 24


@dataclass(eq=False)
class Engine:
    """Answers in turn, within what it is asked for, and remembers what it was asked."""

    answers: list[list[int]]
    stops: tuple[int, ...]
    seen: list[tuple[GenerationRequest, Generation]] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> Generation:
        number = len(self.seen)
        wanted = self.answers[number % len(self.answers)]
        tokens = np.array(wanted[: request.sampling.max_new_tokens], np.int32)
        ended = len(tokens) == len(wanted) and bool(wanted) and wanted[-1] in self.stops
        generation = Generation(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=-(1 + number + np.arange(len(tokens), dtype=np.float32)),
            policy_versions=np.arange(len(tokens), dtype=np.int32) // 3 + number,
            finish_reason="stop" if ended else "length",
        )
        self.seen.append((request, generation))
        return generation


@dataclass(eq=False)
class Script:
    """In place of `EnvHosts`, and an environment of it; the last step ends the episode."""

    steps: Sequence[tuple[str, dict[str, Any]]]
    heard: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, settings: EnvironmentSettings) -> AsyncIterator[Script]:
        yield self

    async def store_images(self, result: Any, environment: str) -> Any:
        return result

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "", {"state": "s0"}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.heard.append(action)
        observation, info = self.steps[len(self.heard) - 1]
        return observation, 0.5, len(self.heard) == len(self.steps), False, {"state": f"s{len(self.heard)}", **info}


def run_episode(
    renderer: ChatRenderer,
    engine: Engine,
    script: Script,
    history: History | None = None,
    *,
    messages: Sequence[Message] = (Message(role="user", content="Play."),),
    tools: Sequence[Any] = (),
    anchor: Anchor | None = None,
    **plan: Any,
) -> Rollout:
    """Play it to its end, from an anchor on if there is one; `plan` is of `EpisodePlan`."""
    prompt = Prompt(
        uid="p",
        domain="d",
        messages=tuple(messages),
        tools=tuple(tools),
        environment=EnvironmentSettings(name="script", history=history),
        turns=len(script.steps) + 1,
    )
    draw = PromptDraw(draw_id=0, prompt=prompt, token_ids=renderer.render(messages, tools), anchor=anchor)
    sampling = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, seed=1, stop_token_ids=engine.stops)
    first = GenerationRequest(request_id="train-0.0", token_ids=draw.token_ids, sampling=sampling)
    hosts: Any = script
    return asyncio.run(play_episode(draw, 0, first, engine.generate, renderer, hosts=hosts, plan=EpisodePlan(**plan)))


def check_exact(rollout: Rollout, engine: Engine, *, max_context: int | None = None) -> None:
    """Every trained turn is one request's answer, behind that request's context, and no token is trained twice.

    Which requests were for summaries is told by their place: an environment hears each other answer that ended.
    """
    policy = np.zeros(len(rollout.token_ids), np.bool_)
    starts = [branch.start for branch in rollout.branches]
    assert starts == sorted(set(starts)) and set(starts) <= {turn.start for turn in rollout.turns}
    asked = iter(engine.seen)
    for turn in rollout.turns:
        here = slice(turn.start, turn.end)
        branch = next((b for b in reversed(rollout.branches) if b.start <= turn.start), None)
        begin, head = (0, rollout.prompt_token_ids) if branch is None else (branch.start, branch.context)
        context = np.concatenate([head, rollout.token_ids[begin : turn.start]]).tolist()
        found = (pair for pair in asked if pair[1].logprobs.tolist() == rollout.logprobs[here].tolist())
        if turn.start == turn.end:  # nothing of it is trained
            continue
        request, answer = next(found)  # log-probs begin with the number of the request, so they name it
        assert context == request.token_ids.tolist()
        assert rollout.token_ids[here].tolist() == answer.token_ids.tolist()
        assert rollout.policy_versions[here].tolist() == answer.policy_versions.tolist()
        assert not policy[here].any()
        policy[here] = True
    assert (rollout.policy_versions[~policy] == -1).all() and (rollout.logprobs[~policy] == 0).all()
    history = rollout.prompt.environment.history if rollout.prompt.environment else None
    untrained = rollout.counts.get("summaries", 0) if history and not history.train_summary else 0
    assert len(rollout.turns) == len(engine.seen) - untrained
    if max_context is not None:
        assert all(len(r.token_ids) + r.sampling.max_new_tokens <= max_context for r, _ in engine.seen)

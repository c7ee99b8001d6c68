"""Models that say what a test has them say, behind the endpoint of agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from roll.agents import Session
from roll.agents.server import AgentServer
from roll.config.agents import AgentLimitsConfig
from roll.data import ChatRenderer
from roll.types import Generation, GenerationRequest, IntArray, Message, Prompt, PromptDraw, Rollout, SamplingParams

__all__ = ["Speaker", "draw_of", "opened", "request_of", "samples", "seen"]

END = 2
"""`<|im_end|>` of the tiny model."""


@dataclass(eq=False)
class Speaker:
    """An engine that says texts, one after the other, or what a function makes of the context.

    Log-probs count down from -1, so that every token's is known; the version is the number of answers so far.
    """

    renderer: ChatRenderer
    says: list[str] | Callable[[str], str]
    end: int = END
    requests: list[GenerationRequest] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    latency_s: float = 0.0
    by_letter: bool = False
    """It writes each character as a piece of its own, as no tokenizer would: written anew, these are other tokens."""

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        number = len(self.requests)
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        said = (
            self.says.pop(0) if isinstance(self.says, list) else self.says(self.renderer.decode_raw(request.token_ids))
        )
        pieces = [self.renderer.tokenize(piece) for piece in (said if self.by_letter else [said])]
        ids = [*np.concatenate(pieces).tolist(), self.end]
        cut = len(ids) > request.sampling.max_new_tokens
        ids = ids[: request.sampling.max_new_tokens]
        generation = Generation(
            request_id=request.request_id,
            token_ids=np.asarray(ids, np.int32),
            logprobs=-1.0 - np.arange(len(ids), dtype=np.float32) - 100 * number,
            policy_versions=np.full(len(ids), number, np.int32),
            finish_reason="length" if cut else "stop",
            engine_id="e",
        )
        self.generations.append(generation)
        return generation


def draw_of(renderer: ChatRenderer, text: str = "What is 6 times 7?", **more: object) -> PromptDraw:
    """A draw of a prompt of one message."""
    prompt = Prompt(uid="t/1", domain="t", messages=(Message(role="user", content=text),), **more)  # type: ignore[arg-type]
    return PromptDraw(draw_id=3, prompt=prompt, token_ids=renderer.render(prompt.messages))


def request_of(
    token_ids: IntArray, name: str = "train-3.0", end: int = END, max_new_tokens: int = 400
) -> GenerationRequest:
    """The first request of a rollout, as a loop is given it."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=(end,), seed=11)
    return GenerationRequest(request_id=name, token_ids=token_ids, sampling=sampling)


@asynccontextmanager
async def opened(
    speaker: Speaker, *, max_context: int = 4096, name: str = "train-3.0", **limits: float
) -> AsyncIterator[tuple[AgentServer, Session]]:
    """A server with one session."""
    async with AgentServer() as server:
        session = Session(
            name,
            request_of(draw_of(speaker.renderer).token_ids, name, speaker.end),
            speaker.generate,
            speaker.renderer,
            limits=AgentLimitsConfig(**limits),  # type: ignore[arg-type]
            max_context=max_context,
        )
        server.sessions.add(session)
        yield server, session


def samples(rollout: Rollout) -> list[tuple[list[int], list[int], list[float]]]:
    """Of every turn: what came before it in its sample, its tokens and their log-probs."""
    begins = [(branch.start, branch.context) for branch in rollout.branches]
    if not begins or begins[0][0] > 0:
        begins.insert(0, (0, rollout.prompt_token_ids))
    found = []
    for turn in rollout.turns:
        begin, context = max((pair for pair in begins if pair[0] <= turn.start), key=lambda pair: pair[0])
        before = np.concatenate([context, rollout.token_ids[begin : turn.start]])
        span = slice(turn.start, turn.end)
        found.append((before.tolist(), rollout.token_ids[span].tolist(), rollout.logprobs[span].tolist()))
    return found


def seen(speaker: Speaker) -> list[tuple[list[int], list[int], list[float]]]:
    """The same, as the engine saw it."""
    pairs = zip(speaker.requests, speaker.generations, strict=True)
    return [(r.token_ids.tolist(), g.token_ids.tolist(), g.logprobs.tolist()) for r, g in pairs]

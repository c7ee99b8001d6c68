"""Attempts at one rollout, from the queue to the reward; a failed attempt is retried.

    queued ──► generating (turns, through the proxy) ──► rewarding ──► accepted
       ▲──── retry, up to max_attempts ◄── infrastructure error ───┘

Invariants:
    - a rollout that fails for an infrastructure error is retried up to `max_attempts`, then marked `infra_error`: it
      never gets a reward of 0 and never enters a baseline; an error that a retry cannot fix is marked at once;
    - once a prompt turns out to be malformed, nothing more is generated for it;
    - a request's seed depends only on the run's seed, the draw, and the index: not on time, engines, or attempts.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace

import numpy as np

from roll.envs.hosting import EnvHosts
from roll.errors import InfraError, MalformedPromptError, ReplayError, UnscorableError
from roll.protocols import Reward
from roll.rollout.episode import EpisodePlan, loop_for
from roll.rollout.lifecycle import LifeCycle, RolloutState
from roll.rollout.loops import Renderer, RolloutLoop
from roll.rollout.proxy import LLMProxy
from roll.running import is_cancelled
from roll.types import Generation, GenerationRequest, PromptDraw, Rollout, RolloutId, RolloutStatus, SamplingParams

__all__ = ["Attempts", "SamplingPlan", "request_seed"]

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 60.0
"""Longest backoff between two attempts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingPlan:
    """How many rollouts each prompt gets, and how they are sampled."""

    purpose: str
    """Purpose, such as `train` or `eval`; part of every request's id and seed."""
    group_size: int
    sampling: SamplingParams
    """Sampling parameters; each request replaces the seed by its own."""

    def rollout_id(self, draw: PromptDraw, index: int) -> RolloutId:
        """Return the id of a rollout sampled under this plan."""
        return RolloutId(purpose=self.purpose, draw_id=draw.draw_id, index=index)


def request_seed(run_seed: int, purpose: str, draw_id: int, index: int) -> int:
    """Return the seed of a request: 31 bits of a hash, so that it is the same on every machine and in every process."""
    digest = hashlib.blake2b(f"{run_seed}/{purpose}/{draw_id}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(eq=False)
class Attempts:
    """Generates and scores rollouts, with retries."""

    proxy: LLMProxy
    """Proxy that gets all requests."""
    rewards: Mapping[str, Reward]
    """Reward function of each domain."""
    renderer: Renderer
    """Converts tokens to text, and renders the text between two turns."""
    life: LifeCycle = field(default_factory=LifeCycle)
    """State of every rollout."""
    _: KW_ONLY
    seed: int
    """Seed of the run."""
    max_attempts: int = 3
    """Number of attempts at a rollout before its fate is `infra_error`."""
    retry_wait_s: float = 0.0
    """Backoff before the second attempt; doubles before each later one."""
    replicate: bool = True
    """Whether a prompt's rollouts may run on different engines."""
    loop: RolloutLoop | None = None
    """User-defined loop that replaces ROLL's own."""
    hosts: EnvHosts = field(default_factory=EnvHosts)
    """Where environments run."""
    episodes: EpisodePlan = field(default_factory=EpisodePlan)
    """How episodes are played."""
    on_rollout: Callable[[Rollout], None] = lambda rollout: None
    """Called with every rollout that ends (for a display); must return at once."""
    _malformed: dict[tuple[str, str], str] = field(init=False, default_factory=dict)
    """By domain and UID: prompts for which no answer can be scored, and why."""

    async def attempt(
        self,
        draw: PromptDraw,
        index: int,
        plan: SamplingPlan,
        *,
        on_start: Callable[[], None] = lambda: None,
        before_reward: asyncio.Event | None = None,
    ) -> Rollout:
        """Generate and score one rollout, with retries.

        Args:
            draw: The prompt draw.
            index: Index of the rollout within its group.
            plan: How to sample.
            on_start: Called when an engine first gets a request of the rollout.
            before_reward: Event for which scoring waits.
        """
        rollout_id = plan.rollout_id(draw, index)
        self.life.begin(rollout_id)
        try:
            rollout = await self._tries(rollout_id, draw, plan, on_start, before_reward)
        except asyncio.CancelledError:
            self.life.move(rollout_id, RolloutState.ABORTED)
            raise
        except BaseException as error:
            self.life.move(rollout_id, RolloutState.ABORTED, f"{type(error).__name__}: {error}")
            raise
        self.on_rollout(rollout)
        return rollout

    def discard(self, rollout: Rollout) -> None:
        """Abort a scored rollout whose result is no longer needed."""
        if rollout.status is RolloutStatus.COMPLETED:
            self.life.move(rollout.rollout_id, RolloutState.ABORTED, "not needed")

    async def _tries(
        self,
        rollout_id: RolloutId,
        draw: PromptDraw,
        plan: SamplingPlan,
        on_start: Callable[[], None],
        before_reward: asyncio.Event | None,
    ) -> Rollout:
        life, index = self.life, rollout_id.index
        request = GenerationRequest(
            request_id=rollout_id.request_id(),
            token_ids=draw.token_ids,
            media=draw.media,
            sampling=replace(plan.sampling, seed=request_seed(self.seed, plan.purpose, draw.draw_id, index)),
        )
        session = str(rollout_id) if self.replicate else f"{plan.purpose}-{draw.draw_id}"
        loop = self.loop or loop_for(draw.prompt, self.hosts, self.episodes)

        def started(engine_id: str) -> None:
            if life.state(rollout_id) is RolloutState.QUEUED:
                life.move(rollout_id, RolloutState.GENERATING, engine_id)
                on_start()

        async def generate(request: GenerationRequest) -> Generation:
            return await self.proxy.generate(request, session=session, pinned=not self.replicate, on_start=started)

        rollout: Rollout | None = None
        cause = self._malformed.get((draw.prompt.domain, draw.prompt.uid), "")
        for attempt in range(1, 1 if cause else self.max_attempts + 1):
            if attempt > 1:
                life.move(rollout_id, RolloutState.QUEUED, cause)
                if self.retry_wait_s:
                    await asyncio.sleep(min(self.retry_wait_s * 2 ** (attempt - 2), LONGEST_WAIT_S))
            try:
                if rollout is None:
                    rollout = replace(await loop(draw, index, request, generate, self.renderer), purpose=plan.purpose)
                if life.state(rollout_id) is RolloutState.QUEUED:  # only its reward is retried, or no model is called
                    life.move(rollout_id, RolloutState.GENERATING)
                life.move(rollout_id, RolloutState.REWARDING)
                if before_reward is not None:
                    await before_reward.wait()
                scored = replace(rollout, reward=await self.rewards[draw.prompt.domain](rollout))
            except InfraError as error:
                cause = f"{type(error).__name__}: {error}"
                logger.info("rollout %s, attempt %d of %d: %s", rollout_id, attempt, self.max_attempts, cause)
                if isinstance(error, MalformedPromptError):
                    self._malformed[draw.prompt.domain, draw.prompt.uid] = cause
                if isinstance(error, (UnscorableError, ReplayError)):
                    break
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                cause = "CancelledError: what it waited for was cancelled"
            else:
                life.move(rollout_id, RolloutState.ACCEPTED)
                return scored
        life.move(rollout_id, RolloutState.INFRA_ERROR, cause)
        return replace(rollout or _empty_rollout(draw, rollout_id), status=RolloutStatus.INFRA_ERROR, cause=cause)


def _empty_rollout(draw: PromptDraw, rollout_id: RolloutId) -> Rollout:
    """Return an empty rollout for an attempt that never got an answer."""
    return Rollout(
        draw_id=draw.draw_id,
        index=rollout_id.index,
        purpose=rollout_id.purpose,
        prompt=draw.prompt,
        prompt_token_ids=draw.token_ids,
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        policy_versions=np.zeros(0, np.int32),
        finish_reason="abort",
        text="",
    )

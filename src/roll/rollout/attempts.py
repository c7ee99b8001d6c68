"""RolloutRunner: runs one rollout from the queue to its reward, and retries failed attempts.

    queued ──► generating (turns, through the proxy) ──► rewarding ──► accepted
       ▲──── retry, up to max_attempts ◄── infrastructure error ───┘

Invariants:
    - after an infrastructure error, a rollout is retried up to `max_attempts` and then marked `infra_error`: it never
      gets a reward of 0 and is excluded from baselines; if a retry cannot fix the error, it is marked immediately;
    - once a prompt turns out to be malformed, nothing more is generated for it;
    - a request's seed depends only on the run's seed, the draw and the index, not on time, engines or attempts.
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
from roll.rollout.episode import choose_loop
from roll.rollout.episode_start import EpisodePlan
from roll.rollout.lifecycle import LifeCycle, RolloutState
from roll.rollout.loops import Renderer, RolloutLoop
from roll.rollout.proxy import LLMProxy
from roll.running import is_cancelled
from roll.types import Generation, GenerationRequest, PromptDraw, Rollout, RolloutId, RolloutStatus, SamplingParams

__all__ = ["RolloutRunner", "SamplingPlan", "compute_request_seed"]

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 60.0
"""Maximum backoff between two attempts, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingPlan:
    """The purpose of rollouts, their number per prompt, and their sampling parameters."""

    purpose: str
    """Purpose of the rollouts, such as `train` or `eval`; part of every request's id and seed."""
    group_size: int
    sampling: SamplingParams
    """Sampling parameters; every request gets its own seed."""

    def build_rollout_id(self, draw: PromptDraw, index: int) -> RolloutId:
        """Return the id of the rollout with this index within the draw's group, for this plan's purpose."""
        return RolloutId(purpose=self.purpose, draw_id=draw.draw_id, index=index)


def compute_request_seed(run_seed: int, purpose: str, draw_id: int, index: int) -> int:
    """Return the seed of a request: a 31-bit hash of the arguments, identical on every machine and in every process."""
    digest = hashlib.blake2b(f"{run_seed}/{purpose}/{draw_id}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(eq=False)
class RolloutRunner:
    """Generates and scores rollouts, with retries."""

    proxy: LLMProxy
    """Proxy to which all requests are sent."""
    rewards: Mapping[str, Reward]
    """Reward function of each domain."""
    renderer: Renderer
    """Converts tokens to text, and renders the text between two turns."""
    lifecycle: LifeCycle = field(default_factory=LifeCycle)
    """State of every rollout."""
    _: KW_ONLY
    seed: int
    """Seed of the run."""
    max_attempts: int = 3
    """Number of attempts at a rollout before it is marked `infra_error`."""
    retry_wait_s: float = 0.0
    """Backoff before the second attempt, in seconds; doubled for each later attempt."""
    replicate: bool = True
    """True if the rollouts of one prompt may run on different engines."""
    loop: RolloutLoop | None = None
    """User-defined rollout loop, which replaces the default loop."""
    hosts: EnvHosts = field(default_factory=EnvHosts)
    """Hosts that run environments."""
    episodes: EpisodePlan = field(default_factory=EpisodePlan)
    """Settings of episodes."""
    on_rollout: Callable[[Rollout], None] = lambda rollout: None
    """Function called with every finished rollout, to display it; must not block."""
    _malformed: dict[tuple[str, str], str] = field(init=False, default_factory=dict)
    """Reason why answers to a prompt cannot be scored, by (domain, prompt UID)."""

    async def generate_and_score(
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
            draw: The sampled prompt.
            index: Index of the rollout within its group.
            plan: The sampling plan.
            on_start: Called when an engine receives the first request of the rollout.
            before_reward: Event that must be set before the rollout is scored.
        """
        rollout_id = plan.build_rollout_id(draw, index)
        self.lifecycle.begin(rollout_id)
        try:
            rollout = await self._attempt_with_retries(rollout_id, draw, plan, on_start, before_reward)
        except asyncio.CancelledError:
            self.lifecycle.move(rollout_id, RolloutState.ABORTED)
            raise
        except BaseException as error:
            self.lifecycle.move(rollout_id, RolloutState.ABORTED, f"{type(error).__name__}: {error}")
            raise
        self.on_rollout(rollout)
        return rollout

    def discard(self, rollout: Rollout) -> None:
        """Mark a rollout as aborted, because its result is not needed; do nothing if it was not scored."""
        if rollout.status is RolloutStatus.COMPLETED:
            self.lifecycle.move(rollout.rollout_id, RolloutState.ABORTED, "not needed")

    async def _attempt_with_retries(
        self,
        rollout_id: RolloutId,
        draw: PromptDraw,
        plan: SamplingPlan,
        on_start: Callable[[], None],
        before_reward: asyncio.Event | None,
    ) -> Rollout:
        lifecycle, index = self.lifecycle, rollout_id.index
        request = GenerationRequest(
            request_id=rollout_id.request_id(),
            token_ids=draw.token_ids,
            media=draw.media,
            sampling=replace(plan.sampling, seed=compute_request_seed(self.seed, plan.purpose, draw.draw_id, index)),
        )
        # If all rollouts of the draw share a session, they go to the engine with their prompt in its prefix cache.
        session = str(rollout_id) if self.replicate else f"{plan.purpose}-{draw.draw_id}"
        loop = self.loop or choose_loop(draw.prompt, self.hosts, self.episodes)

        def begin(engine_id: str) -> None:
            if lifecycle.get_state(rollout_id) is RolloutState.QUEUED:
                lifecycle.move(rollout_id, RolloutState.GENERATING, engine_id)
                on_start()

        async def generate(request: GenerationRequest) -> Generation:
            route = {"session": session, "pinned": not self.replicate, "domain": draw.prompt.domain}
            return await self.proxy.generate(request, **route, on_start=begin)

        rollout: Rollout | None = None
        cause = self._malformed.get((draw.prompt.domain, draw.prompt.uid), "")
        for attempt in range(1, 1 if cause else self.max_attempts + 1):
            if attempt > 1:
                lifecycle.move(rollout_id, RolloutState.QUEUED, cause)
                if self.retry_wait_s:
                    await asyncio.sleep(min(self.retry_wait_s * 2 ** (attempt - 2), MAX_BACKOFF_S))
            try:
                if rollout is None:  # if only the reward is retried, the answer is kept
                    rollout = replace(await loop(draw, index, request, generate, self.renderer), purpose=plan.purpose)
                if lifecycle.get_state(rollout_id) is RolloutState.QUEUED:  # only the reward is retried, or no model
                    lifecycle.move(rollout_id, RolloutState.GENERATING)
                lifecycle.move(rollout_id, RolloutState.REWARDING)
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
                if is_cancelled():  # this task was canceled, not just a call inside a client library
                    raise
                cause = "CancelledError: a call that the rollout awaited was canceled"
            else:
                lifecycle.move(rollout_id, RolloutState.ACCEPTED)
                return scored
        lifecycle.move(rollout_id, RolloutState.INFRA_ERROR, cause)
        return replace(rollout or _build_empty_rollout(draw, rollout_id), status=RolloutStatus.INFRA_ERROR, cause=cause)


def _build_empty_rollout(draw: PromptDraw, rollout_id: RolloutId) -> Rollout:
    """Return a rollout without tokens, for a rollout that got no answer in any attempt."""
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

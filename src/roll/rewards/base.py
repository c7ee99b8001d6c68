"""What every reward shares: cut-off answers, time limits, and who is to blame when a verifier does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from roll.config.rewards import RewardConfig
from roll.errors import RewardInfraError, UserError, WorkerDiedError
from roll.protocols import WorkerPool
from roll.types import RewardResult, Rollout

__all__ = ["Judgement", "Verifier", "in_pool", "judge"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What one verifier says of one answer."""

    value: float
    verdict: str
    correct: bool | None = None
    """`None` where the verifier does not decide whether the task was solved (a format check)."""


Verifier: TypeAlias = Callable[[Rollout], Awaitable[Judgement]]


async def in_pool(pool: WorkerPool, function: Callable[..., Any], *args: Any, time_limit_s: float) -> Any:
    """Run a verifier's function in the pool.

    Raises:
        TimeoutError: the answer took too long to verify.
        RewardInfraError: the worker died or the verifier crashed.
    """
    try:
        return await pool.submit(function, *args, time_limit_s=time_limit_s)
    except (TimeoutError, UserError):
        raise
    except WorkerDiedError as error:
        raise RewardInfraError(f"the verifier's process died: {error}") from error
    except (
        Exception
    ) as error:  # the boundary to verifiers: whatever they raise is our failure, not the model's
        raise RewardInfraError(f"the verifier crashed: {type(error).__name__}: {error}") from error


async def judge(config: RewardConfig, verifier: Verifier, rollout: Rollout) -> Judgement:
    """Ask one verifier. A cut-off answer and one that takes too long to verify are the model's failure: value 0."""
    if config.require_finished and not rollout.finished:
        return Judgement(value=0.0, verdict="unfinished", correct=False)
    try:
        return await verifier(rollout)
    except TimeoutError:
        return Judgement(value=0.0, verdict="timeout", correct=False)


class Scorer:
    """One or several weighted verifiers; implements `Reward`."""

    def __init__(self, components: list[tuple[str, RewardConfig, Verifier]]) -> None:
        self._components = components

    async def __call__(self, rollout: Rollout) -> RewardResult:
        """The weighted sum; solved where every component that decides it says so."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        found = await asyncio.gather(
            *(judge(config, verifier, rollout) for _, config, verifier in self._components)
        )
        decided = [judgement.correct for judgement in found if judgement.correct is not None]
        return RewardResult(
            value=sum(
                config.weight * j.value for (_, config, _), j in zip(self._components, found, strict=True)
            ),
            components={name: j.value for (name, _, _), j in zip(self._components, found, strict=True)},
            verdict=found[0].verdict,
            correct=all(decided) if decided else None,
            duration_s=loop.time() - started,
        )

"""Types that all verifiers share, and the distinction between failures of the answer and of the infrastructure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll.errors import InfraError, RewardInfraError, UserError, WorkerDiedError
from roll.protocols import WorkerPool
from roll.types import Prompt, Rollout

__all__ = ["MAX_TEXT_LENGTH", "TIMEOUT", "Judgement", "Verifier", "build_rollout_from_answer", "run_in_pool"]

MAX_TEXT_LENGTH = 20_000
"""Number of characters that verifiers of final answers read, from the end of an answer."""
TIMEOUT = "timeout"
"""Verdict on an answer that took too long to verify."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """The judgement of one verifier on one answer."""

    value: float
    verdict: str
    correct: bool | None = None
    """`None` if the verifier does not decide whether the task was solved (a format check)."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Parts of the value by name, for metrics: for example, one for each instruction that an answer should follow."""
    timed_out: bool = False
    """True if a verifier behind this one, such as that of a reward service, ran out of time."""


async def _do_nothing() -> None:
    pass


def _return_no_state() -> None:
    return None


def _ignore_state(state: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Verifier:
    """A verifier: the function that judges rollouts, with functions to close it and to save and restore its state."""

    judge: Callable[[Rollout], Awaitable[Judgement]]
    """Judges a rollout. Raises `TimeoutError` if an answer takes too long to verify, `MalformedPromptError` or
    `UnscorableError` if a retry cannot help. Any other exception is a failure of the infrastructure for this one
    answer."""
    decides_correctness: bool
    """True if the verifier decides whether the task was solved."""
    close: Callable[[], Awaitable[None]] = _do_nothing
    """Closes the verifier's connections and processes; calling it twice is allowed."""
    state: Callable[[], Any] = _return_no_state
    """Returns the state that later judgements depend on, as JSON-serializable data; `None` for a stateless verifier."""
    restore: Callable[[Any], None] = _ignore_state
    """Restores the state that `state` returned."""


async def run_in_pool(pool: WorkerPool, function: Callable[..., Any], *args: Any, time_limit_s: float) -> Any:
    """Run a verifier's function in the pool.

    Raises:
        TimeoutError: The answer took too long to verify.
        UserError: The verifier reports that the user must correct something.
        InfraError: The worker died, the verifier crashed, or it reports that it cannot judge.
    """
    try:
        # Verifiers that parse an answer run in the pool, never in the controller: models find text on which a parser
        # backtracks, recurses or raises, and the controller's event loop drives every engine.
        return await pool.submit(function, *args, time_limit_s=time_limit_s)
    # This clause comes first, as `WorkerDiedError` is an `InfraError`, which is raised again unchanged below.
    except WorkerDiedError as error:
        raise RewardInfraError(f"the verifier's process died: {error}") from error
    except (TimeoutError, UserError, InfraError):
        raise
    except Exception as error:  # the boundary to verifiers: their exceptions are not the model's failure
        place = "".join(f" ({note})" for note in getattr(error, "__notes__", [])[-1:])
        raise RewardInfraError(f"the verifier crashed{place}: {type(error).__name__}: {error}") from error


def build_rollout_from_answer(
    prompt: Prompt, text: str, token_ids: Sequence[int] = (), *, finished: bool = True
) -> Rollout:
    """Build a rollout from a given answer, so that a reward can score it without an engine."""
    ids = np.asarray(token_ids, np.int32)
    return Rollout(
        draw_id=0,
        index=0,
        prompt=prompt,
        prompt_token_ids=np.zeros(0, np.int32),
        token_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        policy_versions=np.zeros(len(ids), np.int32),
        finish_reason="stop" if finished else "length",
        text=text,
    )

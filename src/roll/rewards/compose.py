"""Combine several weighted verifiers into one reward, with gates.

    gates, in parallel ──► one below its threshold? ──► 0, and no other verifier runs
                      └──► the others, in parallel ──► sum of weight x value

A gate is a component like any other: its weighted value is part of the sum; with weight 0 it adds nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll.config.rewards import RewardConfig
from roll.errors import RewardInfraError, UnscorableError, UserError
from roll.rewards.base import TIMEOUT, Judgement, Verifier
from roll.rewards.reasoning import NO_ANSWER, get_scored_text
from roll.types import RewardResult, Rollout
from roll_sandbox.errors import SandboxAccessError

__all__ = ["UNFINISHED", "Component", "WeightedReward"]

logger = logging.getLogger(__name__)

MAX_VALUE = 1e9
"""Maximum absolute value of a judgement: larger values could overflow, or make the loss infinite."""
UNFINISHED = "unfinished"
"""Verdict on an answer that was truncated, and therefore not verified."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One verifier with its name and its settings."""

    name: str
    config: RewardConfig
    verifier: Verifier

    @property
    def is_logged_only(self) -> bool:
        """True if the component is only logged: it affects neither reward nor accuracy."""
        return self.config.weight == 0 and self.config.gate is None

    async def judge(self, rollout: Rollout) -> Judgement:
        """Run the verifier.

        The value is 0 if the answer was truncated, is empty after the model's reasoning, or takes too long to verify.
        Any other exception of the verifier is an infrastructure error for this one answer.

        Raises:
            RewardInfraError: The verifier failed; the message names the component and the prompt.
            UnscorableError: Retrying cannot help, because the verifier raised this error or the user must correct
                something.
            SandboxAccessError: Sandboxes can no longer be used.
        """
        failed = False if self.verifier.decides_correctness else None
        if self.config.require_finished and not rollout.is_finished:
            return Judgement(value=0.0, verdict=UNFINISHED, correct=failed)
        if not self.config.scores_reasoning:
            text = get_scored_text(rollout, self.config.reasoning)
            if text is None or (not text.strip() and rollout.text.strip()):
                return Judgement(value=0.0, verdict=NO_ANSWER, correct=failed)
            rollout = rollout if text == rollout.text else replace(rollout, text=text)
        try:
            return _check_judgement(await self.verifier.judge(rollout))
        except TimeoutError:
            return Judgement(value=0.0, verdict=TIMEOUT, correct=failed)
        except (UnscorableError, SandboxAccessError):
            raise
        except UserError as error:
            # A retry cannot help, and would only use up the retries that are meant for failing machines.
            raise UnscorableError(self._describe_error(error, rollout)) from error
        except Exception as error:  # the boundary to verifiers: their exceptions must never end a run
            raise RewardInfraError(self._describe_error(error, rollout)) from error

    def _describe_error(self, error: Exception, rollout: Rollout) -> str:
        what = str(error) if isinstance(error, RewardInfraError | UserError) else f"{type(error).__name__}: {error}"
        return f"reward '{self.name}': {what} (prompt '{rollout.prompt.uid}')"

    def has_timed_out(self, judgement: Judgement) -> bool:
        """Return whether the verifier itself ran out of time.

        The result is false if the program in the answer timed out, because this makes the answer only incorrect.
        """
        return judgement.timed_out or (judgement.verdict == TIMEOUT and not self.config.needs_sandbox)

    def fails_gate(self, judgement: Judgement) -> bool:
        """Return whether the component is a gate that this judgement does not pass."""
        return self.config.gate is not None and judgement.value < self.config.gate


def _check_judgement(judgement: Judgement) -> Judgement:
    """Return the judgement unchanged; raise a `RewardInfraError` if its value or one of its parts is not finite or too
    large.
    """
    values = {"value": judgement.value, **judgement.parts}
    wrong = {name: value for name, value in values.items() if not abs(value) <= MAX_VALUE}
    if wrong:
        name, value = next(iter(wrong.items()))
        raise RewardInfraError(
            f"its values must be numbers between -{MAX_VALUE:g} and {MAX_VALUE:g}, got {name} {value}"
        )
    return judgement


class WeightedReward:
    """The weighted sum of its components, or 0 if a gate is not passed; implements `Reward`.

    A task is solved if every deciding component accepts the answer and every gate is passed; components that are only
    logged (weight 0, no gate) are ignored. The result has the verdict of the gate that was not passed, otherwise of the
    first deciding component, otherwise of the first component.
    """

    def __init__(self, components: Sequence[Component]) -> None:
        self._components = list(components)
        order = [i for i, c in enumerate(components) if c.verifier.decides_correctness and not c.is_logged_only]
        self._verdict_component = self._components[order[0] if order else 0]
        self._reported_failures: set[str] = set()
        """Names of logged-only components whose failure was already reported."""

    async def __call__(self, rollout: Rollout) -> RewardResult:
        """Run all gates in parallel, then all other components in parallel.

        Raises:
            RewardInfraError: A component failed; the message names the component and the prompt.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        found = await self._judge_all(rollout, [c for c in self._components if c.config.gate is not None])
        closed = next((part for part in found if part[0].fails_gate(part[1])), None)
        if closed is None:
            found += await self._judge_all(rollout, [c for c in self._components if c.config.gate is None])
        return self._make_result(found, closed, loop.time() - started)

    async def _judge_all(self, rollout: Rollout, components: list[Component]) -> list[tuple[Component, Judgement]]:
        judgements = await asyncio.gather(*(self._judge(component, rollout) for component in components))
        return [(c, j) for c, j in zip(components, judgements, strict=True) if j is not None]

    async def _judge(self, component: Component, rollout: Rollout) -> Judgement | None:
        """Return a component's judgement; `None` if a component that is only logged failed, so that the rollout is
        kept.

        Only the first such failure is logged as a warning.
        """
        try:
            return await component.judge(rollout)
        except RewardInfraError as error:
            if not component.is_logged_only:
                raise
            level = logging.INFO if component.name in self._reported_failures else logging.WARNING
            self._reported_failures.add(component.name)
            logger.log(level, "the reward '%s', which is only logged, failed: %s", component.name, error)
            return None

    def _make_result(
        self,
        judgements: Sequence[tuple[Component, Judgement]],
        failed_gate: tuple[Component, Judgement] | None,
        duration_s: float,
    ) -> RewardResult:
        decisions = {c.name: j.correct for c, j in judgements if j.correct is not None}
        counted = [decisions[c.name] for c, _ in judgements if c.name in decisions and not c.is_logged_only]
        timed_out = tuple(c.name for c, j in judgements if c.has_timed_out(j))
        components = {c.name: j.value for c, j in judgements}
        components |= {f"{c.name}/{part}": value for c, j in judgements for part, value in j.parts.items()}
        value = sum(c.config.weight * j.value for c, j in judgements)
        if not abs(value) <= MAX_VALUE:
            raise RewardInfraError(
                f"the weighted sum of the rewards must be between -{MAX_VALUE:g} and {MAX_VALUE:g}, got {value:g}: "
                "lower the `weight` of the rewards"
            )
        verdict = next((j.verdict for c, j in judgements if c is self._verdict_component), "")
        correct = all(counted) if counted else None
        if failed_gate is not None:
            gate, judgement = failed_gate
            value, verdict = 0.0, f"{gate.name}: {judgement.verdict}"
            correct = (
                False
                if any(c.verifier.decides_correctness and not c.is_logged_only for c in self._components)
                else None
            )
        return RewardResult(
            value=value,
            components=components,
            verdict=verdict,
            correct=correct,
            decisions=decisions,
            timed_out=timed_out,
            duration_s=duration_s,
        )

    def state(self) -> dict[str, Any]:
        """Return the states of all stateful components, by component name; see `Verifier.state`."""
        states = {component.name: component.verifier.state() for component in self._components}
        return {name: state for name, state in states.items() if state is not None}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore the states that `state` returned; a component without a saved state starts with its initial state."""
        for component in self._components:
            if component.name in states:
                component.verifier.restore(states[component.name])

    async def close(self) -> None:
        """Close all components, then raise the first error. Calling it twice is safe."""
        results = await asyncio.gather(*(c.verifier.close() for c in self._components), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

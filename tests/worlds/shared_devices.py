"""Trainers that share devices with small engines, under virtual time, and the production code that switches them.

World ──► ServedPolicy ──► SharedDevices ──► EngineTransitions ──► TickingEngines
               │                 └──► DeviceTrainer × roles
               └──► WeightSync ──► DeviceTrainer (the policy) ──► TickingEngines
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

from roll.config.sharing import SharingRule
from roll.pipelines.colocation import ALL_STATE_KINDS, SharedDevices
from roll.pipelines.served_policy import ServedPolicy
from roll.protocols import StateKind
from roll.rollout import SamplingPlan
from roll.types import TensorSpec, WeightUpdate
from worlds.engines import TickingEngines

__all__ = ["DeviceTrainer", "SharedTrainers", "build_devices", "build_policy", "choose_rule"]

MAX_MOVE_S = 2.0
"""Longest time to move the state of a trainer."""


class DeviceTrainer:
    """A trainer whose state can be moved; its weights are one tensor, which holds the policy version.

    Args:
        name: Its role.
        violations: Gets what must never happen, in words.
        delay: Draws the time of a move.
    """

    def __init__(self, name: str, violations: list[str], delay: Callable[[], float] = lambda: 0.0) -> None:
        self.name = name
        self.states: set[StateKind] = set(ALL_STATE_KINDS)
        """What is on its devices."""
        self.changes = False
        """Whether an update is under way."""
        self._num_computing = 0
        self.list_holders: Callable[[], Sequence[str]] = list
        """Lists the engines that occupy its devices."""
        self._violations = violations
        self._delay = delay

    async def onload(self, states: Sequence[StateKind]) -> None:
        if "optimizer" in states:
            self._check_memory("is onloaded")
        await self._move()
        self.states |= set(states)
        if "optimizer" in states:
            self._check_memory("is onloaded")

    async def offload(self, states: Sequence[StateKind]) -> None:
        if self._num_computing and states != ["parameters"]:
            self._violations.append(f"{self.name} is offloaded while it computes")
        await self._move()
        self.states -= set(states)

    async def _move(self) -> None:
        if seconds := self._delay():
            await asyncio.sleep(seconds)

    @contextmanager
    def computing(self, *, changes: bool = False) -> Iterator[None]:
        """Check that the trainer has all of its state, and its devices for itself, in a `with` block.

        Args:
            changes: Whether its weights change.
        """
        self._check_compute()
        self.changes = changes
        self._num_computing += 1
        try:
            yield
        finally:
            self.changes = False
            self._num_computing -= 1
        self._check_compute()

    def _check_compute(self) -> None:
        if self.states != set(ALL_STATE_KINDS):
            self._violations.append(f"{self.name} computes with {sorted(self.states)} on its devices")
        self._check_memory("computes")

    def _check_memory(self, what: str) -> None:
        if holders := self.list_holders():
            self._violations.append(f"{self.name} {what} while {', '.join(holders)} occupies its devices")

    async def send_weights(
        self, version: int, transport: str, deliver: Callable[[WeightUpdate], Awaitable[None]]
    ) -> Mapping[str, int]:
        manifest = (TensorSpec(name="w", shape=(1,), dtype="float32"),)
        changes, had = self.changes, "parameters" in self.states
        await deliver(WeightUpdate(policy_version=version, manifest=manifest, transport=transport, handle=None))
        if changes or self.changes:
            self._violations.append(f"weights of policy version {version} are sent while they change")
        if not had or "parameters" not in self.states:
            self._violations.append(f"weights of policy version {version} are sent while they are offloaded")
        return {"w": version}


class SharedTrainers:
    """The trainers of a run, some of which share devices with engines.

    Args:
        rule: The sharing rule.
        engine_ids: Ids of the engines on shared devices.
        engines: The engine group.
        chance: Draws which trainers share the devices, and the time of their moves.
        violations: Gets what must never happen, in words.
    """

    def __init__(
        self,
        rule: SharingRule,
        engine_ids: Collection[str],
        engines: TickingEngines,
        chance: random.Random,
        violations: list[str],
    ) -> None:
        moves = chance.choice([0.0, 0.3, MAX_MOVE_S])
        self.policy, self.reference = (
            DeviceTrainer(name, violations, lambda: chance.uniform(0, moves)) for name in ("policy", "reference")
        )
        every = [self.policy, self.reference]
        self.sharing = [] if rule == "disaggregated" else chance.choice([[self.policy], every, [self.reference]])
        self.engine_ids = list(engine_ids) if self.sharing else []
        for trainer in self.sharing:
            trainer.states.clear()  # engines start after the trainers have released the devices
            trainer.list_holders = lambda: [
                each.engine_id for each in engines.all if each.holds_memory and each.engine_id in self.engine_ids
            ]
        engines.stop_s = lambda: chance.uniform(0, moves)
        engines.is_used_by_trainer = lambda engine_id: (
            engine_id in self.engine_ids and any("optimizer" in trainer.states for trainer in self.sharing)
        )

    async def compute(self, seconds: float, *, changes: bool = False) -> None:
        """Let the trainers compute; see `DeviceTrainer.computing`."""
        with self.policy.computing(changes=changes), self.reference.computing():
            await asyncio.sleep(seconds)


def choose_rule(chance: random.Random, async_ratio: float, num_engines: int) -> SharingRule:
    """Draw a rule that the configuration allows."""
    rules: list[SharingRule] = ["disaggregated", "colocated"]
    if num_engines > 1:
        rules += ["partial_overlap", "elastic_overlap", "elastic_overlap"] if async_ratio else ["stream_training"] * 2
    return chance.choice(rules)


def build_devices(rule: SharingRule, trainers: SharedTrainers) -> SharedDevices | None:
    """Return the devices that are shared; `None` if none are."""
    if not trainers.sharing:
        return None
    return SharedDevices(trainers.policy, trainers.sharing, trainers.engine_ids, rule)


def build_policy(world: Any, devices: SharedDevices | None) -> ServedPolicy:
    """Return the engines that serve the policy of a world, as the training loop knows them."""
    run: Any = SimpleNamespace(spans=SimpleNamespace(phase=lambda name: nullcontext()), state=world)
    generation: Any = SimpleNamespace(proxy=world.proxy, scheduler=world.scheduler, elastic_engines=None, widths=None)
    plan = SamplingPlan(purpose="eval", group_size=2, sampling=world.sampling)
    return ServedPolicy(
        run=run, generation=generation, controller=world.controller, weights=world.weights, plan=plan, devices=devices
    )

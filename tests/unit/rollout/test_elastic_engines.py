"""Engines on nodes that join, are announced to leave, and die, while the others go on; under virtual time."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
from worlds.engines import Fault, TickingEngine, TickingEngines
from worlds.nodes import MovingNodes

from roll.errors import InfraError, RollError, WeightSyncError
from roll.rollout import LLMProxy, elastic, elastic_engines
from roll.rollout.elastic_engines import MAX_START_FAILURES, ElasticEngines
from roll.simulation.clock import run
from roll.types import Generation, GenerationRequest, SamplingParams

NUM_TOKENS = 8


class CountingEngine(TickingEngine):
    """Counts the tokens of every request, on whatever engine."""

    counts: ClassVar[Counter[str]] = Counter()

    def _tick(self, own: Any) -> None:
        type(self).counts[own.request.request_id] += 1
        super()._tick(own)


class World:
    """A proxy with one engine of its own, and engines on nodes."""

    def __init__(
        self,
        *,
        own: int = 1,
        most: int = 4,
        least: int = 0,
        load_s: float = 3.0,
        elastic_type: type[ElasticEngines] = ElasticEngines,
    ) -> None:
        CountingEngine.counts.clear()
        self.most = most
        self.load_s = load_s
        self.prepared: list[str] = []
        self.fault: Fault | None = None
        self.fails_for: set[str] = set()
        self.group = TickingEngines([self.engine(f"engine-{i}") for i in range(own)], random.Random(0))
        self.proxy = LLMProxy(self.group, self.prepare)
        self.nodes = MovingNodes(self.group, self.engine)
        self.said: list[str] = []
        self.elastic = elastic_type(
            self.nodes,
            self.proxy.transitions,
            min_engines=least,
            max_engines=most,
            min_timeout_s=100.0,
            first_number=own,
            on_change=self.said.append,
        )

    def engine(self, name: str) -> CountingEngine:
        return CountingEngine(name, tick_s=1.0, capacity=4, length=_length, fault=self.fault)

    async def prepare(self, engine: Any) -> None:
        await asyncio.sleep(self.load_s)
        if engine.engine_id in self.fails_for:
            raise WeightSyncError("the engine computes other log-probs")
        self.prepared.append(engine.engine_id)

    def ask(self, number: int, prefix: str = "r") -> list[asyncio.Task[Generation]]:
        return [asyncio.create_task(self.proxy.generate(_request(f"{prefix}{n}"))) for n in range(number)]

    @property
    def serving(self) -> list[str]:
        return [connection.engine.engine_id for connection in self.proxy._fleet.serving_connections]

    async def end(self) -> None:
        await self.elastic.close()
        await self.proxy.close()
        self.nodes.close()
        assert not self.nodes.violations
        assert not [text for engine in self.group.all for text in engine.violations]


def _request(name: str) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, seed=5)
    return GenerationRequest(request_id=name, token_ids=np.array([1, 2], np.int32), sampling=sampling)


def _length(request: GenerationRequest) -> int:
    return NUM_TOKENS - (len(request.token_ids) - 2)


def within(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return run(work(), limit_s=10_000.0)


def test_elastic_a_node_that_joins_gets_weights_and_then_requests_while_the_others_go_on() -> None:
    async def main() -> None:
        world = World()
        world.elastic.start()
        asked = world.ask(12)
        await asyncio.sleep(1.5)
        world.nodes.join("n", 2)
        await asyncio.sleep(4.0)
        assert world.serving == ["engine-0", "engine-1", "engine-2"]
        assert world.prepared == ["engine-1", "engine-2"]
        answers = await asyncio.gather(*asked)
        assert {answer.engine_id for answer in answers[4:]} == {"engine-1", "engine-2"}
        assert world.proxy.num_continued == world.proxy.num_reissued == 0
        assert world.elastic.get_counters() == {"elastic": 2, "joined": 2, "drained": 0, "lost": 0}
        await world.end()

    within(main)


def test_elastic_a_notice_moves_requests_and_no_token_is_generated_twice() -> None:
    async def main() -> None:
        world = World()
        world.nodes.join("n")
        world.elastic.start()
        await asyncio.sleep(5.0)
        asked = world.ask(8)
        await asyncio.sleep(2.5)
        world.nodes.notice("n", 30.0)
        await asyncio.sleep(1.5)
        assert world.serving == ["engine-0"]
        assert [len(answer.token_ids) for answer in await asyncio.gather(*asked)] == [NUM_TOKENS] * 8
        assert set(CountingEngine.counts.values()) == {NUM_TOKENS}
        assert world.proxy.num_continued == 4 and world.proxy.num_reissued == 0
        await asyncio.sleep(60.0)
        assert world.elastic.get_counters() == {"elastic": 0, "joined": 1, "drained": 1, "lost": 0}
        assert world.said == ["engine engine-1 joined on node n and serves", "engine engine-1 left node n"]
        await world.end()

    within(main)


@pytest.mark.parametrize("hangs", [False, True])
def test_elastic_requests_of_a_node_that_vanishes_start_again(hangs: bool) -> None:
    async def main() -> None:
        world = World()
        world.nodes.join("n")
        world.elastic.start()
        await asyncio.sleep(5.0)
        asked = world.ask(8)
        await asyncio.sleep(2.5)
        world.nodes.kill("n", hangs=hangs)
        answers = await asyncio.gather(*asked)
        assert [len(answer.token_ids) for answer in answers] == [NUM_TOKENS] * 8
        assert {answer.engine_id for answer in answers} == {"engine-0"}
        assert world.proxy.num_reissued == 4
        await asyncio.sleep(5.0)
        assert world.elastic.get_counters() == {"elastic": 0, "joined": 1, "drained": 0, "lost": 1}
        assert world.proxy.num_replaced == 0 and len(world.group.engines) == 1
        await world.end()

    within(main)


def test_elastic_an_engine_that_dies_on_a_node_that_stays_is_replaced_there() -> None:
    async def main() -> None:
        world = World()
        world.nodes.join("n")
        world.elastic.start()
        await asyncio.sleep(5.0)
        world.nodes.at("n")[0].die()
        asked = world.ask(8)
        await asyncio.gather(*asked)
        await world.proxy.wait_for_replacements()
        assert world.serving == ["engine-0", "engine-1"]
        assert world.elastic.get_counters()["lost"] == 0 and world.proxy.num_replaced == 1
        world.nodes.kill("n")
        await asyncio.sleep(10.0)
        assert world.serving == ["engine-0"]
        await world.end()

    within(main)


@pytest.mark.parametrize("way", ["notice", "kill"])
@pytest.mark.parametrize("after_s", [0.5, 1.5, 3.0, 3.5])
def test_elastic_a_node_that_leaves_while_its_engine_starts_leaves_nothing_behind(way: str, after_s: float) -> None:
    async def main() -> None:
        world = World()
        world.elastic.start()
        world.nodes.join("n")
        await asyncio.sleep(after_s)
        world.nodes.notice("n", 20.0) if way == "notice" else world.nodes.kill("n")
        await asyncio.sleep(30.0)
        assert world.serving == ["engine-0"] and len(world.group.engines) == 1
        assert not world.nodes.at("n") and world.elastic.num_serving == 0
        world.nodes.join("m")
        await asyncio.sleep(5.0)
        assert len(world.serving) == 2
        await world.end()

    within(main)


def test_elastic_an_engine_that_joined_in_the_moment_of_its_notice_is_removed_again() -> None:
    async def main() -> None:
        world = World()
        added = asyncio.create_task(world.proxy.transitions.add("engine-1", lambda: world.engine("engine-1")))
        await asyncio.sleep(0)
        while len(world.serving) < 2:
            await asyncio.sleep(0)
            if asyncio.get_running_loop().time() < world.load_s:
                await asyncio.sleep(world.load_s)
        added.cancel()
        with pytest.raises(asyncio.CancelledError):
            await added
        assert world.serving == ["engine-0"] and len(world.group.engines) == 1
        await world.end()

    within(main)


def test_elastic_nodes_beyond_the_maximum_are_ignored_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        world = World(most=1)
        world.elastic.start()
        world.nodes.join("a")
        await asyncio.sleep(5.0)
        world.nodes.join("b")
        await asyncio.sleep(20.0)
        assert world.serving == ["engine-0", "engine-1"] and not world.nodes.at("b")
        said = [record.getMessage() for record in caplog.records if "maximum" in record.getMessage()]
        assert said == ["no engine is started on node b: the run has 1 elastic engines, the maximum "
                        "(cluster.elastic.max_engines)"]  # fmt: skip
        world.nodes.notice("a", 30.0)
        await asyncio.sleep(10.0)
        assert world.serving == ["engine-0", "engine-2"] and world.nodes.at("b")
        await world.end()

    with caplog.at_level(logging.WARNING):
        within(main)


def test_elastic_the_run_waits_for_the_minimum_and_goes_on_below_it(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        world = World(least=1)
        world.elastic.start()
        loop.call_later(20.0, world.nodes.join, "a")
        await world.elastic.wait_for_min()
        assert 20.0 <= loop.time() < 30.0 and world.elastic.num_serving == 1
        await world.elastic.wait_for_min()
        world.nodes.kill("a")
        await asyncio.sleep(20.0)
        assert await asyncio.gather(*world.ask(1))
        before = loop.time()
        await world.elastic.wait_for_min()
        assert loop.time() == before + 100.0
        await world.end()

    with caplog.at_level(logging.WARNING):
        within(main)
    said = [record.getMessage() for record in caplog.records if "elastic engines serve" in record.getMessage()]
    assert [text.split(": ")[0].split(" (")[0] for text in said] == [
        "the run waits up to 100 s for nodes",
        "0 of 1 elastic engines serve",
        "the run waits up to 100 s for nodes",
        "0 of 1 elastic engines serve after 100 s",
    ]


def test_elastic_a_node_on_which_engines_do_not_start_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        world = World()
        world.fails_for = {f"engine-{number}" for number in range(1, 10)}
        world.elastic.start()
        world.nodes.join("a")
        await asyncio.sleep(500.0)
        assert len(world.nodes.homes) == MAX_START_FAILURES
        assert world.serving == ["engine-0"]
        world.fails_for = set()
        world.nodes.join("b")
        await asyncio.sleep(10.0)
        assert len(world.serving) == 2 and len(world.nodes.at("b")) == 1
        await world.end()

    with caplog.at_level(logging.WARNING):
        within(main)
    said = [record.getMessage() for record in caplog.records if "did not start" in record.getMessage()]
    assert [text.rpartition("; ")[2] for text in said] == [
        "the next attempt is in 10 s",
        "the next attempt is in 20 s",
        "the node is ignored from now on",
    ]
    assert said[0].startswith(
        "engine engine-1 did not start on node a: WeightSyncError: the engine computes other log-probs"
    )


@pytest.mark.parametrize("error", [InfraError("the cluster does not answer"), KeyError("Labels")])
def test_elastic_a_cluster_that_does_not_answer_changes_nothing(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        world = World()
        world.elastic.start()
        world.nodes.join("a")
        await asyncio.sleep(5.0)
        world.nodes.fails = error
        await asyncio.sleep(30.0)
        assert len(world.serving) == 2
        world.nodes.fails = None
        world.nodes.kill("a")
        await asyncio.sleep(5.0)
        assert len(world.serving) == 1
        await world.end()

    with caplog.at_level(logging.WARNING):
        within(main)
    assert sum("cannot list the nodes of the cluster" in record.getMessage() for record in caplog.records) == 1


# ---- random schedules, and bugs that they notice


def play(seed: int, elastic_type: type[ElasticEngines] = ElasticEngines) -> None:
    """Let nodes join, leave with a notice, and vanish at random moments while requests arrive.

    Requests whose engine did not vanish have every token once. All requests have their answers in time.
    """

    async def main() -> None:
        chance = random.Random(seed)
        load_s = chance.choice([0.0, 0.5, 4.0])
        world = World(own=chance.randint(1, 2), most=chance.randint(1, 5), load_s=load_s, elastic_type=elastic_type)
        world.elastic.start()
        asked: list[asyncio.Task[Generation]] = []
        for number in range(30):
            await asyncio.sleep(chance.uniform(0, 6))
            asked += world.ask(chance.randint(0, 4), f"r{number}/")
            staying = [name for name, node in world.nodes.live.items() if not node.is_draining]
            kind = chance.choice(["join", "join", "notice", "notice", "kill", "hang"])
            if kind == "join" or not staying:
                world.nodes.join(f"n{number}", chance.randint(1, 3))
            elif kind == "notice":
                world.nodes.notice(chance.choice(staying), chance.choice([5.0, 30.0]))
            else:
                world.nodes.kill(chance.choice(staying), hangs=kind == "hang")
        async with asyncio.timeout(60.0):
            answers = await asyncio.gather(*asked)
        assert [len(answer.token_ids) for answer in answers] == [NUM_TOKENS] * len(asked)
        twice = {name for name, count in CountingEngine.counts.items() if count != NUM_TOKENS}
        assert twice <= world.nodes.victims, f"tokens of {sorted(twice - world.nodes.victims)} were generated twice"
        await asyncio.sleep(60.0)
        homes = Counter(world.nodes.homes[name] for name in world.serving if name in world.nodes.homes)
        live = {name: node for name, node in world.nodes.live.items() if not node.is_draining}
        assert all(name in live and count <= live[name].capacity for name, count in homes.items())
        room = sum(node.capacity for node in live.values())
        assert sum(homes.values()) == world.elastic.num_serving == min(room, world.most)
        assert len(world.elastic._members) == world.elastic.num_serving
        await world.end()

    within(main)


@pytest.mark.parametrize("seed", range(20))
def test_elastic_random_joins_notices_and_deaths_lose_nothing(seed: int) -> None:
    play(seed)


BUGS = {
    "a notice is not followed": (elastic, "elif node.is_draining:", "elif False:"),
    "a lost engine is drained": (elastic, 'reason="lost"))', 'reason="drain"))'),
    "a node gets more engines than fit": (
        elastic,
        "min(node.capacity - occupied[node.node_id], node.num_free)",
        "node.capacity",
    ),
    "each node may have the maximum": (elastic, "num_allowed - len(additions)", "num_allowed"),
    "a node that leaves gets engines": (elastic, "0 if node.is_draining else", "0 if False else"),
    "an engine that starts on a node that leaves goes on": (elastic_engines, "member.task.cancel()  #", "pass  #"),
    "engine ids are used again": (elastic_engines, "self._next_number += 1", "self._next_number = len(self._members)"),
    "requests of a lost engine wait for it": (elastic_engines, "self._transitions.mark_lost(", "str("),
    "engines that left are still counted": (
        elastic_engines,
        "finally:\n            self._members.pop(engine_id, None)",
        "finally:\n            pass",
    ),
    "the loss of a node is an attempt of its requests": (
        elastic_engines,
        "is_preemptible=True",
        "is_preemptible=False",
    ),
    "the run has one engine too many": (
        elastic_engines,
        "max_engines=self._max_engines,",
        "max_engines=self._max_engines + 1,",
    ),
}


def _plant(module: ModuleType, old: str, new: str) -> type[ElasticEngines]:
    """Return the class with one edit of its module, or of the module that it imports."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"the place is not there once: {old}"
    edited = {module.__name__: source.replace(old, new)}
    with pytest.MonkeyPatch.context() as patch:  # also for dataclasses, which look for their module
        for each in (elastic, elastic_engines):
            changed = ModuleType(each.__name__)
            patch.setitem(sys.modules, each.__name__, changed)
            exec(compile(edited.get(each.__name__, inspect.getsource(each)), each.__name__, "exec"), changed.__dict__)
    return changed.ElasticEngines


@pytest.mark.parametrize("bug", BUGS)
def test_elastic_random_schedules_notice_a_planted_bug(bug: str) -> None:
    changed = _plant(*BUGS[bug])
    for seed in range(40):
        try:
            play(seed, changed)
        except (AssertionError, RollError, TimeoutError, KeyError):
            return
    pytest.fail("no schedule noticed it")

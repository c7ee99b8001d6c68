"""How many sandboxes should wait: by hand, for any arrivals, and for arrivals replayed in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox import virtual_time

from roll_sandbox import SandboxError, SandboxManager, SandboxSpec
from roll_sandbox.forecast import (
    Demand,
    compute_burst_timeout_s,
    compute_max_idle,
    compute_poisson_quantile,
    compute_target_idle,
    scale_to_total,
    update_shortage,
)
from roll_sandbox.pools import Pool, make_pool_key


@pytest.mark.parametrize(
    ("mean", "quantile"),
    [
        (0.0, 0),
        (0.01, 0),  # exp(-0.01) = 0.99005
        (0.02, 1),  # 0.98020, 0.99980
        (1.0, 4),  # 0.36788, 0.73576, 0.91970, 0.98101, 0.99634
        (2.0, 6),  # P(X <= 5) = 0.98344, P(X <= 6) = 0.99547
    ],
)
def test_sandbox_warm_pool_the_number_that_is_enough_in_99_of_100_cases(mean: float, quantile: int) -> None:
    assert compute_poisson_quantile(mean, 0.99, 100) == quantile


@given(st.integers(1, 60), st.integers(0, 40))
def test_sandbox_warm_pool_the_quantile_is_the_smallest_that_suffices(tenths: int, most: int) -> None:
    mean = tenths / 10
    term = cumulated = Fraction(1)
    exact = 0  # sums of mean^k / k!, compared with 0.99 exp(mean), whose series is as exact
    whole = Fraction(1)
    each = Fraction(1)
    for k in range(1, 80):
        each *= Fraction(tenths, 10) / k
        whole += each
    while cumulated < Fraction(99, 100) * whole:
        exact += 1
        term *= Fraction(tenths, 10) / exact
        cumulated += term
    assert compute_poisson_quantile(mean, 0.99, most) == min(exact, most)


def test_sandbox_warm_pool_a_rate_is_half_known_after_its_half_life() -> None:
    demand = Demand()
    for _ in range(10):
        demand = demand.update(8, 1.0, 1.0)
    assert demand.rate_per_s == pytest.approx(4.0)
    assert compute_target_idle(demand, 0.5, 100) == 6  # the 99 % quantile of Poisson(2), above
    assert compute_target_idle(demand, 0.5, 3) == 3


def test_sandbox_warm_pool_a_burst_is_what_was_missing_at_once() -> None:
    short = update_shortage(0.0, 100.0, 10.0)
    assert short == 1.0
    short = update_shortage(short, 0.05, 10.0)
    assert short == 1.5  # half of the first was made up for, and one more is wanted
    assert update_shortage(short, 0.0, 10.0) == 2.5
    assert compute_target_idle(Demand().update(64, 60.2, 1.0), 0.02, 100) == 60


def test_sandbox_warm_pool_a_burst_is_kept_for_the_usual_silence_and_fades_after_it() -> None:
    demand = Demand().update(64, 64.0, 1.0)
    for _ in range(60):
        demand = demand.update(0, 0.0, 1.0)
    assert demand.burst == 64.0 and compute_burst_timeout_s(demand) == 60.0
    for _ in range(20):
        demand = demand.update(0, 0.0, 1.0)
    assert demand.burst == pytest.approx(32.0)
    demand = demand.update(64, 64.0, 1.0)  # the silence of 80 s is now known
    assert demand.gap_s == 80.0 and compute_burst_timeout_s(demand) == 220.0
    for _ in range(220 + 140):
        demand = demand.update(0, 0.0, 1.0)
    assert demand.burst == pytest.approx(64.0 / 2**7)
    assert compute_target_idle(demand.update(0, 0.0, 1.0), 0.02, 100) == 0


def test_sandbox_warm_pool_memory_and_cores_bound_what_waits() -> None:
    bounds = {"num_idle": 0, "num_cores": 2, "start_s": 0.01, "maximum": 512}
    assert compute_max_idle(free_bytes=None, **bounds) == 512
    assert compute_max_idle(free_bytes=230_000_000, **bounds) == 25  # a quarter of the hundred that would fit
    assert compute_max_idle(free_bytes=230_000_000, **{**bounds, "num_idle": 20}) == 30  # of 120
    assert compute_max_idle(free_bytes=None, **{**bounds, "start_s": 2.0}) == 10  # two cores start ten in ten seconds


def test_sandbox_warm_pool_kinds_share_the_bound_in_proportion() -> None:
    assert scale_to_total({"a": 3, "b": 4}, 7) == {"a": 3, "b": 4}
    assert scale_to_total({"a": 30, "b": 10, "c": 1}, 20) == {"a": 15, "b": 5, "c": 0}  # 14.6, 4.9, 0.5
    assert scale_to_total({}, 5) == {}


@given(st.dictionaries(st.integers(), st.integers(0, 50)), st.integers(0, 300))
def test_sandbox_warm_pool_shares_never_exceed_the_bound_nor_the_wish(wanted: dict[int, int], most: int) -> None:
    given = scale_to_total(wanted, most)
    assert sum(given.values()) == min(most, sum(wanted.values()))
    assert all(0 <= given[kind] <= wanted[kind] for kind in wanted)
    assert all(given[a] <= given[b] for a in wanted for b in wanted if wanted[a] < wanted[b])


@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0.01, 5.0)), max_size=50), st.floats(0.001, 2.0))
def test_sandbox_warm_pool_targets_grow_with_demand_and_vanish_without(
    windows: list[tuple[int, float]], lead_s: float
) -> None:
    demand, more = Demand(), Demand()
    for arrivals, window_s in windows:
        demand = demand.update(arrivals, arrivals / 2, window_s)
        more = more.update(2 * arrivals, arrivals, window_s)
        assert 0 <= compute_target_idle(demand, lead_s, 50) <= compute_target_idle(more, lead_s, 50) <= 50
        assert compute_target_idle(demand, lead_s, 50) <= compute_target_idle(demand, 2 * lead_s, 50)
        assert demand.burst <= 100 and demand.rate_per_s <= 200 / 0.01
    for _ in range(4000):
        demand = demand.update(0, 0.0, 1.0)
    assert compute_target_idle(demand, lead_s, 50) == 0


def test_sandbox_warm_pool_where_a_sandbox_runs_makes_no_difference_to_its_pool() -> None:
    assert make_pool_key(SandboxSpec(affinity="a")) == make_pool_key(SandboxSpec(affinity="b")) == SandboxSpec()
    assert len({make_pool_key(SandboxSpec(image=image)) for image in (None, "a", "b")}) == 3


def test_sandbox_warm_pool_a_pool_closes_what_waited_in_vain_and_starts_what_is_missing() -> None:
    async def use() -> None:
        pool = Pool(SandboxSpec(), 3, cores=2)
        pool.starting = 1
        assert pool.num_missing == 2
        pool.target, pool.starting = 1, 0
        pool.idle = [(_Started([0]), 0) for _ in range(4)]
        assert pool.remove_surplus() == [], "none has waited for a window yet"
        taken = [pool.pop_idle(fresh=False) for _ in range(2)]
        pool.idle += [each for each in taken if each is not None]
        assert len(pool.remove_surplus()) == 2, "the other two were in use"

    asyncio.run(use())


def test_sandbox_warm_pool_a_pool_gives_out_no_sandbox_that_broke_while_it_waited() -> None:
    async def use() -> None:
        pool = Pool(SandboxSpec(), 2, cores=2)
        whole, ended = _Started([0]), _Started([0])
        ended.has_ended = True
        pool.idle = [(whole, 0), (ended, 0)]
        assert pool.pop_idle(fresh=True) == (whole, 0)
        assert pool.pop_idle(fresh=False) is None

    asyncio.run(use())


class _Started:
    """A sandbox that does nothing."""

    has_ended = False

    def __init__(self, alive: list[int]) -> None:
        self._alive = alive
        self._calls: list[Callable[[], None]] = []
        alive[0] += 1

    async def wait_until_ready(self) -> None:
        pass

    def on_close(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    async def close(self) -> None:
        self._alive[0] -= 1
        for call in self._calls:
            call()


class _Slow:
    """A runtime whose sandboxes start in 25 ms."""

    name = "slow"
    fresh_programs = True

    def __init__(self) -> None:
        self.alive = [0]

    async def start(self) -> None:
        pass

    def resolve(self, spec: SandboxSpec) -> SandboxSpec:
        return spec

    async def launch(self, spec: SandboxSpec) -> _Started:
        await asyncio.sleep(0.025)
        return _Started(self.alive)

    async def close(self) -> None:
        pass


def _replay(arrivals: list[float], warm: int | None, rest_s: float = 0.0) -> tuple[float, int]:
    """The share of warm starts, and how many wait in the end; a sandbox is used for a second."""

    async def use(manager: SandboxManager, at: float) -> None:
        await asyncio.sleep(at)
        sandbox = await manager.create()
        await asyncio.sleep(1.0)
        await sandbox.close()

    async def replay() -> tuple[float, int]:
        async with SandboxManager(_Slow(), warm=warm) as manager:
            async with asyncio.TaskGroup() as tasks:
                for at in arrivals:
                    tasks.create_task(use(manager, at))
            (report,) = manager.pools()
            await asyncio.sleep(rest_s)
            idle = manager.health()["idle"]
            assert manager.runtime.alive[0] == idle
        assert manager.runtime.alive[0] == 0
        return report.hits / (report.hits + report.misses), idle

    return virtual_time.run(replay())


async def _fails(count: list[int], spec: SandboxSpec) -> _Started:
    count.append(1)
    await asyncio.sleep(0.01)
    raise SandboxError("no such image")


def test_sandbox_warm_pool_what_cannot_be_started_is_not_tried_in_advance_again_and_again() -> None:
    tried: list[int] = []

    async def ask() -> None:
        async with SandboxManager(_Slow(), warm=None) as manager:
            manager.runtime.launch = partial(_fails, tried)  # type: ignore[method-assign]
            asked = (manager.create(SandboxSpec(image="none")) for _ in range(30))
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(each, SandboxError) for each in found)
            await asyncio.sleep(300)

    virtual_time.run(ask())
    assert 60 <= len(tried) <= 70  # twice for each that asked, and hardly more


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll_sandbox.manager.count_cores", lambda: 2)
    monkeypatch.setattr("roll_sandbox.manager.read_free_memory_bytes", lambda: 2**33)


def test_sandbox_warm_pool_bursts_of_training_steps_start_warm_from_the_second_on() -> None:
    bursts = [step * 40.0 + index * 1e-4 for step in range(10) for index in range(64)]
    foreseen, waiting = _replay(bursts, None)
    fixed, _ = _replay(bursts, 2)
    assert 0.9 <= foreseen <= 0.91  # nine steps of ten, and two of the first
    assert fixed == pytest.approx(2 / 64)
    assert 60 <= waiting <= 70


def test_sandbox_warm_pool_steady_arrivals_start_warm() -> None:
    draw = random.Random(0)
    times = [0.0]
    while times[-1] < 120:
        times.append(times[-1] + draw.expovariate(30.0))
    foreseen, waiting = _replay(times, None)
    fixed, _ = _replay(times, 2)
    assert foreseen >= 0.99
    assert fixed < 0.9
    assert waiting <= 12  # of 30 a second, not of all that are in use


def test_sandbox_warm_pool_die_away_when_nothing_comes() -> None:
    times = [index * 0.02 for index in range(250)]
    foreseen, waiting = _replay(times, None, rest_s=600.0)
    assert foreseen > 0.9
    assert waiting == 0

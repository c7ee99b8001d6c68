"""Device classes: requests fill the preferred class, then the cheapest other class."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.rollout.test_proxy import engine

from roll.rollout import Router
from roll.rollout.device_classes import EXPLORATION_INTERVAL, MEASURED, DeviceClasses, rank_classes
from roll.rollout.pace import AnswerLatency

PRICES = st.dictionaries(st.sampled_from("abcd"), st.floats(1e-6, 1e6), min_size=1)


def answer(token_s: float, num_requests: int = 1) -> AnswerLatency:
    return AnswerLatency(num_tokens=100, seconds=100 * token_s, mean_requests=num_requests, domain="d")


class Cluster:
    """A router of engines of several classes, and the slots in use."""

    def __init__(
        self,
        engines: Sequence[tuple[str, int]],
        prices: dict[str, float],
        preferences: dict[str, str],
        token_s: dict[str, float] | None = None,
    ) -> None:
        self.classes = {f"e{index}": name for index, (name, _) in enumerate(engines)}
        self.slots = {f"e{index}": capacity for index, (_, capacity) in enumerate(engines)}
        self.used = dict.fromkeys(self.slots, 0)
        classes = DeviceClasses(engine_classes=self.classes, engine_prices=prices, preferences=preferences)
        self.router = Router("least_loaded", 1.0, classes)
        for name, capacity in self.slots.items():
            self.router.add(engine(name, capacity))  # type: ignore[arg-type]
        first = {device_class: name for name, device_class in reversed(self.classes.items())}
        for _ in range(40 if token_s else 0):
            for device_class, name in first.items():
                self.router.record_latency(name, answer((token_s or {})[device_class], self.slots[name]))

    def acquire(self, domain: str = "d", session: str = "") -> str:
        """Acquire a slot, and return the engine; an empty string if none has room."""
        chosen = self.router.acquire_slot(session, domain=domain)
        if chosen is None:
            return ""
        self.used[chosen.engine_id] += 1
        return chosen.engine_id

    def release(self, name: str) -> None:
        self.used[name] -= 1
        self.router.release_slot(name)

    def has_room(self, device_class: str) -> bool:
        return any(self.used[name] < self.slots[name] for name, own in self.classes.items() if own == device_class)


def build_random_cluster(seed: int, preference: str) -> tuple[Cluster, list[str]]:
    """Return a cluster of two to four classes, and its classes in the order in which they must be filled."""
    rng = random.Random(seed)
    names = list("abcd")[: rng.randint(2, 4)]
    capacity = {name: rng.randint(1, 5) for name in names}
    engines = [(name, capacity[name]) for name in names for _ in range(rng.randint(1, 4))]
    rng.shuffle(engines)
    preferred = MEASURED if preference == MEASURED else rng.choice(names)
    while True:  # until no two classes are about equally expensive
        prices = {name: rng.uniform(1.0, 20.0) for name in names}
        token_s = {name: rng.choice([0.01, 0.02, 0.05]) if preference == MEASURED else 0.01 for name in names}
        per_token = {name: prices[name] * token_s[name] / capacity[name] for name in names}
        ordered = sorted(per_token.values())
        if all(more > 1.5 * less for less, more in itertools.pairwise(ordered)):
            break
    order = sorted(names, key=lambda name: (name != preferred, per_token[name]))
    return Cluster(engines, prices, {"d": preferred}, token_s if preference == MEASURED else None), order


@pytest.mark.parametrize("preference", ["a class", MEASURED])
def test_device_classes_work_goes_to_the_cheaper_class_until_it_is_full_in_1000_random_clusters(
    preference: str,
) -> None:
    """Slots are acquired and released at random; a request must get a slot of the cheapest class that has one."""
    for seed in range(1000):
        cluster, order = build_random_cluster(seed, preference)
        rng, running = random.Random(seed), list[str]()
        for _ in range(40):
            if running and rng.random() < 0.3:
                cluster.release(running.pop(rng.randrange(len(running))))
                continue
            free = [name for name in order if cluster.has_room(name)]
            chosen = cluster.acquire()
            assert cluster.classes.get(chosen, "") == (free[0] if free else ""), seed
            running += [chosen] if chosen else []


@given(PRICES, st.sampled_from(["a", "b", MEASURED]), st.sets(st.sampled_from("abcd")), st.booleans())
def test_device_classes_an_order_has_every_class_once(
    prices: dict[str, float], preference: str, unmeasured: set[str], explores: bool
) -> None:
    order = rank_classes(preference, prices, unmeasured=unmeasured & prices.keys(), explores=explores)
    listed = [name for group in order for name in group]
    assert sorted(listed) == sorted(prices)
    if preference in prices:
        assert list(order[0]) == [preference]
        assert [prices[name] for name in listed[1:]] == sorted(prices[name] for name in listed[1:])


def test_device_classes_a_domain_without_a_preference_uses_all_engines_equally() -> None:
    cluster = Cluster([("a", 4), ("b", 4)], {"a": 1.0, "b": 9.0}, {"d": "a"})
    for _ in range(4):
        cluster.acquire("other")
    assert cluster.used == {"e0": 2, "e1": 2}


def test_device_classes_two_domains_share_the_cluster_by_their_preferences() -> None:
    cluster = Cluster([("a", 4), ("b", 4)], {"a": 5.0, "b": 2.0}, {"long": "b", "short": "a"})
    assert [cluster.classes[cluster.acquire("long")] for _ in range(3)] == ["b"] * 3
    assert [cluster.classes[cluster.acquire("short")] for _ in range(4)] == ["a"] * 4
    assert [cluster.classes[cluster.acquire("short")], cluster.acquire("short")] == ["b", ""]


def test_device_classes_measured_uses_all_classes_until_they_are_measured_and_then_the_cheapest() -> None:
    cluster = Cluster([("a", 8), ("b", 8)], {"a": 5.0, "b": 2.0}, {"d": MEASURED})
    first = [cluster.acquire() for _ in range(4)]
    assert sorted(first) == ["e0", "e0", "e1", "e1"]
    for name in first:
        cluster.release(name)
    for _ in range(20):
        cluster.router.record_latency("e0", answer(0.01))
        cluster.router.record_latency("e1", answer(0.01))
    assert [cluster.acquire() for _ in range(9)] == ["e1"] * 8 + ["e0"]


def test_device_classes_a_class_that_is_no_longer_measured_is_tried_again_now_and_then() -> None:
    cluster = Cluster([("a", 64), ("b", 64)], {"a": 5.0, "b": 2.0}, {"d": MEASURED})
    for _ in range(400):
        cluster.router.record_latency("e1", answer(0.01))
    chosen = [cluster.acquire() for _ in range(3 * EXPLORATION_INTERVAL)]
    assert chosen.count("e0") == 3


def test_device_classes_a_session_stays_at_its_engine_of_another_class() -> None:
    cluster = Cluster([("a", 1), ("b", 8)], {"a": 1.0, "b": 2.0}, {"d": "a"})
    assert cluster.acquire(session="first") == "e0"
    assert cluster.acquire(session="second") == "e1"
    cluster.release("e0")
    cluster.release("e1")
    assert cluster.acquire(session="second") == "e1", "the prefix of the session is cached there"
    assert cluster.acquire(session="third") == "e0"


def test_device_classes_an_engine_without_a_class_is_used_last() -> None:
    cluster = Cluster([("a", 1), ("b", 1)], {"a": 1.0, "b": 2.0}, {"d": "a"})
    cluster.router.add(engine("joined", 4))  # type: ignore[arg-type]
    names = [chosen.engine_id for _ in range(3) if (chosen := cluster.router.acquire_slot(domain="d")) is not None]
    assert names == ["e0", "e1", "joined"]

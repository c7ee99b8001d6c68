"""Which worker a sandbox goes to, by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from roll_sandbox import Limits, SandboxSpec, SandboxUnavailableError

pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")

from roll_sandbox.service.placement import IDLE_BYTES, MIN_FREE_BYTES, choose_worker, compute_load
from roll_sandbox.service.worker_link import WorkerLink
from roll_sandbox.wire import WorkerReport

SPEC = SandboxSpec(limits=Limits(memory_bytes=2**30))


def worker(name: str, *, held: int = 0, **settings: object) -> WorkerLink:
    names = ("is_drained", "is_leaving", "memory_bytes", "num_placed")
    of_link = {key: settings.pop(key) for key in names if key in settings}
    reserved_bytes = held * 2**30
    link = WorkerLink(
        name, lambda _: None, capacity=10, num_sandboxes=held, reserved_memory_bytes=reserved_bytes, **of_link
    )
    link.report = WorkerReport(**settings)
    return link


def test_sandbox_placement_the_scarcest_part_decides() -> None:
    assert compute_load(worker("a", held=3)) == pytest.approx(0.3)
    assert compute_load(worker("a", held=3, memory_bytes=4 * 2**30)) == pytest.approx(0.75)
    assert compute_load(worker("a", held=3, busy=0.5, cores=4)) == pytest.approx(0.5)
    assert compute_load(worker("a", held=3, busy=0.5, cores=4, num_placed=16)) == pytest.approx(0.75)
    free = choose_worker([worker("a", busy=0.9), worker("b", busy=0.1, held=5), worker("c", busy=0.6)], SPEC)
    assert free.name == "b"


def test_sandbox_placement_memory_must_be_there() -> None:
    full = worker("full", held=3, memory_bytes=3 * 2**30)
    low = {"memory_bytes": None, "free_bytes": 2**27}
    starved = worker("starved")
    starved.report = WorkerReport(**low)
    roomy = worker("roomy", held=9)
    assert choose_worker([full, starved, roomy], SPEC) is roomy
    with pytest.raises(SandboxUnavailableError, match="none of 2 workers has capacity"):
        choose_worker([full, starved], SPEC)


def test_sandbox_placement_the_last_place_is_given_and_no_more() -> None:
    need = SPEC.limits.memory_bytes
    free = {"memory_bytes": 2**40, "free_bytes": MIN_FREE_BYTES + IDLE_BYTES}
    for fits, full in (
        (worker("a", held=9), worker("a", held=10)),
        (worker("a", held=2, memory_bytes=2**31 + need), worker("a", held=2, memory_bytes=2**31 + need - 1)),
        (worker("a", num_placed=1), worker("a", num_placed=2)),
    ):
        if fits.num_placed:
            fits.report = full.report = WorkerReport(**free)
        assert choose_worker([fits], SPEC) is fits
        with pytest.raises(SandboxUnavailableError, match="none of 1 workers has capacity"):
            choose_worker([full], SPEC)


def test_sandbox_placement_an_image_that_is_held_is_worth_a_quarter_of_a_worker() -> None:
    spec = SandboxSpec(image="sha256:1")
    holder, other = worker("holder", held=5, images=("sha256:1",)), worker("other", held=3)
    assert choose_worker([holder, other], spec) is holder
    assert choose_worker([holder, other], SPEC) is other
    holder.num_sandboxes = 6
    assert choose_worker([holder, other], spec) is other


def test_sandbox_placement_the_same_affinity_goes_to_the_same_worker_and_few_move_when_one_comes() -> None:
    three = [worker(name) for name in ("a", "b", "c")]
    specs = [SandboxSpec(affinity=f"task-{number}") for number in range(300)]
    before = {spec: choose_worker(three, spec).name for spec in specs}
    assert all(70 < number < 130 for number in Counter(before.values()).values())
    moved = [spec for spec in specs if choose_worker([*three, worker("d")], spec).name != before[spec]]
    assert 40 < len(moved) < 110
    assert all(choose_worker([*three, worker("d")], spec).name == "d" for spec in moved)
    full = next(each for each in three if each.name == before[specs[0]])
    full.num_sandboxes = 10
    assert choose_worker(three, specs[0]) is not full


def test_sandbox_placement_a_copy_goes_beside_what_it_is_a_copy_of() -> None:
    near, free = worker("near", held=8), worker("free")
    assert choose_worker([near, free], SPEC, preferred_worker=near) is near
    near.num_sandboxes = 10
    assert choose_worker([near, free], SPEC, preferred_worker=near) is free


def test_sandbox_placement_who_drains_or_is_away_gets_nothing() -> None:
    away = worker("away")
    away.mark_disconnected(0.0)
    with pytest.raises(SandboxUnavailableError, match="no worker is connected, or all are draining"):
        choose_worker([worker("a", is_drained=True), worker("b", is_leaving=True), away], SPEC)

"""A request that moves between `hf` engines gets the tokens of one that does not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

from hf_helpers import engine_spec, generate_all, has_generated, running
from worlds.migration import build_requests, count_differences

from roll.cluster.engines import ManagedEngineGroup
from roll.inference.hf import HFEngine
from roll.inference.hf_requests import draw_uniforms
from roll.rollout import LLMProxy


async def test_request_migration_200_requests_that_move_three_times_get_the_same_tokens(tiny_model: Path) -> None:
    async with running(tiny_model, max_num_seqs=64) as first, running(tiny_model, max_num_seqs=64) as second:
        assert await count_differences([first, second], build_requests(200, 24)) == 0


async def test_request_migration_an_engine_that_leaves_hands_its_requests_to_another(tiny_model: Path) -> None:
    requests = build_requests(8, 40)
    async with running(tiny_model) as alone:
        unmoved = await generate_all(alone, requests)
    names = ("e0", "e1")
    engines = {name: HFEngine(replace(engine_spec(tiny_model), engine_id=name)) for name in names}
    group = await ManagedEngineGroup.start({name: partial(engines.__getitem__, name) for name in names})
    proxy = LLMProxy(group)
    tasks = [asyncio.create_task(proxy.generate(request)) for request in requests]
    for leaving in ("e0", "e1", "e0"):
        await has_generated(engines[leaving], 3)
        await proxy.transitions.suspend(leaving, "abort")
        await proxy.transitions.wake(leaving)
    moved = await asyncio.gather(*tasks)
    await proxy.close()
    await group.close()
    assert proxy.num_continued >= 3
    assert [one.token_ids.tolist() for one in moved] == [one.token_ids.tolist() for one in unmoved]


def test_request_migration_random_numbers_depend_on_seed_and_position_only() -> None:
    assert draw_uniforms(5, 30)[12:].tolist() == draw_uniforms(5, 40)[12:30].tolist()

"""The `hf` engine sharded over two processes computes what one process computes, in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hf_helpers import Weights, engine_spec, generate_all, has_generated, prompt, request, running, send, sync

from roll.cluster.engines import ManagedEngineGroup
from roll.errors import ConfigError, EngineDiedError, ModelError
from roll.inference.hf import HFEngine
from roll.inference.hf_parallel import ShardedDecoder
from roll.models import load_causal_lm
from roll.rollout import LLMProxy
from roll.rollout.batch import Batch
from roll.rollout.engine_widths import EngineWidths
from roll.types import Generation, Group

pytestmark = pytest.mark.integration

LIMIT = 2e-5
"""Tolerance of log-probs: sums over ranks are rounded in another order."""


def assert_equal(found: Sequence[Generation], expected: Sequence[Generation]) -> None:
    for one, two in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == two.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=LIMIT)


def change(model: Path, factor: float) -> dict[str, torch.Tensor]:
    state = load_causal_lm(model, "float32", attention="eager").state_dict()
    return {name: tensor * factor for name, tensor in state.items()}


async def test_hf_parallel_two_ranks_generate_score_sync_sleep_and_abort_as_one(tiny_model: Path) -> None:
    requests = [request(f"r{i}") for i in range(6)]
    long, late = request("long", max_new_tokens=80), request("late")
    sequences = [prompt(i, 20) for i in range(3)]
    results: list[list[Any]] = []
    for width in (1, 2):
        async with running(tiny_model, tensor_parallel=width) as engine:
            found: list[Any] = [await generate_all(engine, requests), await engine.logprobs(sequences)]
            receipt = await sync(engine, change(tiny_model, 1.1), 1)
            found += [await generate_all(engine, requests), receipt.checksums]
            await engine.sleep()
            await engine.wake()
            await sync(engine, change(tiny_model, 0.9), 2)
            task = asyncio.create_task(engine.generate(long))
            await has_generated(engine, 3)
            await engine.abort(["long"])
            aborted = await task
            assert aborted.finish_reason == "abort" and 3 <= len(aborted.token_ids) < 80
            found.append([await engine.generate(late)])  # the ranks still agree after an abort
            assert engine.load().kv_capacity == width * count_cached_tokens(tiny_model)
            results.append(found)
    one, two = results
    for index in (0, 2, 4):
        assert_equal(two[index], one[index])
    for own, other in zip(two[1], one[1], strict=True):
        np.testing.assert_allclose(own, other, atol=LIMIT)
    assert two[3] == one[3]
    assert {tuple(each.policy_versions) for each in two[2]} == {(1,) * 16}


async def test_hf_parallel_an_engine_whose_other_rank_dies_is_dead(tiny_model: Path) -> None:
    async with running(tiny_model, tensor_parallel=2) as engine:
        task = asyncio.create_task(engine.generate(request("long", max_new_tokens=80)))
        await has_generated(engine, 2)
        decoder = engine._decoder
        assert isinstance(decoder, ShardedDecoder)
        decoder._processes[0].kill()
        with pytest.raises(EngineDiedError):
            await task
        with pytest.raises(EngineDiedError):
            await engine.generate(request("next"))


async def test_hf_parallel_engines_of_two_widths_switch_by_the_rule_in_the_middle_of_requests(tiny_model: Path) -> None:
    """Two engines of one rank, and one of two ranks. Contexts of 60 tokens do not fit into the first two's caches."""
    requests = [request(f"r{i}", max_new_tokens=40) for i in range(8)]
    async with running(tiny_model) as alone:
        unmoved = await generate_all(alone, requests)
    state = change(tiny_model, 1.0)
    widths = {"e0": 1, "e1": 1, "e2": 2}
    bytes_per_token = 2**28 // count_cached_tokens(tiny_model)
    settings = {"kv_cache_bytes": 4 * 96 * bytes_per_token, "max_num_seqs": 4}
    engines = {
        name: HFEngine(replace(engine_spec(tiny_model, tensor_parallel=width, **settings), engine_id=name))
        for name, width in widths.items()
    }
    group = await ManagedEngineGroup.start({name: partial(engines.__getitem__, name) for name in widths})
    proxy = LLMProxy(group, lambda engine: send(engine, Weights(state), 0))
    switch = EngineWidths(proxy, {1: ["e0", "e1"], 2: ["e2"]}, num_requests=16)
    await switch.start()
    assert [engine.engine_id for engine in group.list_awake()] == ["e0", "e1"]
    tasks = [asyncio.create_task(proxy.generate(each)) for each in requests]
    await has_generated(engines["e0"], 5)
    rollout = SimpleNamespace(token_ids=np.zeros(90, np.int32))
    group_of_one = SimpleNamespace(draw=SimpleNamespace(token_ids=np.zeros(12, np.int32)), rollouts=(rollout,))
    switch.on_batch(Batch(groups=[cast(Group, group_of_one)]))
    await switch.before_round("")
    assert switch.width == 2
    assert [engine.engine_id for engine in group.list_awake()] == ["e2"]
    moved = await asyncio.gather(*tasks)
    assert {each.engine_id for each in moved} == {"e2"}
    assert proxy.num_continued >= 1
    assert_equal(moved, unmoved)
    await proxy.close()
    await group.close()


def count_cached_tokens(model: Path) -> int:
    """The tokens that fit into the default cache of 256 MiB."""
    config = load_causal_lm(model, "float32", attention="eager").config
    per_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return 2**28 // per_token


async def test_hf_parallel_models_and_settings_that_cannot_be_sharded_are_named(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match=r"inference.tensor_parallel 3 does not divide num_attention_heads \d+"):
        async with running(tiny_model, tensor_parallel=3):
            pass
    with pytest.raises(ConfigError, match=r"does not support training.router_replay: set inference.tensor_parallel to"):
        async with running(tiny_model, tensor_parallel=2, records_experts=True):
            pass

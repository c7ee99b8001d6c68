"""The same requests give the same bits: across processes, and however the tasks that issue them run."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hf_helpers import HFEngine, generate_all, has_generated, prompt, request, running, same

from roll.inference.hf_decoder import Decoder
from roll.types import Generation, GenerationRequest

HERE = Path(__file__).parent
PROGRAM = """
import asyncio, hashlib, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from test_hf_determinism import digest, groups, running
from hf_helpers import generate_all

async def main():
    for dtype in ("float32", "bfloat16"):
        async with running(Path({model!r}), dtype=dtype, max_num_seqs=6, num_threads=2) as engine:
            for step in range(2):
                print(digest(await generate_all(engine, groups(step))))

asyncio.run(main())
"""


def groups(step: int = 0) -> list[GenerationRequest]:
    """Four prompts of different lengths, three requests each, with answers of many lengths."""
    stops = tuple(range(4, 260, 16))
    return [
        request(f"{step}.{i}.{j}", prompt(step * 10 + i, 6 + 7 * i), stop_token_ids=stops, max_new_tokens=24)
        for i in range(4)
        for j in range(3)
    ]


def digest(results: list[Generation]) -> str:
    parts = (part for r in results for part in (r.token_ids.tobytes(), r.logprobs.tobytes(), r.finish_reason.encode()))
    return hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.integration
def test_hf_determinism_two_processes_give_the_same_bits(tiny_model: Path) -> None:
    program = PROGRAM.format(paths=[str(HERE), str(HERE.parents[1])], model=str(tiny_model))
    environment = {**os.environ, "PYTHONHASHSEED": "random", "OMP_WAIT_POLICY": "passive"}
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    first, second = (process.communicate(timeout=240)[0].split() for process in processes)
    assert first == second and len(set(first)) == 4  # two dtypes, two steps


async def batches_of(engine: HFEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """From now on, the names of the rows of every step."""
    seen: list[tuple[str, ...]] = []
    step = Decoder.step

    def recorded(decoder: Decoder) -> object:
        seen.append(tuple(row.request.request_id for row in decoder.rows))
        return step(decoder)

    monkeypatch.setattr(Decoder, "step", recorded)
    return seen


async def issue_late(engine: HFEngine, requests: list[GenerationRequest], turns: int) -> list[Generation]:
    """Issue each request some turns of the loop after the one before it, as tasks of a scheduler would."""

    async def one(position: int, item: GenerationRequest) -> Generation:
        for _ in range(position * turns):
            await asyncio.sleep(0)
        return await engine.generate(item)

    return list(await asyncio.gather(*(one(i, item) for i, item in enumerate(requests))))


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_hf_determinism_requests_that_trickle_in_over_some_turns_form_the_same_batches(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    async with running(tiny_model, max_num_seqs=6) as engine:
        batches = await batches_of(engine, monkeypatch)
        together = await generate_all(engine, groups())
        expected = list(batches)
        batches.clear()
        late = await issue_late(engine, groups(), turns)
        assert batches == expected and len(batches[0]) == 6
    assert all(same(a, b) for a, b in zip(together, late, strict=True))


async def test_hf_determinism_what_comes_during_a_wave_does_not_change_its_batches(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tiny_model, max_num_seqs=6) as engine:
        batches = await batches_of(engine, monkeypatch)
        await generate_all(engine, groups())
        expected = list(batches)
        for tokens in (1, 3):
            batches.clear()
            wave = asyncio.gather(*(engine.generate(item) for item in groups()))
            await has_generated(engine, tokens)
            late = asyncio.create_task(engine.generate(request("late")))
            await wave
            assert batches[: len(expected)] == expected
            await late


async def test_hf_determinism_answers_do_not_depend_on_the_order_of_requests(tiny_model: Path) -> None:
    """Rows compute the same bits in any place of a batch, on the CPU kernels that we measured."""
    async with running(tiny_model, max_num_seqs=6) as engine:
        forwards = await generate_all(engine, groups())
        backwards = await generate_all(engine, groups()[::-1])
    assert all(same(a, b) for a, b in zip(forwards, backwards[::-1], strict=True))


async def test_hf_determinism_requests_without_seeds_repeat_in_a_fresh_engine_and_differ_under_another_seed(
    tiny_model: Path,
) -> None:
    items = [request(f"{i}", prompt(1), seed=None) for i in range(4)]
    runs = []
    for seed in (0, 0, 1):
        async with running(tiny_model, seed=seed) as engine:
            runs.append(await generate_all(engine, items))
    assert all(same(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not any(same(a, b) for a, b in zip(runs[0], runs[2], strict=True))
    assert len({r.token_ids.tobytes() for r in runs[0]}) == 4

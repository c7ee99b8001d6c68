"""Runs whose answers are scored by a judge of their own, on small models."""

from __future__ import annotations

import asyncio
import json
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos.harness import Run, tiny_config
from integration.test_ray_run import actor_processes, end, marked, steps_recorded, wait_until
from worlds.tiny_model import write_tiny_model

import roll
from roll.cluster.actor_log import ACTOR_LOG
from roll.cluster.local import LocalCluster
from roll.config.pipelines.rlvr import RLVRConfig
from roll.errors import AlarmError, EngineDiedError, RewardInfraError
from roll.inference.hf import HFEngine
from roll.pipelines.judge import start_judge
from roll.rewards.opening import open_rewards
from roll.rollout import fleet
from roll.types import (
    Generation,
    GenerationRequest,
    Message,
    Prompt,
    Rollout,
    SamplingParams,
    WeightReceipt,
    WeightUpdate,
)


@pytest.fixture(scope="session")
def tiny_judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model than the policy, with room for a question."""
    return write_tiny_model(tmp_path_factory.mktemp("judge") / "judge", seed=5, context_length=4096)


def config(directory: Path, model: Path, judge: dict[str, Any], **changes: Any) -> dict[str, Any]:
    reward = {
        "type": "judge", "rubric": "quality", "explain": False, "scale": [0, 4], "require_finished": False,
        "max_reply_tokens": 8,
    }  # fmt: skip
    return {
        **tiny_config(model, num_steps=2),
        "output_dir": str(directory),
        "data": [{"source": "arithmetic", "reward": [reward | changes.pop("reward", {})]}],
        "judge": {"engine": "hf", "dtype": "float32", **judge},
        "checkpoint": {"at_end": False},
        "evaluation": {"num_prompts": 2, "samples_per_prompt": 1},
        **changes,
    }


def steps(directory: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "train"]


def test_judge_run_a_run_learns_from_its_own_judge_whose_weights_stay(
    tmp_path: Path, tiny_model: Path, tiny_judge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updated: set[str] = set()
    update = HFEngine.update_weights

    async def watched(engine: HFEngine, weights: WeightUpdate) -> WeightReceipt:
        updated.add(engine.engine_id)
        return await update(engine, weights)

    monkeypatch.setattr(HFEngine, "update_weights", watched)
    roll.train(config(tmp_path, tiny_model, {"model": str(tiny_judge), "num_engines": 2}))
    rows = steps(tmp_path)
    assert [row["rollout/infra_errors"] for row in rows] == [0, 0]
    assert all(0 < row["reward/mean"] < 1 and row["reward/std"] > 0 for row in rows)
    assert all(row["judge/verdicts"] >= 8 and row["judge/requests"] > 0 for row in rows)  # of 12
    assert updated == {"engine-0"}
    trace = (tmp_path / "run" / "trace.json").read_text()
    assert '"judging"' in trace and '"judge-0"' in trace and '"judge-1"' in trace
    assert (tmp_path / "run" / "logs" / "judge-1.log").is_file()


def test_judge_run_a_judge_that_dies_is_replaced_and_no_answer_pays_for_it(
    tmp_path: Path, tiny_model: Path, tiny_judge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies with a request under way; undisturbed, the same rewards come out."""
    roll.train(config(tmp_path, tiny_model, {"model": str(tiny_judge)}))
    undisturbed = [row["reward/mean"] for row in steps(tmp_path)]
    generate, count = HFEngine.generate, 0

    async def dying(engine: HFEngine, request: GenerationRequest) -> Generation:
        nonlocal count
        count += engine.engine_id == "judge-0"
        if engine.engine_id == "judge-0" and count == 5:
            asyncio.get_running_loop().call_soon(engine._mark_dead, "killed")
        return await generate(engine, request)

    monkeypatch.setattr(HFEngine, "generate", dying)
    roll.train(config(tmp_path / "killed", tiny_model, {"model": str(tiny_judge)}))
    rows = steps(tmp_path / "killed")
    assert rows[-1]["judge/replaced"] == 1
    assert [row["rollout/infra_errors"] for row in rows] == [0, 0]
    assert [row["reward/mean"] for row in rows] == undisturbed


def test_judge_run_without_a_judge_every_rollout_is_an_infrastructure_error_and_the_run_stops(
    tmp_path: Path, tiny_model: Path, tiny_judge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = HFEngine.generate

    async def dead(engine: HFEngine, request: GenerationRequest) -> Generation:
        if engine.engine_id == "judge-0":
            engine._mark_dead("killed")
        return await generate(engine, request)

    monkeypatch.setattr(HFEngine, "generate", dead)
    monkeypatch.setattr(fleet, "FIRST_BACKOFF_S", 0.01)
    changes = {"evaluation": {"before_training": False, "every_num_steps": 0}, "training": {"num_steps": 1}}
    settings = config(tmp_path, tiny_model, {"model": str(tiny_judge)}, **changes)
    settings["rollout"]["retry_wait_s"] = 0.0
    with pytest.raises(AlarmError, match=r"12 of 12 answers got no reward: .*judge"):
        roll.train(settings)
    (row,) = steps(tmp_path)
    assert row["rollout/infra_errors"] == 12
    assert row["data/groups_failed"] == 3
    assert row["judge/replaced"] > 0 and row["policy_version"] == 0


async def test_judge_run_an_engine_that_cannot_be_started_again_is_tried_again_with_the_next_request(
    tmp_path: Path, tiny_model: Path, tiny_judge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RLVRConfig.model_validate(config(tmp_path, tiny_model, {"model": str(tiny_judge)}))
    judge = await start_judge(settings, LocalCluster())
    start = HFEngine.start

    async def fails(engine: HFEngine) -> None:
        raise OSError("no memory")

    def ask(number: int) -> GenerationRequest:
        tokens = judge.model.render([Message(role="user", content="?")])
        return GenerationRequest(
            request_id=str(number), token_ids=np.array(tokens, np.int32), sampling=SamplingParams(max_new_tokens=1)
        )

    try:
        assert len((await judge.generate(ask(0), 60.0)).token_ids) == 1
        (engine,) = judge._engines.engines
        engine._mark_dead("killed")  # type: ignore[attr-defined]
        monkeypatch.setattr(HFEngine, "start", fails)
        for number in (1, 2):
            with pytest.raises((RewardInfraError, EngineDiedError)):
                await judge.generate(ask(number), 60.0)
        monkeypatch.setattr(HFEngine, "start", start)
        generation = None
        for number in range(3, 6):
            try:
                generation = await judge.generate(ask(number), 60.0)
                break
            except RewardInfraError as error:  # hears of the last failure, and starts the engine once more
                assert "cannot be restarted: no memory" in str(error)
        assert generation is not None
        assert judge.collect_metrics()["judge/replaced"] == 1
    finally:
        await judge.close()


async def test_judge_run_a_judge_that_does_not_answer_in_time_is_unreachable_and_left_nothing_to_do(
    tmp_path: Path, tiny_model: Path, tiny_judge: Path
) -> None:
    settings = RLVRConfig.model_validate(config(tmp_path, tiny_model, {"model": str(tiny_judge)}))
    judge = await start_judge(settings, LocalCluster())
    try:
        (engine,) = judge._engines.engines
        await engine.pause("keep")
        tokens = judge.model.render([Message(role="user", content="?")])
        request = GenerationRequest(
            request_id="slow", token_ids=np.array(tokens, np.int32), sampling=SamplingParams(max_new_tokens=9)
        )
        with pytest.raises(RewardInfraError, match=r"did not respond within 0\.05 s"):
            await judge.generate(request, 0.05)
        await judge._proxy.wait_for_orphaned_requests()  # nobody had to ask for it
        await engine.resume()
        assert (engine.load().num_running, engine.load().num_waiting) == (0, 0)
    finally:
        await judge.close()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_judge_run_on_ray_a_killed_judge_is_replaced_on_its_own_device(
    tmp_path: Path, tiny_model: Path, tiny_judge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("ROLL_TEST_MARK", mark)
    mapping = {"actor_train": 0, "actor_infer": 1, "judge": "2-3"}
    cluster = {"type": "ray", "devices_per_node": 4, "device_mapping": mapping}
    judge = {"model": str(tiny_judge)}
    run = Run(tmp_path / "runs", config(tmp_path / "runs", tiny_model, judge, cluster=cluster))
    process = run.start("train", str(tmp_path / "runs" / "config.yaml"), "training.num_steps=1000")
    wait_until(lambda: steps_recorded(run) >= 1 or process.poll() is not None, "the first step")
    assert process.poll() is None, end(process)
    judges = [p for p in actor_processes(mark, "EngineActor") if "judge_actor" in p.environ().get(ACTOR_LOG, "")]
    assert len(judges) == 2
    judges[0].kill()

    def training() -> list[dict[str, Any]]:
        return [row for row in run.metrics() if row["kind"] == "train"]

    wait_until(lambda: training()[-1]["judge/replaced"] == 1 or process.poll() is not None, "a new judge")
    replaced = len(training())
    wait_until(lambda: len(training()) > replaced or process.poll() is not None, "a step with it")
    process.terminate()
    errors = end(process)
    assert process.returncode == 143, errors
    rows = training()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[-1]["judge/replaced"] == 1
    assert {row["rollout/infra_errors"] for row in rows} == {0}
    wait_until(lambda: not list(marked(mark)), "the end of every process")


class NoPool:
    """A judge needs no workers."""


TRUTHS = [
    ("What is the capital of France?", "The capital of France is Paris.", "I like bananas and the moon is blue."),
    ("What colour is a clear sky?", "A clear sky is blue.", "Car car car car car."),
    ("How many legs has a dog?", "A dog has four legs.", "asdf qwer zxcv"),
    ("Name a fruit.", "An apple is a fruit.", "No."),
]


def rollout_of(question: str, text: str) -> Rollout:
    nothing = np.zeros(0, np.int32)
    return Rollout(
        draw_id=0,
        index=0,
        prompt=Prompt(uid="q", domain="arithmetic", messages=(Message(role="user", content=question),)),
        prompt_token_ids=nothing,
        token_ids=nothing,
        logprobs=np.zeros(0, np.float32),
        policy_versions=nothing,
        finish_reason="stop",
        text=text,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
async def test_judge_run_the_default_model_judges_in_form_and_alike_after_it_was_killed(
    kind: str, tmp_path: Path, tiny_model: Path, default_model: Path
) -> None:
    if kind == "vllm":
        pytest.importorskip("vllm")
    judge_config = {"model": str(default_model), "engine": kind, "dtype": "bfloat16", "max_context": 2048}
    settings = RLVRConfig.model_validate(
        config(tmp_path, tiny_model, judge_config, reward={"mode": "pairwise", "reference_key": "noise"})
    )
    judge = await start_judge(settings, LocalCluster())
    try:
        async with open_rewards(settings.data, settings.sandbox, NoPool(), judge.model) as rewards:

            async def preferences() -> list[float]:
                found = []
                for question, good, noise in TRUTHS:
                    asked = rollout_of(question, good)
                    asked = replace(asked, prompt=replace(asked.prompt, metadata={"noise": noise}))
                    found.append((await rewards["arithmetic"](asked)).value)
                return found

            before = await preferences()
            assert all(0 < value < 1 for value in before) and len(set(before)) == len(before)
            (engine,) = judge._engines.engines
            if isinstance(engine, HFEngine):
                engine._mark_dead("killed")
            else:
                for process in engine.processes:  # type: ignore[attr-defined]
                    process.kill()
        async with open_rewards(
            settings.data, settings.sandbox, NoPool(), judge.model
        ) as rewards:  # another memory of replies
            assert await preferences() == pytest.approx(before, abs=1e-3)
        assert judge.collect_metrics()["judge/replaced"] == 1
    finally:
        await judge.close()

"""A pipeline in a user's own folder: three files, which run by the loop of all others, synchronous and asynchronous."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import tiny_config

import roll
from roll.config.pipelines import PIPELINES as CONFIGURATIONS
from roll.pipelines.registry import CHECKS, PIPELINES

FILES = {
    "configuration.py": """
        from typing import Literal

        from roll.config.base import option
        from roll.config.online import OnlineConfig


        class LongestConfig(OnlineConfig):
            '''Learn to write the longest answers.'''

            pipeline: Literal["longest"] = option("longest", "Which pipeline runs.")
            num_kept: int = option(1, "Of each group.", ge=1)
    """,
    "pipeline.py": """
        from contextlib import asynccontextmanager
        from functools import partial

        from roll.algorithms.losses import LikelihoodLoss
        from roll.data.samples import build_batch
        from roll.pipelines.evaluation import measure
        from roll.pipelines.learner import Learner
        from roll.pipelines.learning.state import LearningState
        from roll.pipelines.online.answers import AnswersObjective
        from roll.pipelines.online.loop import train
        from roll.pipelines.online.opening import Placed, facts, open_online, policy_spec
        from roll.pipelines.preparation import prepare
        from roll.pipelines.registry import Pipeline
        from roll.running import in_thread


        def longest(rollouts, num_kept):
            best = sorted(rollouts, key=lambda rollout: -len(rollout.token_ids))
            return [(rollout,) for rollout in best[:num_kept]]


        def objective(online):
            rollout = online.config.rollout

            async def build(choice):
                found = choice.rollouts
                return build_batch(found, temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens)

            choose = partial(longest, num_kept=online.config.num_kept)
            return AnswersObjective(online=online, choose=choose, build=build, loss=LikelihoodLoss())


        @asynccontextmanager
        async def start(config, session):
            prepared = await in_thread(prepare, config)
            placed = [Placed("actor_train", policy_spec(config, prepared.model_path))]
            learner = lambda started: Learner(policy=started[0])
            async with open_online(config, session, prepared, placed, learner) as online:
                yield partial(train, online, objective(online))


        PIPELINE = Pipeline(open=start, facts=partial(facts, method="longest"), evaluate=measure, state=LearningState)
    """,
    "check.py": """
        from roll.pipelines.online.check.inspection import inspect_run


        def inspect(config):
            return inspect_run(config, "longest")
    """,
}


@pytest.fixture
def own_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "longest"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    kept = [dict(registry._entries) for registry in (CONFIGURATIONS, PIPELINES, CHECKS)]
    CONFIGURATIONS.register("longest", "longest.configuration:LongestConfig")
    PIPELINES.register("longest", "longest.pipeline:PIPELINE")
    CHECKS.register("longest", "longest.check:inspect")
    yield "longest"
    for registry, entries in zip((CONFIGURATIONS, PIPELINES, CHECKS), kept, strict=True):
        registry._entries.clear()
        registry._entries.update(entries)
    for name in [name for name in sys.modules if name.partition(".")[0] == "longest"]:
        del sys.modules[name]


@pytest.mark.parametrize("ratio", [0.0, 2.0])
def test_own_pipeline_of_three_files_trains_by_the_loop_of_all(
    tmp_path: Path, tiny_model: Path, own_pipeline: str, ratio: float
) -> None:
    assert len(FILES) <= 4
    base: dict[str, Any] = tiny_config(tiny_model, num_steps=4) | {"pipeline": own_pipeline, "num_kept": 2}
    base["rollout"] = {**base["rollout"], "scheduling": {"async_ratio": ratio}}
    base |= {"output_dir": str(tmp_path / "runs"), "evaluation": {"before_training": False, "num_prompts": 1}}
    assert roll.check(base).problems == []
    roll.train(base)
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    found = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    assert [row["step"] for row in found] == [1, 2, 3, 4] and found[-1]["policy_version"] == 4
    assert max(row["rollout/staleness_max"] for row in found) <= ratio
    assert all(row["data/groups_trained"] == 3 for row in found)

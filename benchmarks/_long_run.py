"""A run directory as a long run leaves it, made in minutes: for `bench_dashboard.py`.

Rollouts of some steps are made and written by ROLL's own table, with log-probs that do not compress; the files of all
other steps are hard links to these. The dashboard takes a rollout's step from its file's name, so that nothing it does
is less; only the disk is.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np

from roll.config.document import dump
from roll.models.catalogue import CATALOGUE, get_cached_directory
from roll.tracking.rollout_table import write_rollouts
from roll.types import Group, Message, Prompt, PromptDraw, RewardResult, Rollout

GROUP_SIZE = 16
WORDS = (Path(__file__).read_text() + (__doc__ or "")).split()
VERDICTS = ("correct", "wrong", "unfinished", "no answer")


def make_run(path: Path, *, num_steps: int, num_rollouts: int, num_tokens: int, num_made: int, trace: bool) -> None:
    """Write the run; `num_made` of its steps are made, the others linked."""
    (path / "rollouts").mkdir(parents=True)
    (path / "logs").mkdir()
    settings = {
        "pipeline": "rlvr",
        "name": path.name,
        "model": {"path": "smollm2-135m-instruct"},
        "training": {"num_steps": num_steps},
        "tracking": {"token_columns": True},
        "algorithm": {"ratio": {"level": "token"}, "gate": {"type": "min_clip", "low": 0.2, "high": 0.2}},
    }
    (path / "config.yaml").write_text(dump(settings))
    tokenizer = get_cached_directory(CATALOGUE["smollm2-135m-instruct"]) / "tokenizer.json"
    if tokenizer.is_file():
        shutil.copy(tokenizer, path / "tokenizer.json")
    _metrics(path / "metrics.jsonl", num_steps)
    for step in range(1, num_steps + 1):
        target = path / "rollouts" / f"step-{step:06d}.parquet"
        if step <= num_made:
            groups, columns = _step(step, num_rollouts, num_tokens)
            write_rollouts(target, step, groups, {}, columns)
        else:
            os.link(path / "rollouts" / f"step-{1 + step % num_made:06d}.parquet", target)
    if trace:
        _trace(path / "trace.json", num_steps, num_rollouts)


def _metrics(path: Path, num_steps: int) -> None:
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for step in range(1, num_steps + 1):
            values = {f"group{i % 8}/metric_{i}": rng.normal() for i in range(100)}
            values |= {"reward/mean": step / num_steps, "time/step_s": 60.0, "policy_version": float(step)}
            file.write(json.dumps({"step": step, "kind": "train"} | values) + "\n")


def _step(step: int, num_rollouts: int, num_tokens: int) -> tuple[list[Group], dict[str, dict[str, np.ndarray]]]:
    rng = np.random.default_rng(step)
    groups, columns = [], {}
    for draw_id in range(num_rollouts // GROUP_SIZE):
        content = " ".join(rng.choice(WORDS, 60))
        prompt = Prompt(
            uid=f"bench/{draw_id}", domain=f"domain-{draw_id % 5}", messages=(Message(role="user", content=content),)
        )
        rollouts = []
        for index in range(GROUP_SIZE):
            logprobs = -rng.exponential(size=num_tokens).astype(np.float32)
            correct = bool(rng.random() < 0.5)
            reward = RewardResult(
                value=float(correct),
                components={"math": float(correct)},
                verdict=str(rng.choice(VERDICTS)),
                correct=correct,
            )
            rollouts.append(
                Rollout(
                    draw_id=draw_id,
                    index=index,
                    prompt=prompt,
                    prompt_token_ids=rng.integers(0, 49_000, 100, dtype=np.int32),
                    token_ids=rng.integers(0, 49_000, num_tokens, dtype=np.int32),
                    logprobs=logprobs,
                    policy_versions=np.full(num_tokens, step - 1 - draw_id % 2, np.int32),
                    finish_reason="stop",
                    text=" ".join(rng.choice(WORDS, num_tokens * 3 // 4)),
                    reward=reward,
                    engine_id=f"engine-{index % 4}",
                )
            )
            columns[f"{draw_id}.{index}"] = {
                "trainer_logprobs": logprobs + rng.normal(scale=0.05, size=num_tokens).astype(np.float32),
                "token_advantages": np.full(num_tokens, reward.value - 0.5, np.float32),
            }
        draw = PromptDraw(draw_id=draw_id, prompt=prompt, token_ids=rollouts[0].prompt_token_ids)
        groups.append(Group(draw=draw, rollouts=tuple(rollouts)))
    return groups, columns


def _trace(path: Path, num_steps: int, num_rollouts: int) -> None:
    """Steps of a minute: generate, train, sync; and three states of every rollout."""
    states = (("queued", 0.0, 0.1), ("generating", 0.1, 0.9), ("rewarding", 0.9, 1.0))
    with path.open("w") as file:
        file.write("[\n")
        for step in range(num_steps):
            begin = step * 60_000_000
            spans = (("generate", 0, 40), ("train", 40, 18), ("sync", 58, 2), (f"step {step + 1}", 0, 60))
            lines = [
                f'{{"ts":{begin + first * 10**6},"pid":7,"tid":0,"name":"{name}","ph":"X","dur":{length_s * 10**6}}}'
                for name, first, length_s in spans
            ]
            for rollout in range(num_rollouts):
                length = 5_000_000 + 35_000_000 * rollout // num_rollouts
                common = f'"pid":1000000003,"tid":0,"cat":"rollout","id":"train-{step * num_rollouts + rollout}.0"'
                for name, first, last in states:
                    for phase, at in (("b", first), ("e", last)):
                        lines.append(f'{{"ts":{begin + int(length * at)},"name":"{name}","ph":"{phase}",{common}}}')
                lines.append(f'{{"ts":{begin + length + 10},"name":"trained","ph":"n",{common}}}')
            file.write(",\n".join(lines) + ("\n]\n" if step == num_steps - 1 else ",\n"))

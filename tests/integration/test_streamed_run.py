"""Runs whose trainer computes gradients while groups of the same step are still generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos.harness import tiny_config
from safetensors.torch import load_file

import roll
from roll.errors import ConfigError


def train(
    directory: Path, source: Path, *, stream: bool, **changes: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the metrics and the weights of five steps, with or without streamed gradients."""
    config = tiny_config(source, num_steps=5)
    rollout = {**config["rollout"], "prompts_per_step": 6, "scheduling": {"stream_training": stream}}
    scheduling = {**rollout["scheduling"], **changes.pop("scheduling", {})}
    training = {**config["training"], "learning_rate": 1e-4}  # Adam amplifies the rounding of gradients near 0
    inference = {"engine": "hf", "max_num_seqs": 4}  # fewer than a step's rollouts: groups end one by one
    changes = {
        "inference": inference,
        "training": training,
        **changes,
        "rollout": {**rollout, "scheduling": scheduling},
    }
    name = "streamed" if stream else "plain"
    roll.train({**config, "output_dir": str(directory), "name": name, **changes})
    rows = map(json.loads, (directory / name / "metrics.jsonl").read_text().splitlines())
    model = directory / name / "checkpoints" / "step-000005" / "model" / "model.safetensors"
    return [row for row in rows if row["kind"] == "train"], load_file(model)


def largest_difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"filters": {"skip_zero_variance": False}},
        {"aggregation": "token_mean", "kl": {"coefficient": 0.1}},
        {"aggregation": "constant_length", "advantage": {"mean": "leave_one_out", "std": "none"}},
    ],
    ids=["unfiltered", "token-mean-kl", "constant-length"],
)
def test_streamed_gradients_train_the_same_weights(tmp_path: Path, tiny_model: Path, algorithm: dict[str, Any]) -> None:
    plain, expected = train(tmp_path, tiny_model, stream=False, algorithm=algorithm)
    streamed, weights = train(tmp_path, tiny_model, stream=True, algorithm=algorithm)
    shares = [row["training/streamed_share"] for row in streamed if "training/streamed_share" in row]
    assert max(shares) > 0.3
    assert largest_difference(weights, expected) < 1e-6
    for row, other in zip(streamed, plain, strict=True):
        assert {name for name in row if "/" in name and not name.startswith("time/")} - {"training/streamed_share"} == {
            name for name in other if "/" in name and not name.startswith("time/")
        }
        for name in (name for name in other if name.startswith(("training/", "mismatch/", "data/", "reward/"))):
            if name != "training/num_tokens":  # groups of different parts share no prefix
                assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


def test_streamed_gradients_with_redundant_prompts_use_the_first_launched(tmp_path: Path, tiny_model: Path) -> None:
    scheduling = {"prompt_redundancy": 1.5}
    plain, expected = train(tmp_path, tiny_model, stream=False, scheduling=scheduling)
    streamed, weights = train(tmp_path, tiny_model, stream=True, scheduling=scheduling)
    assert largest_difference(weights, expected) < 1e-6
    assert [row["data/groups_trained"] for row in streamed] == [row["data/groups_trained"] for row in plain]


def test_streamed_gradients_of_adapters(tmp_path: Path, tiny_model: Path) -> None:
    model = {"path": str(tiny_model), "dtype": "float32", "lora": {"rank": 4}}
    _, expected = train(tmp_path, tiny_model, stream=False, model=model)
    streamed, weights = train(tmp_path, tiny_model, stream=True, model=model)
    assert max(row.get("training/streamed_share", 0.0) for row in streamed) > 0
    assert largest_difference(weights, expected) < 1e-6


def test_streamed_gradients_that_no_longer_match_are_discarded(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from roll.pipelines.learning import gradient_stream

    real = gradient_stream.add_advantages

    def add_wrong_advantages(*arguments: Any, **columns: Any) -> Any:
        batch = real(*arguments, **columns)
        for sample in batch.samples:
            sample.advantages[:] *= 3.0
        return batch

    _, expected = train(tmp_path, tiny_model, stream=False)
    monkeypatch.setattr(gradient_stream, "add_advantages", add_wrong_advantages)
    streamed, weights = train(tmp_path, tiny_model, stream=True)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert {row.get("training/streamed_share", 0.0) for row in streamed} == {0.0}
    assert "discarding the streamed gradients" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": {"updates": {"num_minibatches": 2}}}, r"num_minibatches 2; it requires one update per step"),
        ({"algorithm": {"advantage": {"std": "batch"}}}, r"advantage\.std batch; .* set mean and std to group or none"),
        ({"algorithm": {"advantage": {"whiten": "token"}}}, "advantage.whiten token"),
        ({"algorithm": {"weights": {"length": True}}}, r"algorithm\.weights\.length"),
        ({"algorithm": {"filters": {"top_variance": 0.5}}}, "top_variance 0.5"),
        ({"algorithm": {"kl": {"coefficient": 0.1, "apply_to": "reward"}}}, "apply_to to loss"),
        ({"scheduling": {"async_ratio": 1.0}}, "requires async_ratio 0, got 1"),
        ({"scheduling": {"type": "batch"}}, "set type to queue"),
    ],
)
def test_streamed_gradients_are_refused_with_the_key(
    tmp_path: Path, tiny_model: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tmp_path, tiny_model, stream=True, **changes)

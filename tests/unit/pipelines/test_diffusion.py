"""The pipeline `diffusion` end to end, with 2 x 2 pixels: every method, resuming, bad rows and bad rewards."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import roll
from roll.config.load import load_config
from roll.diffusion.models.loading import list_denoiser_files
from roll.errors import CheckpointError, ConfigError, DataError, ModelError, RewardInfraError
from roll.media import MediaStore
from roll.pipelines.diffusion.rows import ImageReader, read_rows
from roll.pipelines.diffusion.sample_files import SampleRecord, draw_grid
from roll.tracking.metrics_file import read_metrics

pytestmark = pytest.mark.integration

REWARDS = """
import numpy as np

def bright(image, prompt, metadata):
    return float(np.asarray(image).mean() / 255)

def dark(image, prompt, metadata):
    return 1 - bright(image, prompt, metadata)

def fails_on_y(image, prompt, metadata):
    if prompt == "y":
        raise ValueError("no y")
    return bright(image, prompt, metadata)

def fails_once(image, prompt, metadata, marker, how):
    import os, pathlib, signal
    if not pathlib.Path(marker).exists():
        pathlib.Path(marker).touch()
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("connection reset")
    return bright(image, prompt, metadata)

def fails(image, prompt, metadata):
    return float("nan")

def similar(images, prompts):
    return images.mean(dim=(1, 2, 3))
"""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "flow_matching": {"num_draws": 2},
    "dpo": {"beta": 5.0},
    "flow_grpo": {"samples_per_prompt": 4, "kl_coefficient": 0.1, "clip_range": 0.2},
    "ddpo": {"samples_per_prompt": 4, "num_minibatches": 2, "num_epochs": 2},
    "reward_weighted": {"samples_per_prompt": 4},
    "nft": {"samples_per_prompt": 4, "old_decay_rate": 0.3},
    "reward_gradient": {"samples_per_prompt": 2, "num_gradient_steps": 2},
}
LEARNS_FROM_REWARDS = ("flow_grpo", "ddpo", "reward_weighted", "nft")


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A directory with images, rows and rewards."""
    rng = np.random.default_rng(0)
    for i in range(8):
        Image.fromarray(rng.integers(0, 255, (2, 2, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    rows = [
        {"prompt": "x" * (i % 2), "image": f"{i}.png", "chosen": f"{i}.png", "rejected": f"{7 - i}.png", "other": i}
        for i in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def settings(world: Path, method: str, **changes: Any) -> dict[str, Any]:
    algorithm = {"type": method, **ALGORITHMS[method]}
    if method == "reward_gradient":
        algorithm["reward"] = f"{world}/rewards.py:similar"
    found: dict[str, Any] = {
        "pipeline": "diffusion",
        "name": method,
        "output_dir": str(world / "runs"),
        "model": "worlds.diffusion_models:SmallModel",
        "data": [{"path": str(world / "rows.jsonl")}],
        "algorithm": algorithm,
        "sampling": {"num_steps": 3, "batch_size": 5},
        "training": {"num_steps": 3, "prompts_per_step": 3, "learning_rate": 0.01, "micro_batch_size": 4},
        "evaluation": {"num_prompts": 2, "samples_per_prompt": 2, "every_num_steps": 2},
        "tracking": {"console": "quiet", "tensorboard": False},
    }
    if method in LEARNS_FROM_REWARDS:
        found["rewards"] = [{"function": f"{world}/rewards.py:bright"}]
    else:
        found["evaluation"]["rewards"] = [{"function": f"{world}/rewards.py:bright"}]
    for key, value in changes.items():
        found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    return found


def read_run(world: Path, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the metrics of training and evaluation, and the ledger."""
    run = world / "runs" / name
    rows = read_metrics(run / "metrics.jsonl")
    (ledger,) = (run / "checkpoints").glob("step-*/ledger.jsonl")
    entries = [json.loads(line) for line in ledger.read_text().splitlines()]
    return [r for r in rows if r["kind"] == "train"], [r for r in rows if r["kind"] == "evaluation"], entries


@pytest.mark.parametrize("method", list(ALGORITHMS))
def test_diffusion_every_method_trains_records_and_evaluates(method: str, world: Path) -> None:
    roll.train(settings(world, method))
    steps, evaluations, ledger = read_run(world, method)
    assert [row["step"] for row in steps] == [1, 2, 3] and all(np.isfinite(row["training/loss"]) for row in steps)
    assert [row["step"] for row in evaluations] == [0, 2, 3]
    assert all(0 <= row["eval/reward/bright"] <= 1 and row["eval/pixel_distance"] > 0 for row in evaluations)
    assert [entry["draw_id"] for entry in ledger] == list(range(9))
    assert all(entry["outcome"] == "trained" for entry in ledger)
    samples = sorted(path.name for path in (world / "runs" / method / "samples").glob("*.parquet"))
    assert [name for name in samples if "evaluation" in name] == [f"evaluation-step-{i:06d}.parquet" for i in (0, 2, 3)]
    if method not in LEARNS_FROM_REWARDS:
        return
    from pyarrow import parquet

    table = parquet.read_table(world / "runs" / method / "samples" / "step-000001.parquet").to_pylist()
    assert len(table) == 12 and len({row["seed"] for row in table}) == 12
    store = MediaStore(world / "runs" / method / "media")
    image = np.asarray(store.get(table[0]["media"][0]))
    assert table[0]["reward"] == pytest.approx(image.mean() / 255) and table[0]["reward/bright"] == table[0]["reward"]
    assert steps[0]["reward/mean"] == pytest.approx(np.mean([row["reward"] for row in table]))


@pytest.mark.parametrize("method", ["flow_matching", "flow_grpo", "nft", "reward_gradient"])
def test_diffusion_a_resumed_run_equals_an_uninterrupted_one(method: str, world: Path) -> None:
    roll.train(settings(world, method, name="straight"))
    two = settings(world, method, name="resumed")
    two["training"]["num_steps"] = 2
    roll.train(two)
    roll.resume(world / "runs" / "resumed", overrides=["training.num_steps=3"])
    for name in ("training/loss", "training/grad_norm"):
        one, other = ([row[name] for row in read_run(world, run)[0]] for run in ("straight", "resumed"))
        assert one == other


def test_diffusion_turning_points_give_every_step_its_own_advantage(world: Path) -> None:
    changes = {"algorithm": {"turning_points": "loose"}, "name": "turning"}
    roll.train(settings(world, "flow_grpo", **changes))
    steps, _, _ = read_run(world, "turning")
    plain = settings(world, "flow_grpo", name="plain")
    roll.train(plain)
    others, _, _ = read_run(world, "plain")
    assert steps[0]["reward/mean"] == others[0]["reward/mean"]  # the same samples, with other advantages
    assert steps[0]["training/loss"] != others[0]["training/loss"]


def test_diffusion_rewards_raise_the_reward(world: Path) -> None:
    changes: dict[str, Any] = {"training": {"num_steps": 25}, "evaluation": {"samples_per_prompt": 32}}
    roll.train(settings(world, "flow_grpo", **changes, algorithm={"samples_per_prompt": 16, "kl_coefficient": 0.0}))
    _, evaluations, _ = read_run(world, "flow_grpo")
    assert evaluations[-1]["eval/score"] > evaluations[0]["eval/score"] + 0.1


def test_diffusion_a_reward_that_fails_loses_its_group_only(world: Path, caplog: pytest.LogCaptureFixture) -> None:
    (world / "rows.jsonl").write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    rewards = [{"function": f"{world}/rewards.py:fails_on_y"}]
    roll.train(settings(world, "flow_grpo", rewards=rewards, training={"prompts_per_step": 2}))
    steps, _, ledger = read_run(world, "flow_grpo")
    assert all(row["reward/errors"] == 4.0 for row in steps)
    assert sorted((entry["uid"], entry["outcome"]) for entry in ledger) == [
        *[("images/rows-1", "trained")] * 3,
        *[("images/rows-2", "failed")] * 3,
    ]
    assert all("no y" in entry["why"] for entry in ledger if entry["outcome"] == "failed")
    (warning, *others) = [r.getMessage() for r in caplog.records if "without a reward" in r.getMessage()]
    assert warning.startswith("1 of 2 groups have samples without a reward") and "no y" in warning
    assert len(others) == 2


@pytest.mark.parametrize("how", ["dies", "raises"])
def test_diffusion_a_reward_that_fails_once_is_called_again(how: str, world: Path) -> None:
    roll.train(settings(world, "flow_grpo", name="straight"))
    options = {"marker": str(world / "marker"), "how": how}
    rewards = [{"function": f"{world}/rewards.py:fails_once", "name": "bright", "options": options}]
    roll.train(settings(world, "flow_grpo", rewards=rewards))
    (expected, _, _), (steps, _, ledger) = read_run(world, "straight"), read_run(world, "flow_grpo")
    assert (world / "marker").exists()
    assert all(row["reward/errors"] == 0.0 for row in steps)
    assert [row["training/loss"] for row in steps] == [row["training/loss"] for row in expected]
    assert {entry["outcome"] for entry in ledger} == {"trained"}


def test_diffusion_a_reward_that_always_fails_ends_the_run(world: Path) -> None:
    rewards = [{"function": f"{world}/rewards.py:fails"}]
    with pytest.raises(
        RewardInfraError, match=r"no image of this step could be scored.*must return a finite number, got nan"
    ):
        roll.train(settings(world, "flow_grpo", rewards=rewards))


def test_diffusion_equal_rewards_are_filtered_and_the_step_goes_on(
    world: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (world / "rewards.py").write_text("def bright(image, prompt, metadata):\n    return 1.0\n")
    roll.train(settings(world, "flow_grpo"))
    rows = read_metrics(world / "runs" / "flow_grpo" / "metrics.jsonl")
    steps = [row for row in rows if row["kind"] == "train"]
    assert [row["data/filtered"] for row in steps] == [3.0, 6.0, 9.0]
    assert not any("training/loss" in row for row in steps)
    assert "3 groups have zero reward variance, 0 have unscored samples" in caplog.text


def test_diffusion_export_and_evaluation_of_a_trained_model(world: Path) -> None:
    config = settings(world, "flow_matching")
    roll.train(config)
    from roll.pipelines.exporting import export

    target = export(world / "runs" / "flow_matching", world / "exported")
    assert {path.name for path in target.iterdir()} == {
        "README.md",
        "config.json",
        "diffusion_pytorch_model.safetensors",
    }
    assert "text-to-image" in (target / "README.md").read_text()
    metrics = roll.evaluate(config, model=str(world / "runs" / "flow_matching"))
    _, evaluations, _ = read_run(world, "flow_matching")
    assert metrics["eval/score"] == pytest.approx(evaluations[-1]["eval/score"], abs=1e-6)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"image": "0.png"}, "column 'prompt' does not exist"),
        ({"prompt": 3, "image": "0.png"}, "column 'prompt' must be a string, got 3"),
        ({"prompt": "x", "image": "none.png"}, r"the image '.*none.png' does not exist"),
        ({"prompt": "x", "image": "http://a/b.png"}, "is a URL"),
        ({"prompt": "x", "image": ["0.png"]}, r"must be the path of an image, got \['0.png'\]"),
    ],
)
def test_diffusion_bad_rows_are_reported_with_their_line(row: dict[str, Any], message: str, world: Path) -> None:
    good = {"prompt": "x", "image": "0.png"}
    (world / "rows.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message) as caught:
        roll.train(settings(world, "flow_matching"))
    assert "line 2" in str(caught.value)


def test_diffusion_images_that_change_during_a_run_or_before_it_resumes_are_noticed(world: Path) -> None:
    config: Any = load_config(settings(world, "flow_matching"))
    rows = read_rows(config.data, 0, ["image"])
    reader, row = ImageReader(), rows.evaluation[0]
    path = row.images["image"]
    data = path.read_bytes()
    os.utime(path, ns=(1, 1))
    with pytest.raises(
        DataError, match=r"line \d: the image '.*' changed while the run was using it: restore the file"
    ):
        reader.read(row, "image")
    roll.train(settings(world, "flow_matching", training={"num_steps": 2}))
    Image.new("RGB", (2, 2)).save(path, compress_level=0)
    with pytest.raises(CheckpointError, match="the size of an image file of 'images' changed since the checkpoint"):
        roll.resume(world / "runs" / "flow_matching", overrides=["training.num_steps=3"])
    path.write_bytes(data)
    roll.resume(world / "runs" / "flow_matching", overrides=["training.num_steps=3"])


def test_diffusion_images_that_cannot_be_used_name_their_row(world: Path) -> None:
    (world / "0.png").write_bytes(b"<svg></svg>")
    with pytest.raises(DataError, match=r"line 1: the image '.*0.png' is not an image in a supported format"):
        roll.train(settings(world, "flow_matching", training={"prompts_per_step": 8}))
    (world / "1.png").write_bytes(b"<svg></svg>")
    with pytest.raises(DataError, match=r"2 of 8 rows of data source 'images' .*\n  2 × image\n"):
        read_image_rows(world)  # all are reported at once, before training
    Image.new("RGB", (2, 2)).save(world / "1.png")
    Image.new("RGB", (3, 5)).save(world / "0.png")
    with pytest.raises(
        DataError, match=r"line 2: the image '.*1.png' has 2 × 2 pixels, but '.*0.png' has 3 × 5: resize"
    ):
        read_image_rows(world)
    for number in range(8):
        Image.new("RGB", (3, 5)).save(world / f"{number}.png")
    with pytest.raises(DataError, match=r"latents of shape \(1, 5, 3\), but `latent_shape` is \(1, 2, 2\): resize"):
        roll.train(settings(world, "flow_matching", name="sizes", training={"prompts_per_step": 8}))


def read_image_rows(world: Path) -> Any:
    config: Any = load_config(settings(world, "flow_matching"))
    return read_rows(config.data, 0, ["image"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": []}, "requires `rewards`"),
        ({"sampling": {"noise_level": 0.0}}, "requires SDE steps"),
        ({"training": {"parallel": {"tp": 2}}}, "sharded with FSDP2 over all ranks"),
        ({"training": {"fp8": "rowwise"}}, "has no effect on diffusion models"),
        ({"training": {"backend": "megatron"}}, "does not support diffusion models"),
        ({"model": {"path": "a.py:A", "lora": {"dropout": 0.1}}}, "lora.dropout is not supported"),
        ({"algorithm": {"turning_points": "some"}}, "must be one of 'none', 'loose', 'strict'"),
    ],
)
def test_diffusion_configurations_that_cannot_work_are_refused(
    changes: dict[str, Any], message: str, world: Path
) -> None:
    given = settings(world, "flow_grpo")
    for key, value in changes.items():
        given[key] = {**given[key], **value} if isinstance(value, dict) and isinstance(given[key], dict) else value
    with pytest.raises(ConfigError, match=message):
        load_config(given)


def test_diffusion_weights_of_another_model_are_refused(world: Path) -> None:
    (world / "empty").mkdir()
    given = settings(world, "flow_matching")
    given["model"] = {"path": "worlds.diffusion_models:SmallModel", "weights": str(world / "empty")}
    with pytest.raises(ModelError, match="has no safetensors files"):
        roll.train(given)
    given["model"]["weights"] = str(world / "missing")
    (problem,) = roll.check(given).problems
    assert "does not exist: specify a run, a checkpoint, or the directory of an export" in problem


def test_diffusion_weights_of_a_run_are_those_of_its_newest_checkpoint(world: Path) -> None:
    roll.train(settings(world, "flow_matching", training={"num_steps": 1}))
    run = world / "runs" / "flow_matching"
    (newest,) = run.glob("checkpoints/step-*/model")
    assert list_denoiser_files(run) == list_denoiser_files(newest.parent) == list_denoiser_files(newest)
    given = settings(world, "flow_matching", name="further")
    given["model"] = {"path": "worlds.diffusion_models:SmallModel", "weights": str(run)}
    assert roll.check(given).problems == []


def test_diffusion_check_reports_the_model_and_the_rows(world: Path) -> None:
    report = str(roll.check(settings(world, "flow_grpo")))
    assert "denoiser of" in report and "latents of shape (1, 2, 2)" in report
    assert "8 rows to train on, 3 per step" in report and "3 steps of 12 samples each" in report


def test_diffusion_held_out_rows_are_not_trained_and_hold_their_side(world: Path) -> None:
    path = str(world / "rows.jsonl")
    config = load_config(settings(world, "flow_matching", data=[{"path": path, "held_out": 0.5}]))
    rows = read_rows(config.data, 0, ["image"])
    again = read_rows(config.data, 1, ["image"])
    assert 0 < len(rows.held_out) < 8 and rows.train.num_items == 8 - len(rows.held_out)
    assert [row.uid for row in rows.held_out] == [row.uid for row in again.held_out]
    assert rows.fingerprints == again.fingerprints


def test_diffusion_grid_has_a_row_per_draw() -> None:
    records = [
        SampleRecord(
            draw_id=i // 2, index=i % 2, prompt="", seed=0, image=np.full((2, 2, 1), 100 * i, np.uint8), reward=0.0
        )
        for i in range(3)
    ]
    grid = draw_grid(records)
    assert grid.shape == (100, 100, 3)
    assert grid[0, 0, 0] == 0 and grid[0, 50, 0] == 100 and grid[50, 0, 0] == 200 and grid[50, 50, 0] == 255

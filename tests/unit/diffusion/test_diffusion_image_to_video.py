"""Image-to-video: a model of moving digits continues a given first frame, and Reward-FL decides in which direction."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from worlds.diffusion_models import make_spec
from worlds.moving_digits import GLYPHS, MovingDigits, draw_clip, encode, list_clips

import roll
from roll.diffusion.losses import FlowMatchingLoss, RewardGradientLoss
from roll.diffusion.records import DenoisingSettings, DiffusionBatch, DiffusionSample, SampleRequest
from roll.diffusion.trainer import DiffusionTrainer
from roll.media import MediaStore

MODEL = "worlds.moving_digits:MovingDigits"
REWARD = "worlds.moving_digits:reward_of_moving_right"
ODE = DenoisingSettings(num_steps=8, batch_size=128)
CLIPS = list_clips()
KEYS = list(CLIPS)


def make_batch(step: int, count: int, *, given: bool) -> DiffusionBatch:
    """Return samples of random clips, with their first frames; without `given`, only the first frames."""
    rng = np.random.default_rng(step)
    samples = []
    for i in range(count):
        clip = CLIPS[KEYS[rng.integers(len(KEYS))]]
        clean = encode(clip[..., :1]).movedim(0, 1).numpy() if given else None
        seed = 1000 * step + i
        samples.append(DiffusionSample(sample_id=f"{i}", prompt="", seed=seed, clean=clean, first_frame=clip[0]))
    return DiffusionBatch(samples=tuple(samples), settings=ODE, micro_batch_size=count)


def read_clips(trainer: DiffusionTrainer) -> list[tuple[tuple[str, int, int], tuple[str, int, int]]]:
    """Generate clips from new noise; return the key of each first frame with the key of the nearest clip."""
    asked = [(digit, start, 1) for digit in GLYPHS for start in (3, 4)] * 12
    requests = [
        SampleRequest(sample_id=str(i), prompt="", seed=10**9 + i, first_frame=draw_clip(*key)[0])
        for i, key in enumerate(asked)
    ]
    found = []
    for key, path in zip(asked, trainer.sample(requests, ODE), strict=True):
        assert path.images is not None
        np.testing.assert_array_equal(path.images[0], draw_clip(*key)[0][..., :1])
        errors = [((path.images.astype(float) - clip[..., :1]) ** 2).mean() for clip in CLIPS.values()]
        found.append((key, KEYS[int(np.argmin(errors))]))
    return found


def test_image_to_video_reward_gradient_turns_moving_digits_to_the_right_and_keeps_the_digit(tmp_path: Path) -> None:
    trainer = DiffusionTrainer(make_spec(MODEL))
    loss = FlowMatchingLoss(num_draws=2)
    for step in range(150):
        trainer.train_step(make_batch(step, 48, given=True), loss)
    before = read_clips(trainer)
    assert np.mean([key[:2] == clip[:2] for key, clip in before]) > 0.9
    assert 0.2 < np.mean([clip[2] == 1 for _, clip in before]) < 0.8
    trainer.export(tmp_path / "base")
    spec = make_spec(MODEL)
    spec = dataclasses.replace(spec, model=spec.model.model_copy(update={"weights": str(tmp_path / "base")}))
    trainer = DiffusionTrainer(spec)
    reward = RewardGradientLoss(reward=REWARD, num_gradient_steps=8, scale=0.1, kl_coefficient=0.2)
    for step in range(40):
        trainer.train_step(make_batch(1000 + step, 48, given=False), reward)
    after = read_clips(trainer)
    assert np.mean([clip[2] == 1 for _, clip in after]) > 0.9
    assert np.mean([key[:2] == clip[:2] for key, clip in after]) > 0.9


def test_image_to_video_first_frames_are_not_in_the_loss() -> None:
    trainer = DiffusionTrainer(make_spec(MODEL))
    batch = make_batch(0, 4, given=True)
    trainer.forward_backward(batch, FlowMatchingLoss())
    last: Any = trainer.network.blocks[2]
    gradient = last.bias.grad.reshape(MovingDigits.latent_shape)
    assert torch.all(gradient[:, 0] == 0) and torch.all(gradient[:, 1:] != 0)


@pytest.mark.parametrize("method", ["flow_grpo", "reward_gradient"])
@pytest.mark.integration
def test_image_to_video_a_run_reads_first_frames_from_rows(method: str, tmp_path: Path) -> None:
    frames = [draw_clip(digit, 3, 1)[0] for digit in GLYPHS]
    for i, frame in enumerate(frames):
        Image.fromarray(frame).save(tmp_path / f"{i}.png")
    rows = [json.dumps({"prompt": f"{i}", "frame": f"{i}.png"}) for i in range(len(frames))]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "rewards.py").write_text(
        "def last(frames, prompt, metadata): return sum(frames[-1].getdata(0)) / 1e4\n"
    )
    rewards = [{"function": f"{tmp_path}/rewards.py:last"}]
    learns = method == "flow_grpo"
    roll.train(
        {
            "pipeline": "diffusion",
            "name": "clips",
            "output_dir": str(tmp_path / "runs"),
            "model": MODEL,
            "data": [{"path": str(tmp_path / "rows.jsonl"), "first_frame_key": "frame"}],
            "algorithm": {"type": method, "samples_per_prompt": 2} | ({} if learns else {"reward": REWARD}),
            "rewards": rewards if learns else [],
            "sampling": {"num_steps": 3},
            "training": {"num_steps": 1, "prompts_per_step": 3},
            "evaluation": {
                "num_prompts": 3,
                "samples_per_prompt": 2,
                "before_training": False,
                "rewards": [] if learns else rewards,
            },
            "tracking": {"console": "quiet", "tensorboard": False},
        }
    )
    from pyarrow import parquet

    run = tmp_path / "runs" / "clips"
    table = parquet.read_table(run / "samples" / "evaluation-step-000001.parquet").to_pylist()
    store = MediaStore(run / "media")
    assert len(table) == 6
    for row in table:
        assert len(row["media"]) == 4
        np.testing.assert_array_equal(np.asarray(store.get(row["media"][0])), frames[int(row["prompt"])])
        assert row["reward/last"] == pytest.approx(np.asarray(store.get(row["media"][-1]))[..., 0].sum() / 1e4)

"""The frames of a video that a model sees, and their rate, computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import transformers

from roll.media import VideoClip
from roll.models.multimodal.video_frames import sample_frames


@pytest.mark.parametrize(
    ("count", "fps", "chosen", "rate"),
    [
        (40, 8.0, list(range(0, 40, 4)), 2.0),  # 5 s: 10 frames
        (43, 8.0, [int(i * 4.3) for i in range(10)], 2.0),  # 5.4 s: 10.75 frames, rounded down to pairs
        (6, 2.0, [0, 1, 2, 3, 4, 5], 2.0),
        (6, 1.5, [0, 1, 2, 3, 4, 5], 1.5),  # fewer frames than wanted
        (9, 8.0, [0, 2, 4, 6], 8 * 4 / 9),  # 1.1 s: the minimum of 4 frames
        (7, 1.0, [0, 1, 2, 3, 4, 5], 6 / 7),  # pairs of frames only: 7 frames become 6
        (100, 2.0, [int(i * 100 / 12) for i in range(12)], 2 * 12 / 100),  # the maximum of 12 frames
        (1, 8.0, [0], 8.0),
    ],
)
def test_video_frames_and_their_rate(count: int, fps: float, chosen: list[int], rate: float) -> None:
    processor = transformers.Qwen2VLVideoProcessor(max_frames=12)
    frames = np.zeros((count, 2, 2, 3), np.uint8) + np.arange(count, dtype=np.uint8)[:, None, None, None]
    found, found_rate = sample_frames(processor, VideoClip(frames=frames, fps=fps))
    assert found[:, 0, 0, 0].tolist() == chosen
    assert found_rate == pytest.approx(rate)

"""Samples the frames of a video in the same way as the model's video processor."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.media import VideoClip

__all__ = ["sample_frames"]

DEFAULT_FPS = 2.0
"""Frames per second with which Qwen's models were trained; their processors do not specify it."""


def sample_frames(video_processor: Any, video: VideoClip) -> tuple[NDArray[np.uint8], float]:
    """Return the frames that a model receives, and their frame rate.

    The rate is the processor's target rate if the number of chosen frames is the duration times this rate, rounded
    down. Otherwise, the rate is computed from the chosen frames, because `transformers` would compute incorrect
    timestamps.

    Args:
        video_processor: A video processor of `transformers`.
        video: The video.

    Returns:
        Frames uint8 [n, height, width, 3], and their frames per second.
    """
    from transformers.video_utils import VideoMetadata

    count, step = len(video.frames), video_processor.temporal_patch_size
    if count < step:  # the processor repeats the last frame
        return video.frames, video.fps
    fps = getattr(video_processor, "fps", None) or DEFAULT_FPS
    metadata = VideoMetadata(total_num_frames=count, fps=video.fps)
    chosen = video_processor.sample_frames(metadata, fps=fps).numpy()
    wanted = count / video.fps * fps
    if wanted > count or len(chosen) != int(wanted // step) * step:
        fps = video.fps * len(chosen) / count
    return video.frames[chosen], fps

"""Data sources, chat rendering, and training samples."""

from roll.data.build import PromptData, build_data, render_held_out
from roll.data.chat import ChatRenderer
from roll.data.samples import build_batch, build_samples
from roll.data.stream import PromptStream, WeightedSource, WeightedStream

__all__ = [
    "ChatRenderer",
    "PromptData",
    "PromptStream",
    "WeightedSource",
    "WeightedStream",
    "build_batch",
    "build_data",
    "build_samples",
    "render_held_out",
]

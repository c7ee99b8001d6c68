"""A reward for text in images, as in Flow-GRPO: an OCR program compares what it reads with the text that was asked for.

    uv pip install rapidocr onnxruntime

    data: [{path: signs.jsonl}]       # {"prompt": "a street sign that says \\"MAIN ST\\"", "text": "MAIN ST"}
    rewards: [{function: "examples/diffusion/text_reward.py:reads_text"}]

The wheel of `rapidocr` contains its models (PP-OCR, 30 MB). They run on the CPU, in the worker process of the reward.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np

from roll.rewards.edit_distance import compute_edit_distance


@functools.cache
def load_reader() -> Any:
    """Load the OCR models, once per process, with one thread each."""
    from rapidocr import RapidOCR

    threads = "EngineConfig.onnxruntime"
    return RapidOCR(
        params={
            "Global.log_level": "error",
            f"{threads}.intra_op_num_threads": 1,
            f"{threads}.inter_op_num_threads": 1,
        }
    )


def read_text(image: Any) -> str:
    """Return the text in a `PIL.Image`, in reading order; empty if there is none."""
    found = load_reader()(np.asarray(image.convert("RGB"))[..., ::-1])  # OpenCV's order of channels
    return " ".join(found.txts or ())


def compare_texts(read: str, wanted: str) -> float:
    """Return 1 minus the edit distance per character of the wanted text, at least 0; case and spaces do not count."""
    read, wanted = (re.sub(r"\s", "", text).casefold() for text in (read, wanted))
    if not wanted or wanted in read:
        return float(bool(wanted))
    return max(1 - compute_edit_distance(read, wanted) / len(wanted), 0.0)


def reads_text(image: Any, prompt: str, metadata: dict[str, Any]) -> float:
    """Return how much of the row's `text` is in the image; without that column, of the text in quotation marks."""
    wanted = metadata.get("text") or " ".join(re.findall(r'"([^"]+)"', prompt))
    if not wanted:
        raise ValueError(f'the row has no column "text", and its prompt no text in quotation marks: {prompt!r}')
    return compare_texts(read_text(image), wanted)

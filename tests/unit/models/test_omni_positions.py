"""Positions of audio and videos, computed by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from worlds.omni_models import OMNI_MODELS, OmniWorld, write_omni_model

from roll.errors import DataError
from roll.models import load_causal_lm
from roll.models.multimodal import MediaInputs
from roll.models.multimodal.positions import compute_mrope_positions
from roll.types import shift_media


@pytest.mark.parametrize("name", OMNI_MODELS)
def test_omni_positions_are_times_rows_and_columns(tmp_path: Path, name: str) -> None:
    world = OmniWorld.create(write_omni_model(tmp_path / "model", name), tmp_path / "media")
    model = load_causal_lm(world.model, "float32")
    inputs = MediaInputs(world.store, world.processor)
    # Audio has the positions of text, and so has a stray token of a medium in text.
    tokens, media = world.prompt("ab{audio 0}c")
    assert compute_mrope_positions(model, inputs, tokens, media) is None
    # Video 2 has 6 frames at 1.7 a second: 3 pairs of 2 / 1.7 s. 32 × 32 pixels are 4 × 4 patches, 2 × 2 features.
    tokens, media = world.prompt("<|audio_bos|>b{video 2}cd")
    assert (media[0].start, media[0].end) == (3, 15)
    found = compute_mrope_positions(model, inputs, tokens, media)
    assert found is not None
    step = 2 / 1.7 * (13 if name == "qwen3-omni" else 25)
    times = [3.0, 3 + step, 3 + 2 * step] if name == "qwen3-omni" else [3, 3 + int(step), 3 + int(2 * step)]
    after = times[-1] + 1 + np.arange(3)
    np.testing.assert_allclose(found[0], [0, 1, 2, *np.repeat(times, 4), *after], rtol=1e-6)
    np.testing.assert_allclose(found[1], [0, 1, 2, *[3, 3, 4, 4] * 3, *after], rtol=1e-6)
    np.testing.assert_allclose(found[2], [0, 1, 2, *[3, 4, 3, 4] * 3, *after], rtol=1e-6)
    assert found.dtype == (np.float32 if name == "qwen3-omni" else np.int32)


def test_omni_positions_of_media_without_tokens_between_are_refused(tmp_path: Path) -> None:
    world = OmniWorld.create(write_omni_model(tmp_path / "model", OMNI_MODELS[0]), tmp_path / "media")
    model = load_causal_lm(world.model, "float32")
    inputs = MediaInputs(world.store, world.processor)
    tokens, media = world.prompt("{video 0}{image 0}")
    assert compute_mrope_positions(model, inputs, tokens, media) is not None
    gap = np.delete(tokens, media[0].end)
    closer = (media[0], *shift_media(media[1:], -1))
    with pytest.raises(DataError, match=r"cannot separate .* because only 1 tokens are between them"):
        compute_mrope_positions(model, inputs, gap, closer)

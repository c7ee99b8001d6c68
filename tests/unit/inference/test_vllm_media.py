"""Media that vLLM is not sent, because it would compute other log-probs than the trainer."""

from __future__ import annotations

import numpy as np
import pytest
from worlds.omni_models import OMNI_MODELS, OmniWorld, write_omni_model

from roll.errors import ModelError, UnsupportedError
from roll.inference.spec import EngineSpec
from roll.inference.vllm.launch import launch
from roll.inference.vllm.media import _load_media
from roll.models.multimodal import MediaInputs


@pytest.fixture(scope="module", name="inputs")
def _inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[OmniWorld, MediaInputs]]:
    directory = tmp_path_factory.mktemp("omni")
    made = {}
    for name in OMNI_MODELS:
        world = OmniWorld.create(write_omni_model(directory / name, name), directory / f"{name} media")
        made[name] = world, MediaInputs(world.store, world.processor)
    return made


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("qwen3-omni", "{video 2}", "has 1.17647 s between pairs of frames"),
        ("qwen3-omni", "{audio 0}{audio 1}", "audio clips of different lengths"),
        ("qwen3-omni", "{audio 0}{video 0}{audio 0}", ""),
        ("qwen2.5-omni", "{video 0}{video 2}", r"sees at 2, 1\.7 frames per second"),
        ("qwen2.5-omni", "{video 2}{audio 0}{image 0}{audio 1}", ""),
    ],
)
def test_vllm_media_are_sent_or_refused(
    inputs: dict[str, tuple[OmniWorld, MediaInputs]], name: str, text: str, message: str
) -> None:
    world, media_inputs = inputs[name]
    _, media = world.prompt(text)
    if message:
        with pytest.raises(UnsupportedError, match=message):
            _load_media(media_inputs, media)
        return
    data, settings = _load_media(media_inputs, media)
    assert {kind: len(contents) for kind, contents in data.items()} == {
        kind: sum(span.kind == kind for span in media) for kind in data
    }
    fps = 2.0 if "video 0" in text else 1.7
    assert settings == {"fps": fps, "do_sample_frames": False}
    assert data["audio"][0][1] == 16000 and isinstance(data["video"][0], np.ndarray)


def test_vllm_media_a_thinker_alone_is_refused(inputs: dict[str, tuple[OmniWorld, MediaInputs]]) -> None:
    world, _ = inputs["qwen2.5-omni"]
    with pytest.raises(ModelError, match="only the thinker of an omni model"):
        launch(EngineSpec(engine_id="e", kind="vllm", model_path=str(world.model), max_context=64), "name")

"""Stable Diffusion 3, Flux and Wan with random weights: every method takes a step, with LoRA and on two ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds.diffusion_models import make_spec, write_pipeline
from worlds.diffusion_ranks import LOSSES, SIZES, family_batch, run_family, run_family_rank
from worlds.ranks import run_ranks

from roll.config.model import LoRAConfig
from roll.diffusion.models import load_diffusion_model
from roll.diffusion.records import DenoisingSettings, SampleRequest
from roll.diffusion.trainer import DiffusionTrainer
from roll.errors import ModelError

FAMILIES = ("sd3", "flux", "wan")


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("diffusers")
    directory = tmp_path_factory.mktemp("pipelines")
    return {family: write_pipeline(family, directory) for family in FAMILIES}


def load(path: Path, family: str) -> Any:
    return load_diffusion_model(str(path), sizes={"height": 16, "width": 16, "max_prompt_tokens": 8, **SIZES[family]})


@pytest.mark.parametrize("family", FAMILIES)
def test_diffusion_ode_equals_the_pipeline_of_diffusers(family: str, pipelines: dict[str, Path]) -> None:
    """The same latents, prompts, guidance and noise levels give diffusers' own images."""
    model = load(pipelines[family], family)
    trainer = DiffusionTrainer(make_family_spec(pipelines[family], family))
    request = SampleRequest(sample_id="a", prompt="ab c", seed=3)
    guided = 1.0 if family == "flux" else 2.5
    settings = DenoisingSettings(num_steps=3, guidance_scale=guided)
    (path,) = trainer.sample([request], settings)
    latents = torch.from_numpy(path.latents[0])[None]
    if family == "flux":
        latents = latents.reshape(1, 4, 4, 2, 4, 2).permute(0, 2, 4, 1, 3, 5).reshape(1, 16, 16)
    options: dict[str, Any] = {"guidance_scale": guided} if family != "flux" else {"guidance_scale": 3.5}
    if family == "wan":
        options |= {"num_frames": 5}
        model.pipeline.scheduler.set_timesteps = _use_sigmas(model.pipeline.scheduler, path.sigmas)
    else:
        options |= {"sigmas": path.sigmas[:-1].tolist()}
        model.pipeline.scheduler.register_to_config(use_dynamic_shifting=False, shift=1.0)
    result = model.pipeline(
        "ab c", negative_prompt="" if family != "flux" else None, height=16, width=16, num_inference_steps=3,
        latents=latents, max_sequence_length=8, output_type="pt", **options,
    )  # fmt: skip
    images = result.frames if family == "wan" else result.images
    found = images[0].movedim(-3, -1).float().cpu().numpy() * 255
    assert path.images is not None
    np.testing.assert_allclose(path.images, found, atol=0.51 + 1e-2)


def _use_sigmas(scheduler: Any, sigmas: Any) -> Any:
    """Return a `set_timesteps` for Wan's pipeline, which has no argument for noise levels."""
    original = type(scheduler).set_timesteps
    return lambda *_, device=None, **__: original(scheduler, sigmas=sigmas[:-1].tolist(), device=device)


def make_family_spec(path: Path, family: str, **settings: Any) -> Any:
    return make_spec(str(path), height=16, width=16, max_prompt_tokens=8, **SIZES[family], **settings)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2, target_modules=["to_q", "to_v"])], ids=["full", "lora"])
def test_diffusion_every_method_takes_a_step(
    family: str, lora: LoRAConfig | None, pipelines: dict[str, Path], tmp_path: Path
) -> None:
    trainer = DiffusionTrainer(make_family_spec(pipelines[family], family, lora=lora))
    trainer.start_old_policy()
    batch = family_batch(trainer, family)
    before = {name: p.detach().clone() for name, p in trainer.network.named_parameters()}
    for name, loss in LOSSES.items():
        result = trainer.train_step(batch, loss)
        assert result.stepped and np.isfinite(result.loss) and result.grad_norm > 0, name
    changed = {n for n, p in trainer.network.named_parameters() if not torch.equal(p.detach(), before[n])}
    assert changed and all(("lora_" in name) == (lora is not None) for name in changed)
    trainer.export(tmp_path / "model")
    again = type(trainer.model.denoiser).from_pretrained(tmp_path / "model")
    model = load(pipelines[family], family)
    model.denoiser.load_state_dict(again.state_dict())
    latents = torch.from_numpy(batch.samples[0].clean_latents)[None]
    sigma = torch.tensor([0.5])
    with torch.no_grad():
        given = model.encode_prompts(["ab"])
        torch.testing.assert_close(model.predict(latents, sigma, given), trainer.model.predict(latents, sigma, given))


def test_image_to_video_restores_the_first_frame_at_every_step(pipelines: dict[str, Path]) -> None:
    trainer = DiffusionTrainer(make_family_spec(pipelines["wan"], "wan"))
    frame = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    settings = DenoisingSettings(num_steps=3, noise_level=0.7)
    requests = [SampleRequest(sample_id=str(i), prompt="ab", seed=i, first_frame=frame) for i in range(2)]
    paths = trainer.sample(requests, settings)
    expected = trainer.model.encode_images(frame[None])[0].squeeze(1).numpy()
    for path in paths:
        for latents in path.latents:
            np.testing.assert_allclose(latents[:, 0], expected, atol=1e-6)
        assert not np.allclose(path.latents[0][:, 1], path.latents[-1][:, 1])
    # The given frame is not part of the policy: log-probs ignore its entries.
    batch = family_batch(trainer, "wan", paths)
    result = trainer.measure(batch, LOSSES["flow_grpo"])
    assert result.metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
    trainer.start_old_policy()
    for name, loss in LOSSES.items():
        assert trainer.train_step(batch, loss).stepped, name


def test_wan_models_with_channels_of_the_first_frame_are_refused(pipelines: dict[str, Path]) -> None:
    from diffusers import WanTransformer3DModel

    model = load(pipelines["wan"], "wan")
    config = {**model.config, "in_channels": 36}
    model.pipeline.register_modules(transformer=WanTransformer3DModel.from_config(config))
    with pytest.raises(ModelError, match="36 input channels, but 16 output channels"):
        type(model)(model.pipeline, height=16, width=16)


@pytest.mark.parametrize(("name", "message"), [("absent", "has no model_index.json"), ("other", "is not supported")])
def test_diffusion_directories_that_are_no_pipeline_are_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model_index.json").write_text('{"unet": ["diffusers", "UNet2DConditionModel"]}')
    with pytest.raises(ModelError, match=message):
        load_diffusion_model(str(tmp_path / name))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_diffusion_families_two_ranks_do_what_one_does(family: str, pipelines: dict[str, Path], tmp_path: Path) -> None:
    spec = make_family_spec(pipelines[family], family)
    run_ranks(run_family_rank, (tmp_path, spec, family), 2)
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    alone = run_family(DiffusionTrainer(dataclasses.replace(spec)), family)
    for name in LOSSES:
        assert found[name]["loss"] == pytest.approx(alone[name]["loss"], rel=1e-3, abs=1e-5), name
        assert found[name]["grad_norm"] == pytest.approx(alone[name]["grad_norm"], rel=1e-3, abs=1e-5), name

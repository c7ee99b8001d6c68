"""Models of diffusers' pipeline directories: Stable Diffusion 3, Flux and Wan, and models of the same architectures.

They predict the velocity of `roll.diffusion`, because diffusers' flow-matching scheduler computes
x + (sigma' - sigma) v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from roll.diffusion.models.base import Conditions, DiffusionModel, to_float_images
from roll.errors import DataError, ModelError

__all__ = ["FluxModel", "PipelineModel", "StableDiffusion3Model", "WanModel"]

TIMESTEPS = 1000.0
"""Timestep of sigma = 1 in diffusers."""


class PipelineModel(DiffusionModel):
    """A model in a pipeline of diffusers.

    Args:
        pipeline: The pipeline, with its transformer, text encoders and VAE.
        height: Height of images in pixels.
        width: Width of images in pixels.
        num_frames: Number of frames of a video; 1 for images.
        embedded_guidance: Guidance scale that guidance-distilled denoisers receive as an input.
        max_prompt_tokens: Length to which prompts are padded or truncated; by default the pipeline's length.
    """

    def __init__(
        self,
        pipeline: Any,
        *,
        height: int,
        width: int,
        num_frames: int = 1,
        embedded_guidance: float = 3.5,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.denoiser: nn.Module = pipeline.transformer
        self.height, self.width, self.num_frames = height, width, num_frames
        self.embedded_guidance = embedded_guidance
        self.prompt_limits = {} if max_prompt_tokens is None else {"max_sequence_length": max_prompt_tokens}
        for part in self.list_frozen_parts():
            part.requires_grad_(False).eval()
        multiple = self.spatial_scale * self.patch_size
        if height % multiple or width % multiple:
            raise ModelError(
                f"image height and width must be multiples of {multiple}, got {height} x {width}: change model.height "
                "and model.width"
            )
        self.latent_shape = self._compute_latent_shape()

    @property
    def vae(self) -> Any:
        """The VAE, which decodes latents to images."""
        return self.pipeline.vae

    @property
    def spatial_scale(self) -> int:
        """The number of pixels per latent along an axis."""
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    @property
    def patch_size(self) -> int:
        """The number of latents per patch of the denoiser along an axis."""
        return int(self.config["patch_size"])

    @property
    def config(self) -> Any:
        """The configuration of the denoiser."""
        return self.denoiser.config

    def _compute_latent_shape(self) -> tuple[int, ...]:
        scale = self.spatial_scale
        return (int(self.vae.config.latent_channels), self.height // scale, self.width // scale)

    def list_frozen_parts(self) -> list[nn.Module]:
        """Return the text encoders and the VAE."""
        parts = [part for name, part in self.pipeline.components.items() if name != "transformer"]
        return [part for part in parts if isinstance(part, nn.Module)]

    def decode(self, latents: Tensor) -> Tensor:
        config = self.vae.config
        scaled = latents / config.scaling_factor + (getattr(config, "shift_factor", None) or 0.0)
        return (self.vae.decode(scaled.to(self.vae.dtype)).sample.float() / 2 + 0.5).clamp(0, 1)

    @torch.no_grad()
    def encode_images(self, images: NDArray[np.uint8]) -> Tensor:
        pixels = to_float_images(images).to(self.device, self.vae.dtype) * 2 - 1
        self._check_size(pixels)
        config = self.vae.config
        found = self.vae.encode(pixels).latent_dist.mode().float()
        return (found - (getattr(config, "shift_factor", None) or 0.0)) * config.scaling_factor

    def _check_size(self, pixels: Tensor) -> None:
        if pixels.shape[-2:] != (self.height, self.width):
            raise DataError(
                f"an image must have {self.height} x {self.width} pixels (model.height, model.width), got "
                f"{pixels.shape[-2]} x {pixels.shape[-1]}: resize it"
            )

    def build_config(self) -> dict[str, Any]:
        return {key: value for key, value in dict(self.config).items() if key != "_name_or_path"} | {
            "_class_name": type(self.denoiser).__name__
        }

    def list_blocks(self) -> list[nn.Module]:
        """Return the transformer's blocks."""
        lists = (
            getattr(self.denoiser, name, None) for name in ("transformer_blocks", "single_transformer_blocks", "blocks")
        )
        return [block for blocks in lists if blocks is not None for block in blocks]


class StableDiffusion3Model(PipelineModel):
    """Stable Diffusion 3 and 3.5 (arXiv 2403.03206)."""

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[str]) -> Conditions:
        states, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=list(prompts),
            prompt_2=None,
            prompt_3=None,
            device=self.device,
            do_classifier_free_guidance=False,
            **self.prompt_limits,
        )
        return {"encoder_hidden_states": states, "pooled_projections": pooled}

    def predict(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        return self.denoiser(hidden_states=latents, timestep=sigma * TIMESTEPS, **conditions, return_dict=False)[0]


class FluxModel(PipelineModel):
    """Flux.1. Its denoiser combines 2 x 2 latents into one token."""

    @property
    def patch_size(self) -> int:
        return 2

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[str]) -> Conditions:
        states, pooled, _ = self.pipeline.encode_prompt(
            prompt=list(prompts), prompt_2=None, device=self.device, **self.prompt_limits
        )
        return {"encoder_hidden_states": states, "pooled_projections": pooled}

    def predict(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        size, channels, height, width = latents.shape
        tokens = latents.reshape(size, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
        places = torch.cartesian_prod(torch.arange(height // 2), torch.arange(width // 2)).to(latents)
        ids = torch.cat([torch.zeros_like(places[:, :1]), places], dim=1)
        num_words = conditions["encoder_hidden_states"].shape[1]
        guidance = latents.new_full((size,), self.embedded_guidance) if self.config["guidance_embeds"] else None
        found = self.denoiser(
            hidden_states=tokens.reshape(size, -1, channels * 4),
            timestep=sigma,  # the denoiser multiplies it by 1000 itself
            img_ids=ids,
            txt_ids=latents.new_zeros(num_words, 3),
            guidance=guidance,
            **conditions,
            return_dict=False,
        )[0]
        patches = found.reshape(size, height // 2, width // 2, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return patches.reshape(size, channels, height, width)


class WanModel(PipelineModel):
    """Wan 2.1 and 2.2: text-to-video, or video from a first frame that is restored after every step (IPRO)."""

    def __init__(self, pipeline: Any, **sizes: Any) -> None:
        config = pipeline.transformer.config
        if config["in_channels"] != config["out_channels"]:
            raise ModelError(
                f"the denoiser has {config['in_channels']} input channels, but {config['out_channels']} output "
                "channels: models that receive the first frame in additional channels are not supported; use a "
                "text-to-video model, or a model that restores the first frame"
            )
        super().__init__(pipeline, **sizes)

    @property
    def spatial_scale(self) -> int:
        return int(self.vae.config.scale_factor_spatial)

    @property
    def patch_size(self) -> int:
        return int(self.config["patch_size"][1])

    def _compute_latent_shape(self) -> tuple[int, ...]:
        scale = int(self.vae.config.scale_factor_temporal)
        if (self.num_frames - 1) % scale:
            raise ModelError(f"model.num_frames must be 1 more than a multiple of {scale}, got {self.num_frames}")
        frames = (self.num_frames - 1) // scale + 1
        return (
            int(self.vae.config.z_dim),
            frames,
            self.height // self.spatial_scale,
            self.width // self.spatial_scale,
        )

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[str]) -> Conditions:
        states, _ = self.pipeline.encode_prompt(
            prompt=list(prompts), do_classifier_free_guidance=False, device=self.device, **self.prompt_limits
        )
        return {"encoder_hidden_states": states}

    def predict(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        return self.denoiser(hidden_states=latents, timestep=sigma * TIMESTEPS, **conditions, return_dict=False)[0]

    def decode(self, latents: Tensor) -> Tensor:
        mean, std = self._get_statistics(latents)
        videos = self.vae.decode((latents * std + mean).to(self.vae.dtype), return_dict=False)[0]
        return (videos.float() / 2 + 0.5).clamp(0, 1).movedim(2, 1)

    @torch.no_grad()
    def encode_images(self, images: NDArray[np.uint8]) -> Tensor:
        """Return the latents [B, C, 1, H, W] of single images [B, H, W, C], such as first frames."""
        pixels = to_float_images(images).to(self.device, self.vae.dtype) * 2 - 1
        self._check_size(pixels)
        found = self.vae.encode(pixels.unsqueeze(2)).latent_dist.mode().float()
        mean, std = self._get_statistics(found)
        return (found - mean) / std

    def _get_statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        config = self.vae.config
        mean, std = (
            torch.tensor(values).to(like).reshape(1, -1, 1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        return mean, std

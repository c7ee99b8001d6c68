"""Diffusion models: a denoiser, its text encoders, and the decoder from latents to images."""

from roll.diffusion.models.base import Conditions, DiffusionModel
from roll.diffusion.models.loading import load_diffusion_model

__all__ = ["Conditions", "DiffusionModel", "load_diffusion_model"]

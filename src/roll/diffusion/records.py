"""The data that pipelines and the trainer of diffusion models exchange. All arrays are in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DenoisingPath",
    "DenoisingSettings",
    "DiffusionBatch",
    "DiffusionSample",
    "SampleRequest",
]

Float32Array = NDArray[np.float32]
UInt8Array = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class DenoisingSettings:
    """The settings of the denoising loop; they are the same for all requests of a call."""

    num_steps: int
    """Number of denoising steps T."""
    shift: float = 1.0
    """Shift of the sigmas towards noise, for high resolutions: sigma' = shift sigma / (1 + (shift - 1) sigma)."""
    guidance_scale: float = 1.0
    """Scale s of classifier-free guidance: v = v_empty + s (v_prompt - v_empty); 1 computes only v_prompt."""
    noise_level: float = 0.0
    """Noise level a of the SDE steps; 0 gives the ODE."""
    num_stochastic_steps: int | None = None
    """Number of SDE steps at the start; the remaining steps are ODE steps. `None`: all steps are SDE steps."""
    batch_size: int = 16
    """Number of samples in one call of the denoiser, on each rank."""

    @property
    def stochastic_steps(self) -> int:
        """Number of SDE steps at the start of the denoising loop."""
        if self.noise_level == 0:
            return 0
        return self.num_steps if self.num_stochastic_steps is None else min(self.num_stochastic_steps, self.num_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """One sample to generate."""

    sample_id: str
    prompt: str
    seed: int
    """Seed of the initial noise and of the noise of SDE steps. It depends only on the run's seed, the draw and the
    index, so that the sample does not depend on the number of ranks or on the batch."""
    first_frame: UInt8Array | None = None
    """[H, W, C] first frame of a video, which every denoising step restores; `None` if no frame is given."""
    start: Float32Array | None = None
    """Latents before step `start_step`; `None`: noise from the seed."""
    start_step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DenoisingPath:
    """One generated sample, with the latents of every step."""

    request: SampleRequest
    sigmas: Float32Array
    """[T + 1] noise levels of the latents; the last is 0."""
    latents: Float32Array
    """[T + 1, *shape] latents at these noise levels."""
    logprobs: Float32Array
    """[T] log-density of each SDE step under the sampling policy, as the mean over the latents' entries; 0 for ODE
    steps."""
    images: UInt8Array | None = None
    """[H, W, C] decoded image, or [F, H, W, C] frames of a video; `None` if it was not decoded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionSample:
    """One sample to train on: a path with advantages, or an image as latents."""

    sample_id: str
    prompt: str
    seed: int
    """Seed of the random noise levels and noise of a loss."""
    unit: int = 0
    """Index of the sample's pair; samples of the same unit are in the same micro-batch."""
    path: DenoisingPath | None = None
    """The sample's own path, for losses on denoising steps."""
    clean: Float32Array | None = None
    """[*shape] latents x_0; `None`: the last latents of the path."""
    image: UInt8Array | None = None
    """[H, W, C] image that the trainer encodes to `clean`."""
    first_frame: UInt8Array | None = None
    """[H, W, C] first frame of a video, if it is given."""
    advantages: Float32Array | None = None
    """[T] advantages of the steps; a loss on x_0 uses the first entry."""
    weight: float = 1.0
    """Factor on the sample's loss."""
    preferred: bool | None = None
    """True if the sample is preferred over the other sample of its pair."""

    @property
    def clean_latents(self) -> Float32Array:
        """The latents x_0 of the sample.

        Raises:
            ValueError: The sample has neither latents nor a path.
        """
        if self.clean is not None:
            return self.clean
        if self.path is None:
            raise ValueError(f"sample {self.sample_id} has neither latents nor a path")
        return self.path.latents[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionBatch:
    """Samples of one optimizer update, over all ranks."""

    samples: tuple[DiffusionSample, ...]
    settings: DenoisingSettings
    """The settings of the sampler; they include guidance, which is part of the policy."""
    micro_batch_size: int = 16
    """Number of denoiser inputs in one forward and backward pass, on each rank."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Additional plain data for losses."""

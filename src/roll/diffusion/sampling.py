"""Generation of samples: the denoising loop of one rank's network.

    seed ─► noise ─► velocity with guidance ─► SDE or ODE step ─► … ─► latents x_0 ─► decoded image

The noise of a sample depends only on its seed: it is drawn on the host, one sample at a time, so that it is the same in
any batch, on any number of ranks and on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from roll.diffusion.models.base import Conditions, DiffusionModel, to_uint8_images
from roll.diffusion.records import DenoisingPath, DenoisingSettings, SampleRequest
from roll.diffusion.steps import compute_logprob, compute_sde_step, compute_sigmas, expand

__all__ = ["PromptCache", "Sampler", "draw_noise"]

MAX_CACHED_PROMPTS = 4096


class PromptCache:
    """Caches the conditions of prompts, so that the frozen text encoders compute them once.

    Args:
        model: The model.
    """

    def __init__(self, model: DiffusionModel) -> None:
        self._model = model
        self._known: dict[str, dict[str, Tensor]] = {}

    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Return the conditions of prompts, in the order of the prompts."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._known]
        if len(self._known) + len(new) > MAX_CACHED_PROMPTS:
            self._known.clear()
            new = list(dict.fromkeys(prompts))
        if new:
            with torch.no_grad():
                found = self._model.encode_prompts(new)
            for place, prompt in enumerate(new):
                self._known[prompt] = {name: tensor[place] for name, tensor in found.items()}
        return {name: torch.stack([self._known[p][name] for p in prompts]) for name in self._known[prompts[0]]}


def draw_noise(seed: int, count: int, shape: Sequence[int]) -> Tensor:
    """Return standard normal noise, float32 [count, *shape], that depends only on the seed."""
    generator = np.random.Generator(np.random.PCG64(seed))
    return torch.from_numpy(generator.standard_normal((count, *shape), dtype=np.float32))


class Sampler:
    """Denoises samples with a model's current weights.

    Args:
        model: The model.
        prompts: The conditions of prompts.
    """

    def __init__(self, model: DiffusionModel, prompts: PromptCache) -> None:
        self._model = model
        self._prompts = prompts

    def predict(self, latents: Tensor, sigma: Tensor, prompts: Sequence[str], guidance_scale: float) -> Tensor:
        """Return the velocity with guidance [B, *shape], in float32.

        Args:
            latents: [B, *shape] latents.
            sigma: [B] noise levels.
            prompts: B prompts.
            guidance_scale: The scale of classifier-free guidance.
        """
        dtype = next(self._model.denoiser.parameters()).dtype
        latents, size = latents.to(self._model.device), len(prompts)
        sigma = sigma.to(latents)
        guided = guidance_scale != 1.0
        conditions = self._prompts.encode([*prompts, *([""] * size if guided else [])])
        conditions = {n: t.to(dtype) if t.is_floating_point() else t for n, t in conditions.items()}
        if guided:  # in one call, so that every parameter has one gradient
            latents, sigma = torch.cat([latents, latents]), torch.cat([sigma, sigma])
        found = self._model.predict(latents.to(dtype), sigma, conditions).float()
        if not guided:
            return found
        prompted, empty = found.chunk(2)
        return empty + guidance_scale * (prompted - empty)

    @torch.no_grad()
    def sample(
        self, requests: Sequence[SampleRequest], settings: DenoisingSettings, *, decode: bool = True
    ) -> list[DenoisingPath]:
        """Generate one batch of samples that begin at the same step."""
        model, sigmas = self._model, compute_sigmas(settings.num_steps, settings.shift)
        begin = requests[0].start_step
        assert all(request.start_step == begin for request in requests), "a batch begins at one step"
        first = self.encode_first_frames(requests)
        noises = [draw_noise(request.seed, settings.num_steps + 1, model.latent_shape) for request in requests]
        noise = torch.stack(noises, dim=1).to(model.device)
        latents = noise[0]
        if requests[0].start is not None:
            latents = torch.stack([torch.from_numpy(np.array(r.start)) for r in requests]).to(model.device)
        latents = self.restore_first_frame(latents, first)
        mask = None if first is None else model.mask_first_frame(latents)
        states, logprobs = [latents.cpu()], []
        for step in range(begin, settings.num_steps):
            velocity = self.predict(
                latents,
                torch.full((len(requests),), float(sigmas[step])),
                [request.prompt for request in requests],
                settings.guidance_scale,
            )
            now, then = (torch.full((len(requests),), float(sigmas[step + k])) for k in (0, 1))
            if step < settings.stochastic_steps:
                gauss = compute_sde_step(latents, velocity, now, then, float(sigmas[1]), settings.noise_level)
                latents = self.restore_first_frame(gauss.mean + gauss.deviation * noise[step + 1], first)
                logprobs.append(compute_logprob(gauss, latents, mask).cpu())
            else:
                latents = self.restore_first_frame(latents + velocity * expand(then - now, latents), first)
                logprobs.append(torch.zeros(len(requests)))
            states.append(latents.cpu())
        images = to_uint8_images(model.decode(latents)) if decode else None
        path, scores = torch.stack(states, dim=1).numpy(), torch.stack(logprobs, dim=1).numpy() if logprobs else None
        return [
            DenoisingPath(
                request=request,
                sigmas=sigmas[begin:],
                latents=path[i],
                logprobs=np.zeros(0, np.float32) if scores is None else scores[i],
                images=None if images is None else images[i],
            )
            for i, request in enumerate(requests)
        ]

    def encode_first_frames(self, requests: Sequence[SampleRequest]) -> Tensor | None:
        """Return the latents [B, C, H, W] of the requests' first frames; `None` if no request has one.

        Raises:
            ValueError: Some requests of the batch have a first frame, and others do not.
        """
        frames = [request.first_frame for request in requests]
        given = [frame for frame in frames if frame is not None]
        if not given:
            return None
        if len(given) < len(frames):
            raise ValueError("either all samples of a batch must have a first frame, or none")
        return self._model.encode_images(np.stack(given)).squeeze(2)

    def restore_first_frame(self, latents: Tensor, first: Tensor | None) -> Tensor:
        """Return latents with `first` as the first frame; unchanged if `first` is `None`."""
        return latents if first is None else self._model.impose_first_frame(latents, first.to(latents))

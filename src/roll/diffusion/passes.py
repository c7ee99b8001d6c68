"""Forward and backward passes of a batch through one rank's denoiser.

    samples ─► this rank's samples ─► terms ─► velocities of other weights (no gradients)
                                        └────► micro-batches: denoiser ─► loss ─► backward

    RewardGradientLoss: prompts ─► paths (no gradients) ─► last steps again, with gradients ─► loss ─► backward

Every rank gets the whole batch and computes its share. All ranks run the same number of micro-batches, because each is
collective under FSDP; a rank without work repeats an input with a loss weight of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from roll.diffusion.losses import DiffusionLoss, RewardGradientLoss, Term, Terms, collate
from roll.diffusion.losses.base import CopyName
from roll.diffusion.models.base import DiffusionModel
from roll.diffusion.records import DenoisingPath, DenoisingSettings, DiffusionBatch, DiffusionSample, SampleRequest
from roll.diffusion.sampling import Sampler
from roll.diffusion.steps import expand
from roll.errors import DataError
from roll.models.transfers import copy_to_host, read_results, wait_for_copies
from roll.training.distributed import Ranks
from roll.types import BatchCounts, ForwardBackwardResult

__all__ = ["DiffusionPassRunner", "Loss"]

T = TypeVar("T")
Loss = DiffusionLoss | RewardGradientLoss


@dataclass(kw_only=True, slots=True)
class _MicroBatchSums:
    """Accumulates loss and metrics over one rank's micro-batches."""

    loss: Tensor | None = None
    """The sum of the losses in float64; `None` before the first micro-batch."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    num_terms: int = 0

    def add(self, loss: Tensor, metrics: dict[str, Tensor]) -> None:
        self.loss = loss.detach().double() if self.loss is None else self.loss + loss.detach().double()
        for name, value in metrics.items():
            self.metrics[name] = self.metrics[name] + value.detach() if name in self.metrics else value.detach()


class DiffusionPassRunner:
    """Runs batches through one rank's denoiser.

    Args:
        model: The model.
        sampler: The sampler of the model.
        ranks: The ranks that share the work.
        activate: Returns a context manager in which the denoiser has the named weights.
        recompute: Whether to recompute the activations of denoising steps in the backward pass.
    """

    def __init__(
        self,
        model: DiffusionModel,
        sampler: Sampler,
        ranks: Ranks,
        activate: Callable[[CopyName], AbstractContextManager[None]],
        *,
        recompute: bool,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._ranks = ranks
        self._activate = activate
        self._recompute = recompute

    def compute_losses(
        self,
        batch: DiffusionBatch,
        loss: Loss,
        backward: Any = None,
        *,
        counts: BatchCounts | None = None,
        last: bool = True,
    ) -> ForwardBackwardResult:
        """Return a batch's loss and metrics over all ranks; run `backward` if it is given.

        In the result, each input of the denoiser is counted as one token.

        Raises:
            ValueError: The batch has no samples, a sample lacks an input of the loss, or `counts` is given.
        """
        if counts is not None:
            raise ValueError(
                "the loss of a diffusion batch is normalized over the batch itself, so `counts` must be None"
            )
        if not batch.samples:
            raise ValueError("a batch must have at least one sample")
        sums = _MicroBatchSums()
        if isinstance(loss, RewardGradientLoss):
            self._run_reward_gradient(batch, loss, backward, sums, last=last)
        else:
            self._run_terms(batch, loss, backward, sums, last=last)
        own = {**sums.metrics, **({} if sums.loss is None else {"loss": sums.loss})}
        numbers = map(float, read_results([*own.values()]))
        metrics = self._ranks.reduce({"loss": 0.0, **dict(zip(own, numbers, strict=True))}, add)
        num_terms = sum(self._ranks.gather(sums.num_terms))
        return ForwardBackwardResult(
            loss=metrics.pop("loss"), num_tokens=num_terms, num_loss_tokens=num_terms, metrics=metrics
        )

    def select_rank_items(self, items: Sequence[T], unit: int = 1) -> list[T]:
        """Return this rank's share of a list: a contiguous part that consists of whole units of `unit` items."""
        num_units = len(items) // unit
        rank, size = self._ranks.data_rank, self._ranks.data_size
        return list(items[num_units * rank // size * unit : num_units * (rank + 1) // size * unit])

    def iter_micro_batches(self, items: Sequence[T], size: int, filler: T) -> Iterator[tuple[list[T], bool]]:
        """Yield this rank's micro-batches, each with a flag for the last one; all ranks yield the same number.

        A rank with fewer micro-batches than other ranks repeats `filler`. Collective.
        """
        count = max(self._ranks.gather(-(-len(items) // size)))
        for number in range(count):
            part = list(items[number * size : (number + 1) * size])
            yield part or [filler], number == count - 1

    def _run_terms(
        self, batch: DiffusionBatch, loss: DiffusionLoss, backward: Any, sums: _MicroBatchSums, *, last: bool
    ) -> None:
        """Run a loss whose terms are single inputs of the denoiser."""
        unit = 2 if loss.compares_pairs else 1
        terms = self._build_terms(batch, loss, self.select_rank_items(batch.samples, unit), unit)
        sums.num_terms = len(terms)
        # A rank without samples takes part in collectives with an input of another rank's sample.
        idle = terms[:1] or self._build_terms(batch, loss, list(batch.samples[:unit]), unit)[:1]
        idle_units = [replace(idle[0], loss_weight=0.0)] * unit
        scale, size = batch.settings.guidance_scale, max(batch.micro_batch_size // unit, 1)
        units = [terms[i : i + unit] for i in range(0, len(terms), unit)]
        for name in sorted(loss.needs):
            with self._activate(name):
                for part, _ in self.iter_micro_batches(units, size, idle_units):
                    flat = [term for own in part for term in own]
                    velocity = self._predict_terms(collate(flat, self._model.device), flat, scale)
                    for term, each in zip(flat, copy_to_host(velocity.detach()), strict=True):
                        term.other_velocities[name] = each
            wait_for_copies(self._model.device)
        for part, ends in self.iter_micro_batches(units, size, idle_units):
            flat = [term for own in part for term in own]
            stacked = collate(flat, self._model.device, self._build_mask(flat))
            with torch.enable_grad() if backward is not None else torch.no_grad():
                velocity = self._predict_terms(stacked, flat, scale)
                each, metrics = loss.compute(velocity, stacked)
                total = (each * stacked.loss_weights).sum()
            if backward is not None:
                backward(total, last=last and ends)
            sums.add(total, {name: (values * stacked.loss_weights).sum() for name, values in metrics.items()})

    @torch.no_grad()
    def _build_terms(
        self, batch: DiffusionBatch, loss: DiffusionLoss, samples: Sequence[DiffusionSample], unit: int
    ) -> list[Term]:
        """Return the terms of samples, with their weights in the batch's loss; the terms of a pair alternate."""
        clean = self._encode_clean(samples, batch.micro_batch_size)
        found = [loss.build_terms(s, x, batch.settings) for s, x in zip(samples, clean, strict=True)]
        count = len(batch.samples) // unit
        for sample, terms in zip(samples, found, strict=True):
            for term in terms:
                term.loss_weight = sample.weight / (count * len(terms))
        if unit == 1:
            return [term for terms in found for term in terms]
        pairs = zip(found[::2], found[1::2], strict=True)
        return [term for won, lost in pairs for both in zip(won, lost, strict=True) for term in both]

    def _encode_clean(self, samples: Sequence[DiffusionSample], size: int) -> list[Tensor]:
        """Return the latents x_0 of samples in host memory; images are encoded `size` at a time.

        Raises:
            DataError: The size of the images is not the model's image size.
        """
        found = {i: torch.from_numpy(s.clean_latents) for i, s in enumerate(samples) if s.image is None}
        places = [i for i, sample in enumerate(samples) if sample.image is not None]
        for begin in range(0, len(places), size):
            part = places[begin : begin + size]
            latents = self._model.encode_images(np.stack([np.asarray(samples[i].image) for i in part]))
            if latents.shape[1:] != self._model.latent_shape:
                raise DataError(
                    f"`encode_images` of the model returned latents of shape {tuple(latents.shape[1:])}, but "
                    f"`latent_shape` is {tuple(self._model.latent_shape)}: resize the images, or correct the method."
                )
            found |= dict(zip(part, latents.float().cpu(), strict=True))
        return [found[i] for i in range(len(samples))]

    def _predict_terms(self, stacked: Terms, terms: Sequence[Term], guidance_scale: float) -> Tensor:
        return self._predict(stacked.latents, stacked.sigma, [term.prompt for term in terms], guidance_scale)

    def _predict(self, latents: Tensor, sigma: Tensor, prompts: list[str], guidance_scale: float) -> Tensor:
        """Return velocities. With gradients, activations are stored or, if `recompute` is true, recomputed."""
        if not (self._recompute and torch.is_grad_enabled()):
            return self._sampler.predict(latents, sigma, prompts, guidance_scale)
        return checkpoint(self._sampler.predict, latents, sigma, prompts, guidance_scale, use_reentrant=False)

    def _build_mask(self, terms: Sequence[Term]) -> Tensor | None:
        if terms[0].first_frame is None:
            return None
        return self._model.mask_first_frame(terms[0].latents[None].to(self._model.device))

    def _run_reward_gradient(
        self, batch: DiffusionBatch, loss: RewardGradientLoss, backward: Any, sums: _MicroBatchSums, *, last: bool
    ) -> None:
        """Run a loss that backpropagates through denoising steps."""
        settings, size = replace(batch.settings, noise_level=0.0), batch.micro_batch_size
        requests = [
            SampleRequest(sample_id=s.sample_id, prompt=s.prompt, seed=s.seed, first_frame=s.first_frame)
            for s in batch.samples
        ]
        own = self.select_rank_items(
            list(zip(requests, [s.weight / len(requests) for s in batch.samples], strict=True))
        )
        sums.num_terms = len(own) * min(loss.num_gradient_steps, settings.num_steps)
        idle = (requests[0], 0.0)
        paths: list[list[DenoisingPath]] = []
        for part, _ in self.iter_micro_batches(own, size, idle):
            paths.append(self._sampler.sample([request for request, _ in part], settings, decode=False))
        references = self._compute_references(paths, loss, settings)
        for (part, ends), path, reference in zip(
            self.iter_micro_batches(own, size, idle), paths, references, strict=True
        ):
            loss_weight = torch.tensor([weight for _, weight in part], device=self._model.device)
            with torch.enable_grad() if backward is not None else torch.no_grad():
                rewards, divergences = self._unroll(path, loss, settings, reference)
                total = (loss.compute_loss(rewards, divergences) * loss_weight).sum()
            if backward is not None:
                backward(total, last=last and ends)
            sums.add(
                total, {"reward/mean": (rewards * loss_weight).sum(), "kl/mean": (divergences * loss_weight).sum()}
            )

    def _compute_references(
        self, paths: Sequence[Sequence[DenoisingPath]], loss: RewardGradientLoss, settings: DenoisingSettings
    ) -> list[list[Tensor]]:
        """Return the reference model's velocities at the paths' latents, for each micro-batch and step.

        The loss treats these velocities as constants, as in Reward-FL, so they are computed before the steps with
        gradients.
        """
        begin = max(settings.num_steps - loss.num_gradient_steps, 0)
        if not loss.needs:
            return [[] for _ in paths]
        found = []
        with self._activate("reference"), torch.no_grad():
            for path in paths:
                prompts = [each.request.prompt for each in path]
                steps = []
                for step in range(begin, settings.num_steps):
                    latents = torch.from_numpy(np.stack([each.latents[step] for each in path]))
                    sigma = torch.full((len(path),), float(path[0].sigmas[step]))
                    steps.append(self._sampler.predict(latents, sigma, prompts, settings.guidance_scale))
                found.append(steps)
        return found

    def _unroll(
        self,
        paths: Sequence[DenoisingPath],
        loss: RewardGradientLoss,
        settings: DenoisingSettings,
        reference: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Run the last steps with gradients; return the rewards [B] and the divergences [B]."""
        model, device = self._model, self._model.device
        begin = max(settings.num_steps - loss.num_gradient_steps, 0)
        requests, sigmas = [path.request for path in paths], paths[0].sigmas
        first = self._sampler.encode_first_frames(requests)
        latents = torch.from_numpy(np.stack([path.latents[begin] for path in paths])).to(device)
        mask = None if first is None else model.mask_first_frame(latents)
        prompts = [request.prompt for request in requests]
        divergence = torch.zeros(len(paths), device=device)
        for place, step in enumerate(range(begin, settings.num_steps)):
            sigma, change = (
                torch.full((len(paths),), float(v), device=device)
                for v in (sigmas[step], sigmas[step + 1] - sigmas[step])
            )
            velocity = self._predict(latents, sigma, prompts, settings.guidance_scale)
            if reference:
                divergence = divergence + loss.compute_divergence(velocity, reference[place], sigma, mask)
            latents = self._sampler.restore_first_frame(latents + velocity * expand(change, latents), first)
        return loss.compute_rewards(model.decode(latents), prompts), divergence / (settings.num_steps - begin)

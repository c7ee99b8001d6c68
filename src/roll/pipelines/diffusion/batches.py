"""Builds sample requests and batches from rows of the data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from roll.config.diffusion import DPOConfig, FlowMatchingConfig
from roll.config.pipelines.diffusion import DiffusionConfig
from roll.diffusion.records import DenoisingSettings, DiffusionBatch, DiffusionSample, SampleRequest
from roll.pipelines.diffusion.rows import ImageReader, ImageRow, RowDraw

__all__ = ["BatchBuilder", "compute_seed"]


def compute_seed(seed: int, purpose: str, *numbers: int) -> int:
    """Return a seed that depends only on the run's seed, the purpose and the numbers."""
    text = "/".join(map(str, (seed, purpose, *numbers)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchBuilder:
    """Builds the batches and sample requests for the trainer.

    The seed of a sample depends only on the run's seed, the purpose, the draw's ID and the sample's index.
    """

    config: DiffusionConfig
    images: ImageReader = field(default_factory=ImageReader)

    @property
    def settings(self) -> DenoisingSettings:
        """The denoising settings of training samples."""
        sampling, explores = self.config.sampling, self.config.uses_log_probs
        return DenoisingSettings(
            num_steps=sampling.num_steps,
            shift=sampling.shift,
            guidance_scale=sampling.guidance_scale,
            noise_level=sampling.noise_level if explores else 0.0,
            num_stochastic_steps=sampling.num_stochastic_steps,
            batch_size=sampling.batch_size,
        )

    def build_dataset_batch(self, draws: Sequence[RowDraw]) -> DiffusionBatch:
        """Return a batch of rows, for methods that train on the data's images or generate samples in the trainer."""
        samples: list[DiffusionSample] = []
        for draw in draws:
            row, seed = draw.row, compute_seed(self.config.seed, "train", draw.draw_id)
            first = self.images.read(row, "first_frame") if "first_frame" in row.images else None
            common = {"prompt": row.prompt, "unit": draw.draw_id, "first_frame": first}
            if isinstance(self.config.algorithm, FlowMatchingConfig):
                image = self.images.read(row, "image")
                samples.append(DiffusionSample(sample_id=f"{draw.draw_id}", seed=seed, image=image, **common))
            elif isinstance(self.config.algorithm, DPOConfig):
                # One seed for both, so that their noise is the same.
                samples += [
                    DiffusionSample(
                        sample_id=f"{draw.draw_id}.{name}",
                        seed=seed,
                        image=self.images.read(row, name),
                        preferred=name == "chosen",
                        **common,
                    )
                    for name in ("chosen", "rejected")
                ]
            else:
                samples += [
                    DiffusionSample(
                        sample_id=f"{draw.draw_id}.{i}",
                        seed=compute_seed(self.config.seed, "train", draw.draw_id, i),
                        **common,
                    )
                    for i in range(self.config.samples_per_prompt)
                ]
        return self.build_batch(samples)

    def build_batch(self, samples: Sequence[DiffusionSample]) -> DiffusionBatch:
        """Return a batch of samples."""
        return DiffusionBatch(
            samples=tuple(samples),
            settings=self.settings,
            micro_batch_size=self.config.training.micro_batch_size,
        )

    def build_requests(self, row: ImageRow, purpose: str, number: int, count: int) -> list[SampleRequest]:
        """Return one request per sample of a row.

        Args:
            row: The row.
            purpose: `train` or `evaluation`; the seeds depend on it.
            number: The draw's ID, or the row's index in the evaluation.
            count: The number of samples.
        """
        first = self.images.read(row, "first_frame") if "first_frame" in row.images else None
        return [
            SampleRequest(
                sample_id=f"{purpose}-{number}.{i}",
                prompt=row.prompt,
                seed=compute_seed(self.config.seed, purpose, number, i),
                first_frame=first,
            )
            for i in range(count)
        ]

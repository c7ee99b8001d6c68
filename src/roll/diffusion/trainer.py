"""One rank of the trainer of a diffusion model, which also generates the samples, with the same weights.

    sample        requests ─► paths, on all ranks
    train_step    batch of samples or paths ─► loss ─► update      (see `roll.training.rank`)
    update_old_policy      the old policy moves towards the current policy

The denoiser is sharded with FSDP2 over all ranks; text encoders and the VAE are frozen, and each rank has a copy.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from roll.config.diffusion import DiffusionModelConfig
from roll.config.model import LoRAConfig
from roll.diffusion.losses.base import CopyName
from roll.diffusion.models import load_diffusion_model
from roll.diffusion.passes import DiffusionPassRunner, Loss
from roll.diffusion.records import DenoisingPath, DenoisingSettings, DiffusionBatch, SampleRequest
from roll.diffusion.sampling import PromptCache, Sampler
from roll.diffusion.weight_copies import WeightCopies
from roll.errors import ConfigError
from roll.tracking import atomic
from roll.training.checkpoint.export import move_to_final_name, write_weights
from roll.training.network.lora import find_adapters, inject_adapters
from roll.training.network.weights import TrainerWeights
from roll.training.parallel.fsdp import fully_shard_module, reshard_after_forward
from roll.training.precision import Precision
from roll.training.spec import TrainerSpec
from roll.training.torch_rank import TorchRank

if TYPE_CHECKING:
    from roll.training.distributed import Ranks

__all__ = ["DiffusionTrainer"]

WeightsName = Literal["current"] | CopyName


class DiffusionTrainer(TorchRank[DiffusionBatch, Loss]):
    """Trains a denoiser, and generates samples with it.

    Args:
        spec: The spec of the rank; its model is a `DiffusionModelConfig`. If `holds_reference` is true, the initial
            weights are kept.

    Raises:
        ConfigError: The model in the spec is not a `DiffusionModelConfig`.
        ModelError: The model cannot be loaded.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        super().__init__(spec)
        config = spec.model
        if not isinstance(config, DiffusionModelConfig):
            raise ConfigError("the diffusion trainer requires a diffusion model: set pipeline to diffusion")
        self.precision = Precision.from_name(config.dtype)
        self.model = load_diffusion_model(
            spec.model_path,
            weights=config.weights,
            options=config.options,
            sizes=config.sizes,
            dtype=self.precision.compute,
            seed=spec.seed,
        )
        self.network = self.model.denoiser
        if config.lora is not None:
            inject_adapters(self.network, _find_lora_targets(self.network, config.lora), config.lora, spec.seed)
        else:
            self.network.requires_grad_(True)
        self.network.to(self.device)
        for part in self.model.list_frozen_parts():
            part.to(self.device)
        if self.ranks.mesh is not None:
            _shard(self.network, self.model.list_blocks(), self.ranks, self.precision)
        trained = {name: p for name, p in self.network.named_parameters() if p.requires_grad}
        self._prepare_updates(trained)
        self._copies = WeightCopies(trained)
        if spec.holds_reference:
            self._copies.store("reference")
        self._sampler = Sampler(self.model, PromptCache(self.model))
        self._passes = DiffusionPassRunner(
            self.model,
            self._sampler,
            self.ranks,
            self._use_weights,
            recompute=spec.training.activation_checkpointing,
        )

    def sample(
        self,
        requests: Sequence[SampleRequest],
        settings: DenoisingSettings,
        *,
        weights: WeightsName = "current",
        decode: bool = True,
    ) -> list[DenoisingPath]:
        """Generate samples. Collective: each rank generates a share, and every rank returns all, in order.

        Args:
            requests: The samples to generate; a batch has consecutive requests that begin at the same step.
            settings: The denoising settings.
            weights: The weights to use.
            decode: Whether to decode the images.
        """
        if not requests:
            return []
        self.network.eval()
        found: list[DenoisingPath] = []
        with self._use_weights(weights), self._random_states.activate():
            for group in _split_by_start_step(requests):
                own = self._passes.select_rank_items(group)
                paths: list[DenoisingPath] = []
                for part, _ in self._passes.iter_micro_batches(own, settings.batch_size, group[0]):
                    paths += self._sampler.sample(part, settings, decode=decode)
                found += [path for each in self.ranks.gather(paths[: len(own)]) for path in each]
        reshard_after_forward(self.network)
        return found

    def start_old_policy(self) -> None:
        """Initialize the weights `old`, the moving average of the policy, with a copy of the current weights."""
        self._copies.store("old")

    def update_old_policy(self, decay: float) -> None:
        """Move the weights `old` towards the current weights: old <- decay old + (1 - decay) current."""
        self._copies.update_ema("old", decay)

    @contextlib.contextmanager
    def _use_weights(self, name: WeightsName) -> Iterator[None]:
        """Use the named weights within the `with` block."""
        if name == "current":
            yield
            return
        # Gathered weights would be used although the shards have changed.
        reshard_after_forward(self.network)
        with self._copies.activate(name), torch.no_grad():
            yield
            reshard_after_forward(self.network)

    @property
    def _saved_buffers(self) -> list[Tensor]:
        return self._copies.get_tensors("old")

    def export(self, path: Path) -> None:
        """Write the denoiser's `config.json` and safetensors files, which the denoiser's diffusers class can load.
        Adapters are merged. Collective.
        """
        names = list(dict(self.network.named_parameters())) + [
            name for name in self.network.state_dict() if name not in dict(self.network.named_parameters())
        ]
        tensors = dict(self.network.named_parameters()) | dict(self.network.named_buffers())
        weights = TrainerWeights(
            names=names,
            read=lambda name: tensors[name],
            adapters=find_adapters(self.network) if self.spec.model.lora is not None else {},
            dtype=self.precision.compute,
            is_first=self.ranks.is_first,
        )
        partial = atomic.make_temporary_path(path)
        write_weights(partial, weights, is_first=self.ranks.is_first, stem="diffusion_pytorch_model")
        if self.ranks.is_first:
            config = self.model.build_config() | {"roll_model": self.spec.model_path}
            (partial / "config.json").write_text(json.dumps(config, indent=2, default=list) + "\n", encoding="utf-8")
            move_to_final_name(partial, path)


def _find_lora_targets(network: nn.Module, config: LoRAConfig) -> list[str]:
    """Return the `target_modules` of peft; for `all-linear`, the names of all linear layers."""
    if config.target_modules != "all-linear":
        return list(config.target_modules)
    return [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]


def _shard(network: nn.Module, blocks: Sequence[nn.Module], ranks: Ranks, precision: Precision) -> None:
    """Shard a denoiser in place with FSDP2: its blocks one by one, then the rest."""
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.master)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(precision.master)  # the shards are the master weights
    for module in (*blocks, network):
        fully_shard_module(module, ranks.weights_mesh, policy)


def _split_by_start_step(requests: Sequence[SampleRequest]) -> list[list[SampleRequest]]:
    """Split requests into contiguous parts that begin at the same step."""
    groups: list[list[SampleRequest]] = []
    for request in requests:
        if groups and groups[-1][0].start_step == request.start_step:
            groups[-1].append(request)
        else:
            groups.append([request])
    return groups

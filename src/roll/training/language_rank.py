"""The code of a language model's trainer rank that all training back-ends share.

forward     passes without a loss: log-probs, values, …
weights     the stream of all weights for engines and exports, under their HF names
export      a directory that transformers loads
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll.errors import UnsupportedError
from roll.protocols import LossFn, WeightSource
from roll.training.checkpoint.export import export_trained
from roll.training.network.adapter_weights import AdapterWeights
from roll.training.network.policy import PolicyNetwork
from roll.training.network.value import ValueNetwork
from roll.training.network.weights import collect_adapters
from roll.training.packing.division import RankShare
from roll.training.parallel.fsdp import reshard_after_forward
from roll.training.passes import PassRunner
from roll.training.rank import TrainerRank
from roll.training.spec import TrainerSpec
from roll.types import ForwardOptions, OutputName, Outputs, TrainingBatch

__all__ = ["LanguageModelRank"]


class LanguageModelRank(TrainerRank[TrainingBatch, LossFn]):
    """The base class of the training back-ends of language models, in any role.

    Args:
        spec: The spec of the rank. The `__init__` of a subclass must also set `network` and `_passes`.
    """

    network: PolicyNetwork | ValueNetwork
    _passes: PassRunner

    def __init__(self, spec: TrainerSpec) -> None:
        super().__init__(spec)
        self.head_factor = (spec.value_head_learning_rate or self.schedule.peak) / self.schedule.peak
        """The factor on the learning rate of a policy's value head."""

    def forward(
        self, batch: TrainingBatch, outputs: Outputs, options: ForwardOptions | None = None
    ) -> dict[OutputName, list[Any]]:
        """Compute the outputs for a batch with the current weights or with a snapshot; see `PassRunner.forward`."""
        options = options or ForwardOptions()
        using = contextlib.nullcontext() if options.version is None else self._use_snapshot(options.version)
        with self._get_library_context(), using:
            results = self._passes.forward(batch, outputs, options)
            reshard_after_forward(self.network)
        return results

    @property
    def batch_share(self) -> RankShare | None:
        """This rank's share of every batch. The rank then receives only the arrays of its own samples, and of the other
        samples the tokens and loss masks; see `roll.training.packing.division`.

        A subclass that reads the arrays of all samples must return `None`.
        """
        return self._passes.share

    def use_adapter(self, name: str) -> None:
        """Raise `UnsupportedError`; back-ends that train several adapters override this method."""
        backend = self.spec.training.backend
        lacks = "has no model.lora" if self.spec.model.lora is None else f"trains only one adapter with {backend}"
        raise UnsupportedError(f"adapter '{name}' cannot be used: the trainer {lacks}")

    def keep_snapshot(self, version: int, versions: Collection[int]) -> None:
        """Raise `UnsupportedError`; back-ends with snapshots override this method."""
        raise UnsupportedError(
            f"training.backend {self.spec.training.backend} does not support snapshots: set training.backend to 'torch'"
        )

    def _use_snapshot(self, version: int) -> contextlib.AbstractContextManager[None]:
        """Return a context manager within which the network uses the weights of a snapshot."""
        raise UnsupportedError(
            f"training.backend {self.spec.training.backend} does not support snapshots: set training.backend to 'torch'"
        )

    @abstractmethod
    def weights(self) -> WeightSource:
        """Return all weights by HF name, in the model's dtype and with adapters merged, as engines need them."""

    def adapter_weights(self) -> WeightSource:
        """Return the tensors of the current adapter, for engines that have the frozen weights.

        Raises:
            UnsupportedError: The trainer has no adapters.
        """
        if self.spec.model.lora is None:
            raise UnsupportedError("weight_sync.lora 'adapter' cannot be used: the trainer has no model.lora")
        adapters = collect_adapters(self._hf_network)
        return AdapterWeights(adapters, self._read, self.engine_dtype, is_first=self.ranks.is_first)

    def export(self, path: Path) -> None:
        """Write an HF safetensors model directory that `transformers` loads; a critic is written as a token classifier.

        Adapters are merged into the weights. A policy's and a reward model's adapters are also written separately, to
        the directory `adapter` next to `path`.
        """
        is_first = self.ranks.is_first
        with self._get_library_context():
            export_trained(path, self.spec, self._hf_network, self.weights(), self._read, is_first=is_first)

    @property
    def engine_dtype(self) -> torch.dtype:
        """The compute dtype of the engines."""
        return getattr(torch, self.spec.model.dtype)

    @abstractmethod
    def _read(self, name: str) -> Tensor:
        """Return a full parameter of the network by HF name."""

    @property
    def _hf_network(self) -> PolicyNetwork | ValueNetwork:
        """The network with the HF configuration and the adapters that are exported."""
        return self.network

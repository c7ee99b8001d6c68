"""A trainer's weights in the form that its engines receive."""

from __future__ import annotations

from roll.errors import UnsupportedError
from roll.models import list_linear_weights
from roll.protocols import SupportsAdapterSync, TrainBackend, WeightSource
from roll.training.spec import TrainerSpec
from roll.weights.quantization import QuantizedWeights

__all__ = ["build_engine_weights"]


def build_engine_weights(backend: TrainBackend, spec: TrainerSpec) -> WeightSource:
    """Return the weights that engines receive: all weights, or only the adapter if the spec says so.

    Linear weights are quantized if the spec sets a quantization.

    Raises:
        ModelError: The model's weights cannot be quantized.
        UnsupportedError: The back-end cannot send adapters.
    """
    if spec.sends_adapter:
        if not isinstance(backend, SupportsAdapterSync):
            raise UnsupportedError(
                f"training.backend '{spec.training.backend}' cannot send adapters: set weight_sync.lora to merged"
            )
        return backend.adapter_weights()
    weights = backend.weights()
    if spec.quantization == "none":
        return weights
    linear = list_linear_weights(spec.model_path, trust_remote_code=spec.model.trust_remote_code)
    return QuantizedWeights(weights, spec.quantization, linear)

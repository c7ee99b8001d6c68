"""A trainer's weights in the form that its engines receive."""

from __future__ import annotations

from roll.models import list_linear_weights
from roll.protocols import TrainBackend, WeightSource
from roll.training.spec import TrainerSpec
from roll.weights.quantization import QuantizedWeights

__all__ = ["build_engine_weights"]


def build_engine_weights(backend: TrainBackend, spec: TrainerSpec) -> WeightSource:
    """Return all weights for the engines, with linear weights quantized if the spec sets a quantization.

    Raises:
        ModelError: The model's weights cannot be quantized.
    """
    weights = backend.weights()
    if spec.quantization == "none":
        return weights
    linear = list_linear_weights(spec.model_path, trust_remote_code=spec.model.trust_remote_code)
    return QuantizedWeights(weights, spec.quantization, linear)

"""Linear layers that compute in 8 bits (W8A8) in vLLM: 8-bit weights with a scale per output channel, and activations
that vLLM's kernels quantize per token.

    checkpoint ─► `QuantizingLoader` ─┐ `roll.weights.quantization`        ┌─► codes and scales, packed by vLLM
    trainer    ─► weight sync ────────┴─► codes and scales of a weight ────┴─► read back: `compute_held_checksums`

vLLM loads the model as a `compressed-tensors` checkpoint, but the directory contains the model in 16 or 32 bits. The
loader computes the codes, and so does the trainer at every weight sync, with the same function. vLLM's own online
quantization (`quantization="fp8"`) rounds differently, and fails on a CPU in vLLM 0.32.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roll.errors import ModelError, WeightSyncError
from roll.inference.spec import EngineSpec
from roll.models import list_linear_weights
from roll.types import TensorSpec
from roll.weights import compute_checksum
from roll.weights.quantization import FORMATS, QUANTIZED_DTYPES, quantize

__all__ = [
    "DERIVED_PARAMETERS",
    "QuantizedLayer",
    "build_quantization_arguments",
    "check_quantized_manifest",
    "compute_held_checksums",
    "find_quantized_layers",
    "quantize_stored",
    "register_loader",
]

logger = logging.getLogger("vllm.roll")

LOAD_FORMAT = "roll_quantize"
DERIVED_PARAMETERS = ("bias_fp32", "azp_adj")
"""Parameters that vLLM's CPU kernels compute from others, so no weight update contains them."""
_BLOCK_ROWS = 32
"""Output channels in a block of vLLM's packed int8 weights on a CPU (`BLOCK_N` in `csrc/cpu/sgl-kernels/gemm.h`)."""
_VNNI = 4
"""Consecutive int8 codes of a row that are packed next to each other."""


def build_quantization_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return vLLM's arguments for the spec's quantization, which is not `none`."""
    names = list_linear_weights(spec.model_path, trust_remote_code=spec.trust_remote_code)
    kind = "int" if spec.quantization == "int8" else "float"
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": f"{kind}-quantized",
        "ignore": [],
        "config_groups": {
            "group_0": {
                "targets": sorted(name.removesuffix(".weight") for name in names),
                "weights": {**common, "strategy": "channel", "dynamic": False},
                "input_activations": {**common, "strategy": "token", "dynamic": True},
            }
        },
    }
    overrides = {"quantization_config": config, **spec.options.get("hf_overrides", {})}
    return {"hf_overrides": overrides, "load_format": LOAD_FORMAT}


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A linear layer of vLLM's model that computes in 8 bits."""

    module: Any
    names: tuple[str, ...]
    """Checkpoint names of the weights that the layer fuses, in order."""

    def split(self, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the rows of each fused weight, with its checkpoint name."""
        return zip(self.names, rows.split(list(self.module.logical_widths)), strict=True)


def find_quantized_layers(model: Any) -> list[QuantizedLayer]:
    """Return all layers of vLLM's model that compute in 8 bits."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsLinearMethod,
    )

    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or {}
    found = []
    for path, module in model.named_modules():
        if isinstance(module, LinearBase) and isinstance(module.quant_method, CompressedTensorsLinearMethod):
            parent, _, name = path.rpartition(".")
            names = tuple(f"{parent}.{part}.weight".lstrip(".") for part in fused.get(name, [name]))
            found.append(QuantizedLayer(module, names))
    return found


def check_quantized_manifest(layers: Iterable[QuantizedLayer], manifest: Iterable[TensorSpec], version: int) -> None:
    """Check that an update contains codes for exactly the layers that compute in 8 bits.

    vLLM would convert codes without an error if a layer computed in the model's dtype.

    Raises:
        WeightSyncError: a weight has codes although its layer computes in the model's dtype, or the other way around.
    """
    expected = {name for layer in layers for name in layer.names}
    sent = {spec.name for spec in manifest if spec.dtype in QUANTIZED_DTYPES}
    for name in sorted(expected ^ sent):
        if name in expected:
            raise WeightSyncError(
                f"weight sync of policy version {version}: the engine computes in 8 bits with tensor '{name}', but it "
                "is sent without quantization."
            )
        raise WeightSyncError(
            f"weight sync of policy version {version}: tensor '{name}' is sent in 8 bits, but the layer in vLLM "
            "computes in the model's dtype: set inference.quantization to none, and weight_sync.quantization instead."
        )


def compute_held_checksums(layers: Iterable[QuantizedLayer]) -> dict[str, int]:
    """Return the checksums of codes and scales that the layers contain, by the names with which they are sent.

    Layers whose packed format is unknown are left out.
    """
    held: dict[str, int] = {}
    for layer in layers:
        codes = read_codes(layer.module)
        if codes is None:
            continue
        held |= {name: compute_checksum(part) for name, part in layer.split(codes)}
        scales = layer.module.weight_scale.data.reshape(len(codes), 1)
        held |= {f"{name}_scale": compute_checksum(part) for name, part in layer.split(scales)}
    return held


def read_codes(module: Any) -> Tensor | None:
    """Return the codes [outputs, inputs] of a layer, unpacked; `None` if the packed format is unknown."""
    weight: Tensor | None = module.weight
    rows, columns = sum(module.logical_widths), module.input_size_per_partition
    if weight is None or weight.dtype not in {dtype for dtype, _ in FORMATS.values()}:
        return None
    weight = weight.data
    if tuple(weight.shape) == (rows, columns + 4):
        return unpack_int8(weight)
    # Kernels that do not pack weights store the codes transposed. The strides identify transposed square weights.
    if tuple(weight.shape) == (columns, rows) and weight.stride(0) == 1:
        return weight.t()
    return None


def unpack_int8(packed: Tensor) -> Tensor:
    """Return the codes [N, K] of a weight that vLLM packed for its int8 kernel on a CPU [N, K + 4].

    A block of 32 output channels contains its codes as [K / 4, 32, 4], and 32 sums in int32, which correct for
    activations being unsigned.
    """
    rows, columns = packed.shape[0], packed.shape[1] - 4
    flat, parts = packed.reshape(-1), []
    for start in range(0, rows, _BLOCK_ROWS):
        count = min(_BLOCK_ROWS, rows - start)
        block = flat[start * (columns + 4) :][: count * columns]
        parts.append(block.view(columns // _VNNI, count, _VNNI).transpose(0, 1).reshape(count, columns))
    return torch.cat(parts)


def quantize_stored(
    tensors: Iterable[tuple[str, Tensor]], names: Collection[str], dtype: torch.dtype, format: str
) -> Generator[tuple[str, Tensor]]:
    """Yield the tensors of a model's files; a quantized weight is yielded as its scales and its codes.

    Args:
        tensors: The tensors in the files.
        names: The names of the weights to quantize.
        dtype: The dtype to which weights are rounded before they are quantized.
        format: `int8` or `fp8`.

    Raises:
        ModelError: A weight has NaN or infinite values, or is not in the files.
    """
    missing = set(names)
    for name, tensor in tensors:
        if name not in names:
            yield name, tensor
            continue
        missing.discard(name)
        codes, scales = quantize(tensor.to(dtype), format)
        if not scales.isfinite().all():
            raise ModelError(
                f"weight '{name}' has NaN or infinite values, so it cannot be quantized to {format}: restore the files "
                "of the model."
            )
        yield f"{name}_scale", scales
        yield name, codes
    if missing:
        raise ModelError(f"the model's files have no weight '{min(missing)}', which is computed in {format}.")


def register_loader() -> None:
    """Register the load format with which vLLM quantizes the weights of a directory while it loads them."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    @register_model_loader(LOAD_FORMAT)
    class QuantizingLoader(DefaultModelLoader):
        """Loads the files of a model, and quantizes the weights of layers that compute in 8 bits."""

        def __init__(self, load_config: Any) -> None:
            load_config = copy.copy(load_config)
            load_config.load_format = "auto"
            super().__init__(load_config)

        def get_all_weights(self, model_config: Any, model: Any) -> Generator[tuple[str, Tensor]]:
            """Yield all tensors; a quantized weight is yielded as its scales and its codes."""
            form = model_config.hf_config.quantization_config["format"]
            yield from quantize_stored(
                super().get_all_weights(model_config, model),
                {name for layer in find_quantized_layers(model) for name in layer.names},
                model_config.dtype,  # the dtype in which trainers quantize
                "int8" if form.startswith("int") else "fp8",
            )

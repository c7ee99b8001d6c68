"""Quantization of linear weights to 8 bits for the transfer to engines, with a scale for every output channel.

    trainer   weight [outputs, inputs] ─ max magnitude of a row / largest code ─────────► `<name>_scale` [outputs, 1]
                                       └ weight / scale, to the nearest code ──────────► `<name>`, int8 or float8_e4m3fn
    engine    codes x scales, rounded to the dtype that the engine computes in: the applied weight
              or, if the engine computes in 8 bits (`inference.quantization`), codes and scales themselves

Codes and scales are both tensors of the manifest, so checksums cover the bytes that are sent. Their names and shapes
are those of `compressed-tensors`. Scales are float32 and sent first, so that weights can be dequantized one at a time.

A row is quantized as a whole, on rank 0 and in the engines' dtype. Its codes therefore depend only on the weight, not
on the parallel layout or on a merged adapter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from roll.errors import WeightSyncError
from roll.protocols import WeightSource
from roll.types import TensorSpec

__all__ = [
    "FORMATS",
    "QUANTIZED_DTYPES",
    "QuantizedWeights",
    "dequantize",
    "dequantize_stream",
    "drop_scales",
    "find_quantized_dtype",
    "quantize",
]

FORMATS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Dtype and largest code of each format. Codes are symmetric: int8 does not use -128."""
QUANTIZED_DTYPES = frozenset(str(dtype).removeprefix("torch.") for dtype, _ in FORMATS.values())
"""Names of the dtypes of codes, as in a manifest."""
_SUFFIX = "_scale"


class QuantizedWeights:
    """A `WeightSource` that quantizes some weights of another source, and yields their scales and codes.

    Args:
        source: The source of all weights.
        format: `int8` or `fp8`.
        names_to_quantize: The names of the weights to quantize.
    """

    def __init__(self, source: WeightSource, format: str, names_to_quantize: Collection[str]) -> None:
        self._source = source
        self._format = format
        self._names_to_quantize = names_to_quantize

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._source:
            if name not in self._names_to_quantize:
                yield name, weight
                continue
            # ranks other than 0 get no weights: they only iterate over the names
            codes, scales = (weight, weight) if weight is None else quantize(weight, self._format)
            yield name + _SUFFIX, scales
            yield name, codes

    def names(self) -> list[str]:
        """Return all names in the order of iteration; a quantized weight appears as its scales and its codes."""
        return [each for name in self._source.names() for each in self._list_tensors(name)]

    def _list_tensors(self, name: str) -> tuple[str, ...]:
        return (name + _SUFFIX, name) if name in self._names_to_quantize else (name,)


@torch.no_grad()
def quantize(weight: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Quantize a weight; return codes [outputs, inputs] and float32 scales [outputs, 1].

    Args:
        weight: The weight [outputs, inputs]; a non-finite row stays non-finite after dequantization.
        format: `int8` or `fp8`.
    """
    dtype, largest = FORMATS[format]
    smallest = torch.finfo(torch.float32).tiny  # for rows of zeros, whose scale must not be 0
    scales = (weight.abs().amax(1, keepdim=True).float() / largest).clamp(min=smallest)
    shares = weight / scales  # in float32
    return (shares if dtype.is_floating_point else shares.round_()).to(dtype), scales


@torch.no_grad()
def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize codes and scales from `quantize`; return the weight [outputs, inputs]."""
    return codes.float().mul_(scales).to(dtype)


def find_quantized_dtype(manifest: Sequence[TensorSpec]) -> str | None:
    """Return the dtype of the codes in a manifest; `None` if no weight is quantized."""
    return next((spec.dtype for spec in manifest if spec.dtype in QUANTIZED_DTYPES), None)


def drop_scales(manifest: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the manifest without the scales of quantized weights, which are not tensors of the HF checkpoint."""
    scales = _list_scales(manifest)
    return tuple(spec for spec in manifest if spec.name not in scales)


def dequantize_stream(
    tensors: Iterable[tuple[str, Tensor]], manifest: Sequence[TensorSpec], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield received tensors; combine codes and scales into dequantized weights.

    Args:
        tensors: The received tensors, in order.
        manifest: The manifest of the tensors.
        dtype: The dtype of dequantized weights; other tensors are passed through unchanged.

    Raises:
        WeightSyncError: codes were received before their scales, or the shape of the scales is wrong.
    """
    scale_names, scales = _list_scales(manifest), dict[str, Tensor]()
    in_codes = {spec.name for spec in manifest if spec.dtype in QUANTIZED_DTYPES}
    for name, tensor in tensors:
        if name in scale_names:
            scales[name] = tensor.clone()  # the transport reuses its buffer
        elif name not in in_codes:
            yield name, tensor
        else:
            scale = scales.pop(name + _SUFFIX, None)
            if scale is None or scale.shape != (len(tensor), 1):
                raise WeightSyncError(
                    f"tensor '{name}' was received as {str(tensor.dtype).removeprefix('torch.')} codes before the "
                    "scales of its rows."
                )
            yield name, dequantize(tensor, scale, dtype)


def _list_scales(manifest: Sequence[TensorSpec]) -> frozenset[str]:
    return frozenset(spec.name + _SUFFIX for spec in manifest if spec.dtype in QUANTIZED_DTYPES)

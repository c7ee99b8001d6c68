"""Reads any shard of a model's weights from its safetensors files, so that no process needs all weights in memory.

    files ─ names and shapes ─► model on the meta device, as `transformers` would have loaded it
          ─ name, box        ─► that part of one weight: a slice of one tensor in the files or, if `transformers` builds
                                the weight from several tensors, the result for the tensors that the box needs

Invariants: a part equals the same part of the completely loaded weight, bit for bit. At most one weight is in memory. A
weight that is stored as one tensor in the model's dtype is mapped instead of copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeAlias

from roll.errors import ModelError
from roll.models.finite_check import check_tensor_finite

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Box", "WeightReader", "defer_weight_loading"]

Box: TypeAlias = Sequence[tuple[int, int]]
"""A part of a tensor: for each dimension, the first index and the size."""


class WeightReader:
    """Reads parts of a model's weights from its files.

    Args:
        model: An HF model before its weights are loaded.
        tensors: The safetensors slices (`get_slice`), by checkpoint name.
        transforms: The renamings and conversions that `transformers` applies to this checkpoint.
    """

    def __init__(self, model: Any, tensors: Mapping[str, Any], transforms: Sequence[Any]) -> None:
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        self.path = ""
        """The path of the model, for messages."""
        self._model = model
        self._tensors = dict(tensors)
        self._source: dict[str, str] = {}
        """For each weight that is stored as one tensor, the tensor's checkpoint name."""
        self._conversions: dict[str, _Conversion] = {}
        """For each other weight, the conversion that builds it."""
        expected, prefix = model.state_dict(), model.base_model_prefix
        self._dtypes: dict[str, torch.dtype] = {}
        renamings = [deepcopy(t) for t in transforms if isinstance(t, WeightRenaming)]
        converters = [deepcopy(t) for t in transforms if isinstance(t, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        made: dict[str, _Conversion] = {}
        for key in sorted(tensors, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
            # As in `convert_and_load_state_dict_in_model` of `transformers`: a key that the model has is not renamed.
            if name not in expected and key in expected:
                name, pattern = rename_source_key(key, [], [], prefix, expected)
            if name in expected and pattern is None:
                self._source[name] = key
            elif name in expected and pattern is not None:
                made.setdefault(name, _Conversion(name, by_pattern[pattern])).sources.append((pattern, key))
        for making in made.values():
            shapes = {key: _MetaSlice(self._tensors[key]) for _, key in making.sources}
            # The weights that a conversion builds are known only after running it, here without data.
            for name in making.convert(model, lambda key, shapes=shapes: shapes[key].to()):
                self._conversions[name] = making

    def store_dtypes(self) -> None:
        """Store the dtypes of the loaded model: `transformers` always loads some modules in float32."""
        self._dtypes = {name: tensor.dtype for name, tensor in self._model.state_dict().items()}

    def __contains__(self, name: str) -> bool:
        return name in self._source or name in self._conversions

    def read(self, name: str, box: Box) -> Tensor:
        """Return the part `box` of a weight, in the dtype of the loaded model; it may share memory with the file.

        Raises:
            ModelError: the weight is not in the files, or it has NaN or infinite values.
        """
        part = self._read(name, box)
        check_tensor_finite(part, name, self.path)
        return part

    def _read(self, name: str, box: Box) -> Tensor:
        import torch

        if any(size == 0 for _, size in box):
            return torch.empty([size for _, size in box], dtype=self._dtypes[name])
        if name in self._source:
            return _read_box(self._tensors[self._source[name]], box).to(self._dtypes[name])
        if name not in self._conversions:
            raise ModelError(f"the files of model '{self.path}' do not contain weight '{name}': copy the model again")
        making = self._conversions[name]
        first, size = making.compute_needed_range(box)
        dtype = self._dtypes[making.name]
        converted = making.convert(self._model, lambda key: self._tensors[key][...].to(dtype), first, size)
        part = converted[name]
        return _read_box(part, [(0, part.shape[0]), *box[1:]] if size is not None else box)


class _Conversion:
    """A conversion with which `transformers` builds weights from several tensors of the checkpoint."""

    def __init__(self, name: str, converter: Any) -> None:
        self.name = name
        """The name of the weight; the first name if the conversion builds several."""
        self.sources: list[tuple[str, str]] = []
        """Pattern and checkpoint name of each source tensor, in order."""
        self._converter = converter

    def compute_needed_range(self, box: Box) -> tuple[int, int | None]:
        """Return the range of source tensors of each pattern that are needed for `box`, as (first index, count).

        A count of `None` means all.
        """
        from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

        first, *others = self._converter.operations
        stacks = isinstance(first, MergeModulelist) and first.dim == 0
        keeps = all(
            (isinstance(op, Concatenate) and op.dim > 0)
            or (isinstance(op, Transpose) and min(op.dim0, op.dim1) > 0 and not op.check_dims)
            for op in others
        )
        # If the later operations keep dimension 0, a range of experts needs only the tensors of these experts.
        return box[0] if stacks and keeps else (0, None)

    def convert(self, model: Any, read: Any, first: int = 0, size: int | None = None) -> dict[str, Tensor]:
        """Build weights from source tensors, and return them by name.

        With `size`, only `size` source tensors of each pattern are read, beginning with index `first`.
        """
        converter, seen = deepcopy(self._converter), dict.fromkeys((pattern for pattern, _ in self.sources), 0)
        for pattern, key in self.sources:
            number, seen[pattern] = seen[pattern], seen[pattern] + 1
            if size is None or first <= number < first + size:
                converter.add_tensor(self.name, key, pattern, read(key))
        converted = converter.convert(self.name, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()}


def _read_box(source: Any, box: Box) -> Tensor:
    return source[tuple(slice(first, first + size) for first, size in box)] if box else source[...]


class _MetaSlice:
    """Replaces a safetensors slice with a tensor on the meta device where only the shape is needed."""

    def __init__(self, source: Any) -> None:
        self._shape = list(source.shape) if hasattr(source, "shape") else source.get_shape()

    def __getitem__(self, index: Any) -> _MetaSlice:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of this shape on the meta device; `device` is ignored."""
        import torch

        return torch.empty(self._shape, dtype=dtype, device="meta")


@contextmanager
def defer_weight_loading() -> Iterator[list[WeightReader]]:
    """Make `from_pretrained` build models on the meta device; yield a list to which each model's weight reader is
    added.

    Weights that are missing from the files, and buffers that are not stored, are created as usual. Not thread-safe.
    """
    from transformers import modeling_utils

    # `from_pretrained` has no public option for this, so its private loading function is replaced.
    plain, found = modeling_utils.convert_and_load_state_dict_in_model, []

    def load(model: Any, state_dict: Any, load_config: Any, *rest: Any, **more: Any) -> Any:
        found.append(WeightReader(model, state_dict, load_config.weight_mapping or []))
        shapes = {name: _MetaSlice(tensor) for name, tensor in state_dict.items()}
        return plain(model, shapes, load_config, *rest, **more)

    modeling_utils.convert_and_load_state_dict_in_model = load
    try:
        yield found
    finally:
        modeling_utils.convert_and_load_state_dict_in_model = plain

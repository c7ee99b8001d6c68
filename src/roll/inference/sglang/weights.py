"""Writes the weights of a sync as safetensors files, which the server loads with `/update_weights_from_disk`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from roll.errors import WeightSyncError
from roll.inference.manifests import check_manifest, read_checkpoint_shapes
from roll.models.describe import describe_model
from roll.types import WeightUpdate
from roll.weights import open_update
from roll.weights.quantization import dequantize_stream, drop_scales

__all__ = ["SHARD_BYTES", "check_update", "convert_write_errors", "create_weights_dir", "write_weights"]

SHARD_BYTES = 2 * 2**30
"""Maximum size of a file, except for a larger tensor: the weights of this many bytes are held in memory at once."""
_SHARED_MEMORY = Path("/dev/shm")


def create_weights_dir(parent: str | None, engine_id: str) -> Path:
    """Create a directory for the weights of an engine.

    Args:
        parent: An existing directory; by default, shared memory, so that no disk is involved.
        engine_id: The id of the engine.

    Raises:
        WeightSyncError: The directory cannot be created.
    """
    place = Path(parent) if parent is not None else _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    try:
        return Path(tempfile.mkdtemp(prefix=f"roll-{engine_id}-", dir=place))
    except OSError as error:
        raise WeightSyncError(
            f"engine '{engine_id}': cannot create a directory for weights in '{place}' ({error.strerror}): set "
            "inference.options.weights_dir to a directory that the SGLang server can read."
        ) from error


def check_update(update: WeightUpdate, model_path: str) -> None:
    """Check that an update has the tensors of the checkpoint that the server loaded at its start.

    SGLang ignores unknown names, keeps the old weights of missing ones, and ends at a wrong shape.

    Raises:
        WeightSyncError: A tensor is missing, unknown, or has the wrong shape.
    """
    expected = read_checkpoint_shapes(model_path)
    if expected is not None:
        tied = not describe_model(model_path).has_untied_lm_head
        check_manifest(drop_scales(update.manifest), expected, tied=tied, policy_version=update.policy_version)


@contextmanager
def convert_write_errors(update: WeightUpdate, directory: Path) -> Iterator[None]:
    """Convert errors while an update is written to `directory`, such as a full disk.

    Raises:
        WeightSyncError: The files cannot be written.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        details = getattr(error, "strerror", None) or str(error)
        with suppress(OSError):
            details += f"; {shutil.disk_usage(directory.parent).free / 2**30:.1f} GiB free"
        raise WeightSyncError(
            f"policy version {update.policy_version} cannot be written to '{directory}' ({details}): set "
            "inference.options.weights_dir to a directory with more space."
        ) from error


def write_weights(update: WeightUpdate, directory: Path, dtype: torch.dtype) -> Mapping[str, int]:
    """Receive all weights of an update and write them to `directory`, replacing its content.

    Weights that were sent in 8 bits are written in `dtype`.

    Returns:
        The checksum of the received bytes, by tensor name.

    Raises:
        WeightSyncError: A tensor is missing, unexpected, or has the wrong shape; or the files cannot be written.
    """
    from safetensors.torch import save_file

    for file in directory.iterdir():
        file.unlink()
    shard: dict[str, torch.Tensor] = {}
    num_files = num_bytes = 0

    def write_shard() -> None:
        nonlocal shard, num_files, num_bytes
        if shard:
            save_file(shard, directory / f"model-{num_files:05d}.safetensors", {"format": "pt"})
            shard, num_files, num_bytes = {}, num_files + 1, 0

    with convert_write_errors(update, directory), open_update(update, device="cpu") as receiver:
        for name, tensor in dequantize_stream(receiver, update.manifest, dtype):
            size = tensor.numel() * tensor.element_size()
            if num_bytes + size > SHARD_BYTES:
                write_shard()
            shard[name] = tensor.clone(memory_format=torch.contiguous_format)  # the transport reuses its buffer
            num_bytes += size
        write_shard()
        return dict(receiver.checksums)

"""Compares a weight update with the checkpoint from which an engine was loaded, before any weight changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from roll.errors import WeightSyncError
from roll.models.omni import SPEECH_PREFIXES
from roll.types import TensorSpec

__all__ = ["check_manifest", "read_checkpoint_shapes"]


def read_checkpoint_shapes(model_path: str | Path) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of all tensors in a directory's safetensors files, by name; `None` if there are no files.

    The speech weights of omni models are left out, because engines do not load them and trainers do not send them.
    """
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(model_path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return {name: shape for name, shape in shapes.items() if not name.startswith(SPEECH_PREFIXES)} or None


def check_manifest(
    manifest: Sequence[TensorSpec], expected: Mapping[str, tuple[int, ...]], *, tied: bool, policy_version: int
) -> None:
    """Compare an update's manifest with the checkpoint from which the engine was loaded.

    Args:
        manifest: The manifest of the update.
        expected: The shapes of the checkpoint's tensors, by name.
        tied: Whether input and output embeddings are tied; then the output embeddings may be missing.
        policy_version: The version of the update, for messages.

    Raises:
        WeightSyncError: a tensor is missing, unknown, or has the wrong shape; the message names it.
    """
    about = f"weight sync of policy version {policy_version}: tensor"
    announced = {spec.name: spec.shape for spec in manifest}
    for name, shape in announced.items():
        if name not in expected:
            raise WeightSyncError(f"{about} '{name}' does not exist in the engine's checkpoint.")
        if tuple(shape) != expected[name]:
            raise WeightSyncError(f"{about} '{name}' must have shape {expected[name]}, got {tuple(shape)}.")
    for name in expected:
        derived = name.endswith("rotary_emb.inv_freq") or (tied and name.endswith("lm_head.weight"))
        if name not in announced and not derived:
            raise WeightSyncError(f"{about} '{name}' is missing from the update.")

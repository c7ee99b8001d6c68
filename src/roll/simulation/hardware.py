"""Descriptions of devices and models, by name or from a YAML file of the same form (`devices.yaml`, `models.yaml`)."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from roll.errors import ConfigError
from roll.registry import nearest

__all__ = ["Device", "Measured", "Model", "device", "known", "model"]

_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What steps of one engine took on this device; written by `roll simulate --calibrate`, which has the details."""

    model: str
    tensor_parallel: int
    curve: tuple[tuple[float, float], ...]
    """Numbers of requests, ascending, and seconds of a step of so many."""
    prefill_token_s: float
    context_token_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator, or one CPU worker slot. Rates are peaks; the efficiencies say what of them is reached."""

    name: str
    flops: float
    """Dense bfloat16, per second."""
    memory_bandwidth: float
    """Bytes per second."""
    memory_bytes: float
    link_bandwidth: float
    """To the other devices of the machine, in one direction; bytes per second."""
    network_bandwidth: float
    """To other machines, per device, in one direction; bytes per second."""
    compute_efficiency: float
    """Of an engine's matrix products with large batches."""
    bandwidth_efficiency: float
    """Of reading weights and cache while decoding."""
    training_efficiency: float
    """Model FLOPs utilisation of training."""
    step_overhead_s: float
    """Of every engine step: launches and the engine's own scheduling."""
    request_overhead_s: float
    """Of every engine step, for each request that decodes in it: the host's share."""
    collective_latency_s: float
    """Of one small all-reduce within a machine."""
    sync_overhead_s: float
    """Of every weight sync, whatever its size."""
    measured: Measured | None = None
    """In place of the roofline, for one model and width."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A decoder's sizes."""

    name: str
    parameters: float
    active_parameters: float
    """That a token passes through: fewer than all for a mixture of experts."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Inside the MLP; of a mixture of experts that of all active ones together."""
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int = 2

    @property
    def num_parameters(self) -> int:
        """All parameters, by the name that `roll.config.estimate.ModelSizes` gives them."""
        return round(self.parameters)

    @property
    def weight_bytes(self) -> float:
        """All weights."""
        return self.parameters * self.element_bytes

    @property
    def active_bytes(self) -> float:
        """Weights that a decoding step reads (of experts: those of one token, so a lower bound for small batches)."""
        return self.active_parameters * self.element_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def query_size(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head_dim


T = TypeVar("T", Device, Model)


def device(name: str) -> Device:
    """A device by name, or the one that a YAML file describes.

    Raises:
        ConfigError: there is no such name or file, or a quantity is missing or no positive number.
    """
    return _find(Device, "device", name, "devices.yaml")


def model(name: str) -> Model:
    """A model by name, or the one that a YAML file describes; see `device`."""
    return _find(Model, "model", name, "models.yaml")


@functools.cache
def known(file: str) -> dict[str, dict[str, Any]]:
    """What comes with ROLL, by name: of `devices.yaml` or `models.yaml`."""
    return yaml.safe_load((_HERE / file).read_text(encoding="utf-8"))


def _find(kind: type[T], what: str, name: str, file: str) -> T:
    shipped = known(file)
    if name in shipped:
        return _build(kind, what, name, shipped[name])
    path = Path(name)
    if path.suffix not in {".yaml", ".yml"}:
        raise ConfigError(
            f"unknown {what} '{name}'.{nearest(name, list(shipped))} Known: {', '.join(shipped)}; or name a YAML file "
            f"with the same keys."
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} file '{name}' cannot be read: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{what} file '{name}' is not a mapping of names to values.")
    return _build(kind, what, path.stem, content)


def _number(value: Any) -> Any:
    """YAML reads `1e9` as text, since it has no point and no sign."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _build(kind: type[T], what: str, name: str, values: dict[str, Any]) -> T:
    if kind is Model:
        values = {"active_parameters": values.get("parameters")} | values
    given = {"name": name} | {key: _number(value) for key, value in values.items()}
    known = {field.name for field in fields(kind)}
    for key in given:
        if key not in known:
            raise ConfigError(f"{what} '{name}' has the unknown key '{key}'.{nearest(str(key), sorted(known))}")
    for field in fields(kind):
        value = given.get(field.name)
        if field.name == "measured" and value is not None:
            given["measured"] = _measured(name, value)
        if field.name in {"name", "measured"} or (field.name == "element_bytes" and value is None):
            continue
        if value is None:
            raise ConfigError(f"{what} '{name}' lacks '{field.name}'.")
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"{what} '{name}': '{field.name}' is {value!r}, not a number of at least 0.")
        if value == 0 and not field.name.endswith("_s"):
            raise ConfigError(f"{what} '{name}': '{field.name}' is 0, so nothing would ever be done.")
    return kind(**given)


def _measured(name: str, value: Any) -> Measured:
    """The section `measured` of a device's file.

    Raises:
        ConfigError: it is not one.
    """
    try:
        curve = tuple((float(requests), float(seconds)) for requests, seconds in value["curve"])
        found = Measured(
            model=str(value["model"]),
            tensor_parallel=int(value["tensor_parallel"]),
            curve=curve,
            prefill_token_s=float(value["prefill_token_s"]),
            context_token_s=float(value["context_token_s"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"device '{name}': 'measured' is not what `roll simulate --calibrate` writes: {error}."
        ) from None
    ascending = all(before < after for (before, _), (after, _) in itertools.pairwise(curve))
    if not curve or not ascending or min(seconds for _, seconds in curve) < 0:
        raise ConfigError(
            f"device '{name}': 'measured.curve' needs pairs of requests, ascending, and seconds, none negative."
        )
    return found

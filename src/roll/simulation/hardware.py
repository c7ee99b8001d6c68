"""Descriptions of devices and models, by name or from a YAML file of the same form (`devices.yaml`, `models.yaml`)."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError, field_validator, model_validator

from roll.config.base import Section, option
from roll.config.document import Document, read
from roll.config.problems import describe, message
from roll.errors import ConfigError
from roll.registry import looked_from, nearest

__all__ = ["Device", "Measured", "Model", "device", "known", "model"]

_HERE = Path(__file__).parent


class Measured(Section, strict=False):
    """What steps of one engine took on this device; written by `roll simulate --calibrate`, which has the details."""

    model: str = option(..., "Which one the engine had.")
    tensor_parallel: int = option(..., "Devices of the engine.", ge=1)
    curve: tuple[tuple[float, float], ...] = option(
        ..., "Numbers of requests, ascending, and seconds of a step of so many."
    )
    prefill_token_s: float = option(..., "Of a further prefilled token.", unit="seconds")
    context_token_s: float = option(..., "Of a token of context.", unit="seconds")

    @field_validator("curve")
    @classmethod
    def _ascending(cls, curve: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        ascending = all(before < after for (before, _), (after, _) in itertools.pairwise(curve))
        if not curve or not ascending or min(seconds for _, seconds in curve) < 0:
            raise ValueError("it needs pairs of requests, ascending, and seconds, none negative")
        return curve


class Device(Section):
    """One accelerator, or one CPU worker slot. Rates are peaks; the efficiencies say what of them is reached."""

    name: str = option(..., "What it is called.")
    flops: float = option(..., "Dense bfloat16, per second.", gt=0)
    memory_bandwidth: float = option(..., "Bytes per second.", gt=0)
    memory_bytes: float = option(..., "Size of its memory.", unit="bytes", gt=0)
    link_bandwidth: float = option(
        ..., "To the other devices of the machine, in one direction; bytes per second.", gt=0
    )
    network_bandwidth: float = option(..., "To other machines, per device, in one direction; bytes per second.", gt=0)
    compute_efficiency: float = option(..., "Of an engine's matrix products with large batches.", gt=0)
    bandwidth_efficiency: float = option(..., "Of reading weights and cache while decoding.", gt=0)
    training_efficiency: float = option(..., "Model FLOPs utilisation of training.", gt=0)
    step_overhead_s: float = option(
        ..., "Of every engine step: launches and the engine's own scheduling.", unit="seconds", ge=0
    )
    request_overhead_s: float = option(
        ..., "Of every engine step, for each request that decodes in it: the host's share.", unit="seconds", ge=0
    )
    collective_latency_s: float = option(..., "Of one small all-reduce within a machine.", unit="seconds", ge=0)
    sync_overhead_s: float = option(..., "Of every weight sync, whatever its size.", unit="seconds", ge=0)
    measured: Measured | None = option(None, "In place of the roofline, for one model and width.")


class Model(Section):
    """A decoder's sizes."""

    name: str = option(..., "What it is called.")
    parameters: float = option(..., "All of them.", gt=0)
    active_parameters: float = option(
        ..., "That a token passes through: fewer than all for a mixture of experts; by default all.", gt=0
    )
    num_layers: int = option(..., "Layers.", gt=0)
    hidden_size: int = option(..., "Width between layers.", gt=0)
    intermediate_size: int = option(
        ..., "Inside the MLP; of a mixture of experts that of all active ones together.", gt=0
    )
    vocab_size: int = option(..., "Tokens that there are.", gt=0)
    num_heads: int = option(..., "Of queries.", gt=0)
    num_kv_heads: int = option(..., "Of keys and values.", gt=0)
    head_dim: int = option(..., "Width of a head.", gt=0)
    element_bytes: int = option(2, "Of a weight.", unit="bytes", gt=0)

    @model_validator(mode="before")
    @classmethod
    def _all_are_active(cls, values: Any) -> Any:
        return {"active_parameters": values["parameters"]} | values if "parameters" in values else values

    @property
    def num_parameters(self) -> int:
        """All parameters, by the name that `roll.config.estimate.ModelSizes` gives them."""
        return round(self.parameters)

    @property
    def experts_per_token(self) -> int:
        """Copies of a hidden vector that experts are given: left out of the plans."""
        return 0

    @property
    def num_experts(self) -> int:
        """As `experts_per_token`."""
        return 0

    @property
    def expert_parameters(self) -> int:
        """Those that ranks would divide with `ep`: left out of the plans."""
        return 0

    @property
    def has_own_projection(self) -> bool:
        """As models have that are large enough for a plan."""
        return True

    @property
    def norm_width(self) -> int:
        """Of two norms a layer."""
        return 2 * self.hidden_size

    @property
    def has_plain_norms(self) -> bool:
        """As Llama's."""
        return True

    @property
    def has_plain_gates(self) -> bool:
        """As `has_plain_norms`."""
        return True

    @property
    def weight_bytes(self) -> float:
        """All weights."""
        return self.parameters * self.element_bytes

    @property
    def linear_parameters(self) -> float:
        """Of linear layers, experts' included: those of one token's layers, and all experts that it does not meet."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        met = self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)
        return min(met + self.parameters - self.active_parameters, self.parameters)

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
    return read(_HERE / file).tree


def _find(kind: type[T], what: str, name: str, file: str) -> T:
    shipped = known(file)
    if name in shipped:
        document = Document(name=name, tree={"name": name} | shipped[name])
    elif Path(name).suffix in {".yaml", ".yml"}:
        if not Path(name).exists():
            raise ConfigError(f"{what} file '{name}' cannot be read: it does not exist{looked_from(name)}.")
        written = read(name)
        document = Document(name=name, tree={"name": Path(name).stem} | written.tree, origins=written.origins)
    else:
        raise ConfigError(
            f"unknown {what} '{name}'.{nearest(name, list(shipped))} Known: {', '.join(shipped)}; or name a YAML file "
            f"with the same keys."
        )
    try:
        return kind.model_validate(document.tree)
    except ValidationError as error:
        raise ConfigError(message(describe(error, document, kind))) from None

"""The settings of `roll serve`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from roll.config.cluster import ClusterConfig, RoleDevices
from roll.config.inference import InferenceConfig
from roll.config.model import ModelConfig
from roll.config.training import TrainingConfig
from roll.errors import ConfigError

__all__ = ["KEY_PREFIX", "ServeSettings", "create_key", "read_keys"]

KEY_PREFIX = "tml-"
"""The prefix of all keys: the client library rejects other keys."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The served model, the keys and the limits of a server.

    Raises:
        ConfigError: A value is out of range.
    """

    model: str
    """The base model: a name from the catalog, a Hugging Face directory, or a hub ID."""
    name: str = ""
    """The name that clients use for the base model; by default `model`."""
    directory: Path = Path("runs/serve")
    """The directory of checkpoints and snapshots."""
    host: str = "127.0.0.1"
    port: int = 8765
    """The port; 0 selects a free port."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Owners by API key."""
    engine: str = "hf"
    num_engines: int = 1
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_rank: int = 32
    """The largest rank of a client's adapter."""
    alpha: float = 32.0
    """The output of an adapter of rank r is multiplied by alpha / r."""
    max_context: int | None = None
    """The largest number of tokens of a prompt with its answer, or of a datum; by default that of the model, but at
    most 4096."""
    max_adapters: int = 16
    """The number of snapshots that each engine holds at a time; others are read from disk when they are sampled."""
    session_timeout_s: float = 3600.0
    """The time without a request or heartbeat after which a session ends."""
    idle_timeout_s: float = 900.0
    """The time without a request after which a model leaves the memory of the trainer, until its next request."""
    gap_timeout_s: float = 300.0
    """The time after which a request that waits for an earlier request of its model fails."""
    poll_s: float = 25.0
    """The maximum time that a poll waits for a result."""
    num_threads: int | None = None
    model_config: ModelConfig | None = None
    """The configuration of the base model with its adapters, from a run's configuration."""
    training_config: TrainingConfig | None = None
    """The configuration of the trainer. Clients send the optimizer settings."""
    engine_options: InferenceConfig | None = None
    """The configuration of the engines."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """The cluster of the trainer's ranks and of the engines; `local`: one rank and all engines are in this process."""
    roles: Mapping[str, RoleDevices] = field(default_factory=dict)
    """The devices of `actor_train` and `actor_infer` in the cluster."""

    def __post_init__(self) -> None:
        limits = {
            "max_rank": 1,
            "max_adapters": 1,
            "num_engines": 1,
            "alpha": 0,
            "session_timeout_s": 0,
            "idle_timeout_s": 0,
            "gap_timeout_s": 0,
            "poll_s": 0,
        }
        for name, lowest in limits.items():
            value = getattr(self, name)
            if not (value >= lowest if lowest else value > 0):
                bound = f">= {lowest}" if lowest else "> 0"
                raise ConfigError(f"--{name.removesuffix('_s').replace('_', '-')} must be {bound}, got {value}.")
        if self.max_context is not None and self.max_context < 2:
            raise ConfigError(f"--max-context must be >= 2, got {self.max_context}.")
        if not self.keys:
            raise ConfigError("a training server needs at least one key: set keys, or use --key or --keys.")
        for key in self.keys:
            check_key(key)

    @property
    def model_name(self) -> str:
        """The name of the base model."""
        return self.name or self.model


def check_key(key: str) -> None:
    """Check that clients can use a key.

    Raises:
        ConfigError: The key has another prefix, or is too short.
    """
    rest = key.removeprefix(KEY_PREFIX)
    if rest == key:
        problem = "has another prefix"
    elif len(rest) < 8:
        problem = f"has {len(rest)} characters after the prefix"
    elif not (key.isascii() and key.isprintable()):
        problem = "has other characters"
    else:
        return
    raise ConfigError(
        f"a key must be '{KEY_PREFIX}' and at least 8 printable ASCII characters, because clients refuse other keys: "
        f"this key {problem}. Choose another key, or omit --key and --keys to create one."
    )


def create_key() -> str:
    """Return a new random key."""
    return KEY_PREFIX + secrets.token_urlsafe(24)


def read_keys(given: Sequence[str], path: Path | None) -> dict[str, str]:
    """Return the owners by key.

    Args:
        given: Keys of the command line, as `KEY` or `OWNER=KEY`.
        path: A file with one `OWNER=KEY` per line; empty lines and lines that begin with `#` are ignored.

    Raises:
        ConfigError: The file cannot be read, a line is invalid, or a key has two owners.
    """
    entries = [(f"--key {each.partition('=')[0] if '=' in each else ''}".strip(), each) for each in given]
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--keys: cannot read '{path}': {error}") from error
        for number, line in enumerate(lines, start=1):
            if line.strip() and not line.lstrip().startswith("#"):
                if "=" not in line:
                    raise ConfigError(f"--keys: line {number} of '{path}' must be OWNER=KEY.")
                entries.append((f"line {number} of '{path}'", line.strip()))
    owners: dict[str, str] = {}
    for where, text in entries:
        owner, _, key = text.rpartition("=")
        owner, key = owner.strip() or "default", key.strip()
        check_key(key)
        if owners.setdefault(key, owner) != owner:
            raise ConfigError(f"{where}: the key of '{owner}' is also the key of '{owners[key]}'.")
    return owners

"""Build the sandbox manager of a configuration, for sandboxes on this machine or in a service."""

from __future__ import annotations

import os

from roll.config.sandbox import SandboxConfig
from roll.errors import ConfigError
from roll.sandbox_errors import sandbox_errors
from roll_sandbox.manager import SandboxManager
from roll_sandbox.remote import connect
from roll_sandbox.types import SandboxSpec

__all__ = ["build_manager"]


def build_manager(
    config: SandboxConfig, *, spec: SandboxSpec, warm: int | None = None, max_sandboxes: int = 512
) -> SandboxManager:
    """Build the sandbox manager of a configuration, without starting it.

    Args:
        config: Configuration of sandboxes: on this machine, or of a service.
        spec: See `SandboxManager`.
        warm: See `SandboxManager`.
        max_sandboxes: See `SandboxManager`.

    Raises:
        ConfigError: The environment variable of the token is not set, or the certificate file does not exist.
    """
    if config.url is None:
        return SandboxManager(config.runtime, spec=spec, warm=warm, max_sandboxes=max_sandboxes)
    token = os.environ.get(config.token_env, "").strip()
    if not token:
        raise ConfigError(
            f"the environment variable {config.token_env}, which must contain the token for the sandboxes at "
            f"{config.url}, is not set: `roll sandbox token create` creates a token; or remove sandbox.url."
        )
    if config.ca_file is not None and not os.path.isfile(os.path.expanduser(config.ca_file)):
        raise ConfigError(f"sandbox.ca_file: file '{config.ca_file}' does not exist.")
    with sandbox_errors():
        return connect(
            config.url,
            token,
            spec=spec,
            warm=warm,
            max_sandboxes=max_sandboxes,
            ca_file=None if config.ca_file is None else os.path.expanduser(config.ca_file),
            reconnect_timeout_s=config.reconnect_timeout_s,
            wait_for_quota=True,
        )

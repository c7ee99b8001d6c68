"""Creates runtimes by name; the module of a runtime is imported when it is requested."""

from __future__ import annotations

from importlib import import_module

from roll_sandbox.errors import ConfigError
from roll_sandbox.names import suggest_nearest
from roll_sandbox.runtime import Runtime

__all__ = ["check_runtime", "make_runtime"]

_RUNTIMES = {
    "bubblewrap": ("roll_sandbox.bubblewrap", "BubblewrapRuntime"),
    "docker": ("roll_sandbox.docker", "DockerRuntime"),
    "subprocess": ("roll_sandbox.subprocess_runtime", "SubprocessRuntime"),
}


def check_runtime(name: str) -> None:
    """Check that a runtime of this name exists.

    Raises:
        ConfigError: no runtime has this name.
    """
    if name not in _RUNTIMES:
        known = ", ".join(sorted(_RUNTIMES))
        raise ConfigError(f"unknown sandbox runtime '{name}'.{suggest_nearest(name, _RUNTIMES)} Known: {known}.")


def make_runtime(name: str) -> Runtime:
    """Return a new runtime of this name.

    Raises:
        ConfigError: no runtime has this name.
    """
    check_runtime(name)
    module, attribute = _RUNTIMES[name]
    return getattr(import_module(module), attribute)()

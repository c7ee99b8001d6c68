"""The runtimes by name."""

from __future__ import annotations

from roll.registry import Registry
from roll.sandbox.protocols import Runtime

__all__ = ["RUNTIMES", "make_runtime"]

RUNTIMES: Registry[type[Runtime]] = Registry(
    "sandbox runtime",
    {
        "bubblewrap": "roll.sandbox.bubblewrap:BubblewrapRuntime",
        "docker": "roll.sandbox.docker:DockerRuntime",
        "subprocess": "roll.sandbox.subprocess_runtime:SubprocessRuntime",
    },
)


def make_runtime(name: str) -> Runtime:
    """The runtime called `name`.

    Raises:
        ConfigError: there is none of that name.
    """
    return RUNTIMES.get(name)()

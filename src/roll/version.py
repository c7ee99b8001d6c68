"""The version of the installed package, and the name under which it is installed."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["DISTRIBUTION", "__version__", "build_install_command"]

DISTRIBUTION = "roll-rl"
"""Name of the distribution; the import package and the command are called `roll`."""

try:
    __version__ = version(DISTRIBUTION)
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0+unknown"


def build_install_command(name: str) -> str:
    """Return the command that installs an extra of this distribution."""
    return f"pip install '{DISTRIBUTION}[{name}]'"

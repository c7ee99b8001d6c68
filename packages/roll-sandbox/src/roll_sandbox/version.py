"""The version of the installed distribution, and the name under which it is installed."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["DISTRIBUTION", "__version__", "get_install_command"]

DISTRIBUTION = "roll-sandbox"
"""Name of the distribution and of the command; the import package is `roll_sandbox`."""

try:
    __version__ = version(DISTRIBUTION)
except PackageNotFoundError:  # run from a source tree without an installation
    __version__ = "0.0.0+unknown"


def get_install_command(name: str) -> str:
    """Return the pip command that installs an extra of this distribution."""
    return f"pip install '{DISTRIBUTION}[{name}]'"

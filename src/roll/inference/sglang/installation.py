"""Checks before a run starts that SGLang's server can be started."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from roll.errors import ConfigError

__all__ = ["check_options"]


def check_options(options: Mapping[str, Any]) -> None:
    """Check that the options name a Python that can run the server, unless they name a server that already runs.

    Raises:
        ConfigError: The Python does not exist, or it is ROLL's own and SGLang is not installed for it; or the address
            of the server is not a URL.
    """
    if url := options.get("url"):
        parts = urlsplit(str(url))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"inference.options.url is '{url}', which is not an HTTP address: set it to an address such as "
                "http://10.0.0.5:30000."
            )
        return
    python = options.get("python")
    if python is None and importlib.util.find_spec("sglang") is None:
        raise ConfigError(
            "inference.engine is sglang, but sglang is not installed: install it in an environment of its own "
            "(docs/how-to/use-sglang.md) and set inference.options.python to the Python of that environment, or set "
            "inference.options.url to the address of a running server."
        )
    if python is not None and shutil.which(str(python)) is None:
        raise ConfigError(
            f"inference.options.python is '{python}', which cannot be executed: set it to the Python of an environment "
            "in which sglang is installed."
        )

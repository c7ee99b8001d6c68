"""Computes the sizes of a model from its config.json, without its weights.

The sizes are computed in a separate process: the network is built on the meta device, which needs torch, and
`roll check` does not load torch.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

from roll.errors import ModelError, UserError
from roll.models import ModelDescription, describe_config, find_config

__all__ = ["find_cached_config", "read_model_sizes"]

BUILD_TIMEOUT_S = 90.0
"""Timeout for building the network, in seconds; nearly all of the time is spent on importing torch."""


def read_model_sizes(name: str) -> ModelDescription:
    """Return the sizes of a hub model; only config.json is downloaded, if it is not in the hub's cache.

    Raises:
        ModelError: the file cannot be found or downloaded, or transformers cannot build the model that it describes.
    """
    if find_cached_config(name) is None:
        find_config(name)
    # -P: a file of the working directory, such as types.py, must not replace a module of the standard library.
    command = [sys.executable, "-P", "-m", __name__, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"the sizes of '{name}' could not be computed from its config.json within {BUILD_TIMEOUT_S:g} s"
        ) from None
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        last = done.stderr.strip().rpartition("\n")[2]
        problem = f"exit code {done.returncode}{last and ': '}{last}"
        raise ModelError(f"the config.json of '{name}' could not be read: {problem}")
    found = json.loads(lines[-1])  # libraries may print before it
    if isinstance(found, str):
        raise ModelError(found)
    return ModelDescription(**found)


def find_cached_config(name: str) -> Path | None:
    """Return the cache directory with a hub model's config.json, which may lack the model's other files; `None` if
    config.json is not cached.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _main(name: str) -> None:
    try:
        print(json.dumps(dataclasses.asdict(describe_config(find_config(name), name))))
    except UserError as error:
        print(json.dumps(str(error)))


if __name__ == "__main__":
    _main(*sys.argv[1:])

"""Downloads a hub model's config.json with a timeout.

It runs in a separate process, because the hub's client cannot be interrupted: without a network, it retries for half a
minute and prints each attempt.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["FetchError", "fetch_config"]

TIMEOUT_S = 8.0
"""Timeout for the hub's answer, in seconds."""


class FetchError(Exception):
    """The file cannot be fetched; the message is a short reason."""


def fetch_config(name: str, cache: str) -> Path:
    """Fetch a model's config.json and return its path in the hub's cache.

    Args:
        name: A hub id.
        cache: The directory of the hub's cache.

    Raises:
        FetchError: the hub does not answer in time, or does not have the file.
    """
    command = [sys.executable, "-P", __file__, name, cache]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise FetchError(f"the hub did not respond within {TIMEOUT_S:g} s") from None
    output = done.stdout.strip()
    if done.returncode != 0 or not output:
        raise FetchError(output or done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}")
    return Path(output)


def _main(name: str, cache: str) -> None:
    from huggingface_hub import hf_hub_download

    try:
        print(hf_hub_download(name, "config.json", cache_dir=cache))
    except Exception as error:  # printed, so that the calling process reports any error of the hub's client
        print(next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__))
        sys.exit(1)


if __name__ == "__main__":
    _main(*sys.argv[1:])

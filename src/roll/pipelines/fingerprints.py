"""Check that held-out rows and user code have not changed since the run began."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from roll.config.base import EXTENSION_PATTERN, FUNCTION_PATTERN
from roll.config.run import RunConfig
from roll.config.sources import PythonTable
from roll.errors import CheckpointError
from roll.user_code import compute_code_fingerprint

__all__ = ["check_fingerprints", "compute_fingerprints"]


def compute_fingerprints(config: RunConfig, held_out: Mapping[str, str]) -> dict[str, str]:
    """Return digests of held-out rows and user code, with keys such as "the code of 'rewards.py:f'".

    Args:
        config: Configuration of the run.
        held_out: Fingerprints of the held-out rows by domain.
    """
    found = {f"the held-out rows of '{domain}'": digest for domain, digest in held_out.items()}
    found |= {
        f"the code of '{path}'": digest for path, digest in compute_code_fingerprint(_list_functions(config)).items()
    }
    for entry in getattr(config, "data", ()):
        for reward in getattr(entry, "reward", ()):
            function = getattr(reward, "passed_function", None)
            if function is not None and (digest := _hash_function(function)):
                found[f"the code of the reward '{getattr(function, '__name__', type(function).__name__)}'"] = digest
    return found


def check_fingerprints(saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Check that the digests in a checkpoint equal the current digests.

    Keys that are missing from one of the mappings are ignored.

    Raises:
        CheckpointError: A digest differs.
    """
    changed = [name for name, digest in current.items() if saved.get(name, digest) != digest]
    if changed:
        raise CheckpointError(
            f"{' and '.join(changed)} changed since the checkpoint, so steps before and after it would not be "
            "comparable. Resume with the original rows and code, or start a new run from the checkpoint's model."
        )


def _list_functions(section: BaseModel) -> Iterator[str]:
    """Yield the import path of every function that a configuration names, and of every environment in a file.

    Data sources are skipped, since their rows are compared instead.
    """
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, str):
            patterns = {getattr(limit, "pattern", None) for limit in field.metadata}
            is_named = (
                ":" in value
                and patterns & {EXTENSION_PATTERN, FUNCTION_PATTERN}
                and not isinstance(section, PythonTable)
            )
            if is_named or (name == "environment" and ".py:" in value):
                yield value
            continue
        entries = (
            value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
        )
        for entry in entries:
            if isinstance(entry, BaseModel):
                yield from _list_functions(entry)


def _hash_function(function: Callable[..., Any]) -> str:
    """Return the digest of a function's source code; an empty string if the source is not available."""
    try:
        source = inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError, ValueError):
        return ""
    return hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()

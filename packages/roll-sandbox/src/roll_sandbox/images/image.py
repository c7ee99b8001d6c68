"""The metadata of an unpacked image."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from roll_sandbox.errors import BadImageError
from roll_sandbox.images.names import DIGEST_PATTERN

__all__ = ["DEFAULT_PATH", "Image", "parse_image"]

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_VARIABLE_NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_MAX_LAYERS = 127


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image in the cache."""

    digest: str
    """Digest of the image's configuration ("image ID"), which does not depend on the source of the image."""
    layers: tuple[str, ...]
    """Digests of the uncompressed archives of the layers, lowest first."""
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    """Directory in which programs start; if empty, they start in home."""
    user: str = ""
    """The user in the configuration: a name or number, possibly with a group."""
    uid: int = 1000
    gid: int = 1000
    """UID and GID of the image's programs in a sandbox. The UID is never 0."""
    size_bytes: int = 0
    """Size of all layers, uncompressed."""

    def dumps(self) -> str:
        """Serialize the image to JSON, to be read by `loads`."""
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> Image:
        """Parse the image from the JSON that `dumps` returned."""
        fields: dict[str, Any] = json.loads(text)
        fields["layers"] = tuple(fields["layers"])
        return Image(**fields)


def parse_image(config: object, digest: str) -> Image:
    """Parse an image's configuration (OCI image specification, "Image Configuration").

    Raises:
        BadImageError: `config` is not a configuration, or has values that cannot be passed to programs.
    """
    if not isinstance(config, dict) or not isinstance(config.get("rootfs"), dict):
        raise BadImageError(f"the configuration of the image {digest} does not list its layers.")
    layers = config["rootfs"].get("diff_ids")
    if not isinstance(layers, list) or not 0 < len(layers) <= _MAX_LAYERS:
        raise BadImageError(f"the configuration of the image {digest} must list 1 to {_MAX_LAYERS} layers.")
    if not all(isinstance(each, str) and DIGEST_PATTERN.fullmatch(each) for each in layers):
        raise BadImageError(f"the image {digest} has layers without a SHA-256 digest.")
    settings = config.get("config") or {}
    if not isinstance(settings, dict):
        raise BadImageError(f"the configuration of the image {digest} is invalid: 'config' must be an object.")
    cwd, user = _parse_string(settings.get("WorkingDir")), _parse_string(settings.get("User"))
    return Image(digest=digest, layers=tuple(layers), env=_parse_environment(settings.get("Env")), cwd=cwd, user=user)


def _parse_environment(entries: Any) -> dict[str, str]:
    """Parse variables of the form `NAME=value`."""
    if entries is None:
        entries = []
    if not isinstance(entries, list):
        raise BadImageError("the image's environment must be a list of 'NAME=value' strings.")
    variables = {}
    for each in entries:
        name, equals, value = _parse_string(each).partition("=")
        if not equals or not _VARIABLE_NAME_PATTERN.fullmatch(name):
            raise BadImageError(f"the image configuration has an invalid environment variable: {each[:80]!r}.")
        variables[name] = value
    return variables


def _parse_string(value: Any) -> str:
    if value is None:
        return ""
    good = isinstance(value, str) and "\0" not in value and len(value) <= 2**16
    if not good or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise BadImageError(f"the image configuration has an invalid string: {str(value)[:80]!r}.")
    return value

"""Parses image names, `[registry/]repository[:tag|@digest]`, as Docker does, but without a default registry."""

from __future__ import annotations

import re
from dataclasses import dataclass

from roll_sandbox.errors import SandboxRequestError

__all__ = ["DIGEST_PATTERN", "ImageReference", "parse_reference"]

DIGEST_PATTERN = re.compile(r"sha256:[0-9a-f]{64}")
_HOST_PATTERN = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?")
_REPOSITORY_PATTERN = re.compile(
    r"(?=.{1,255}$)[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
)
_TAG_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class ImageReference:
    """An image name, with the default tag filled in."""

    registry: str
    """Host of the registry; empty for an image that has only a local name."""
    repository: str
    version: str
    """The tag, or the digest of a manifest."""

    def __str__(self) -> str:
        between = "@" if DIGEST_PATTERN.fullmatch(self.version) else ":"
        above = f"{self.registry}/" if self.registry else ""
        return f"{above}{self.repository}{between}{self.version}"


def parse_reference(name: str) -> ImageReference:
    """Parse an image name, and fill in the default tag.

    Raises:
        SandboxRequestError: the name is malformed.
    """
    rest, _, digest = name.partition("@")
    first, slash, others = rest.partition("/")
    named = slash and ("." in first or ":" in first or first == "localhost")
    registry, path = (first, others) if named else ("", rest)
    path, colon, tag = path.partition(":")
    version = digest or tag or "latest"
    good = (not named or _HOST_PATTERN.fullmatch(registry)) and _REPOSITORY_PATTERN.fullmatch(path)
    good = (
        good
        and (DIGEST_PATTERN.fullmatch(digest) if "@" in name else True)
        and (_TAG_PATTERN.fullmatch(tag) if colon else True)
    )
    if not good:
        raise SandboxRequestError(
            f"invalid image name {name[:200]!r}: expected a name such as 'python:3.12', "
            "'registry.example/team/world:7' or 'team/world@sha256:…', with the repository in lowercase."
        )
    return ImageReference(registry=registry, repository=path, version=version)

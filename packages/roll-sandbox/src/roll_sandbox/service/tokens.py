"""The tokens of a service. Only their digests are stored.

A token is `roll_` id `_` secret. The secret has 256 bits, so storing an unsalted digest of it is safe.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, insert, select, update

from roll_sandbox.errors import ConfigError
from roll_sandbox.service.store import Store
from roll_sandbox.service.store.tables import tokens

__all__ = ["SCOPES", "Identity", "TokenStore", "check_owner"]

SCOPES = ("read", "run", "admin", "worker")
_MAX_LIFETIME_S = 36_500 * 86_400.0
_TOKEN_PATTERN = re.compile(r"roll_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_OWNER_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Identity:
    """The owner and the scopes of a valid token."""

    token: str
    """The token's id."""
    owner: str
    scopes: frozenset[str]
    expires: float | None = None


def check_owner(name: str) -> None:
    """Check the name of an owner.

    Raises:
        ConfigError: the name is malformed.
    """
    if not _OWNER_PATTERN.fullmatch(name):
        raise ConfigError(
            f"an owner name must consist of 1 to 64 letters, digits, '.', '_' and '-', got {name[:80]!r}."
        )


class TokenStore:
    """Creates, finds and revokes the tokens in a database. Times are in seconds since 1970."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def create(
        self, owner: str, scopes: Iterable[str] = ("read", "run"), *, lifetime_s: float | None = None, note: str = ""
    ) -> str:
        """Create a token and return it. Only the token's digest is stored, so the token cannot be shown again.

        Raises:
            ConfigError: the owner's name, a scope or the lifetime is invalid.
        """
        scopes = sorted(set(scopes))
        check_owner(owner)
        if not scopes or not set(scopes) <= set(SCOPES):
            raise ConfigError(
                f"scopes must be one or more of {', '.join(SCOPES)}, got {', '.join(scopes)[:80] or '(none)'}."
            )
        if lifetime_s is not None and not 0 < lifetime_s <= _MAX_LIFETIME_S:
            raise ConfigError(f"a token lifetime must be above 0 and at most 36,500 days, got {lifetime_s / 86400:g}.")
        name, secret, now = secrets.token_hex(8), secrets.token_urlsafe(32), time.time()
        self._store.write_now(
            insert(tokens).values(
                id=name,
                owner=owner,
                digest=_hash_secret(secret),
                scopes=" ".join(scopes),
                note=note[:200],
                created=now,
                expires=None if lifetime_s is None else now + lifetime_s,
            )
        )
        return f"roll_{name}_{secret}"

    def rotate(self, name: str, *, grace_s: float = 0.0) -> str:
        """Create and return a token that replaces the token with the ID `name`; owner, scopes and lifetime stay the
        same.

        The old token stays valid for at most `grace_s` more seconds.

        Raises:
            ConfigError: no token has this id, or the token is no longer valid.
        """
        row = self._load_row(name)
        now = time.time()
        if row is None or row.revoked is not None or (row.expires is not None and row.expires <= now):
            raise ConfigError(
                f"token '{name[:40]}' is unknown or no longer valid: `roll-sandbox token list` lists the tokens."
            )
        lifetime_s = None if row.expires is None else row.expires - row.created
        token = self.create(row.owner, row.scopes.split(), lifetime_s=lifetime_s, note=row.note)
        ends = now + grace_s if row.expires is None else min(row.expires, now + grace_s)
        self._store.write_now(update(tokens).where(tokens.c.id == name).values(expires=ends))
        return token

    def revoke(self, name: str) -> None:
        """Revoke the token with the id `name`, so that later requests with it are rejected.

        Raises:
            ConfigError: no token has this id.
        """
        if self._load_row(name) is None:
            raise ConfigError(f"unknown token '{name[:40]}': `roll-sandbox token list` lists the tokens.")
        self._store.write_now(update(tokens).where(tokens.c.id == name).values(revoked=time.time()))

    def list(self) -> Sequence[Row[Any]]:
        """Return all tokens, oldest first, without their digests."""
        columns = (column for column in tokens.c if column is not tokens.c.digest)
        return self._store.read(select(*columns).order_by(tokens.c.created))

    def identify(self, token: str) -> Identity | None:
        """Return the identity of a token; `None` if the token is invalid, expired or revoked."""
        form = _TOKEN_PATTERN.fullmatch(token)
        row = self._load_row(form[1]) if form is not None else None
        # `compare_digest` takes the same time wherever the digests differ.
        if (
            form is None
            or row is None
            or not hmac.compare_digest(str(row.digest).encode(), _hash_secret(form[2]).encode())
        ):
            return None
        if row.revoked is not None or _is_expired(row) or not _OWNER_PATTERN.fullmatch(str(row.owner)):
            return None
        return Identity(row.id, row.owner, frozenset(str(row.scopes).split()), row.expires)

    def is_valid(self, identity: Identity) -> bool:
        """Return whether an identity's token is still valid."""
        row = self._load_row(identity.token)
        return row is not None and row.revoked is None and not _is_expired(row)

    def _load_row(self, name: str) -> Row[Any] | None:
        rows = self._store.read(select(tokens).where(tokens.c.id == name))
        return rows[0] if rows else None


def _is_expired(row: Row[Any]) -> bool:
    """Return whether the token in a row has expired; a row with a corrupt time is treated as expired."""
    expires = row.expires
    return expires is not None and not (isinstance(expires, int | float) and expires > time.time())


def _hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()

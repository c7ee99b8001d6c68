"""The tables of the database. Migrations create them. No table stores request bodies, output or secrets."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, Index, Integer, MetaData, String, Table, Text

__all__ = ["METADATA", "executions", "owners", "sandboxes", "tokens", "workers"]

METADATA = MetaData()

tokens = Table(
    "tokens",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("owner", String(64), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("scopes", String(100), nullable=False),
    Column("note", String(200), nullable=False, default=""),
    Column("created", Float, nullable=False),
    Column("expires", Float),
    Column("revoked", Float),
)
owners = Table("owners", METADATA, Column("owner", String(64), primary_key=True), Column("quota", Text, nullable=False))
sandboxes = Table(
    "sandboxes",
    METADATA,
    Column("owner", String(64), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("worker", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("spec", Text, nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float, nullable=False),
    Column("ended", Float),
    Column("why", String(16), nullable=False, default=""),
    Column("leased", Integer, nullable=False, server_default="1"),
    Index("sandboxes_state", "state"),
)
executions = Table(
    "executions",
    METADATA,
    Column("owner", String(64), primary_key=True),
    Column("sandbox", String(64), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("started", Float, nullable=False),
    Column("end", Text),
    Column("pieces", Integer, nullable=False, default=0),
    Column("output_bytes", BigInteger, nullable=False, default=0),
)
workers = Table(
    "workers",
    METADATA,
    Column("name", String(64), primary_key=True),
    Column("owner", String(64), nullable=False),
    Column("seen", Float, nullable=False),
    Column("draining", Integer, nullable=False, default=0),
)

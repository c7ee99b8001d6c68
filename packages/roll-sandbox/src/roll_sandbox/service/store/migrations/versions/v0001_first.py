"""Initial tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create all tables."""
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("scopes", sa.String(100), nullable=False),
        sa.Column("note", sa.String(200), nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("expires", sa.Float),
        sa.Column("revoked", sa.Float),
    )
    op.create_table(
        "owners", sa.Column("owner", sa.String(64), primary_key=True), sa.Column("quota", sa.Text, nullable=False)
    )
    op.create_table(
        "sandboxes",
        sa.Column("owner", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("worker", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("expires", sa.Float, nullable=False),
        sa.Column("ended", sa.Float),
        sa.Column("why", sa.String(16), nullable=False),
    )
    op.create_index("sandboxes_state", "sandboxes", ["state"])
    op.create_table(
        "executions",
        sa.Column("owner", sa.String(64), primary_key=True),
        sa.Column("sandbox", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("started", sa.Float, nullable=False),
        sa.Column("end", sa.Text),
        sa.Column("pieces", sa.Integer, nullable=False),
        sa.Column("output_bytes", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "workers",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("seen", sa.Float, nullable=False),
        sa.Column("draining", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    """Drop all tables."""
    for name in ("workers", "executions", "sandboxes", "owners", "tokens"):
        op.drop_table(name)

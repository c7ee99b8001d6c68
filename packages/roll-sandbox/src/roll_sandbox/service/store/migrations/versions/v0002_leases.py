"""Adds the column for leased sandboxes, which end when no client is connected to them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column `leased`, with the value 1 for existing sandboxes, which may not have been created over HTTP."""
    op.add_column("sandboxes", sa.Column("leased", sa.Integer, nullable=False, server_default="1"))


def downgrade() -> None:
    """Drop the column `leased`."""
    op.drop_column("sandboxes", "leased")

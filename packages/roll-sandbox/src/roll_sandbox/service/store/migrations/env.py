"""Run by Alembic, on the connection from `Store.migrate`."""

from __future__ import annotations

from alembic import context

from roll_sandbox.service.store.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()

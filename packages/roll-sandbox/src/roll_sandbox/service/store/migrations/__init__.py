"""Alembic migrations, which bring a database of an earlier version to this one."""

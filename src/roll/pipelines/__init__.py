"""Pipelines: each is its objective and what it opens; `commands` has what the command line calls."""

"""Pipelines: one loop each, over parts that `setup` builds; `commands` has what the command line calls."""
